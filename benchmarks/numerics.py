"""Measure the orthogonalizers and write docs/numerics.md: ``python benchmarks/numerics.py``."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import choice
import torch
from choice import alternated_medians
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz as torch_newton_schulz

from ortho_func.coefficients import MINIMAX_ARGUMENTS, Schedule, minimax_schedule, schedule
from ortho_func.primitives.iterations import BOUND_ZERO
from ortho_func.primitives.orthogonalize import (
    Orthogonalizer,
    flops,
    gram_newton_schulz,
    newton_schulz,
    polar_svd,
)

PAGE = Path(__file__).parents[1] / "docs" / "numerics.md"
SEEDS = range(3)
PEERS = (
    ("jordan", 5),
    ("you", 5),
    ("polar_express", 5),
    ("cans", 4),
    ("turbo_muon", 4),
    ("cubic", 7),
)
OURS = tuple(("minimax", steps) for steps in (2, 3, 4, 5))
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}


def with_spectrum(s: Tensor, rows: int, cols: int) -> Tensor:
    u = torch.linalg.qr(torch.randn(rows, len(s), dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(cols, len(s), dtype=torch.float64)).Q
    return (u * s.double()) @ v.mT


def spectra(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [
        torch.randn(256, 1024, dtype=torch.float64),
        torch.randn(256, 256, dtype=torch.float64),
        with_spectrum(torch.logspace(0, -3, 256), 256, 512),
    ]


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


class Errors:
    """Errors to the polar factor, averaged over seeds, and the largest singular value left."""

    def __init__(self) -> None:
        self.matrices = [spectra(seed) for seed in SEEDS]
        self.polar = [[polar_svd(x) for x in row] for row in self.matrices]

    def __call__(self, f: Callable[[Tensor], Tensor]) -> tuple[list[float], float]:
        errors, largest = torch.zeros(3, dtype=torch.float64), 0.0
        for row, polar in zip(self.matrices, self.polar, strict=True):
            got = [f(x) for x in row]
            errors += torch.stack(
                [(g - p).norm() / p.norm() for g, p in zip(got, polar, strict=True)]
            )
            largest = max(largest, *(float(torch.linalg.svdvals(g)[0]) for g in got))
        return (errors / len(SEEDS)).tolist(), largest

    def row(self, f: Callable[[Tensor], Tensor]) -> list[str]:
        errors, largest = self(f)
        return [*(f"{e:.4f}" for e in errors), f"{largest:.3f}"]


COLUMNS = ("Gaussian 256×1024", "Gaussian 256×256", "log 1 to 1e-3, 256×512", "largest value")


def error_table(errors: Errors) -> str:
    rows = []
    for dtype_name, dtype in DTYPES.items():
        for name, steps in (*PEERS, *OURS):
            made = schedule(name, steps)
            got = errors.row(
                lambda x, s=made, d=dtype: newton_schulz(x, schedule=s, compute_dtype=d)
            )
            rows.append([dtype_name, name, steps, *got])
    return table(("dtype", "schedule", "steps", *COLUMNS), rows)


def search_table(errors: Errors) -> str:
    rows = []
    for degrees in ((5, 9, 9), (5, 5, 5, 5), (5, 5, 5, 9), (5, 3, 3, 3, 9), (3,) * 6, (3,) * 7):
        for lower in (0.012, 0.0106, 0.007, 0.005, 0.0035):
            cushion = MINIMAX_ARGUMENTS.get(len(degrees), (0.0, 0.05))[1]
            made = minimax_schedule(len(degrees), lower, cushion=cushion, degrees=degrees)
            rows.append(
                [
                    degrees,
                    lower,
                    cushion,
                    *errors.row(lambda x, s=made: newton_schulz(x, schedule=s)),
                ]
            )
    return table(("degrees", "lower bound", "cushion", *COLUMNS), rows)


def arithmetic_table() -> str:
    rows = []
    for rows_, cols in ((1024, 1024), (1024, 2048), (1024, 4096)):
        five = flops(rows_, cols, method="jordan", steps=5)
        ratios = [flops(rows_, cols, steps=steps) / five for steps in (3, 4, 5)]
        wide = flops(rows_, cols, method="gram_newton_schulz", compute_dtype=torch.float32) / five
        rows.append([f"1:{cols // rows_}", *(f"{r:.2f}" for r in (*ratios, wide))])
    return table(("shape", "3 steps", "4 steps", "5 steps", "4 steps, Gram, float32"), rows)


def bound_table() -> str:
    rows = []
    named = dict(zip(COLUMNS, spectra(0), strict=False))
    named["all equal, 256"] = torch.eye(256, dtype=torch.float64)
    named["rank 1"] = torch.ones(256, 256, dtype=torch.float64)
    for name, x in named.items():
        s = torch.linalg.svdvals(x)
        q = (s / s[0]) ** 2
        schatten = float((q**4).sum() ** 0.25)
        u = BOUND_ZERO * schatten
        tight = u / 2 + (u * u / 4 + float((q * q - u * q).norm())) ** 0.5
        frobenius = float(q.sum() ** 0.5)
        rows.append([name, *(f"{v:.3f}" for v in (frobenius, schatten**0.5, tight**0.5))])
    return table(("matrix", "Frobenius", "Schatten-8", "used"), rows)


def least_quotient(made: Schedule) -> float:
    """Least p(x)/x of any step p on what reaches it."""
    top, least = 1.0, 1.0
    for step in made.steps:
        one = Schedule("one step", (step,))
        points = [top * (i + 1) / 2000 for i in range(2000)]
        ends = [one(x) for x in points]
        least = min(least, *(end / x for end, x in zip(ends, points, strict=True)))
        top = max(ends)
    return least


def diagonal_table() -> str:
    torch.manual_seed(0)
    low, high = torch.rand(2**16) * 0.97 + 0.03, torch.rand(2**16) * 0.5 + 0.5
    pairs = torch.diag_embed(torch.stack([high, low], dim=-1))
    made = {f"{name}, {steps} steps": schedule(name, steps) for name, steps in (*PEERS, *OURS)}
    for steps, (lower, _, degrees) in MINIMAX_ARGUMENTS.items():
        if steps > 2:
            bare = minimax_schedule(steps, lower, cushion=0.0, degrees=degrees)
            made[f"minimax, {steps} steps, no cushion"] = bare
    rows = []
    for name, one in made.items():
        got = newton_schulz(pairs, schedule=one).diagonal(dim1=-2, dim2=-1)
        ends = (float(got.min()), float(got.max()), least_quotient(one))
        rows.append([name, *(f"{value:.3f}" for value in ends)])
    return table(("schedule in bfloat16", "least", "largest", "least p(x)/x"), rows)


def restart_table(errors: Errors) -> str:
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for restarts in ((), (1,), (2,), (3,), (2, 3), (1, 2, 3)):
            got = errors.row(
                lambda x, r=restarts, d=dtype: gram_newton_schulz(x, restarts=r, compute_dtype=d)
            )
            rows.append([str(dtype)[6:], restarts or "none", *got])
    return table(("dtype", "restarts", *COLUMNS), rows)


METHODS = (
    ("jordan", None),
    ("you", None),
    ("polar_express", None),
    ("cans", None),
    ("cubic", None),
    ("turbo_muon", None),
    ("newton_schulz", 3),
    ("newton_schulz", 4),
    ("newton_schulz", 5),
    ("gram_newton_schulz", 4),
    ("svd", None),
)


def method_table() -> str:
    """Every method in every dtype on singular values from 1 to 1e-4."""
    torch.manual_seed(0)
    x = with_spectrum(torch.logspace(0, -4, 256), 256, 512)
    polar = polar_svd(x)
    timed = torch.randn(512, 1024)
    rows = []
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        made = {one: Orthogonalizer(*one, dtype) for one in METHODS}
        calls = {one: partial(f, timed.to(dtype)) for one, f in made.items()}
        took = alternated_medians(calls, 5)
        for (name, steps), f in made.items():
            got = f(x)
            out = torch.linalg.svdvals(got)
            share = flops(512, 1024, method=name, steps=steps, compute_dtype=dtype)
            rows.append(
                [
                    str(dtype)[6:],
                    name if steps is None else f"{name}, {steps} steps",
                    f"{float(out[-1]):.4f} to {float(out[0]):.3f}",
                    f"{float((got - polar).norm() / polar.norm()):.4f}",
                    f"{share / flops(512, 1024, method='jordan'):.2f}",
                    f"{took[name, steps] / took['jordan', None]:.2f}",
                ]
            )
    head = ("dtype", "method", "values out", "error", "operations", "time")
    return table(head, rows)


def choice_table() -> str:
    rows = list(choice.measured_rows())
    return table(choice.HEAD, map(choice.cells, rows)) + "\n" + choice.summary(rows) + "\n"


def time_table() -> str:
    rows = []
    for shape, repeats in (((768, 768), 21), ((768, 3072), 11), ((48, 64, 64), 15)):
        x = torch.randn(shape).bfloat16()
        stack = x if x.ndim == 3 else x[None]
        calls = {
            "torch": lambda s=stack: [
                torch_newton_schulz(m, (3.4445, -4.775, 2.0315), 5, 1e-7) for m in s
            ],
            "jordan": lambda x=x: newton_schulz(x, schedule="jordan"),
            "4": lambda x=x: newton_schulz(x, steps=4),
            "3": lambda x=x: newton_schulz(x, steps=3),
        }
        got = alternated_medians(calls, repeats)
        rows.append(
            [
                "×".join(map(str, shape)),
                *(f"{got[k] / got['torch']:.2f}" for k in ("jordan", "4", "3")),
            ]
        )
    return table(
        ("shape, bfloat16", "jordan, 5 steps", "minimax, 4 steps", "minimax, 3 steps"), rows
    )


TEXT = """# Numerics of the orthogonalizers

