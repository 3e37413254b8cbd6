"""How far a step goes: the shape scale of the learning rate, decay, and the last rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ortho_func.primitives.momentum import Scalar

__all__ = ["ADJUST_LR", "descend", "lr_scale"]

ADJUST_LR: dict[str | None, Callable[[int, int], float]] = {
    # Jordan 2024, https://kellerjordan.github.io/posts/muon/
    "original": lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
    # Moonlight, arXiv 2502.16982, section 2.2
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    # Bernstein, modular norms, arXiv 2405.14813
    "spectral_norm": lambda rows, cols: math.sqrt(rows / cols),
    "none": lambda rows, cols: 1.0,
}
ADJUST_LR[None] = ADJUST_LR["original"]


def lr_scale(rows: int, cols: int, adjust_lr_fn: str | None = None) -> float:
    """The factor on lr for a matrix of R rows and C columns.

    "original" √max(1, R/C); "match_rms_adamw" 0.2·√max(R, C); "spectral_norm" √(R/C);
    "none" 1; None means "original", as in ``torch.optim.Muon``.

    Raises:
        ValueError: for another name.

    Example:
        >>> [lr_scale(16, 4, name) for name in ("original", "match_rms_adamw", "none")]
        [2.0, 0.8, 1.0]
    """
    if adjust_lr_fn not in ADJUST_LR:
        names = ", ".join(repr(name) for name in ADJUST_LR)
        raise ValueError(f"adjust_lr_fn must be one of {names}, got {adjust_lr_fn!r}.")
    return ADJUST_LR[adjust_lr_fn](rows, cols)


def descend(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    lr: Scalar,
    weight_decay: Scalar = 0.0,
    scales: Sequence[float | Tensor] | None = None,
    cautious: bool = False,
) -> list[Tensor]:
    """New parameters X − lr·λ·X − lr·s·U, in fp32 at least and rounded once to X's dtype.

    Args:
        params: X, any floating dtypes.
        updates: U, of the shapes of X.
        lr: a float or a 0-d tensor.
        weight_decay: λ, decoupled.
        scales: s of each parameter: a number, or a tensor that broadcasts against U.
        cautious: decay only where U and X agree in sign (arXiv 2510.12402).

    Example:
        >>> descend([torch.ones(2)], [torch.ones(2)], lr=0.1, weight_decay=0.5)[0]
        tensor([0.8500, 0.8500])
    """
    if not params:
        return []
    numbers = [1.0] * len(params) if scales is None else list(scales)
    wide = [_widen(x) for x in params]
    moves = [
        _widen(u) * s if isinstance(s, Tensor) else _widen(u)
        for u, s in zip(updates, numbers, strict=True)
    ]
    factors = [1.0 if isinstance(s, Tensor) else s for s in numbers]
    if cautious:
        decays = [torch.where(u * x > 0, x, 0) for u, x in zip(moves, wide, strict=True)]
        kept = torch._foreach_sub(wide, torch._foreach_mul(decays, lr * weight_decay))
    else:
        kept = torch._foreach_mul(wide, 1 - lr * weight_decay)
    if isinstance(lr, Tensor):
        steps = torch._foreach_mul(torch._foreach_mul(moves, factors), lr)
    else:
        steps = torch._foreach_mul(moves, [lr * factor for factor in factors])
    moved = torch._foreach_sub(kept, steps)
    return [new.to(old.dtype) for new, old in zip(moved, params, strict=True)]


def _widen(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x
