"""Leaving out the matrices of a step in which something is not finite.

The owner sees a matrix whole: if anything in it is not finite, what it sends back is NaN all over,
and so every rank that holds a part of it learns so, from the exchange that there is anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["finite_or_nan", "skipped_rows", "without"]

Sided = tuple[Tensor, tuple[Tensor, ...]]


def finite_or_nan(function: Callable[[Tensor], Sided], x: Tensor) -> Sided:
    """A function of matrices [n, R, C], and what else it returns; NaN for those not finite.

    Examples:
        >>> x = torch.tensor([[[1.0, 2.0]], [[1.0, torch.inf]]])
        >>> finite_or_nan(lambda x: (-x, ()), x)[0].flatten(1)
        tensor([[-1., -2.],
                [nan, nan]])
    """
    bad = ~x.isfinite().all(dim=-1).all(dim=-1)
    main, sides = function(torch.where(bad[:, None, None], 0, x))
    told = tuple(torch.where(bad[:, None], torch.nan, side) for side in sides)
    return torch.where(bad[:, None, None], torch.nan, main), told


def skipped_rows(result: Tensor, shape: tuple[int, int, int], factor: bool) -> Tensor:
    """Which rows of a shard [stack, rows, cols] are of matrices to skip: [stack, rows, 1].

    Where a part of the shard travelled, the rest of it is of the same matrix. A factor's rows are
    not the matrix's: then a 0-d False, and all that follows from the factor is NaN.
    """
    if factor:
        return result.new_zeros((), dtype=torch.bool)
    gone = result.isnan()
    if tuple(result.shape) == tuple(shape):
        gone = gone.any(dim=-1, keepdim=True)
    else:
        gone = gone.flatten(1).any(dim=1)[:, None, None]
    return gone.expand(shape[0], shape[1], 1)


def without(
    skipped: Sequence[Tensor], values: Sequence[Tensor], instead: Sequence[Tensor]
) -> list[Tensor]:
    """The values, but others where they are NaN or of skipped rows.

    Values have one element for each of a shard, or for each of its rows.
    """
    found = []
    for gone, value, other in zip(skipped, values, instead, strict=True):
        here = value.isnan()
        if gone.ndim:
            stack, rows = gone.shape[:2]
            cols = value.numel() // max(1, stack * rows)
            here = here | gone.expand(stack, rows, cols).reshape(value.shape)
        found.append(torch.where(here, other.reshape(value.shape).to(value.dtype), value))
    return found
