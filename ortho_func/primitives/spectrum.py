"""The extreme singular values of many matrices at once, by a few products with vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from ortho_func.primitives.rounding import random_bits
from ortho_func.primitives.scaling import widen

__all__ = ["extreme_singular_values"]

STEPS = 16
# Of a new direction over what it was before the known ones were taken out: below is rounding, which
# comes up to some 2e-7 in fp32. At 1e-5 directions of small singular values were lost.
_EXHAUSTED = 1e-6
# λ grows over its neighbours to the power 2 to this. Small singular values are near one another in
# λ = σ²: those of 0 and 1% of σ₁ are told apart from 2¹⁵ on, and fp32 tells no more than 2²⁴.
_SQUARINGS = 22


def extreme_singular_values(x: Tensor, *, steps: int = STEPS) -> tuple[Tensor, Tensor]:
    """Estimates of σ₁ and of the smallest of min(R, C) singular values, by Lanczos' method on XXᵀ.

    A basis of span{q, XXᵀq, (XXᵀ)²q, …}, orthogonalized twice, and the extremes over it: the first
    is never above σ₁ and the second never below the smallest, but by rounding. With 16 steps the
    largest of an orthogonalized matrix is within 1%, the smallest too large by at most 4% of σ₁ (of
    a square Gaussian matrix, which has singular values near zero, by 8%). Where min(R, C) ≤ steps,
    the largest is exact to rounding and the smallest within 0.1% of σ₁: rounding of λ = σ².

    Args:
        x: [n, R, C], any floating dtype; computed in fp32 at least.
        steps: products with XXᵀ.

    Returns:
        Two tensors [n], in fp32 at least; zeros for zeros, NaN where X is not finite. No step
        waits for the device.

    Source: Lanczos 1950, doi 10.6028/jres.045.026.

    Examples:
        >>> large, small = extreme_singular_values(torch.diag(torch.tensor([3.0, 2.0, 0.5]))[None])
        >>> round(large.item(), 3), round(small.item(), 3)
        (3.0, 0.5)
    """
    wide = widen(x)
    m_nkl = wide if x.shape[-2] <= x.shape[-1] else wide.mT  # the short side first
    n, k, _ = m_nkl.shape
    if m_nkl.numel() == 0:
        return wide.new_zeros(n), wide.new_zeros(n)
    size = m_nkl.abs().amax(dim=(-2, -1))
    m_nkl = m_nkl / torch.where(size == 0, 1, size)[:, None, None]
    basis_nsk, images_nsk = _krylov(m_nkl, min(steps, k))
    small_nss = basis_nsk @ images_nsk.mT
    known = basis_nsk.square().sum(-1) > 0.5
    # A direction that there is not gets a value that there is.
    filler = torch.where(known, 0, small_nss[:, :1, 0])
    small_nss = (small_nss + small_nss.mT) / 2 + torch.diag_embed(filler)
    bound = small_nss.abs().sum(-1).amax(-1)[:, None, None]
    rest = bound * torch.eye(min(steps, k), device=x.device, dtype=wide.dtype) - small_nss
    ends_n2k = _top(torch.cat([small_nss, rest])).unflatten(0, (2, n)).transpose(0, 1) @ basis_nsk
    along = torch.linalg.vector_norm(ends_n2k @ m_nkl, dim=-1)
    values = size[:, None] * along / torch.linalg.vector_norm(ends_n2k, dim=-1)
    return values[:, 0], values[:, 1]


def _krylov(m_nkl: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """An orthonormal basis, zero where there are no more directions, and its images."""
    n, k, _ = m_nkl.shape
    place = torch.arange(k, device=m_nkl.device)
    start = random_bits(place, place.new_zeros(())).to(m_nkl.dtype) / 2**31 - 1
    basis = [(start / torch.linalg.vector_norm(start)).expand(n, k)]
    images: list[Tensor] = []
    while True:
        new = (m_nkl @ (m_nkl.mT @ basis[-1].unsqueeze(-1))).squeeze(-1)
        images.append(new)
        known_nsk = torch.stack(basis, dim=1)
        if len(images) == steps:
            return known_nsk, torch.stack(images, dim=1)
        before = torch.linalg.vector_norm(new, dim=-1, keepdim=True)
        for _ in range(2):
            new = new - ((known_nsk @ new.unsqueeze(-1)).mT @ known_nsk).squeeze(1)
        after = torch.linalg.vector_norm(new, dim=-1, keepdim=True)
        real = after > _EXHAUSTED * before
        basis.append(torch.where(real, new / torch.where(real, after, 1), 0))


def _top(t_nss: Tensor) -> Tensor:
    """Of matrices without negative eigenvalues, the eigenvector of the largest: [n, s]."""
    power = t_nss
    for _ in range(_SQUARINGS):
        largest = power.abs().amax(dim=(-2, -1), keepdim=True)
        power = power / torch.where(largest == 0, 1, largest)
        power = power @ power
    index = torch.diagonal(power, dim1=-2, dim2=-1).argmax(-1)
    column = power.gather(-1, index[:, None, None].expand(-1, power.shape[-1], 1)).squeeze(-1)
    length = torch.linalg.vector_norm(column, dim=-1, keepdim=True)
    any_one = torch.eye(column.shape[-1], dtype=column.dtype, device=column.device)[0]
    return torch.where(length == 0, any_one, column / torch.where(length == 0, 1, length))
