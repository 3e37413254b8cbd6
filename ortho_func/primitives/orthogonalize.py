"""Orthogonalizers: a matrix to (an approximation of) its polar factor.

Every function here takes ``[..., R, C]`` in any floating dtype and gives back the same shape and
dtype without writing its input. Leading dims are a batch. The work is done on the short side, and
each matrix is scaled on its own, so results don't depend on the norm of the input.

Shape suffixes: B batch, R rows, C columns, M the shorter of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ortho_func.coefficients import SCHEDULE_NAMES, Schedule, Step
from ortho_func.coefficients import schedule as find_schedule
from ortho_func.primitives.iterations import (
    gram_iterate,
    iterate,
    nonzero,
    norm_of,
    power_of_two,
    wide_dtype,
)

ScheduleLike = str | Schedule | Sequence[Step]

DEFAULT_SCHEDULE = "minimax"

_COMPUTE_DTYPES = (torch.bfloat16, torch.float32, torch.float64)

# What an operation on the short side alone costs beside one on the long side: such products run
# below full speed, and each brings passes over its operands, which cost as much as this many
# operations an element. Fitted to float32 and float64 by benchmarks/choice.py.
_SHORT_PRICE = 1.26
_PASS_PRICE = {torch.bfloat16: 64.0, torch.float32: 64.0, torch.float64: 32.0}

# How much of a batch the CPU takes at a time, counted on the short side: about a core's
# second-level cache. Measured by benchmarks/orthogonalizers.py.
_CACHED_BYTES = 2 * 1024 * 1024


def newton_schulz(
    x: Tensor,
    *,
    schedule: ScheduleLike = DEFAULT_SCHEDULE,
    steps: int | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Orthogonalize by a composition of odd polynomials: ``X <- aX + (bA + cA^2)X``, ``A = XX^T``.

    ``x`` is ``[..., R, C]``, floating; the result has its shape and dtype. ``compute_dtype=None``
    computes in bfloat16, except float64 input, which stays float64. ``schedule`` is a name,
    a `Schedule`, or the steps: cubics ``(a, b)``, quintics ``(a, b, c)``, or degree nine.

    A schedule for the Frobenius norm is applied as published; one for the Schatten-8 norm is scaled
    by a bound that the first step's ``A`` and ``A^2`` yield. ``"turbo_muon"`` scales almost
    orthogonally: ``X <- DX`` with ``D_i = (sum_j |A_ij|)^(-1/2)`` over rows of the short side
    (rows, of a square). No singular value of ``DX`` is above one. But the result is the polar
    factor of ``DX``, not of ``X``, and of a square matrix it depends on which side is called rows.

    Raises ``ValueError`` for fewer than two dims, an unknown schedule or another compute dtype,
    ``TypeError`` for a dtype that isn't real floating point.

    >>> newton_schulz(torch.ones(1, 16), schedule="jordan", compute_dtype=torch.float32)[0, 0]
    tensor(0.1741)

    Sources: https://kellerjordan.github.io/posts/muon/, arXiv 2505.16932; almost-orthogonal
    scaling: arXiv 2208.03160, arXiv 2512.04632.
    """
    made = find_schedule(schedule, steps)
    dtype = _compute_dtype(x, compute_dtype)
    if x.numel() == 0:
        return x.clone()
    return _in_cache(lambda part: _newton_schulz(part, made, dtype), x, dtype)


def _newton_schulz(x: Tensor, made: Schedule, dtype: torch.dtype) -> Tensor:
    x_BRC, restore = _prepared(x, dtype)
    return restore(iterate(x_BRC, made))


