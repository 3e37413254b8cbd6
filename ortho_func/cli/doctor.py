"""What is installed, what it is used for, and whether two processes agree with one."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from ortho_func.primitives.orthogonalize import DEFAULT_SCHEDULE

__all__ = ["Check", "checks", "diagnose", "self_test"]

TORCH = (2, 9)  # the oldest version that works
SECONDS = 300.0  # for two processes to start and train
TOLERANCE = 1e-5  # of the largest element, in fp32


class Check(NamedTuple):
    """One finding: a fault if `good` is False, a remark if it is None."""

    name: str
    good: bool | None
    detail: str


def diagnose() -> int:
    """Print all findings and a verdict; the exit code is 1 if anything is at fault."""
    faults = 0
    for check in checks():
        mark = {True: "ok", False: "FAULT", None: "-"}[check.good]
        print(f"{mark:>5}  {check.name}: {check.detail}", flush=True)
        faults += check.good is False
    print("All is well." if not faults else f"{faults} fault(s): see above.")
    return int(faults > 0)


def checks() -> list[Check]:
    """All findings, the quick ones first."""
    quick: list[Callable[[], Check]] = [
        _torch, _einops, _distributed, _device, _matmul, _compiler, _orthogonalizer,
    ]  # fmt: skip
    extras = [
        _extra("triton", "torch.compile on GPUs"),
        _extra("rich", "tables of `plan` on a terminal"),
        _extra("matplotlib", "`plan --plot`"),
    ]
    return [*(check() for check in quick), *extras, self_test()]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> Check:
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    detail = f"{torch.__version__} on Python {sys.version.split()[0]}"
    if found < TORCH:
        return Check("torch", False, f"{detail}; needs {'.'.join(map(str, TORCH))} or newer")
    return Check("torch", True, detail)


def _einops() -> Check:
    found = _version("einops")
    return Check("einops", found is not None, found or "missing: pip install einops")


def _distributed() -> Check:
    if not torch.distributed.is_available():
        return Check("torch.distributed", False, "this torch is built without it")
    names = {
        "gloo": torch.distributed.is_gloo_available,
        "nccl": torch.distributed.is_nccl_available,
    }
    found = [name for name, there in names.items() if there()]
    return Check("torch.distributed", True, f"exchanges over {', '.join(found) or 'no backend'}")


def _device() -> Check:
    if not torch.cuda.is_available():
        return Check("device", None, f"CPU, {torch.get_num_threads()} threads; no GPU seen")
    count = torch.cuda.device_count()
    return Check("device", True, f"{count} x {torch.cuda.get_device_name(0)}")


def _matmul() -> Check:
    if torch.cuda.is_available():
        good = torch.cuda.is_bf16_supported()
        return Check("bfloat16 products", good or None, "fast" if good else "emulated and slow")
    kind = torch.backends.cpu.get_cpu_capability()
    try:
        fast = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        fast = False
    text = "by oneDNN" if fast else "slow: pass compute_dtype=torch.float32"
    return Check("bfloat16 products", fast or None, f"{text} ({kind})")


def _compiler() -> Check:
    if torch.cuda.is_available():
        found = _version("triton")
        return Check(
            "compile=True", None if found is None else True, "Triton " + (found or "missing")
        )
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++", "cl"]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    detail = "C++ compiler " + (found or "missing: only eager steps work")
    return Check("compile=True", None if found is None else True, detail)


def _orthogonalizer() -> Check:
    return Check("orthogonalizer", True, f"schedule {DEFAULT_SCHEDULE!r} in bfloat16 by default")


def _extra(name: str, purpose: str) -> Check:
    found = _version(name)
    detail = found or f"not installed; only needed for {purpose}"
    return Check(f"{name} (extra)", None if found is None else True, detail)


def self_test() -> Check:
    """Two gloo processes train an (18, 64), an uneven and a nearly empty weight; so does one."""
    name = "self-test, two processes against one"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2):
            fault = _run(world, Path(folder))
            if fault:
                return Check(name, False, fault)
        one, two = (
            torch.load(Path(folder) / f"weights-{world}.pt", weights_only=True) for world in (1, 2)
        )
    error = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(one, two, strict=True))
    took = f"{time.monotonic() - began:.0f} s"
    if not error <= TOLERANCE:
        return Check(name, False, f"weights differ by {error:.1e} of the largest element ({took})")
    return Check(name, True, f"weights agree to {error:.1e} of the largest element ({took})")


def _run(world: int, folder: Path) -> str:
    """Run the self-test on `world` processes; what went wrong, or nothing."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = [folder / f"log-{world}-{rank}" for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            command = [sys.executable, "-m", "ortho_func.cli.selftest", str(rank), str(world)]
            ranks.append(
                subprocess.Popen([*command, str(folder)], env=env, stdout=output, stderr=output)
            )
    try:
        return _outcome(ranks, logs)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _outcome(ranks: list[subprocess.Popen[bytes]], logs: list[Path]) -> str:
    end = time.monotonic() + SECONDS
    while any(process.poll() is None for process in ranks):
        if time.monotonic() > end or any(process.poll() for process in ranks):
            break
        time.sleep(0.1)
    for rank, (process, log) in enumerate(zip(ranks, logs, strict=True)):
        if process.poll():
            last = (log.read_text(errors="replace").strip().splitlines() or ["no message"])[-1]
            return f"rank {rank} of {len(ranks)} failed: {last}"
    if any(process.poll() is None for process in ranks):
        return f"{len(ranks)} processes did not end within {SECONDS:.0f} s"
    return ""
