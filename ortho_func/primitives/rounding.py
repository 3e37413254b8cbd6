"""Sums in a narrow dtype that lose nothing: what rounding leaves is carried along."""

from __future__ import annotations

import torch
from torch import Tensor

from ortho_func.primitives.scaling import widen

__all__ = ["compensated_sum", "unrounded"]


def unrounded(rounded: Tensor, residual: Tensor) -> Tensor:
    """The value that was rounded, in fp32 at least: rounded + residual."""
    wide = widen(rounded)
    return wide + residual.to(wide.dtype)


def compensated_sum(rounded: Tensor, residual: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
    """Add an update to a value that is stored as two narrow ones, and store it so again.

    s = x + r + u;  x ← round(s);  r ← s − x

    Args:
        rounded: x, of any floating dtype.
        residual: r, of x's shape; in x's dtype it has as many bits again.
        update: u.

    Returns:
        The new x and r, in their dtypes. Where s is not finite, r is zero and x says so.

    Source: Kahan 1965, Communications of the ACM 8(1); for weights in bfloat16 arXiv 2010.06192.

    Examples:
        >>> x, r = torch.ones(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
        >>> for _ in range(100):
        ...     x, r = compensated_sum(x, r, torch.tensor([-1e-3]))
        >>> x, torch.ones(1, dtype=torch.bfloat16) - 1e-3  # one rounded sum stays where it was
        (tensor([0.8984], dtype=torch.bfloat16), tensor([1.], dtype=torch.bfloat16))
    """
    total = unrounded(rounded, residual) + update
    new = total.to(rounded.dtype)
    left = total - new.to(total.dtype)
    return new, torch.where(left.isfinite(), left, 0).to(residual.dtype)
