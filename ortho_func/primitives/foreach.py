"""Multi-tensor kernels, or plain loops inside ``torch.func`` transforms.

One kernel for many tensors matters to eager steps. `vmap` has no rules for these kernels, so
under a transform the same arithmetic runs tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["add", "add_", "copy_", "lerp", "lerp_", "mul", "sign", "sub"]


def _transformed() -> bool:
    """Whether a ``torch.func`` transform is at work; compilers can trace it."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def mul(tensors: Sequence[Tensor], factor: float | Tensor | Sequence[float]) -> list[Tensor]:
    """Each tensor times a number, a 0-d tensor, or a number of its own.

    Examples:
        >>> mul([torch.ones(1), torch.ones(1)], [2.0, 3.0])
        [tensor([2.]), tensor([3.])]
    """
    if not _transformed():
        return list(torch._foreach_mul(list(tensors), factor))
    if isinstance(factor, (Tensor, float, int)):
        return [x * factor for x in tensors]
    return [x * number for x, number in zip(tensors, factor, strict=True)]


def add(left: Sequence[Tensor], right: Sequence[Tensor], *, alpha: float = 1.0) -> list[Tensor]:
    """Sums, left + alpha·right."""
    if not _transformed():
        return list(torch._foreach_add(list(left), list(right), alpha=alpha))
    return [torch.add(x, y, alpha=alpha) for x, y in zip(left, right, strict=True)]


def add_(tensors: Sequence[Tensor], number: float) -> None:
    """A number added to each, in place.

    Examples:
        >>> counts = [torch.tensor(1), torch.tensor(5)]
        >>> add_(counts, 1)
        >>> counts
        [tensor(2), tensor(6)]
    """
    torch._foreach_add_(list(tensors), number)


def sub(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    """Differences, left − right."""
    if not _transformed():
        return list(torch._foreach_sub(list(left), list(right)))
    return [x - y for x, y in zip(left, right, strict=True)]


def lerp(start: Sequence[Tensor], end: Sequence[Tensor], weight: float) -> list[Tensor]:
    """Linear interpolation, start + weight·(end − start)."""
    if not _transformed():
        return list(torch._foreach_lerp(list(start), list(end), weight))
    return [torch.lerp(x, y, weight) for x, y in zip(start, end, strict=True)]


def lerp_(start: Sequence[Tensor], end: Sequence[Tensor], weight: float) -> None:
    """Linear interpolation, written into `start`."""
    torch._foreach_lerp_(list(start), list(end), weight)


def copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Write each source into its target, in the target's dtype.

    Examples:
        >>> narrow = torch.zeros(2, dtype=torch.bfloat16)
        >>> copy_([narrow], [torch.ones(2)])
        >>> narrow
        tensor([1., 1.], dtype=torch.bfloat16)
    """
    torch._foreach_copy_(list(targets), list(sources))


def sign(tensors: Sequence[Tensor]) -> list[Tensor]:
    """−1, 0 or 1."""
    if not _transformed():
        return list(torch._foreach_sign(list(tensors)))
    return [torch.sign(x) for x in tensors]
