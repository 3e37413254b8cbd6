"""How far a step goes: the shape scale of the learning rate, decay, and the last rounding."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ortho_func.primitives import foreach
from ortho_func.primitives.momentum import Scalar

__all__ = ["ADJUST_LR", "Descent", "descend_", "lr_scale", "step_updates", "widen"]

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

    Examples:
        >>> [lr_scale(16, 4, name) for name in ("original", "match_rms_adamw", "none")]
        [2.0, 0.8, 1.0]
    """
    if adjust_lr_fn not in ADJUST_LR:
        names = ", ".join(repr(name) for name in ADJUST_LR)
        raise ValueError(f"adjust_lr_fn must be one of {names}, got {adjust_lr_fn!r}.")
    return ADJUST_LR[adjust_lr_fn](rows, cols) if rows * cols else 1.0


def step_updates(
    params: Sequence[Tensor],
    directions: Sequence[Tensor],
    *,
    lr: Scalar,
    weight_decay: Scalar = 0.0,
    scales: Sequence[float | Tensor] | None = None,
    cautious: bool = False,
) -> list[Tensor]:
    """What to add to the parameters: −lr·s·U − lr·λ·X, in fp32 at least and not yet rounded.

    Args:
        params: X, any floating dtypes.
        directions: U, of the shapes of X or reshapeable to them.
        lr: a float or a 0-d tensor.
        weight_decay: λ, decoupled.
        scales: s of each parameter: a number, or a tensor that broadcasts against U.
        cautious: decay only where U and X agree in sign (arXiv 2510.12402).

    Examples:
        >>> step_updates([torch.ones(2)], [torch.ones(2)], lr=0.1, weight_decay=0.5)[0]
        tensor([-0.1500, -0.1500])
    """
    if not params:
        return []
    numbers = [1.0] * len(params) if scales is None else list(scales)
    moves = [
        (widen(u) * s if isinstance(s, Tensor) else widen(u)).reshape(x.shape)
        for u, s, x in zip(directions, numbers, params, strict=True)
    ]
    factors = [1.0 if isinstance(s, Tensor) else s for s in numbers]
    wide = [widen(x) for x in params]
    decayed = wide
    if cautious:
        decayed = [torch.where(u * x > 0, x, 0) for u, x in zip(moves, wide, strict=True)]
    if isinstance(lr, Tensor):
        steps = foreach.mul(foreach.mul(moves, factors), -lr)
    else:
        steps = foreach.mul(moves, [-lr * factor for factor in factors])
    if isinstance(weight_decay, Tensor) or isinstance(lr, Tensor):
        return foreach.sub(steps, foreach.mul(decayed, lr * weight_decay))
    if weight_decay == 0.0:
        return steps
    return foreach.add(steps, decayed, alpha=-lr * weight_decay)


class Descent(NamedTuple):
    """A step not yet taken: directions U of parameters X, and how far, −lr·s·U − lr·λ·X."""

    directions: list[Tensor]
    lr: Scalar
    weight_decay: Scalar
    scales: list[float | Tensor]
    cautious: bool = False

    def moves(self) -> list[Tensor]:
        """s·U, in fp32 at least."""
        return [widen(u) * s for u, s in zip(self.directions, self.scales, strict=True)]

    def updates(self, params: Sequence[Tensor]) -> list[Tensor]:
        """What to add to the parameters; see `step_updates`."""
        return step_updates(
            params,
            self.directions,
            lr=self.lr,
            weight_decay=self.weight_decay,
            scales=self.scales,
            cautious=self.cautious,
        )


def descend_(params: Sequence[Tensor], descent: Descent) -> None:
    """Take a step in place, without temporaries where one rounding or two make no difference."""
    plain = not (
        descent.cautious
        or isinstance(descent.lr, Tensor)
        or isinstance(descent.weight_decay, Tensor)
        or any(isinstance(scale, Tensor) for scale in descent.scales)
        or any(x.dtype.itemsize < 4 for x in params)
    )
    if not plain:
        torch._foreach_add_(list(params), descent.updates(params))
        return
    lr = float(descent.lr)
    if descent.weight_decay:
        torch._foreach_mul_(list(params), 1 - lr * descent.weight_decay)
    by_scale: dict[float | Tensor, list[int]] = defaultdict(list)
    for number, scale in enumerate(descent.scales):
        by_scale[scale].append(number)
    for scale, numbers in by_scale.items():
        moved = [params[n] for n in numbers]
        along = [_shaped_like(descent.directions[n], params[n]) for n in numbers]
        torch._foreach_add_(moved, along, alpha=-lr * float(scale))


def _shaped_like(x: Tensor, y: Tensor) -> Tensor:
    return x if x.shape == y.shape else x.reshape(y.shape)


def widen(x: Tensor) -> Tensor:
    """At least fp32, so that sums are rounded once."""
    return x.float() if x.dtype.itemsize < 4 else x
