"""The arithmetic of the orthogonalizers: scales, Gram matrices, steps and their composition.

What is *tall* has its short side along the columns; the work is done on the short side. `tall` is
said outright, since a share of a matrix can be narrower than the matrix's short side.

Shape suffixes: B batch, R rows, C columns, M the shorter of both sides of the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ortho_func.coefficients import Schedule, Step
from ortho_func.primitives.roots import sqrt

__all__ = [
    "BOUND_ZERO",
    "frobenius_scaled",
    "gram_iterate",
    "gram_of",
    "is_tall",
    "iterate",
    "largest_eigenvalue_bound",
    "nonzero",
    "norm_of",
    "power_of_two",
    "segment_of",
    "step_of",
    "wide_dtype",
]

# Zero of the quadratic r(x) = x**2 - u*x in `largest_eigenvalue_bound`, as a fraction of the
# Schatten bound. Chosen by benchmarks/numerics.py; every value is safe.
BOUND_ZERO = 0.3

# Where a step of degree nine that isn't the last is expanded: the middle of A's eigenvalues, since
# early steps overshoot to singular values just below two (arXiv 2505.16932, section 3).
_EARLY_CENTRE = 1.8

# --- scales ------------------------------------------------------------------------------------


def norm_of(x: Tensor) -> Tensor:
    """Frobenius norm of each matrix as [..., 1, 1], accumulated in at least float32."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return norm


def nonzero(scale: Tensor) -> Tensor:
    """``scale`` with exact zeros replaced by one, so that zeros divide to zeros and NaN stays."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _amax(x: Tensor) -> Tensor:
    """Largest magnitude of each matrix as [..., 1, 1]."""
    if x.numel() > x.shape[-2] * x.shape[-1]:
        if x.dtype == torch.bfloat16 and x.device.type == "cpu":
            # Magnitudes are ordered as their bits are, and CPUs compare integers twice as fast.
            bits = x.view(torch.int16).bitwise_and(0x7FFF).amax(dim=(-2, -1), keepdim=True)
            return bits.view(torch.bfloat16)
        return x.abs().amax(dim=(-2, -1), keepdim=True)
    # A whole tensor's extremes come in one pass without a copy.
    low, high = torch.aminmax(x)
    return torch.maximum(high, -low).reshape((1,) * x.ndim)


def power_of_two(x: Tensor) -> Tensor:
    """The power of two in (amax/2, amax] of each matrix as [..., 1, 1]: division by it is exact."""
    # The scale cancels in every result, so it carries no gradient.
    amax = _amax(x.detach())
    mantissa = torch.frexp(amax.to(wide_dtype(amax.dtype))).mantissa
    return nonzero(amax / nonzero(2 * mantissa).to(amax.dtype))


def largest_eigenvalue_bound(a_BMM: Tensor, a2_BMM: Tensor) -> Tensor:
    """An upper bound [B, 1, 1] of A's largest eigenvalue, from A and its square.

    For every real polynomial r, ``|r(lambda_1)| <= |r(A)|_F``. With ``r = x^2`` that is the
    Schatten-8 norm of X, squared. With ``r = x^2 - u*x`` it solves to
    ``lambda_1 <= u/2 + sqrt(u^2/4 + |A^2 - uA|_F)``, tighter for a flat spectrum.
    """
    u = BOUND_ZERO * sqrt(norm_of(a2_BMM))
    residual = norm_of(torch.addcmul(a2_BMM, a_BMM, u, value=-1))
    half = u / 2
    return nonzero(half + sqrt(half * half + residual))


# --- the iterations ----------------------------------------------------------------------------


def _product(left: Tensor, right: Tensor) -> Tensor:
    # A batch of one as a plain product: backends have faster kernels for it.
    if left.shape[0] == 1:
        return (left[0] @ right[0]).unsqueeze(0)
    return left @ right


def _plus_product(
    base: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float = 1.0
) -> Tensor:
    """``beta*base + alpha*left@right`` as one fused product."""
    if base.shape[0] == 1:
        return torch.addmm(base[0], left[0], right[0], beta=beta, alpha=alpha).unsqueeze(0)
    return torch.baddbmm(base, left, right, beta=beta, alpha=alpha)


def is_tall(x: Tensor) -> bool:
    """Whether whole matrices have more rows than columns."""
    return x.shape[-2] > x.shape[-1]


def gram_of(x_BRC: Tensor, tall: bool) -> Tensor:
    """Products of the short side: ``XX^T``, or of a tall matrix ``X^TX``.

    Tall matrices are not transposed, since passes over transposed memory are slow.
    """
    if tall:
        return _product(x_BRC.mT, x_BRC)
    return _product(x_BRC, x_BRC.mT)


def _applied(
    factor_BMM: Tensor, x_BRC: Tensor, tall: bool, *, beta: float, alpha: float = 1.0
) -> Tensor:
    """``beta*X + alpha*FX``, or of a tall matrix ``beta*X + alpha*XF``."""
    if tall:
        return _plus_product(x_BRC, x_BRC, factor_BMM, beta=beta, alpha=alpha)
    return _plus_product(x_BRC, factor_BMM, x_BRC, beta=beta, alpha=alpha)


def _combined(a_BMM: Tensor, a2_BMM: Tensor, p: float, q: float) -> tuple[Tensor, float]:
    """``pA + qA^2`` as a matrix and the weight it still needs: one pass instead of two."""
    return (torch.add(a_BMM, a2_BMM, alpha=q / p), p) if p else (a2_BMM, q)


def _factor(a_BMM: Tensor, a2_BMM: Tensor, step: Step) -> tuple[Tensor, float]:
    """``bA``, ``bA + cA^2``, or ``bA + cA^2 + A^2(dA + eA^2)``, as a matrix and a weight.

    That is a step's polynomial in A without its constant term.
    """
    if len(step) == 2:
        return a_BMM, step[1]
    low, weight = _combined(a_BMM, a2_BMM, step[1], step[2])
    if len(step) == 3:
        return low, weight
    high, alpha = _combined(a_BMM, a2_BMM, step[3], step[4])
    return _plus_product(low, a2_BMM, high, beta=weight, alpha=alpha), 1.0


def _factor_of(a_BMM: Tensor, step: Step) -> tuple[Tensor, float]:
    """`_factor` from A alone; for a quintic the square is fused in."""
    if len(step) == 2:
        return a_BMM, step[1]
    if len(step) == 3:
        return _plus_product(a_BMM, a_BMM, a_BMM, beta=step[1], alpha=step[2]), 1.0
    return _factor(a_BMM, _product(a_BMM, a_BMM), step)


def _recentred(step: Step, centre: float) -> Step:
    """The coefficients of a step's polynomial in A as one in ``A - centre*I``."""
    terms = range(len(step))
    return tuple(
        sum(step[k] * math.comb(k, j) * centre ** (k - j) for k in terms if k >= j) for j in terms
    )