Made by `python benchmarks/numerics.py`; don't edit.

## Errors
Relative error to the polar factor of an SVD, in the Frobenius norm, averaged over three draws, and
the largest singular value left in any. The published schedules divide by the Frobenius norm, as
their authors do; `minimax` divides by the tighter bound below.

{errors}
Four steps of `minimax` are no worse than five of Jordan, You or Polar Express on any of the three,
in float64 and in bfloat16. Three steps are no worse than five of Jordan, and match You up to
bfloat16's rounding. More steps mostly pull up small singular values; in bfloat16, rounding the
input itself hides the smallest ones.

## All methods
Singular values from 1 to 1e-4 (logarithmic, 256×512) and where they end: the least and the largest
singular value of the result; the relative error to the polar factor of the SVD in float64; floating
operations, and time on one thread, over those of `jordan` in the same dtype at 512×1024. float16
input is computed in one of these. `turbo_muon` scales rows first, so its result is the polar factor
of another matrix; the errors here are to that of the input all the same.

{methods}
## Arithmetic
Floating-point operations over those of five quintic steps. A step of degree nine costs one more
product of the short side than a quintic does.

{arithmetic}
CPU time of `newton_schulz` over that of the function inside `torch.optim.Muon` (five steps, one
matrix at a time) on one thread, alternated medians. Machines differ: this one multiplies bfloat16
matrices so fast (AMX) that at 768×768 a pass of additions costs a quarter of a product.

