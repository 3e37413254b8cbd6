"""Which slices of a matrix take part in a step (Dion2)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gather_slices", "scatter_slices", "slice_mask", "top_slices"]


def top_slices(x: Tensor, count: int, dim: int) -> Tensor:
    """Indices, ascending, of the `count` slices along `dim` (-2 or -1) with largest L1 norm.

    Args:
        x: [..., R, C].
        count: how many, a static integer; 0 for an empty shard.
        dim: -2 for rows, -1 for columns.

    Returns:
        int64 indices [..., count]. Of equal norms the lower index wins.

    Source: Dion2, arXiv 2512.16928, section 3.

    Examples:
        >>> top_slices(torch.tensor([[1.0, 1.0], [3.0, 0.0], [0.0, 2.5]]), 2, -2)
        tensor([1, 2])
    """
    norms = x.float().abs().sum(dim=-3 - dim) if x.dtype.itemsize < 4 else x.abs().sum(dim=-3 - dim)
    best = torch.sort(norms, dim=-1, descending=True, stable=True).indices[..., :count]
    return best.sort(dim=-1).values


def gather_slices(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """The slices at `index` [..., k] of x [..., R, C] along `dim`."""
    return x.gather(dim, _spread(index, x, dim))


def scatter_slices(slices: Tensor, index: Tensor, dim: int, extent: int) -> Tensor:
    """Zeros of `extent` along `dim` with the slices put at `index`: the adjoint of gathering."""
    shape = list(slices.shape)
    shape[dim] = extent
    return slices.new_zeros(shape).scatter(dim, _spread(index, slices, dim), slices)


def slice_mask(index: Tensor, extent: int) -> Tensor:
    """1.0 at the selected slices, else 0.0: [..., extent] in fp32."""
    zeros = torch.zeros(*index.shape[:-1], extent, device=index.device)
    return zeros.scatter(-1, index, 1.0)


def _spread(index: Tensor, x: Tensor, dim: int) -> Tensor:
    spread = index.unsqueeze(-1 if dim == -2 else -2)
    shape = list(x.shape)
    shape[dim] = index.shape[-1]
    return spread.expand(shape)