def _shifted(a_BMM: Tensor, centre: float) -> Tensor:
    """``A - centre*I``, written into A where it is one's own and nothing traces it."""
    if torch.compiler.is_compiling():  # inductor's lowering of a diagonal view warns
        eye = torch.eye(a_BMM.shape[-1], dtype=a_BMM.dtype, device=a_BMM.device)
        return a_BMM - centre * eye
    a_BMM.diagonal(dim1=-2, dim2=-1).sub_(centre)
    return a_BMM


def _apply_step(x_BRC: Tensor, tall: bool, gram: Tensor, step: Step, centre: float) -> Tensor:
    """``X <- p(XX^T) X`` for one step; its Gram matrix is used up."""
    if len(step) > 3:
        # Around its centre a polynomial of degree nine has small coefficients, so that rounding A
        # hurts little: around zero they are many times the result, fatal in bfloat16.
        step = _recentred(step, centre)
        gram = _shifted(gram, centre)
    factor, weight = _factor_of(gram, step)
    return _applied(factor, x_BRC, tall, beta=step[0], alpha=weight)


def iterate(x_BRC: Tensor, made: Schedule) -> Tensor:
    """All steps of a schedule on prepared matrices."""
    tall = is_tall(x_BRC)
    if made.scale == "frobenius":
        x_BRC = frobenius_scaled(x_BRC)
    for number in range(len(made.steps)):
        x_BRC = step_of(made, number, x_BRC, tall, gram_of(x_BRC, tall))
    return x_BRC


