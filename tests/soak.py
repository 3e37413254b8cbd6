"""What takes minutes: thousands of parameters and steps, long training, curves on all layouts.

    python tests/soak.py                                # all of it
    python tests/soak.py load                           # 5000 parameters, 2000 steps, 4 ranks
    python tests/soak.py load --only muon --steps 500   # all of them matrices
    python tests/soak.py curves drift

"load" takes steps without a barrier between them, its gradients are new tensors now and then, and
what each rank has grown by after the first quarter is measured. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import test_curves
import torch
from layouts import by_fully_shard, gather
from pool import Pool
from torch import Tensor

import ortho_func
from ortho_func.geometry import local

SHAPES = ((4, 4), (2, 6), (6, 2), (3, 5))
# In percent: as in a model of many small layers, most parameters are no matrices.
SHARES = {
    "muon": 10, "normuon": 2, "dion2": 1, "dion3": 1, "dion": 1, "lion": 5, "adamw": 80,
}  # fmt: skip
SAMPLES = 40
RENEWED_EVERY = 50  # steps between gradients that are new tensors
FOREVER = 24 * 3600.0


class Sample(NamedTuple):
    """What a rank has after a step."""

    step: int
    resident: int  # bytes
    handles: int
    threads: int
    objects: int  # that the garbage collector knows


class Soaked(NamedTuple):
    """What a rank saw."""

    samples: list[Sample]
    seconds: float
    finite: bool


class Growth(NamedTuple):
    """From the second quarter's mean to the last one's."""

    resident: float  # bytes
    handles: float
    threads: float
    objects: float


def sample(step: int) -> Sample:
    """The process as it is now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(
        step,
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        len(gc.get_objects()),
    )


def growth(samples: list[Sample]) -> Growth:
    """How much there is more of everything at the end."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    means = [[sum(one) / quarter for one in zip(*part, strict=True)][1:] for part in (early, late)]
    resident, handles, threads, objects = (b - a for a, b in zip(*means, strict=True))
    kept = (len(samples) - quarter) - quarter  # the samples themselves
    return Growth(resident, handles, threads, objects - kept)


def shared_out(names: Sequence[str], only: str | None) -> dict[str, list[str]]:
    """Names by algorithm; at least one for each."""
    if only is not None:
        return {only: list(names)}
    found, first = {}, 0
    for algorithm, share in SHARES.items():
        count = max(1, len(names) * share // 100)
        found[algorithm] = list(names[first : first + count])
        first += count
    found["adamw"] += names[first:]
    return found


def steady(more: Growth) -> bool:
    """Whether nothing grows: a mebibyte is the allocator's play."""
    return more.resident < 2**20 and max(more[1:]) <= 0


def soak(rank: int, world: int, parameters: int, steps: int, only: str | None = None) -> Soaked:
    """Take the steps."""
    torch.manual_seed(0)
    tensors = {f"w{n}": torch.randn(SHAPES[n % len(SHAPES)]) for n in range(parameters)}
    placed = by_fully_shard(tensors, (world,))
    groups = [
        {"params": [(name, placed[name]) for name in names], "algorithm": algorithm}
        for algorithm, names in shared_out(list(placed), only).items()
    ]
    optimizer = ortho_func.Muon(groups, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    gc.freeze()  # what is there now need not be looked through again and again
    samples: list[Sample] = []
    every = max(1, steps // SAMPLES)
    start = time.monotonic()
    for step in range(steps):
        if step % RENEWED_EVERY == 0:
            shards = renew(placed)
        torch._foreach_mul_(shards, -0.999)
        optimizer.step()
        scheduler.step()
        if (step + 1) % every == 0:
            samples.append(sample(step + 1))
    seconds = time.monotonic() - start
    finite = all(bool(gather(p).isfinite().all()) for p in list(placed.values())[::97])
    return Soaked(samples, seconds, finite)


def renew(parameters: dict[str, Tensor]) -> list[Tensor]:
    """New gradients, and their shards."""
    shards = []
    for p in parameters.values():
        p.grad = torch.zeros_like(p)
        shards.append(local(p.grad).normal_())
    return shards


def load(pool: Any, args: argparse.Namespace) -> bool:
    """Memory and handles over many steps."""
    found = pool.run(
        soak, args.parameters, args.steps, args.only, world=args.ranks, timeout=FOREVER
    )
    good = True
    for rank, one in enumerate(found):
        first, last, more = one.samples[0], one.samples[-1], growth(one.samples)
        print(
            f"rank {rank}: {args.steps} steps in {one.seconds:.0f} s; resident "
            f"{first.resident / 2**20:.1f} MiB after {first.step}, {last.resident / 2**20:.1f} MiB "
            f"after {last.step}; {last.handles} handles, {last.threads} threads; grown by "
            f"{more.resident / 2**20:.2f} MiB, {more.handles:g} handles, {more.threads:g} threads, "
            f"{more.objects:g} objects"
        )
        good &= one.finite and steady(more)
    return good


def curves(pool: Any, args: argparse.Namespace) -> bool:
    """200 steps of training on every layout, against one process."""
    right = pool.run(test_curves.curve, "one", (1,), 200, world=1, timeout=FOREVER)[0]
    print(f"one process: the loss falls from {right[0]:.4f} to {right[-1]:.5f}")
    good = True
    for layout, (kind, mesh) in test_curves.LAYOUTS.items():
        world = math.prod(mesh)
        found = pool.run(test_curves.curve, kind, mesh, 200, world=world, timeout=FOREVER)[0]
        end = abs(found[-1] - right[-1]) / right[-1]
        worst = test_curves.apart(found, right)
        print(f"{layout}: off by {end:.1e} at step 200, by at most {worst:.1e}", flush=True)
        good &= end < 1e-4
    return good


def drift(pool: Any, args: argparse.Namespace) -> bool:
    """Momentum in bfloat16 for 2000 steps against the noise of runs in float32."""
    good = True
    for algorithm in ("muon", "normuon", "dion2", "dion3", "dion"):
        right, found = (
            test_curves.trained_with(dtype, algorithm, 2000, (0, 1, 2))
            for dtype in (torch.float32, torch.bfloat16)
        )
        (mean, spread), (other, _) = (test_curves.noise(one.losses) for one in (right, found))
        sizes = [sum(one.sizes) / len(one.sizes) for one in (right, found)]
        print(
            f"{algorithm}: loss {mean:.5f} ± {spread:.5f} in fp32, {other:.5f} in bf16; the norm "
            f"of the weights {sizes[0]:.4f} and {sizes[1]:.4f}",
            flush=True,
        )
        good &= abs(other - mean) < spread
    return good


PARTS = {"load": load, "curves": curves, "drift": drift}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--parameters", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", choices=list(SHARES), help="one algorithm for all parameters")
    args = parser.parse_args()
    pool = Pool()
    try:
        results = [PARTS[part](pool, args) for part in args.part or PARTS]
    finally:
        pool.close()
    print("all well" if all(results) else "NOT WELL")
    return not all(results)


if __name__ == "__main__":
    # Workers import `soak` by the module's name, which is not __main__.
    import soak as this

    sys.exit(this.main())