{times}
## The choice by shape
`orthogonalize(x, method="auto")` compares two numbers: operations that touch the long side, plus
those on the short side alone at a price of 1.26 + 32/M (float64: 1.26 + 16/M), M being the short
side. Such products run below full speed and come with passes over their operands. In bfloat16 the
Gram iteration computes in float32, so that it is never chosen. Here the work of the Gram
iteration over that of plain Newton–Schulz, by operations, by the model and measured (one thread),
and which is chosen and fastest (`python benchmarks/choice.py`).

{choice}
## The scale
A polynomial needs an upper bound of the largest singular value, and each factor that the bound is
too large costs slope at zero. The first step computes A = XXᵀ and A² in any case. For every real
polynomial r, |r(λ₁)| ≤ ‖r(A)‖_F. With r(x) = x² that is the Schatten-8 norm, ‖A²‖_F^(1/4) ≥ σ₁.
With r(x) = x² − ux it gives λ₁ ≤ u/2 + √(u²/4 + ‖A² − uA‖_F), for any u ≥ 0; u = {zero} times the
Schatten bound of λ₁ is near the best on all of these. Bound over true σ₁:

{bounds}
## Degrees and lower bounds
`minimax_schedule` composes the best polynomial for [lower bound, 1] greedily. A small lower bound
serves small singular values, a large one the rest. A last step of degree nine gains more than it
costs. Earlier ones gain too, but powers of A would lose them in bfloat16: they are expanded around
a centre inside the spectrum, their coefficients are small. As a first step they remain unsafe.
Cubics need no square of A. On a square matrix (5, 3, 3, 3, 9) takes as many operations as
(5, 5, 5, 9) and is no better; seven cubics take 15% more for the same error; the longer the matrix,
the more they lose. They stay an option, `"cubic"`.

{search}
## Safety in bfloat16
On a diagonal matrix rounding doesn't average out: each entry goes through the polynomials by
itself. Here 65,536 random pairs, entries from 0.03 to 1. A step that takes a large value close to
zero may turn its sign by rounding; how near is the least quotient p(x)/x of any step, to compare
with bfloat16's error of up to 1/16 in that quotient. The cushion (as in Polar Express) bounds it.

{diagonal}
## Where the Gram iteration restarts
It updates A by q(A)·A·q(A) and so amplifies A's error. float32 needs no restart within four steps,
and restarts after every four of a longer schedule. For bfloat16 the input is rounded and the
rest is float32: applying the accumulated factor in bfloat16 instead (its entries reach thirty after
two steps) was measured to leave singular values up to two on matrices of less than full rank.

{restarts}"""


def main() -> None:
    torch.set_num_threads(1)
    errors = Errors()
    page = TEXT.format(
        errors=error_table(errors),
        methods=method_table(),
        choice=choice_table(),
        arithmetic=arithmetic_table(),
        times=time_table(),
        zero=BOUND_ZERO,
        bounds=bound_table(),
        search=search_table(errors),
        diagonal=diagonal_table(),
        restarts=restart_table(errors),
    )
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
