"""Thin factors of sharded matrices: what travels when a matrix itself does not.

A low-rank algorithm keeps, of an R×C matrix B, a right factor Q of C×r, and sends two products:
Y = BQ of R×r, and W = BᵀP of C×r. Where columns are cut, the ranks that share rows each hold a
term of the sum Y; where rows are cut, those that share columns hold a term of W. So each factor
is a parameter of its own to the plan, whose replicas hold terms of a sum (`Sums`).

A *part* is a run of equal row blocks of one parameter (all of it, mostly).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ortho_func.geometry import (
    Box,
    Layout,
    Reading,
    StackBox,
    Sums,
    layout_of,
    like_without_rows,
    local,
    stack_box,
    this_rank,
)
from ortho_func.plan import ParamSpec, slice_count

__all__ = ["Held", "Part", "first_factor", "held", "left_spec", "parts_of", "right_spec"]


class Part(NamedTuple):
    """A run of equal row blocks, and where their factors lie in the parameter's state."""

    blocks: int
    row: int  # of the parameter's rows, the first
    rows: int  # of all blocks together
    cols: int
    rank: int  # r of each block
    column: int  # of the columns of all blocks' right factors side by side, the first


@dataclass(frozen=True)
class Held:
    """What one rank holds of a part: `rows` of each of its blocks, and `cols` columns."""

    part: Part
    first: int  # row of the rank's shard
    rows: tuple[int, ...]
    cols: int
    row_dim: int  # of the parameter
    all_rows: bool  # whether the part is all of the parameter's rows

    @property
    def count(self) -> int:
        """Rows of all blocks together."""
        return sum(self.rows)

    def rows_of(self, tensor: Tensor) -> Tensor:
        """The part of a shard, or of state of its shape."""
        if self.all_rows:
            return tensor
        return tensor.narrow(self.row_dim, self.first, self.count)

    def factor_of(self, tensor: Tensor) -> Tensor:
        """The part of the right factors: [..., columns, blocks · r]."""
        width = self.part.blocks * self.part.rank
        return tensor if tensor.shape[-1] == width else tensor.narrow(-1, self.part.column, width)


def parts_of(shape: Sequence[int], reading: Reading, fraction: float) -> tuple[Part, ...]:
    """The parts of a parameter, r = ⌈fraction·min(R, C)⌉ for blocks of R rows.

    Examples:
        >>> found = parts_of((12, 16), Reading(split_sizes=(8, 2, 2)), 0.5)
        >>> [(part.blocks, part.row, part.rows, part.rank, part.column) for part in found]
        [(1, 0, 8, 4, 0), (2, 8, 4, 1, 4)]
    """
    _, rows, cols = reading.dims(shape)
    if rows * cols == 0:
        return ()
    found, row, column = [], 0, 0
    for size, run in groupby(count for _, count in reading.blocks(rows)):
        blocks = len(list(run))
        rank = slice_count(fraction, min(size, cols))
        found.append(Part(blocks, row, blocks * size, cols, rank, column))
        row, column = row + blocks * size, column + blocks * rank
    return tuple(found)


def row_dim(shape: Sequence[int], reading: Reading) -> int:
    """The dim of a parameter along which its matrices' rows lie."""
    return 0 if reading.flatten or len(shape) == 2 else len(shape) - 2


def held(layout: Layout, reading: Reading, part: Part, place: int) -> Held:
    """What the rank at a place of the domain holds of a part."""
    box = stack_box(layout.shape, layout.boxes[place], reading)
    size = part.rows // part.blocks
    rows = tuple(
        max(0, min(start + size, box.row + box.rows) - max(start, box.row))
        for start in range(part.row, part.row + part.rows, size)
    )
    first = max(0, min(part.row - box.row, box.rows))
    everything = reading.dims(layout.shape)[1]
    dim = row_dim(layout.shape, reading)
    return Held(part, first, rows, box.cols, dim, part.rows == everything)


@lru_cache(maxsize=1024)
def _left_layout(layout: Layout, reading: Reading, part: Part) -> Layout:
    lead = _lead(layout, reading)
    boxes = []
    for box in layout.boxes:
        rows = stack_box(layout.shape, box, reading)
        start = min(max(rows.row, part.row), part.row + part.rows)
        stop = max(start, min(rows.row + rows.rows, part.row + part.rows))
        first = part.rows if start == stop else start - part.row
        boxes.append(
            Box((*box.start[:lead], first, 0), (*box.size[:lead], stop - start, part.rank))
        )
    shape = (*layout.shape[:lead], part.rows, part.rank)
    at = row_dim(layout.shape, reading)
    return _summed(layout, shape, boxes, [chunk[at + 1 :] for chunk in layout.chunks])