def gram_newton_schulz(
    x: Tensor,
    *,
    schedule: ScheduleLike = DEFAULT_SCHEDULE,
    steps: int | None = None,
    restarts: Sequence[int] | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Orthogonalize by iterating on the Gram matrix: ``W <- qW``, ``A <- qAq``, ``X <- WX``.

    The same polynomials as `newton_schulz` with ``q = aI + bA + cA^2``, but the long side is
    touched only at the start, at each restart and at the end. ``restarts`` are the step numbers
    before which ``X <- WX`` is formed and ``A`` computed anew; the default keeps float32 stable.
    With bfloat16 as compute dtype the input is rounded to it and all the rest is float32: products
    of bfloat16 amplify its rounding until singular values leave the interval of the steps.

    Shapes, dtypes and errors are those of `newton_schulz`; ``ValueError`` too for a restart
    outside ``1 .. steps - 1``.

    >>> x = torch.randn(8, 64, dtype=torch.float64)
    >>> torch.allclose(gram_newton_schulz(x), newton_schulz(x))
    True
    """
    made = find_schedule(schedule, steps)
    dtype = _compute_dtype(x, compute_dtype)
    cuts = _checked_restarts(restarts, len(made.steps))
    if x.numel() == 0:
        return x.clone()
    x_BRC, restore = _prepared(x, dtype)
    return restore(gram_iterate(x_BRC.to(wide_dtype(dtype)), made, cuts))


def polar_svd(x: Tensor) -> Tensor:
    """The polar factor ``UV^T`` of ``x = U diag(s) V^T`` by SVD, in float64.

    Directions with ``s <= max(R, C) * eps * max(s)`` count as absent and give zero, where ``eps``
    is float32's, or float64's for float64 input. A matrix that holds NaN or Inf gives NaN.

    >>> polar_svd(torch.tensor([[0.0, -3.0], [2.0, 0.0]]))
    tensor([[ 0., -1.],
            [ 1.,  0.]])
    """
    _check_input(x)
    if x.numel() == 0:
        return x.clone()
    wide = x.double()
    finite = torch.isfinite(wide).all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    clean = torch.where(finite, wide, 0.0)
    u, s, vt = torch.linalg.svd(clean, full_matrices=False)
    eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    present = s > s.amax(dim=-1, keepdim=True) * (max(x.shape[-2:]) * eps)
    polar = (u * present.unsqueeze(-2)) @ vt
    return torch.where(finite, polar, torch.nan).to(x.dtype)


def normalize_vector(x: Tensor) -> Tensor:
    """The exact polar factor ``x / |x|`` of matrices with a single row or column.

    >>> normalize_vector(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """
    _check_input(x)
    if x.numel() == 0:
        return x.clone()
    wide = x.double() if x.dtype == torch.float64 else x.float()
    wide = wide / power_of_two(wide)
    return (wide / nonzero(norm_of(wide))).to(x.dtype)


def orthogonalize(
    x: Tensor,
    *,
    method: str = "auto",
    steps: int | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """Orthogonalize ``[..., R, C]`` by a method's name, chosen by shape and compute dtype alone.

    ``"auto"`` normalizes a single row or column exactly, takes `gram_newton_schulz` where `cost`
    says that it is cheaper and the compute dtype is float32 or float64, and `newton_schulz`
    elsewhere. Other names: ``"newton_schulz"``, ``"gram_newton_schulz"``, ``"svd"`` (the exact
    polar factor, slow) and the schedules'.

    Raises ``ValueError`` for an unknown name; see `newton_schulz` for the rest.

    >>> orthogonalize(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """
    _check_method(method)
    dtype = _compute_dtype(x, compute_dtype)
    if method == "auto":
        method = _auto(x.shape[-2], x.shape[-1], steps, dtype)
    if method == "vector":
        return normalize_vector(x)
    if method == "svd":
        return polar_svd(x)
    if method == "gram_newton_schulz":
        return gram_newton_schulz(x, steps=steps, compute_dtype=compute_dtype)
    name = DEFAULT_SCHEDULE if method == "newton_schulz" else method
    return newton_schulz(x, schedule=name, steps=steps, compute_dtype=compute_dtype)


#: The names that `orthogonalize` and `get_orthogonalizer` take.
METHODS: tuple[str, ...] = ("auto", "newton_schulz", "gram_newton_schulz", "svd", *SCHEDULE_NAMES)


class Iteration(NamedTuple):
    """What an orthogonalizer does: a schedule's steps, on X or between `cuts` on its Gram."""

    schedule: Schedule
    cuts: tuple[int, ...] | None  # None: on X
    compute_dtype: torch.dtype | None


@dataclass(frozen=True)
class Orthogonalizer:
    """`orthogonalize` with its settings bound: hashable, comparable, picklable."""

    method: str = "auto"
    steps: int | None = None
    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _check_method(self.method)
        _check_compute_dtype(self.compute_dtype)
        find_schedule(_schedule_name(self.method), self.steps)

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype to which input is cast before anything else; None if it is not."""
        return None if self.method == "svd" else self.compute_dtype or torch.bfloat16

    def iteration(self, rows: int, cols: int) -> Iteration | None:
        """The iteration for matrices of this shape; None where there is none."""
        dtype = self.compute_dtype or torch.bfloat16
        method = _auto(rows, cols, self.steps, dtype) if self.method == "auto" else self.method
        if method in ("vector", "svd"):
            return None
        made = find_schedule(_schedule_name(method), self.steps)
        cuts = _default_restarts(len(made.steps)) if method == "gram_newton_schulz" else None
        return Iteration(made, cuts, self.compute_dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """The orthogonalized ``x``, ``[..., R, C]``."""
        return orthogonalize(
            x, method=self.method, steps=self.steps, compute_dtype=self.compute_dtype
        )


def get_orthogonalizer(
    name_or_callable: str | Callable[[Tensor], Tensor],
    *,
    steps: int | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Callable[[Tensor], Tensor]:
    """A function ``[..., R, C] -> [..., R, C]`` for a method's name; a callable stays what it is.

    Raises ``ValueError`` for an unknown name, a number of steps its schedule doesn't offer, or an
    unsupported compute dtype; ``TypeError`` for anything that is neither a name nor callable.

    >>> get_orthogonalizer("jordan", steps=5)
    Orthogonalizer(method='jordan', steps=5, compute_dtype=None)
    """
    if isinstance(name_or_callable, str):
        return Orthogonalizer(name_or_callable, steps, compute_dtype)
    if not callable(name_or_callable):
        raise TypeError(
            f"orthogonalizer: expected a name or a callable, got {type(name_or_callable).__name__}"
        )
    return name_or_callable


@cache
def flops(
    rows: int,
    cols: int,
    *,
    method: str = "auto",
    steps: int | None = None,
    compute_dtype: torch.dtype | None = None,
) -> int:
    """Floating-point operations that one matrix of this shape takes, a multiply-add counting two.

    ``compute_dtype`` matters to ``"auto"``; None counts as bfloat16.
    Raises ``ValueError`` for an unknown method or a number of steps its schedule doesn't offer.

    >>> flops(2, 3, method="jordan", steps=1)
    64
    """
    _check_method(method)
    _check_compute_dtype(compute_dtype)
    return sum(_work(rows, cols, method, steps, compute_dtype or torch.bfloat16))


@cache
def flops_of_share(
    rows: int,
    cols: int,
    share: float,
    *,
    method: str = "auto",
    steps: int | None = None,
    compute_dtype: torch.dtype | None = None,
) -> float:
    """`flops` of an owner that has a share of the long side, and all of the short one.

    >>> flops_of_share(64, 64, 1.0) == flops(64, 64)
    True
    """
    along, short = _work(rows, cols, method, steps, compute_dtype or torch.bfloat16)
    return along * share + short


def cost(
    rows: int,
    cols: int,
    *,
    method: str = "auto",
    steps: int | None = None,
    compute_dtype: torch.dtype | None = None,
) -> float:
    """What one matrix of this shape takes, in operations at the long side's speed: a model of time.

    Like `flops`, with what is done on the short side alone at its price, ``1.26 + 32 / min(R, C)``
    (in float64, where products are slower, ``1.26 + 16 / min(R, C)``). It compares methods of one
    compute dtype, and ``"auto"`` takes the cheapest of those that are safe and fast in it;
    benchmarks/choice.py holds the model against measurement.

    >>> cost(512, 512, method="gram_newton_schulz") > cost(512, 512, method="newton_schulz")
    True
    """
    _check_method(method)
    _check_compute_dtype(compute_dtype)
    dtype = compute_dtype or torch.bfloat16
    along, short = _work(rows, cols, method, steps, dtype)
    # A product of M x M is 2M operations an element.
    return along + short * (_SHORT_PRICE + _PASS_PRICE[dtype] / (2 * max(1, min(rows, cols))))


def _work(
    rows: int, cols: int, method: str, steps: int | None, dtype: torch.dtype
) -> tuple[int, int]:
    """Operations that touch the long side, and those on the short side alone."""
    short, long = min(rows, cols), max(rows, cols)
    if method == "auto":
        method = _auto(rows, cols, steps, dtype)
    if method == "vector":
        return 3 * long, 0
    if method == "svd":
        # Golub and Van Loan, Matrix Computations, 4th ed., figure 8.6.1 (R-SVD).
        return 6 * long * short**2, 20 * short**3
    made = find_schedule(_schedule_name(method), steps)
    squares = [_square_products(step) for step in made.steps]
    touching = len(squares)  # steps that touch the long side
    if made.scale == "schatten8":
        squares[0] = max(squares[0], 1)  # the bound takes A^2
    if method == "gram_newton_schulz":
        starts = (0, *_default_restarts(len(squares)))
        touching = len(starts)
        # After a segment's first step, each one multiplies W by q and A by q from both sides.
        squares = [max(n, 1) if k in starts else n + 3 for k, n in enumerate(squares)]
    return touching * 4 * short**2 * long, sum(squares) * 2 * short**3


def _square_products(step: Step) -> int:
    """Products of the short side alone that a step's factor takes, the square included."""
    return {2: 0, 3: 1, 5: 2}[len(step)]


# --- choices -----------------------------------------------------------------------------------


def _schedule_name(method: str) -> str:
    return method if method in SCHEDULE_NAMES else DEFAULT_SCHEDULE


def _check_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"unknown orthogonalizer {method!r}: expected one of {', '.join(METHODS)}")


def _auto(rows: int, cols: int, steps: int | None, dtype: torch.dtype) -> str:
    if min(rows, cols) == 1:
        return "vector"
    # The Gram iteration computes in float32 even for bfloat16, which costs more than it saves.
    if dtype == torch.bfloat16:
        return "newton_schulz"
    names = ("newton_schulz", "gram_newton_schulz")
    prices = [cost(rows, cols, method=name, steps=steps, compute_dtype=dtype) for name in names]
    return names[prices.index(min(prices))]


def _check_input(x: Tensor) -> None:
    if x.ndim < 2:
        raise ValueError(f"expected matrices [..., R, C], got a tensor of shape {list(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"expected a real floating dtype, got {x.dtype}")


def _check_compute_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in _COMPUTE_DTYPES:
        # float16 can't hold the eighth powers of a singular value that the bound needs.
        names = ", ".join(map(str, _COMPUTE_DTYPES))
        raise ValueError(f"compute_dtype must be None or one of {names}, got {dtype}")


def _compute_dtype(x: Tensor, asked: torch.dtype | None) -> torch.dtype:
    _check_input(x)
    _check_compute_dtype(asked)
    if asked is not None:
        return asked
    return torch.float64 if x.dtype == torch.float64 else torch.bfloat16


def _prepared(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """``x`` as [B, R, C] with amax in [1, 2), and the way back."""
    # A narrower dtype's exponents don't cover float64's: there the scaling comes before the cast.
    source = x if x.dtype == torch.float64 else x.to(dtype)
    scaled = (source / power_of_two(source)).to(dtype)
    flat = scaled.reshape(-1, *x.shape[-2:]) if x.ndim != 3 else scaled
    return flat, lambda y_BRC: y_BRC.reshape(x.shape).to(x.dtype)


def _in_cache(function: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype) -> Tensor:
    """A function of matrices, on CPUs a few at a time, so that passes over them stay in cache.

    A compiler fuses the passes instead, and its graph should not grow with the batch.
    """
    if x.device.type != "cpu" or x.ndim != 3 or torch.compiler.is_compiling():
        return function(x)
    of_one = min(x.shape[-2:]) ** 2 * dtype.itemsize
    at_once = max(torch.get_num_threads(), _CACHED_BYTES // of_one)
    if at_once >= x.shape[0]:
        return function(x)
    return torch.cat([function(part) for part in x.tensor_split(-(-x.shape[0] // at_once))])


def _default_restarts(steps: int) -> tuple[int, ...]:
    """Where a Gram iteration restarts by itself; the search is in docs/numerics.md."""
    # A segment multiplies the error in A by its slope at zero squared: 2e5 in four steps.
    return tuple(range(4, steps, 4))


def _checked_restarts(restarts: Sequence[int] | None, steps: int) -> tuple[int, ...]:
    if restarts is None:
        return _default_restarts(steps)
    cuts = tuple(sorted(set(restarts)))
    if any(not 0 < cut < steps for cut in cuts):
        raise ValueError(f"restarts must be in 1 .. {steps - 1}, got {tuple(restarts)}")
    return cuts
