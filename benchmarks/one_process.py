"""Whole steps in one process: ``python benchmarks/one_process.py [--dion PATH]``.

Gradients are presented anew before each step and not timed: some peers consume them.
"""

import argparse
import warnings
from collections.abc import Sequence
from typing import Any

import measure
import peers
import torch
from peers import Absent, Entry

Shapes = list[tuple[int, int]]


def layers(count: int, width: int) -> Shapes:
    """Matrices of `count` layers of a transformer."""
    return count * [*4 * [(width, width)], (4 * width, width), (width, 4 * width)]


CASES: dict[str, Shapes] = {
    "12 layers, D=64": layers(12, 64),
    "12 layers, D=256": layers(12, 256),
    "12 layers, D=768": layers(12, 768),
    "200 matrices of 32×64": 200 * [(32, 64)],
}
# What a compiled step of ours costs to compile here is in compile.py; peers' own compiled
# functions are one per shape.
COMPILED = ("12 layers, D=64", "12 layers, D=256")


def timed(
    entries: Sequence[Entry], shapes: Shapes, *, repeats: int, seconds: float
) -> tuple[measure.Times, list[Absent]]:
    """Seconds of whole steps by entry, and who failed."""
    params = {entry.name: peers.parameters(shapes) for entry in entries}
    grads = peers.gradients(next(iter(params.values())))
    steps, failed = {}, []
    for entry in entries:
        peers.set_gradients(params[entry.name], grads)
        try:
            optimizer = entry.make(params[entry.name], None)
            optimizer.step()
        except Exception as error:
            if entry.ours:
                raise
            failed.append(Absent(entry.name, f"{type(error).__name__}: {error}"))
            continue
        steps[entry.name] = optimizer.step
    times = measure.alternate(
        steps,
        repeats=repeats,
        before=lambda name: peers.set_gradients(params[name], grads),
        seconds=seconds,
    )
    return times, failed


def run(
    cases: Sequence[str] = tuple(CASES),
    *,
    threads: int = 2,
    repeats: int = 25,
    seconds: float = 30.0,
    compiled: Sequence[str] = COMPILED,
) -> dict[str, Any]:
    torch.set_num_threads(threads)
    found, absent = peers.one_process()
    everyone = [*peers.ours(), *found]
    errors = {entry.name: peers.errors(entry) for entry in everyone if not entry.ours}
    errors |= {entry.name: peers.errors(entry) for entry in peers.ours(compiled=False)}
    for name in ("", ", 3 steps"):
        errors[f"ortho_func, compiled{name}"] = errors[f"ortho_func{name}"]
    result: dict[str, Any] = {
        "threads": threads,
        "errors": errors,
        "schedules": {entry.name: entry.schedule for entry in everyone},
        "absent": {one.name: one.reason for one in absent},
        "cases": {},
    }
    for case in cases:
        torch._dynamo.reset()  # or peers' functions reach the limit of recompilations
        entries = [*peers.ours(compiled=case in compiled), *found]
        times, failed = timed(entries, CASES[case], repeats=repeats, seconds=seconds)
        result["cases"][case] = {
            "times": times,
            "failed": {one.name: one.reason for one in failed},
        }
        print(case, {name: f"{1e3 * t:.2f} ms" for name, t in measure.medians(times).items()})
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dion", help="a checkout of microsoft/dion")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=25)
    args = parser.parse_args()
    peers.use_dion(args.dion)
    warnings.simplefilter("ignore")  # peers' and the compiler's
    found = run(args.cases, threads=args.threads, repeats=args.repeats)
    print(measure.save("one_process", found))


if __name__ == "__main__":
    main()
