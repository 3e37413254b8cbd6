"""Shares of matrices: ranges of the long side, for matrices that several ranks own together.

Each share is a parameter of its own to the plan, so it travels as any other does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from ortho_func.geometry import Box, Layout, Reading
from ortho_func.plan import ParamSpec, Share

__all__ = ["Cut", "Within", "cut_of", "share_spec", "within"]


class Cut(NamedTuple):
    """Along which dim of a parameter its matrices are shared, and of how many slices."""

    dim: int
    tall: bool  # the slices are rows
    slices: int


class Within(NamedTuple):
    """Where a share lies in one rank's shard."""

    dim: int
    first: int
    count: int  # type: ignore[assignment]  # not tuple.count
    tall: bool

    def of(self, tensor: Tensor, kind: str) -> Tensor:
        """The share's part of a shard or of its state: "param", or "row" with a value a row."""
        if kind == "row" and not self.tall:
            return tensor
        return tensor.narrow(self.dim, self.first, self.count)


def cut_of(shape: Sequence[int], reading: Reading) -> Cut | None:
    """How the matrices of a parameter are shared: along their long side, columns of square ones.

    None for stacks, for row blocks of several sizes, and for those whose long side are the rows.

    Examples:
        >>> cut_of((4, 8), Reading()), cut_of((8, 4), Reading())
        (Cut(dim=1, tall=False, slices=8), Cut(dim=0, tall=True, slices=8))
        >>> cut_of((8, 4), Reading(num_heads=2)), cut_of((8, 2), Reading(num_heads=2))
        (Cut(dim=1, tall=False, slices=4), None)
    """
    stacks, rows, cols = reading.dims(shape)
    if rows * cols == 0:
        return None
    blocks = reading.blocks(rows)
    sizes = {count for _, count in blocks}
    if stacks != 1 or (len(shape) > 2 and not reading.flatten) or len(sizes) > 1:
        return None
    if sizes.pop() <= cols:
        return Cut(1, False, shape[1])
    return Cut(0, True, shape[0]) if len(blocks) == 1 else None


def share_spec(spec: ParamSpec, cut: Cut, share: Share) -> ParamSpec:
    """A share of a parameter, as a parameter."""
    start, stop = _range(cut, share)
    return replace(spec, layout=_narrowed(spec.layout, cut.dim, start, stop), share=share)


def within(spec: ParamSpec, cut: Cut, share: Share, place: int) -> Within:
    """Where a share lies in the shard of the rank at a place of the domain."""
    box = spec.layout.boxes[place]
    start, stop = _overlap(box, cut.dim, *_range(cut, share))
    first = start - box.start[cut.dim] if start < stop else 0
    return Within(cut.dim, first, stop - start, cut.tall)


def _range(cut: Cut, share: Share) -> tuple[int, int]:
    first, last = (cut.slices * n // share.count for n in (share.number, share.number + 1))
    return first, last


def _overlap(box: Box, dim: int, start: int, stop: int) -> tuple[int, int]:
    first = max(box.start[dim], start)
    return first, max(first, min(box.start[dim] + box.size[dim], stop))


@lru_cache(maxsize=1024)
def _narrowed(layout: Layout, dim: int, start: int, stop: int) -> Layout:
    """The layout of slices start .. stop - 1 of a dim."""

    def of(sizes: Sequence[int], value: int) -> tuple[int, ...]:
        return (*sizes[:dim], value, *sizes[dim + 1 :])

    boxes = []
    for box in layout.boxes:
        first, last = _overlap(box, dim, start, stop)
        place = first - start if first < last else stop - start
        boxes.append(Box(of(box.start, place), of(box.size, last - first)))
    return replace(layout, shape=of(layout.shape, stop - start), boxes=tuple(boxes))
