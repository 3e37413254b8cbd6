"""The orthogonalizer alone, against published schedules in plain products.

``python benchmarks/orthogonalizers.py``. Compared at equal error only: ours with the fewest steps
whose errors are no worse on three spectra. And its rate of arithmetic beside that of a batched
product of the same size.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import measure
import peers
import torch
from torch import Tensor

from ortho_func import newton_schulz
from ortho_func.coefficients import schedule
from ortho_func.primitives import orthogonalize as module
from ortho_func.primitives.orthogonalize import flops

PUBLISHED = (("jordan", 5), ("you", 5), ("polar_express", 5))
SHAPES = ((1, 768, 768), (1, 768, 3072), (4, 768, 768), (4, 768, 3072))
CURVE = ((48, 256, 256), (8, 768, 768), (12, 256, 1024))
RATES = ((48, 256, 256), (12, 256, 1024), (8, 768, 768), (4, 768, 3072), (4, 1536, 1536))


def in_plain_products(x: Tensor, name: str, steps: int) -> Tensor:
    """A published schedule as its authors write it: bfloat16, three products a step."""
    y = x.bfloat16()
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in schedule(name, steps).steps:
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y


def in_fused_products(x: Tensor, name: str, steps: int) -> Tensor:
    """The same with additions fused into the products, as in torch.optim.Muon."""
    y = x.bfloat16()
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in schedule(name, steps).steps:
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y


def errors(function: Callable[[Tensor], Tensor]) -> list[float]:
    matrices = peers.spectra()
    return peers.relative_errors([function(x[None])[0] for x in matrices], matrices)


def candidates() -> dict[str, Callable[[Tensor], Tensor]]:
    ours = {f"ours, {n} steps": partial(newton_schulz, steps=n) for n in (2, 3, 4, 5)}
    plain = {
        f"{name}, {steps} steps": partial(in_plain_products, name=name, steps=steps)
        for name, steps in PUBLISHED
    }
    fused = {
        f"{name}, {steps} steps, fused": partial(in_fused_products, name=name, steps=steps)
        for name, steps in PUBLISHED
    }
    return {**ours, **plain, **fused}


def run(*, threads: int = 2, repeats: int = 15, seconds: float = 8.0) -> dict[str, Any]:
    torch.set_num_threads(threads)
    functions = candidates()
    result: dict[str, Any] = {
        "threads": threads,
        "errors": {name: errors(function) for name, function in functions.items()},
        "cases": {},
        "rates": {},
    }
    generator = torch.Generator().manual_seed(0)
    for shape in SHAPES:
        x = torch.randn(shape, generator=generator).bfloat16()
        calls = {name: partial(function, x) for name, function in functions.items()}
        name = "×".join(map(str, shape))
        result["cases"][name] = measure.alternate(calls, repeats=repeats, seconds=seconds)
    for shape in RATES:
        result["rates"]["×".join(map(str, shape))] = rate(shape, repeats, generator, seconds / 2)
    result["cache"] = cache_curve(repeats, seconds / 2)
    return result


def rate(
    shape: tuple[int, int, int], repeats: int, generator: torch.Generator, seconds: float
) -> float:
    """Operations a second over those of plain batched products of the same sizes."""
    x = torch.randn(shape, generator=generator).bfloat16()
    a = torch.randn(shape[0], shape[1], shape[1], generator=generator).bfloat16()
    n, rows, cols = shape
    times = measure.alternate(
        {
            "ours": lambda: newton_schulz(x),
            "long": lambda: torch.bmm(a, x),
            "short": lambda: torch.bmm(a, a),
        },
        repeats=repeats,
        seconds=seconds,
    )
    medians = measure.medians(times)
    # What the products alone would take at the rate measured beside: most are either AX or AA.
    work, long = n * flops(rows, cols), n * 2 * rows * rows * cols
    square = n * 2 * rows**3
    fast = (long + square) / (medians["long"] + medians["short"])
    return (work / medians["ours"]) / fast


def at_once(kibibytes: int, x: Tensor) -> Tensor:
    """`newton_schulz` where a CPU takes so much of a batch at a time."""
    before = module._CACHED_BYTES
    module._CACHED_BYTES = kibibytes * 1024
    try:
        return newton_schulz(x)
    finally:
        module._CACHED_BYTES = before


def cache_curve(repeats: int, seconds: float) -> dict[str, measure.Times]:
    """Times by how much of a batch is taken at a time, in KiB of the short side's matrices."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for shape in CURVE:
        x = torch.randn(shape, generator=generator).bfloat16()
        calls = {str(n): partial(at_once, n, x) for n in (512, 1024, 2048, 4096, 2**20)}
        found["×".join(map(str, shape))] = measure.alternate(
            calls, repeats=repeats, seconds=seconds
        )
    return found


def equal_error(errors_of: dict[str, list[float]], theirs: str) -> str | None:
    """Ours with the fewest steps that is no worse than theirs on any spectrum."""
    for steps in (2, 3, 4, 5):
        name = f"ours, {steps} steps"
        if peers.no_worse(errors_of[name], errors_of[theirs]):
            return name
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    found = run(threads=args.threads)
    print(measure.save("orthogonalizers", found))
    for shape, times in found["cases"].items():
        for name, steps in PUBLISHED:
            for style in ("", ", fused"):
                theirs = f"{name}, {steps} steps{style}"
                ours = equal_error(found["errors"], theirs)
                if ours is not None:
                    ratio = measure.median_ratio(times, theirs, ours)
                    print(f"{shape}: {theirs} over {ours}: {ratio:.2f}")
    print("share of the rate of plain products:", found["rates"])


if __name__ == "__main__":
    main()
