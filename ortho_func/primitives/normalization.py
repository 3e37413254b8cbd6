"""Per-row second moments of an orthogonalized matrix (NorMuon)."""

from __future__ import annotations

import torch
from torch import Tensor

from ortho_func.primitives.momentum import Scalar
from ortho_func.primitives.roots import sqrt

__all__ = ["normalize_rows"]


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
    square = o.float().square() if o.dtype.itemsize < 4 else o.square()
    mean = square.mean(dim=-1)
    variance = variance + (1 - beta2) * (mean - variance)
    inverse = 1 / (sqrt(variance) + eps)
    before = mean.sum(dim=-1, keepdim=True)
    after = (mean * inverse.square()).sum(dim=-1, keepdim=True)
    tiny = torch.finfo(mean.dtype).tiny
    keep = sqrt(before / after.clamp_min(tiny))
    factor = torch.where(mean > 0, inverse, 0) * keep
    return (o * factor.unsqueeze(-1)).to(o.dtype), variance
