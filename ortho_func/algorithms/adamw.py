"""AdamW for what is no matrix: torch's own, in place for the shells and pure for the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from ortho_func.primitives.momentum import Scalar

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
    if cautious or torch.compiler.is_compiling():  # the fused kernels cannot be traced
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
    fused = all(p.dtype == g.dtype for p, g in zip(params, grads, strict=True)) and all(
        p.dtype == m.dtype for p, m in zip(params, exp_avgs, strict=True)
    )
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

    With `cautious`, decay only where the step and the parameter agree in sign
    (arXiv 2510.12402).
    """
    new = [p.clone() if cautious else torch.mul(p, 1 - lr * weight_decay) for p in params]
    averages = [m.clone() for m in exp_avgs]
    squares = [v.clone() for v in exp_avg_sqs]
    counts = [step.clone() for step in steps]
    if new:
        _call(new, grads, averages, squares, counts, lr, 0.0, betas, eps, differentiable=True)
    if cautious:
        new = [
            moved - lr * weight_decay * torch.where((p - moved) * p > 0, p, 0)
            for p, moved in zip(params, new, strict=True)
        ]
    return new, averages, squares, counts


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
    differentiable: bool = False,
) -> None:
    cast = [
        g if g.dtype == m.dtype else g.to(m.dtype) for g, m in zip(grads, exp_avgs, strict=True)
    ]
    torch_adamw(
        list(params), cast, list(exp_avgs), list(exp_avg_sqs), [], list(steps),
        foreach=False, capturable=False, differentiable=differentiable, fused=fused,
        grad_scale=None, found_inf=None, has_complex=False, amsgrad=False,
        beta1=betas[0], beta2=betas[1], lr=lr, weight_decay=weight_decay, eps=eps,
        maximize=False,
    )  # fmt: skip