def step_of(made: Schedule, number: int, x_BRC: Tensor, tall: bool, gram_BMM: Tensor) -> Tensor:
    """One step of a schedule, the first with its scale (but for Frobenius); uses up the Gram."""
    step = made.steps[number]
    if number == 0 and made.scale == "schatten8":
        return _bounded_step(x_BRC, tall, gram_BMM, step)
    if number == 0 and made.scale == "aol":
        x_BRC, gram_BMM = _aol_scaled(x_BRC, tall, gram_BMM)
    last = 0 < number == len(made.steps) - 1
    return _apply_step(x_BRC, tall, gram_BMM, step, 1.0 if last else _EARLY_CENTRE)


def frobenius_scaled(x_BRC: Tensor) -> Tensor:
    """X divided by its Frobenius norm."""
    return x_BRC / nonzero(norm_of(x_BRC))


def _aol_scaled(x_BRC: Tensor, tall: bool, gram_BMM: Tensor) -> tuple[Tensor, Tensor]:
    """``DX`` and its Gram matrix, ``D_i = (sum_j |A_ij|)^(-1/2)``: no singular value above one.

    Of a tall matrix ``XD``.
    """
    sums = gram_BMM.abs().sum(dim=-1, keepdim=True, dtype=wide_dtype(gram_BMM.dtype))
    scale = nonzero(sums).rsqrt()
    along = scale.mT if tall else scale
    return (x_BRC * along).to(x_BRC.dtype), (gram_BMM * scale * scale.mT).to(gram_BMM.dtype)


def _bounded_step(x_BRC: Tensor, tall: bool, gram: Tensor, step: Step) -> Tensor:
    """The first step, on X divided by a tight bound of its largest singular value."""
    square = _product(gram, gram)
    shrink = largest_eigenvalue_bound(gram, square).reciprocal()
    x_BRC = x_BRC * shrink.sqrt()
    if len(step) == 3 and step[1]:
        # s(bA + c*sA^2) as b * s(A + (c/b)sA^2): fewer passes over the small side.
        weight = step[1]
        factor = torch.addcmul(gram, square, shrink, value=step[2] / weight) * shrink
    else:
        factor, weight = _factor(gram * shrink, square * shrink * shrink, step)
    return _applied(factor, x_BRC, tall, beta=step[0], alpha=weight)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gram_iterate(x_BRC: Tensor, made: Schedule, cuts: tuple[int, ...]) -> Tensor:
    """All steps of a schedule, touching the long side only between the segments."""
    tall = is_tall(x_BRC)
    if made.scale == "frobenius":
        x_BRC = frobenius_scaled(x_BRC)
    for start, stop in pairwise((0, *cuts, len(made.steps))):
        x_BRC = segment_of(made, start, stop, x_BRC, tall, gram_of(x_BRC, tall))
    return x_BRC


def segment_of(
    made: Schedule, start: int, stop: int, x_BRC: Tensor, tall: bool, gram_BMM: Tensor
) -> Tensor:
    """Some steps on the Gram matrix alone, the first with its scale (but for Frobenius)."""
    if start == 0 and made.scale == "aol":
        x_BRC, gram_BMM = _aol_scaled(x_BRC, tall, gram_BMM)
    square = _product(gram_BMM, gram_BMM)
    if start == 0 and made.scale == "schatten8":
        shrink = largest_eigenvalue_bound(gram_BMM, square).reciprocal()
        x_BRC = x_BRC * shrink.sqrt()
        gram_BMM, square = gram_BMM * shrink, square * shrink * shrink
    factor, shift = _gram_segment(gram_BMM, square, made.steps[start:stop])
    return _applied(factor, x_BRC, tall, beta=shift)


def _gram_segment(a_BMM: Tensor, a2_BMM: Tensor, steps: Sequence[Step]) -> tuple[Tensor, float]:
    """The product of a segment's factors as ``W + shift*I``: returns W and shift.

    Keeping the identity's share apart leaves X's own share exact when W is rounded.
    """
    first, *rest = steps
    q, weight = _factor(a_BMM, a2_BMM, first)
    q, lead = q * weight, first[0]
    w, shift = q, lead
    for step in rest:
        # A <- (q + lead*I) A (q + lead*I), one side at a time.
        half = _plus_product(a_BMM, q, a_BMM, beta=lead)
        a_BMM = _plus_product(half, half, q, beta=lead)
        q, weight = _factor_of(a_BMM, step)
        q, lead = q * weight, step[0]
        # (q + lead*I)(W + shift*I) = (qW + lead*W + shift*q) + lead*shift*I
        w = torch.add(_plus_product(w, q, w, beta=lead), q, alpha=shift)
        shift *= lead
    return w, shift
