"""Per-row second moments of an orthogonalized matrix (NorMuon)."""

from __future__ import annotations

import torch
from torch import Tensor

from ortho_func.primitives.momentum import Scalar
from ortho_func.primitives.roots import sqrt

__all__ = ["mean_squares", "normalize_rows", "row_scales", "scaled_rows"]


def normalize_rows(
    o: Tensor, variance: Tensor, *, beta2: Scalar, eps: float
) -> tuple[Tensor, Tensor]:
    """Divide rows by the root of their running mean square, keeping the matrix's norm.

    v = mean_C(O²);  V ← β₂V + (1 − β₂)v;  Ô = O/(√V + ε) · ‖O‖_F / ‖O/(√V + ε)‖_F

    Args:
        o: [..., R, C] whole matrices, any floating dtype.
        variance: [..., R], fp32, V before this step.
        beta2: decay of V, a float or a 0-d tensor.
        eps: added to √V.

    Returns:
        Ô in `o`'s dtype and the new V. A zero matrix gives zeros.

    Source: NorMuon, arXiv 2510.05491, Algorithm 1; the rescaling by the norm as published there.

    Examples:
        >>> o = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
        >>> out, v = normalize_rows(o, torch.zeros(2), beta2=0.0, eps=0.0)
        >>> out, v
        (tensor([[2.2361, 0.0000],
                [0.0000, 2.2361]]), tensor([4.5000, 0.5000]))
    """
    mean = mean_squares(o)
    variance, inverse = row_scales(mean, variance, beta2=beta2, eps=eps)
    before = mean.sum(dim=-1, keepdim=True)
    after = (mean * inverse.square()).sum(dim=-1, keepdim=True)
    return scaled_rows(o, mean, inverse, before, after), variance


def mean_squares(o: Tensor) -> Tensor:
    """V = mean_C(O²) of [..., R, C], in fp32 at least."""
    square = o.float().square() if o.dtype.itemsize < 4 else o.square()
    return square.mean(dim=-1)


def row_scales(
    mean: Tensor, variance: Tensor, *, beta2: Scalar, eps: float
) -> tuple[Tensor, Tensor]:
    """The new V, and 1/(√V + ε)."""
    variance = variance + (1 - beta2) * (mean - variance)
    return variance, 1 / (sqrt(variance) + eps)


def scaled_rows(o: Tensor, mean: Tensor, inverse: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Rows divided as `inverse` says, and all by the root of what became of the norm, squared."""
    tiny = torch.finfo(mean.dtype).tiny
    keep = sqrt(before / after.clamp_min(tiny))
    factor = torch.where(mean > 0, inverse, 0) * keep
    return (o * factor.unsqueeze(-1)).to(o.dtype)