@lru_cache(maxsize=1024)
def _right_layout(layout: Layout, reading: Reading, part: Part) -> Layout:
    lead, blocks = _lead(layout, reading), _block_dims(layout, reading, part)
    boxes = []
    for box in layout.boxes:
        seen: StackBox = stack_box(layout.shape, box, reading)
        start = (*box.start[:lead], *(0 for _ in blocks), seen.col, 0)
        boxes.append(Box(start, (*box.size[:lead], *blocks, seen.cols, part.rank)))
    shape = (*layout.shape[:lead], *blocks, part.cols, part.rank)
    at = row_dim(layout.shape, reading)
    return _summed(layout, shape, boxes, [chunk[at : at + 1] for chunk in layout.chunks])


def _lead(layout: Layout, reading: Reading) -> int:
    """How many leading dims are a stack's."""
    return row_dim(layout.shape, reading)


def _block_dims(layout: Layout, reading: Reading, part: Part) -> tuple[int, ...]:
    """Dims of a right factor between those of the stack and its columns.

    Four dims or more are never cut over several buckets, as a stack of three is: blocks are
    together, since they are in the parameter.
    """
    if part.blocks == 1:
        return ()
    return (part.blocks,) if _lead(layout, reading) else (1, part.blocks)


def _summed(
    layout: Layout, shape: tuple[int, ...], boxes: Sequence[Box], across: Sequence[tuple[int, ...]]
) -> Layout:
    """A factor's layout: ranks at the same place `across` hold one term of it between them."""
    keys = list(zip(layout.replicas, across, strict=True))
    numbers = {key: number for number, key in enumerate(sorted(set(keys)))}
    replicas = tuple(numbers[key] for key in keys)
    over = 1 if layout.sums is None else layout.sums.over
    made = Layout(shape, layout.domain, tuple(boxes), replicas)
    if layout.sums is None and len(numbers) == len(set(layout.replicas)):
        return made
    return replace(made, sums=Sums(layout.families, over))


def left_spec(spec: ParamSpec, part: Part) -> ParamSpec:
    """Y = BQ of a part, as a parameter."""
    layout = _left_layout(spec.layout, spec.reading, part)
    blocks = part.blocks if part.blocks > 1 else None
    reading = Reading(flatten=False, num_heads=blocks)
    return replace(spec, layout=layout, reading=reading, bulk=part.cols / part.rank)


def right_spec(spec: ParamSpec, part: Part) -> ParamSpec:
    """W = BᵀP of a part, as a parameter."""
    layout = _right_layout(spec.layout, spec.reading, part)
    bulk = part.rows // part.blocks / part.rank
    return replace(spec, layout=layout, reading=Reading(flatten=False), bulk=bulk)


def first_factor(parameter: Tensor, reading: Reading, parts: Sequence[Part]) -> Tensor:
    """The right factors before the first step, placed as the parameter's columns are.

    Q of C×r is the first r columns of a cosine transform whose rows have pseudo-random signs:
    orthonormal, spread over all directions, and known for any rows of it without the others, so
    that every sharding begins alike.

    Source: the subsampled randomized Fourier transform, arXiv 0909.4061, section 4.6, with
    cosines.
    """
    shape = tuple(parameter.shape)
    dim = row_dim(shape, reading)
    # which columns are here has nothing to do with a process group of replicas
    layout = layout_of(parameter)
    ranks = layout.domain.ranks
    shard = local(parameter)
    width = sum(part.blocks * part.rank for part in parts)
    whole = (*shape[:dim], *shape[dim + 1 :], width)
    extents = (*shard.shape[:dim], *shard.shape[dim + 1 :], width)
    wide = torch.promote_types(shard.dtype, torch.float32)
    if this_rank() not in ranks or 0 in extents:
        zeros = torch.zeros(extents, dtype=wide, device=shard.device)
        return like_without_rows(parameter, zeros, whole, dim)
    seen = stack_box(shape, layout.boxes[ranks.index(this_rank())], reading)
    columns = [
        _cosines(seen.col, seen.cols, part).repeat(1, part.blocks).to(shard.device, wide)
        for part in parts
    ]
    stacks = len(seen.stack)
    factor = torch.cat(columns, dim=1).expand(stacks, -1, -1).reshape(extents).contiguous()
    return like_without_rows(parameter, factor, whole, dim)


def _cosines(first: int, count: int, part: Part) -> Tensor:
    """Rows first .. first + count - 1 of a part's Q, in float64."""
    row = torch.arange(first, first + count, dtype=torch.int64)
    column = torch.arange(part.rank, dtype=torch.int64)
    turns = ((2 * row[:, None] + 1) * column) % (4 * part.cols)  # exact, whatever the size
    basis = torch.cos(turns.double() * (torch.pi / (2 * part.cols)))
    norms = torch.where(column == 0, part.cols, part.cols / 2).double().sqrt()
    # signs: a bit of a multiplicative hash (Knuth, The Art of Computer Programming 3, 6.4)
    signs = 1 - 2 * (((row + 1) * 2654435761 >> 15) & 1)
    return signs[:, None] * basis / norms
