"""Zero padding to the largest piece, and its inverse.

Zero rows and columns do not change what an odd matrix polynomial does to the others, so padding
before an exchange and narrowing after it are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["narrow", "pad_to_max"]


def pad_to_max(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Pad the last dims with trailing zeros up to `shape`, the largest piece of any rank.

    Args:
        x: any tensor, empty ones included.
        shape: the padded extents of the last ``len(shape)`` dims, static integers.

    Returns:
        A tensor whose last dims are `shape`; `x` itself where nothing is missing.

    Raises:
        ValueError: if a dim of `x` is larger than its padded extent.

    Examples:
        >>> pad_to_max(torch.ones(2, 3), (4, 3)).sum(dim=1)
        tensor([3., 3., 0., 0.])
    """
    extents = x.shape[x.ndim - len(shape) :]
    if any(have > want for have, want in zip(extents, shape, strict=True)):
        raise ValueError(f"cannot pad {tuple(x.shape)} to {tuple(shape)}: a dim is larger already.")
    if tuple(extents) == tuple(shape):
        return x
    pads: list[int] = []
    for have, want in reversed(list(zip(extents, shape, strict=True))):
        pads += [0, want - have]
    return torch.nn.functional.pad(x, pads)


def narrow(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Drop trailing padding of the last dims: the inverse of `pad_to_max`, as a view.

    Raises:
        ValueError: if a dim of `x` is smaller than asked for.

    Examples:
        >>> narrow(torch.ones(4, 3), (2, 3)).shape
        torch.Size([2, 3])
    """
    if x.shape == shape:
        return x
    for dim, want in enumerate(shape, start=-len(shape)):
        if x.shape[dim] < want:
            raise ValueError(f"cannot narrow {tuple(x.shape)} to {tuple(shape)}: it is smaller.")
        if x.shape[dim] != want:
            x = x.narrow(dim, 0, want)
    return x
