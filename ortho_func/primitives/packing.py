"""Many tensors in one flat buffer, and fp32 values in a buffer of a narrower dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from ortho_func.primitives import foreach
from ortho_func.primitives.opaque import join, opaque

__all__ = ["concatenate", "decode", "encode", "pack", "unpack", "views"]


def pack(
    tensors: Sequence[Tensor], *, dtype: torch.dtype | None = None
) -> tuple[Tensor, tuple[tuple[int, ...], ...]]:
    """Concatenate tensors into one flat buffer; the receipt says how to undo it.

    Args:
        tensors: any shapes, empty ones included; at least one.
        dtype: of the buffer, rounded once; by default the tensors' promoted dtype.

    Returns:
        The buffer, 1-D, and the receipt (the shapes) that `unpack` takes.

    Raises:
        ValueError: without tensors.

    Examples:
        >>> flat, receipt = pack([torch.zeros(2, 3), torch.ones(2)])
        >>> flat.shape, receipt
        (torch.Size([8]), ((2, 3), (2,)))
    """
    if not tensors:
        raise ValueError("pack needs at least one tensor.")
    return concatenate(tensors, dtype=dtype), tuple(tuple(tensor.shape) for tensor in tensors)


def unpack(flat: Tensor, receipt: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of a packed buffer in the shapes of its receipt.

    Raises:
        ValueError: if the buffer's size is not the receipt's.

    Examples:
        >>> [part.shape for part in unpack(torch.arange(8), ((2, 3), (2,)))]
        [torch.Size([2, 3]), torch.Size([2])]
    """
    total = sum(math.prod(shape) for shape in receipt)
    if flat.numel() != total:
        raise ValueError(f"the receipt speaks of {total} elements, got {flat.numel()}.")
    return views(flat, [tuple(shape) for shape in receipt])


def views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Consecutive parts of a flat buffer in these shapes, equal neighbours cut off at once."""
    runs = [(shape, sum(1 for _ in same)) for shape, same in groupby(shapes)]
    parts = flat.split([math.prod(shape) * count for shape, count in runs])
    found: list[Tensor] = []
    for part, (shape, count) in zip(parts, runs, strict=True):
        found += [part.reshape(shape)] if count == 1 else part.reshape(count, *shape).unbind()
    return found


def concatenate(parts: Sequence[Tensor], *, dtype: torch.dtype | None = None) -> Tensor:
    """Join parts of any shape as 1-D, cast if a dtype is given; a single part is not copied."""
    if len(parts) > 1 and opaque(parts):
        return join(parts, dtype or parts[0].dtype)
    dtypes = {part.dtype for part in parts}
    if len(parts) == 1 or dtypes == {dtype or parts[0].dtype} or _watched(parts):
        flat = [_as(_flat(part), dtype) for part in parts]
        return flat[0] if len(flat) == 1 else torch.cat(flat)
    # One pass: cast on the way into the buffer.
    total = sum(part.numel() for part in parts)
    buffer = torch.empty(total, dtype=dtype or parts[0].dtype, device=parts[0].device)
    foreach.copy_(views(buffer, [part.shape for part in parts]), parts)
    return buffer


def _flat(x: Tensor) -> Tensor:
    return x if x.ndim == 1 else x.reshape(-1)


def _as(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast where it changes anything: a compiled step has a node less."""
    return x if dtype in (None, x.dtype) else x.to(dtype)


def _watched(parts: Sequence[Tensor]) -> bool:
    """Whether a compiler or autograd would rather see no writes."""
    return torch.compiler.is_compiling() or any(part.requires_grad for part in parts)


def encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Fp32 values, bit for bit, in a 1-D buffer of a narrower dtype; cast if it is wide enough."""
    if dtype.itemsize >= 4:
        return values.to(dtype)
    return _as(values, torch.float32).contiguous().view(dtype)


def decode(buffer: Tensor) -> Tensor:
    """The inverse of `encode`, as fp32 (fp64 stays)."""
    return buffer if buffer.dtype.itemsize >= 4 else buffer.contiguous().view(torch.float32)
