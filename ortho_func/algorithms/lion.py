"""Lion for what is no matrix.

X ← (1 − lr·λ)X − lr·sign(β₁M + (1 − β₁)G);  M ← β₂M + (1 − β₂)G

Source: arXiv 2302.06675, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ortho_func.primitives import foreach
from ortho_func.primitives.momentum import Scalar, ema, nesterov
from ortho_func.primitives.scaling import step_updates

__all__ = ["lion_step"]


def lion_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    *,
    lr: Scalar,
    weight_decay: Scalar,
    betas: tuple[float, float],
    cautious: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """What to add to the parameters, fp32 at least, and the new momenta.

    Examples:
        >>> import torch
        >>> zero = torch.zeros(2)
        >>> updates, momenta = lion_step(
        ...     [zero], [torch.tensor([3.0, -0.1])], [zero],
        ...     lr=0.1, weight_decay=0.0, betas=(0.9, 0.99),
        ... )
        >>> updates[0]
        tensor([-0.1000,  0.1000])
    """
    if not params:
        return [], []
    looked = nesterov(momenta, grads, betas[0])  # the same sum, not rounded to M's dtype
    signs = foreach.sign(looked)
    updates = step_updates(params, signs, lr=lr, weight_decay=weight_decay, cautious=cautious)
    return updates, ema(momenta, grads, betas[1])
