"""AdamW for what is no matrix: torch's own in place, and as a pure function."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from ortho_func.primitives.momentum import Scalar
from ortho_func.primitives.roots import sqrt
from ortho_func.primitives.scaling import widen

__all__ = ["adamw_", "adamw_step"]


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Scalar,
    weight_decay: Scalar,
    betas: tuple[float, float],
    eps: float,
    cautious: bool = False,
) -> None:
    """One step in place, by torch's fused kernel where the dtypes allow it."""
    if not params:
        return
    # The fused kernels cannot be traced, and torch's others round on the way to narrower state.
    mixed = any(
        p.dtype != m.dtype or p.dtype != v.dtype
        for p, m, v in zip(params, exp_avgs, exp_avg_sqs, strict=True)
    )
    if cautious or mixed or torch.compiler.is_compiling():
        old = (list(params), list(exp_avgs), list(exp_avg_sqs), list(steps))
        new = adamw_step(
            params, grads, exp_avgs, exp_avg_sqs, steps,
            lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, cautious=cautious,
        )  # fmt: skip
        for before, after in zip(old, new, strict=True):
            torch._foreach_copy_(before, after)
        return
    if isinstance(weight_decay, Tensor):  # no overload takes one: decay first, as AdamW does
        torch._foreach_mul_(list(params), 1 - lr * weight_decay)
        weight_decay = 0.0
    fused = all(p.dtype == g.dtype for p, g in zip(params, grads, strict=True))
    _call(params, grads, exp_avgs, exp_avg_sqs, steps, lr, weight_decay, betas, eps, fused=fused)


def adamw_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Scalar,
    weight_decay: Scalar,
    betas: tuple[float, float],
    eps: float,
    cautious: bool = False,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """The same without writing the arguments: new params, averages, squares and steps.

    m ← β₁m + (1 − β₁)G;  v ← β₂v + (1 − β₂)G²;
    X ← (1 − lr·λ)X − lr/(1 − β₁ᵗ) · m/(√v/√(1 − β₂ᵗ) + ε)

    Written out: torch's own differentiable form writes in place, which `vmap` cannot follow, and
    divides by lr, which makes NaN of parameters without gradients while lr is zero. With
    `cautious`, decay only where the step and the parameter agree in sign (arXiv 2510.12402).
    """
    first, second = betas
    new, averages, squares = [], [], []
    counts = [step + 1 for step in steps]
    for p, g, m, v, t in zip(params, grads, exp_avgs, exp_avg_sqs, counts, strict=True):
        x, slope = widen(p), widen(g)
        wide = torch.promote_types(widen(m).dtype, slope.dtype)
        average = torch.lerp(m.to(wide), slope.to(wide), 1 - first)
        square = widen(v) * second + slope.square() * (1 - second)
        root = sqrt(square) / sqrt(_correction(second, t)) + eps
        move = lr / _correction(first, t) * (average / root)
        decayed = torch.where(move * x > 0, x, 0) if cautious else x
        new.append((x - lr * weight_decay * decayed - move).to(p.dtype))
        averages.append(average.to(m.dtype))
        squares.append(square.to(v.dtype))
    return new, averages, squares, counts


def _correction(beta: float, step: Tensor) -> Tensor:
    """1 − βᵗ, exact to the last digits where βᵗ is near one."""
    return -torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step)


def _call(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    lr: Scalar,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    *,
    fused: bool = False,
) -> None:
    cast = [
        g if g.dtype == m.dtype else g.to(m.dtype) for g, m in zip(grads, exp_avgs, strict=True)
    ]
    torch_adamw(
        list(params), cast, list(exp_avgs), list(exp_avg_sqs), [], list(steps),
        foreach=False, capturable=False, differentiable=False, fused=fused,
        grad_scale=None, found_inf=None, has_complex=False, amsgrad=False,
        beta1=betas[0], beta2=betas[1], lr=lr, weight_decay=weight_decay, eps=eps,
        maximize=False,
    )  # fmt: skip
