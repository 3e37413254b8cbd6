"""Momentum over lists of tensors, without writing any of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ortho_func.primitives import foreach

__all__ = ["Scalar", "cast_like", "ema", "ema_", "heavy_ball", "nesterov"]

Scalar = float | Tensor


def cast_like(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor in the dtype of its counterpart."""
    return _cast(tensors, [x.dtype for x in like])


def lerp(start: Sequence[Tensor], end: Sequence[Tensor], weight: Scalar) -> list[Tensor]:
    """Linear interpolation, start + weight·(end − start), for a float or a 0-d tensor."""
    if isinstance(weight, Tensor):
        return foreach.add(start, foreach.mul(foreach.sub(end, start), weight))
    return foreach.lerp(start, end, weight)


def ema(momenta: Sequence[Tensor], grads: Sequence[Tensor], beta: Scalar) -> list[Tensor]:
    """Exponential moving average, M ← βM + (1 − β)G, rounded once to M's dtype.

    Examples:
        >>> import torch
        >>> ema([torch.zeros(2)], [torch.ones(2)], 0.9)[0]
        tensor([0.1000, 0.1000])
    """
    return cast_like(_between(momenta, grads, 1 - beta), momenta)


def ema_(momenta: Sequence[Tensor], grads: Sequence[Tensor], beta: Scalar) -> None:
    """`ema`, written into M.

    Examples:
        >>> import torch
        >>> m = torch.zeros(2)
        >>> ema_([m], [torch.ones(2)], 0.9)
        >>> m
        tensor([0.1000, 0.1000])
    """
    same = all(m.dtype == g.dtype for m, g in zip(momenta, grads, strict=True))
    if isinstance(beta, Tensor) or not same:
        foreach.copy_(momenta, ema(momenta, grads, beta))
    elif momenta:
        foreach.lerp_(momenta, grads, 1 - beta)


def nesterov(momenta: Sequence[Tensor], grads: Sequence[Tensor], beta: Scalar) -> list[Tensor]:
    """Look ahead, B = (1 − β)G + βM, rounded once to the wider dtype of M and G.

    M is the momentum after this step's `ema`, as it is stored.
    """
    ahead = _between(grads, momenta, beta)
    return _cast(ahead, _joint_dtypes(momenta, grads))


def heavy_ball(
    momenta: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Accumulation, M + G; decay happens elsewhere (error feedback).

    Returns:
        The sums in fp32 at least, to be decayed and then rounded once to M's dtype; and in the
        wider dtype of M and G, to be compared and sent.
    """
    if not momenta:
        return [], []
    joint = _joint_dtypes(momenta, grads)
    wide = [torch.promote_types(dtype, torch.float32) for dtype in joint]
    sums = foreach.add(_cast(momenta, wide), _cast(grads, wide))
    return sums, _cast(sums, joint)


def _between(start: Sequence[Tensor], end: Sequence[Tensor], weight: Scalar) -> list[Tensor]:
    """Interpolation without rounding on the way: in fp32 at least, or by kernels that do so."""
    if not start:
        return []
    same = all(x.dtype == y.dtype for x, y in zip(start, end, strict=True))
    if same and not isinstance(weight, Tensor):
        return lerp(start, end, weight)
    wide = [torch.promote_types(dtype, torch.float32) for dtype in _joint_dtypes(start, end)]
    return lerp(_cast(start, wide), _cast(end, wide), weight)


def _joint_dtypes(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[torch.dtype]:
    return [torch.promote_types(x.dtype, y.dtype) for x, y in zip(left, right, strict=True)]


def _cast(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    pairs = zip(tensors, dtypes, strict=True)
    return [x if x.dtype == dtype else x.to(dtype) for x, dtype in pairs]  # no node in a graph
