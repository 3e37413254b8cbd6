"""Many tensors in one flat buffer, and fp32 values in a buffer of a narrower dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["decode", "encode", "pack", "unpack"]


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

    Example:
        >>> flat, receipt = pack([torch.zeros(2, 3), torch.ones(2)])
        >>> flat.shape, receipt
        (torch.Size([8]), ((2, 3), (2,)))
    """
    if not tensors:
        raise ValueError("pack needs at least one tensor.")
    receipt = tuple(tuple(tensor.shape) for tensor in tensors)
    flat = concatenate([tensor.reshape(-1) for tensor in tensors])
    return flat if dtype is None else flat.to(dtype), receipt


def unpack(flat: Tensor, receipt: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of a packed buffer in the shapes of its receipt.

    Raises:
        ValueError: if the buffer's size is not the receipt's.

    Example:
        >>> [part.shape for part in unpack(torch.arange(8), ((2, 3), (2,)))]
        [torch.Size([2, 3]), torch.Size([2])]
    """
    sizes = [math.prod(shape) for shape in receipt]
    if flat.numel() != sum(sizes):
        raise ValueError(f"the receipt speaks of {sum(sizes)} elements, got {flat.numel()}.")
    parts = flat.split(sizes)
    return [part.reshape(shape) for part, shape in zip(parts, receipt, strict=True)]


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Join 1-D parts; a single part is passed on as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Fp32 values, bit for bit, in a 1-D buffer of a narrower dtype; cast if it is wide enough."""
    if dtype.itemsize >= 4:
        return values.to(dtype)
    return values.to(torch.float32).contiguous().view(dtype)


def decode(buffer: Tensor) -> Tensor:
    """The inverse of `encode`, as fp32 (fp64 stays)."""
    return buffer if buffer.dtype.itemsize >= 4 else buffer.contiguous().view(torch.float32)
