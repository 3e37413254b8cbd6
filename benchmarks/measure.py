"""How the benchmarks measure: everything in one run, in alternation, warm; ratios of medians."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RUNS = Path(__file__).parents[1] / "runs" / "bench"

Times = dict[str, list[float]]


def alternate(
    calls: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    before: Callable[[str], None] = lambda name: None,
    warm: int = 2,
    seconds: float = 60.0,
) -> Times:
    """Seconds of each call, one of each after the other, `warm` rounds of them not counted.

    `before` is run ahead of each call and not timed. After `seconds` no further round begins, but
    for the first three.
    """
    times: Times = {name: [] for name in calls}
    begin = time.perf_counter()
    for turn in range(warm + repeats):
        if turn >= warm + 3 and time.perf_counter() - begin > seconds:
            break
        for name, call in calls.items():
            before(name)
            start = time.perf_counter()
            call()
            taken = time.perf_counter() - start
            if turn >= warm:
                times[name].append(taken)
    return times


def medians(times: Times) -> dict[str, float]:
    return {name: statistics.median(taken) for name, taken in times.items() if taken}


def median_ratio(times: Times, peer: str, ours: str) -> float:
    """The median over rounds of a peer's time over ours in the same round.

    Another load on the machine slows both sides of a round alike, so it mostly cancels.
    """
    return statistics.median(p / o for p, o in zip(times[peer], times[ours], strict=True))


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "")
    wide = [flag for flag in ("amx_bf16", "avx512_bf16", "avx2") if flag in flags]
    return f"{named[0] if named else platform.processor()} ({', '.join(wide)})"


def save(name: str, found: Mapping[str, Any]) -> Path:
    """Write what a benchmark found to runs/bench, with what it ran on."""
    RUNS.mkdir(parents=True, exist_ok=True)
    path = RUNS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")
    return path


def load(name: str) -> dict[str, Any] | None:
    path = RUNS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"
