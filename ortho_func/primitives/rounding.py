"""Writing bf16 parameters without losing small updates.

A bf16 number has eight bits: from 1.0, a step of 1e-3 rounds to no step at all. Two ways keep it:
round up or down at random, with odds that make the mean right; or keep what rounding cut off and
add it to the next step.

Random bits are a hash of a key and of an element's place in its parameter, never a generator's:
replicas draw equal ones, a shard draws what the whole parameter would, and a compiled step traces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["compensated_add", "positions", "random_bits", "stochastic_round"]

_LOW = 0xFFFFFFFF


def stochastic_round(x: Tensor, bits: Tensor) -> Tensor:
    """Round to one of the two bf16 neighbours at random, so that the mean is x.

    P(up) = (|x| − down)/(up − down), where down ≤ |x| < up are the neighbours of |x|. What bf16
    holds exactly stays, NaN and infinities stay, and no result is a unit in the last place or more
    away. (Above bf16's largest number the upper neighbour is infinity, as in rounding to nearest.)

    Args:
        x: fp32, any shape.
        bits: integers of this shape whose lower 16 bits are uniform, as `random_bits` gives.

    Returns:
        bf16, of the shape of x.

    Raises:
        TypeError: if x is not fp32.

    Source: arXiv 2010.06192, section 4.

    Examples:
        >>> x = torch.full((10000,), 1 - 1e-3)
        >>> bits = random_bits(torch.arange(10000), torch.tensor(7))
        >>> rounded = stochastic_round(x, bits)
        >>> sorted(set(rounded.tolist())), round(rounded.double().mean().item(), 3)
        ([0.99609375, 1.0], 0.999)
    """
    if x.dtype != torch.float32:
        raise TypeError(f"stochastic_round takes float32, got {x.dtype}.")
    # fp32 is bf16 and 16 bits more: a carry out of them is a step to the next bf16 away from zero.
    raised = x.contiguous().view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    cut = (raised & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), cut, x).to(torch.bfloat16)


def compensated_add(x: Tensor, compensation: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
    """Add to a bf16 number held in two parts, and keep both: Kahan's summation.

    S = X + C + U;  X ← bf16(S);  C ← bf16(S − X)

    X + C has 16 bits and more where X alone has eight. An update of exactly zero changes neither.
    Where S is not finite, X is and C is zero.

    Args:
        x: X, bf16.
        compensation: C, bf16, of the same shape; zeros before the first update.
        update: U, of the same shape; summed in fp32 at least.

    Returns:
        The new X and C.

    Source: arXiv 2010.06192, section 4; Kahan 1965, doi 10.1145/363707.363723.

    Examples:
        >>> x, c = torch.ones(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
        >>> for _ in range(100):
        ...     x, c = compensated_add(x, c, torch.tensor([-1e-3]))
        >>> round((x.float() + c.float()).item(), 3)
        0.9
    """
    total = x.float() + compensation.float() + update
    new = total.to(x.dtype)
    left = total - new
    kept = torch.where(left.isfinite(), left, 0).to(compensation.dtype)
    same = update == 0  # adding up again could round a tie otherwise than it was
    return torch.where(same, x, new), torch.where(same, compensation, kept)


def random_bits(position: Tensor, key: Tensor) -> Tensor:
    """Uniform 32-bit integers, a function of position and key alone.

    h(h(position) ⊕ h(h(key's lower half) ⊕ key's upper half)), h a mixing of 32 bits

    Args:
        position: int64, not negative, any shape.
        key: int64, 0-d; another key gives other bits everywhere.

    Returns:
        int64 of the shape of `position`, in 0 … 2³² − 1.

    Source of h: https://github.com/skeeto/hash-prospector, constants below 2³¹ so that products
    stay within int64.

    Examples:
        >>> bits = random_bits(torch.arange(1000), torch.tensor(1))
        >>> torch.equal(bits[100:], random_bits(torch.arange(100, 1000), torch.tensor(1)))
        True
        >>> 0.45 < (bits / 2**32).mean().item() < 0.55
        True
    """
    secret = _mixed(_mixed(key & _LOW) ^ (key >> 32 & _LOW))
    upper = position >> 32  # zero but in parameters of more than four billion elements
    return _mixed(_mixed((position & _LOW) ^ _mixed(upper)) ^ secret)


def _mixed(x: Tensor) -> Tensor:
    """A permutation of 32-bit integers in which every bit depends on every other."""
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _LOW
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _LOW
    return x ^ (x >> 15)


def positions(
    start: Sequence[int], size: Sequence[int], whole: Sequence[int], device: torch.device | str
) -> tuple[Tensor, ...]:
    """Where the elements of a box lie in the whole tensor, flattened: the terms of it, by dim.

    Args:
        start: the box's first index along each dim.
        size: its extent.
        whole: the whole tensor's shape.
        device: where to make them.

    Returns:
        By dim, int64 of shape `size`, expanded and so without memory of its own. Their sum is the
        position; a slice of each is a slice of it.

    Examples:
        >>> sum(positions((1, 2), (2, 2), (3, 4), "cpu"))
        tensor([[ 6,  7],
                [10, 11]])
    """
    found = []
    for dim, (first, count) in enumerate(zip(start, size, strict=True)):
        stride = math.prod(whole[dim + 1 :])
        steps = torch.arange(first, first + count, device=device) * stride
        shape = [1] * len(size)
        shape[dim] = count
        found.append(steps.reshape(shape).expand(tuple(size)))
    return tuple(found) if found else (torch.zeros((), dtype=torch.int64, device=device),)
