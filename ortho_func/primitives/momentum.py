"""Momentum over lists of tensors, without writing any of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ortho_func.primitives import foreach

__all__ = ["Scalar", "cast_like", "ema", "ema_", "heavy_ball", "nesterov"]

Scalar = float | Tensor


def cast_like(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor in the dtype of its counterpart."""
    return [x if x.dtype == y.dtype else x.to(y.dtype) for x, y in zip(tensors, like, strict=True)]


def lerp(start: Sequence[Tensor], end: Sequence[Tensor], weight: Scalar) -> list[Tensor]:
    """Linear interpolation, start + weight·(end − start), for a float or a 0-d tensor."""
    if isinstance(weight, Tensor):
        return foreach.add(start, foreach.mul(foreach.sub(end, start), weight))
    return foreach.lerp(start, end, weight)


def ema(momenta: Sequence[Tensor], grads: Sequence[Tensor], beta: Scalar) -> list[Tensor]:
    """Exponential moving average, M ← βM + (1 − β)G, in M's dtype.

    Example:
        >>> import torch
        >>> ema([torch.zeros(2)], [torch.ones(2)], 0.9)[0]
        tensor([0.1000, 0.1000])
    """
    if not momenta:
        return []
    return lerp(momenta, cast_like(grads, momenta), 1 - beta)


def ema_(momenta: Sequence[Tensor], grads: Sequence[Tensor], beta: Scalar) -> None:
    """`ema`, written into M.

    Example:
        >>> import torch
        >>> m = torch.zeros(2)
        >>> ema_([m], [torch.ones(2)], 0.9)
        >>> m
        tensor([0.1000, 0.1000])
    """
    if isinstance(beta, Tensor):
        foreach.copy_(momenta, ema(momenta, grads, beta))
    elif momenta:
        foreach.lerp_(momenta, cast_like(grads, momenta), 1 - beta)


def nesterov(momenta: Sequence[Tensor], grads: Sequence[Tensor], beta: Scalar) -> list[Tensor]:
    """Look ahead, B = (1 − β)G + βM, in M's dtype; M is the momentum after this step's `ema`."""
    if not momenta:
        return []
    return lerp(cast_like(grads, momenta), momenta, beta)


def heavy_ball(momenta: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Accumulation, M ← M + G, in M's dtype; decay happens elsewhere (error feedback)."""
    if not momenta:
        return []
    return foreach.add(momenta, cast_like(grads, momenta))
