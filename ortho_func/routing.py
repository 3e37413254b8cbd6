"""One rank's part of the plan: split sizes, and where everything lies in its buffers.

A *lane* is what travels for one slab: the matrices themselves, or a side vector of them. The
segment from one rank to another holds first every matrix lane, then every side lane; within a
lane the matrices in the slab's order; of each matrix one *slot*, the piece that the rank holds,
padded if the bucket is dense. Side values are fp32 and take `width` elements each.

An *entry* is this rank's shard of a parameter in a bucket. Where whole entries, one after the
other, are the order of the wire, packing is one concatenation. Elsewhere index tables say where
each *unit* lies: the longest run of elements that is never cut.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ortho_func.geometry import MatrixGeometry, Piece
from ortho_func.plan import Bucket, Grid, Item, Matrix, Plan, Slab, place_in_shard
from ortho_func.teams import Seat, TeamTables, team_tables

__all__ = ["Batch", "Entry", "Lane", "Route", "Tables", "routes"]

MATRICES = -1  # the number of a lane that holds the matrices themselves
NOTHING = -1  # the number of an entry that is none, of a parameter that is none


class Lane(NamedTuple):
    """What travels for one slab: its matrices, or its side vectors number `side`."""

    slab: int
    side: int = MATRICES

    @property
    def main(self) -> bool:
        """Whether it holds the matrices themselves."""
        return self.side == MATRICES


class Batch(NamedTuple):
    """The matrices of one slab that this rank orthogonalizes, as one [count, rows, cols].

    `members` says which they are: the plan's parameter, and which of its matrices. Zero matrices
    that fill up a batch come after them.
    """

    group: int
    rows: int
    cols: int
    count: int  # type: ignore[assignment]  # not tuple.count
    grid: Grid | None
    sides: tuple[str, ...]  # "row" or "col"
    members: tuple[tuple[int, int], ...] = ()


class Entry(NamedTuple):
    """This rank's shard of a bucket's item, as [stack, rows, cols] and padded for the wire."""

    item: Item
    group: int
    first: int  # range of the shard's own stack indices
    last: int
    shape: tuple[int, int, int]
    padded: tuple[int, int, int]
    blocks: tuple[int, ...]  # rows of each row block of which the shard has a piece
    kinds: tuple[tuple[str, ...], ...]  # by side: "row" or "col" for each of these blocks
    sides: tuple[tuple[int, int], ...]  # by side: [stack, values], and padded
    padded_sides: tuple[tuple[int, int], ...]


class Run(NamedTuple):
    """A whole entry's lane in wire order: which entry, and which side (MATRICES for itself).

    Entry NOTHING stands for a zero matrix that fills up a batch, of `filler` elements.
    """

    entry: int
    side: int
    filler: int = 0


@dataclass(frozen=True, eq=False)
class Tables:
    """Index tables of one route. None where order suffices."""

    pack: Tensor | None = None  # units of [mains, natural order | sides, wire order]
    pack_sides: Tensor | None = None  # values, into natural order
    assemble: tuple[Tensor, ...] = ()  # by batch: units of what arrives
    assemble_sides: tuple[tuple[Tensor, ...], ...] = ()  # values
    disassemble: Tensor | None = None  # units of [batches | sides, wire order]
    disassemble_sides: Tensor | None = None
    unpack: Tensor | None = None  # units of what comes home, in natural order
    unpack_sides: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """All tables, flat."""
        flat = [self.pack, self.pack_sides, self.disassemble, self.disassemble_sides]
        flat += [self.unpack, self.unpack_sides, *self.assemble]
        return [t for t in flat if t is not None] + [t for row in self.assemble_sides for t in row]


@dataclass(frozen=True, eq=False)
class Route:
    """One bucket as one rank sees it."""

    number: int  # of the bucket in the plan
    bucket: Bucket
    rank: int  # within the bucket's domain
    near: tuple[int, ...]  # the ranks of both exchanges: all, or with two hops this replica's
    far: tuple[int, ...]  # with two hops: those at this rank's place in all replicas
    send: tuple[int, ...]  # split sizes of the first exchange, in elements, by rank of `near`
    arrive: tuple[int, ...]
    back: tuple[int, ...]  # and of the second
    home: tuple[int, ...]
    passed: tuple[int, ...]  # what comes by the second hop, by rank of `far`
    batches: tuple[Batch, ...]
    entries: tuple[Entry, ...]
    pack_order: tuple[Run, ...] | None  # None: by tables
    unpack_order: tuple[Run, ...] | None
    parts: tuple[int, ...]  # dense: which source's part goes back to each rank that gets one
    terms: tuple[tuple[int, ...], ...]  # dense: the sources of each term of a sum, own first
    unit: int
    width: int
    tables: Tables
    team: TeamTables | None = None  # where teams own the matrices

    @property
    def table_bytes(self) -> int:
        """Bytes that the index tables occupy."""
        return sum(t.numel() * t.element_size() for t in self.tables.tensors())


def routes(made: Plan, rank: int, device: torch.device | str = "cpu") -> tuple[Route, ...]:
    """The routes of one process, by its global rank; index tables lie on `device`.

    Examples:
        >>> import torch
        >>> from ortho_func.plan import plan
        >>> (route,) = routes(plan({"w": torch.randn(4, 8)}), rank=0)
        >>> route.batches[0].count
        1
    """
    found = []
    for number, bucket in enumerate(made.buckets):
        place = bucket.domain.ranks.index(rank)
        found.append(_Router(made, bucket, place).route(number, device))
    return tuple(found)


class _Slot(NamedTuple):
    matrix: Matrix
    piece: Piece | None  # None: a rank that holds nothing sends padding
    size: int  # in elements


class _Router:
    """Computes one route. All methods are arithmetic on the plan; `me` only selects."""

    def __init__(self, made: Plan, bucket: Bucket, me: int) -> None:
        self.plan, self.bucket, self.me = made, bucket, me
        self.everyone = range(bucket.domain.size)
        self.width = max(1, 4 // bucket.wire_dtype.itemsize)
        self.kinds = [
            tuple(_kind(kind, slab) for kind in made.groups[slab.group].sides)
            for slab in bucket.slabs
        ]
        self.lanes = [Lane(number) for number in range(len(bucket.slabs))]
        self.lanes += [
            Lane(number, side)
            for number, kinds in enumerate(self.kinds)
            for side in range(len(kinds))
        ]
        self.near: Sequence[int] = self.everyone
        self.far: tuple[int, ...] = ()
        # The segments of what comes home, in order: what this or which other rank got of whom.
        self.homeward = [(me, owner) for owner in self.everyone]
        if bucket.hops == 2:
            layout = made.params[bucket.items[0].param].layout
            self.near, self.far = layout.replica(me), layout.peers(me)
            self.homeward = [(peer, o) for peer in self.far for o in layout.replica(peer)]
        self.owned = [self._by_owner(slab) for slab in bucket.slabs]
        self.lanes_of = [
            [lane for lane in self.lanes if self.owned[lane.slab][owner]] for owner in self.everyone
        ]
        self.held = self._pieces_by_rank()
        self.natural = self._natural_order()
        self.unit = self._unit()
        self.align = math.lcm(self.unit, self.width) if any(self.kinds) else self.unit

    def route(self, number: int, device: torch.device | str) -> Route:
        entries = [self._entry(*pair) for pair in zip(self.bucket.items, self.natural, strict=True)]
        pack_order, unpack_order = self._order(returning=False), self._order(returning=True)
        me, near = self.me, self.near
        received: dict[int, int] = dict.fromkeys(self.far, 0)
        for peer, owner in self.homeward if self.far else ():
            received[peer] += self._segment(peer, owner, returning=True)
        return Route(
            number=number,
            bucket=self.bucket,
            rank=me,
            near=tuple(near),
            far=self.far,
            send=tuple(self._segment(me, owner, returning=False) for owner in near),
            arrive=tuple(self._segment(rank, me, returning=False) for rank in near),
            back=tuple(self._segment(rank, me, returning=True) for rank in near),
            home=tuple(self._segment(me, owner, returning=True) for owner in near),
            passed=tuple(received.values()),
            batches=tuple(
                Batch(
                    slab.group,
                    slab.rows,
                    slab.cols,
                    len(owned[me]),
                    slab.grid,
                    kinds,
                    tuple((m.param, m.index) for m in owned[me] if m.param != NOTHING),
                )
                for slab, owned, kinds in zip(
                    self.bucket.slabs, self.owned, self.kinds, strict=True
                )
            ),
            entries=tuple(entries),
            pack_order=pack_order,
            unpack_order=unpack_order,
            parts=self._parts(),
            terms=self._terms(),
            unit=self.unit,
            width=self.width,
            tables=self._tables(pack_order is None, unpack_order is None, device),
            team=self._team(device) if self.bucket.team > 1 else None,
        )

    def _team(self, device: torch.device | str) -> TeamTables:
        """Where the terms of a team's sums go and come from; shares are in the batches' order."""
        owned = [
            [self._seat(matrix) for found in self.owned for matrix in found[owner]]
            for owner in self.everyone
        ]
        return team_tables(owned, self.me, self.bucket.team, device)

    def _seat(self, matrix: Matrix) -> Seat:
        share = self.plan.params[matrix.param].share
        assert share is not None
        return Seat((share.team, matrix.index), share.number)

    # -- who has what -----------------------------------------------------------------------

    def _by_owner(self, slab: Slab) -> list[list[Matrix]]:
        owned: list[list[Matrix]] = [[] for _ in self.everyone]
        for matrix in slab.members:
            owned[matrix.owner].append(matrix)
        zero = MatrixGeometry(0, 0, slab.rows, slab.cols, ())
        for owner, found in enumerate(owned if slab.quota is not None else []):
            found += [Matrix(NOTHING, 0, zero, owner)] * ((slab.quota or 0) - len(found))
        return owned

    def _pieces_by_rank(self) -> dict[int, dict[int, Piece]]:
        held: dict[int, dict[int, Piece]] = {}
        for slab in self.bucket.slabs:
            for matrix in slab.members:
                pieces = matrix.geometry.pieces
                if id(pieces) not in held:
                    every = (*pieces, *matrix.geometry.edges)
                    held[id(pieces)] = {piece.rank: piece for piece in every}
        return held

    def _piece(self, matrix: Matrix, rank: int) -> Piece | None:
        if matrix.param == NOTHING:
            return None
        return self.held[id(matrix.geometry.pieces)].get(rank)

    def _holds(self, piece: Piece | None) -> bool:
        """Whether a piece has a slot: in a dense bucket an empty one has none of its own."""
        return piece is not None and (piece.numel > 0 or not self.bucket.dense)

    def _natural_order(self) -> list[list[tuple[int, Matrix]]]:
        """By item: (slab, matrix) of all matrices of which this rank has a slot, by index."""
        members: dict[int, list[tuple[int, Matrix]]] = defaultdict(list)
        for number, slab in enumerate(self.bucket.slabs):
            for matrix in slab.members:
                padded = self.bucket.dense and self.bucket.gathers
                if padded or self._holds(self._piece(matrix, self.me)):
                    members[matrix.param].append((number, matrix))
        return [
            sorted(
                ((n, m) for n, m in members[item.param]
                 if self._inside(item, m)),
                key=lambda pair: pair[1].index,
            )
            for item in self.bucket.items
        ]  # fmt: skip

    def _inside(self, item: Item, matrix: Matrix) -> bool:
        place = place_in_shard(self.plan.params[item.param], matrix)
        return item.whole or item.first <= place < item.last

    # -- sizes ------------------------------------------------------------------------------

    def _unit(self) -> int:
        sizes: set[int] = set()
        for number, slab in enumerate(self.bucket.slabs):
            if slab.grid is not None:
                sizes.add(slab.grid.rows * slab.grid.cols)
                sizes.update(
                    self._slot_size(Lane(number, side), None)
                    for side in range(len(self.kinds[number]))
                )
            else:
                sizes.add(slab.cols)
        if not self.bucket.dense:
            for pieces in self.held.values():
                sizes.update(n for piece in pieces.values() for n in (piece.col, piece.cols))
        return math.gcd(*sizes)

    def _slot_size(self, lane: Lane, piece: Piece | None) -> int:
        grid = self.bucket.slabs[lane.slab].grid
        if grid is not None:
            rows, cols = grid.rows, grid.cols
        else:
            assert piece is not None
            rows, cols = piece.rows, piece.cols
        if lane.main:
            return rows * cols
        return (rows if self.kinds[lane.slab][lane.side] == "row" else cols) * self.width

    def _slots(self, lane: Lane, rank: int, owner: int, *, returning: bool) -> list[_Slot]:
        """What lies of a lane in the segment between a rank and an owner."""
        slots = []
        for matrix in self.owned[lane.slab][owner]:
            piece = self._piece(matrix, rank)
            if self._meets(lane, matrix, rank, piece, returning):
                slots.append(_Slot(matrix, piece, self._slot_size(lane, piece)))
        return slots

    def _meets(
        self, lane: Lane, matrix: Matrix, rank: int, piece: Piece | None, returning: bool
    ) -> bool:
        """Whether a rank has a slot of a matrix of this lane."""
        if not self.bucket.gathers:
            if not returning:
                return rank == matrix.owner
            return self._holds(piece) or matrix.param == NOTHING
        if not returning and matrix.param == NOTHING:
            layout = self.plan.params[self.bucket.items[0].param].layout
            return layout.families[rank] == layout.families[matrix.owner]
        if not returning:
            layout = self.plan.params[matrix.param].layout
            if layout.families[rank] != layout.families[matrix.owner]:
                return False
            if not (lane.main or self.bucket.dense or self._same_replica(rank, matrix)):
                return False  # side vectors are equal on all replicas: one of them brings them
        if self.bucket.dense:
            return True
        if piece is None:
            return False
        return returning or lane.main or self._speaks(lane, piece)

    def _same_replica(self, rank: int, matrix: Matrix) -> bool:
        replicas = self.plan.params[matrix.param].layout.replicas
        return replicas[rank] == replicas[matrix.owner]

    def _term(self, rank: int, matrix: Matrix) -> int:
        """Which term of the owner's sum a rank contributes to: 0, 1, … by replica."""
        layout = self.plan.params[matrix.param].layout
        mine = layout.families[matrix.owner]
        pairs = zip(layout.families, layout.replicas, strict=True)
        return sorted({r for f, r in pairs if f == mine}).index(layout.replicas[rank])

    def _terms(self) -> tuple[tuple[int, ...], ...]:
        """For a dense bucket: of each term of this rank's sums, which of its sources hold it."""
        if not (self.bucket.dense and self.bucket.gathers):
            return ()
        layout = self.plan.params[self.bucket.items[0].param].layout
        family = layout.families[self.me]
        found: dict[int, list[int]] = defaultdict(list)
        sources = [rank for rank in self.everyone if layout.families[rank] == family]
        for place, rank in enumerate(sources):
            found[layout.replicas[rank]].append(place)
        own = found.pop(layout.replicas[self.me])
        return (tuple(own), *(tuple(found[replica]) for replica in sorted(found)))

    def _speaks(self, lane: Lane, piece: Piece) -> bool:
        """Of the pieces with the same side values, one brings them: the first."""
        return (piece.col if self.kinds[lane.slab][lane.side] == "row" else piece.row) == 0

    def _section(self, slots: Sequence[_Slot]) -> int:
        """Elements that a lane takes in a segment."""
        size = sum(slot.size for slot in slots)
        return size if self.bucket.dense else -(-size // self.align) * self.align

    def _segment(self, rank: int, owner: int, *, returning: bool) -> int:
        return sum(
            self._section(self._slots(lane, rank, owner, returning=returning))
            for lane in self.lanes_of[owner]
        )

    def _entry(self, item: Item, found: Sequence[tuple[int, Matrix]]) -> Entry:
        held = [(n, m, p) for n, m in found if (p := self._piece(m, self.me)) is not None]
        stacks = sorted({m.geometry.stack for _, m, _ in held})
        blocks = [(n, p) for n, m, p in held if m.geometry.stack == stacks[0]]
        # Without any here, still after those of the items before: results are joined by it.
        first = self._stack_index(item.param, stacks[0]) if stacks else item.first
        shape = (len(stacks), sum(p.rows for _, p in blocks), blocks[0][1].cols if blocks else 0)
        group = self.plan.params[item.param].group
        count = len(self.plan.groups[group].sides)
        kinds = tuple(tuple(self.kinds[n][side] for n, _ in blocks) for side in range(count))
        sides = tuple(
            (shape[0], sum(p.rows if kind == "row" else p.cols
                           for kind, (_, p) in zip(kinds[side], blocks, strict=True)))
            for side in range(count)
        )  # fmt: skip
        padded, padded_sides = shape, sides
        if self.bucket.dense and found:
            padded, padded_sides = self._padded(found)
        return Entry(
            item=item,
            group=group,
            first=first,
            last=first + len(stacks),
            shape=shape,
            padded=padded,
            blocks=tuple(p.rows for _, p in blocks),
            kinds=kinds,
            sides=sides,
            padded_sides=padded_sides,
        )

    def _padded(
        self, found: Sequence[tuple[int, Matrix]]
    ) -> tuple[tuple[int, int, int], tuple[tuple[int, int], ...]]:
        """Extents of an entry of a dense bucket, slots of what this rank lacks included."""
        stack = len({m.geometry.stack for _, m in found})
        here = [number for number, m in found if m.geometry.stack == found[0][1].geometry.stack]
        grids = [grid for number in here if (grid := self.bucket.slabs[number].grid) is not None]
        sides = tuple(
            (stack, sum(self._slot_size(Lane(n, side), None) for n in here) // self.width)
            for side in range(len(self.kinds[here[0]]))
        )
        return (stack, sum(grid.rows for grid in grids), grids[0].cols), sides

    def _stack_index(self, param: int, stack: int) -> int:
        """Where a stack index lies in this rank's shard."""
        spec = self.plan.params[param]
        box, shape = spec.layout.boxes[self.me], spec.layout.shape
        if spec.reading.flatten or len(shape) < 3:
            return 0
        index, scale = 0, 1
        for extent, start, size in reversed(
            list(zip(shape[:-2], box.start[:-2], box.size[:-2], strict=True))
        ):
            index += (stack % extent - start) * scale
            scale *= size
            stack //= extent
        return index

    def _parts(self) -> tuple[int, ...]:
        """For a dense bucket: which source's part each rank gets that gets one."""
        if not self.bucket.dense:
            return ()
        getting = [r for r in self.near if self._segment(r, self.me, returning=True)]
        if not self.bucket.gathers:
            return (0,) * len(getting)
        replicas = self.plan.params[self.bucket.items[0].param].layout.replicas
        before: dict[int, int] = defaultdict(int)
        numbers = []
        for replica in replicas:
            numbers.append(before[replica])
            before[replica] += 1
        return tuple(numbers[rank] for rank in getting)

    # -- whole entries in wire order --------------------------------------------------------

    def _order(self, *, returning: bool) -> tuple[Run, ...] | None:
        """The wire order as whole entries, if it can be said so. Exact buckets have tables."""
        if not self.bucket.dense:
            return None
        entry_of = {
            (m.param, m.index): number
            for number, found in enumerate(self.natural)
            for _, m in found
        }
        walked: dict[Run, list[int]] = {}
        last: Run | None = None
        segments = self.homeward if returning else [(self.me, owner) for owner in self.everyone]
        for rank, owner in segments:
            for lane in self.lanes_of[owner]:
                for slot in self._slots(lane, rank, owner, returning=returning):
                    if slot.matrix.param == NOTHING:
                        last = Run(NOTHING - len(walked), lane.side, slot.size)
                        walked[last] = []
                        continue
                    key = (slot.matrix.param, slot.matrix.index)
                    run = Run(entry_of[key], lane.side)
                    if run in walked and run != last:
                        return None
                    walked.setdefault(run, []).append(slot.matrix.index)
                    last = run
        for run, indices in walked.items():
            if run.entry >= 0 and indices != [m.index for _, m in self.natural[run.entry]]:
                return None
        return tuple(walked)

    # -- tables -----------------------------------------------------------------------------

    def _tables(self, pack: bool, unpack: bool, device: torch.device | str) -> Tables:
        positions = self._natural_positions() if pack or unpack else {}
        packs = self._pack_tables(positions) if pack else (None, None)
        unpacks = self._unpack_tables(positions) if unpack else (None, None)
        assembles = self._assemble_tables() if not self.bucket.dense else ((), ())
        returns = self._disassemble_tables() if not self.bucket.dense else (None, None)

        def move(table: Tensor | None) -> Tensor | None:
            return None if table is None else table.to(device)

        return Tables(
            pack=move(packs[0]),
            pack_sides=move(packs[1]),
            assemble=tuple(table.to(device) for table in assembles[0]),
            assemble_sides=tuple(tuple(t.to(device) for t in row) for row in assembles[1]),
            disassemble=move(returns[0]),
            disassemble_sides=move(returns[1]),
            unpack=move(unpacks[0]),
            unpack_sides=move(unpacks[1]),
        )

    def _natural_positions(self) -> dict[tuple[Lane, int, int], int]:
        """Where each slot begins in natural order: matrices in elements, sides in values.

        Matrices lie entry after entry; side values entry after entry, within one side by side.
        """
        positions: dict[tuple[Lane, int, int], int] = {}
        at = value = 0
        for item, found in zip(self.bucket.items, self.natural, strict=True):
            for number, matrix in found:
                positions[Lane(number), matrix.param, matrix.index] = at
                at += self._slot_size(Lane(number), self._piece(matrix, self.me))
            group = self.plan.params[item.param].group
            for side in range(len(self.plan.groups[group].sides)):
                for number, matrix in found:
                    lane = Lane(number, side)
                    positions[lane, matrix.param, matrix.index] = value
                    value += self._slot_size(lane, self._piece(matrix, self.me)) // self.width
        self.natural_size = at
        return positions

    def _pack_tables(
        self, positions: dict[tuple[Lane, int, int], int]
    ) -> tuple[Tensor, Tensor | None]:
        units, values = _Index(), _Index()
        base = self.natural_size
        for owner in self.everyone:
            for lane in self.lanes_of[owner]:
                slots = self._slots(lane, self.me, owner, returning=False)
                length = self._section(slots)
                spare = length - sum(slot.size for slot in slots)
                step, index = (self.unit, units) if lane.main else (self.width, values)
                for slot in slots:
                    if slot.matrix.param == NOTHING:
                        index.pad(slot.size // step)  # whatever: nobody gets the result
                        continue
                    start = positions[lane, slot.matrix.param, slot.matrix.index]
                    index.add(start // step if lane.main else start, slot.size // step)
                index.pad(spare // step)
                if not lane.main:
                    units.add(base // self.unit, length // self.unit)
                    base += length
        return units.table(), values.table() if any(self.kinds) else None

    def _unpack_tables(
        self, positions: dict[tuple[Lane, int, int], int]
    ) -> tuple[Tensor, Tensor | None]:
        found: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        at = 0
        for rank, owner in self.homeward:
            for lane in self.lanes_of[owner]:
                slots = self._slots(lane, rank, owner, returning=True)
                start = at
                for slot in slots:
                    if slot.matrix.param == NOTHING:
                        start += slot.size
                        continue
                    natural = positions[lane, slot.matrix.param, slot.matrix.index]
                    found[lane.main].append((natural, start, slot.size))
                    start += slot.size
                at += self._section(slots)
        units, values = _Index(), _Index()
        for _, start, size in sorted(found[True]):
            units.add(start // self.unit, size // self.unit)
        for _, start, size in sorted(found[False]):
            values.add(start // self.width, size // self.width)
        return units.table(), values.table() if any(self.kinds) else None

    def _lane_shape(self, lane: Lane) -> tuple[int, ...]:
        """Units of one matrix of a lane, or values of one side vector."""
        slab = self.bucket.slabs[lane.slab]
        if lane.main:
            return slab.rows, slab.cols // self.unit
        return (slab.rows if self.kinds[lane.slab][lane.side] == "row" else slab.cols,)

    def _span(self, lane: Lane, piece: Piece) -> tuple[int, int]:
        if self.kinds[lane.slab][lane.side] == "row":
            return piece.row, piece.rows
        return piece.col, piece.cols

    def _assemble_tables(self) -> tuple[tuple[Tensor, ...], tuple[tuple[Tensor, ...], ...]]:
        terms = self.bucket.terms
        grids = {
            lane: torch.zeros(
                terms if lane.main else 1,
                len(self.owned[lane.slab][self.me]),
                *self._lane_shape(lane),
                dtype=torch.int64,
            )
            for lane in self.lanes
        }
        mine = self.lanes_of[self.me]
        places = [self._places(lane) for lane in mine]
        at = 0
        for source in self.everyone:
            for lane, place in zip(mine, places, strict=True):
                slots = self._slots(lane, source, self.me, returning=False)
                start = at
                for slot in slots:
                    assert slot.piece is not None
                    term = self._term(source, slot.matrix) if terms > 1 and lane.main else 0
                    grid = grids[lane][term, place[id(slot.matrix)]]
                    self._place(grid, lane, slot.piece, start)
                    start += slot.size
                at += self._section(slots)
        mains = tuple(grids[lane].reshape(-1) for lane in self.lanes if lane.main)
        sides = tuple(
            tuple(grids[Lane(number, side)].reshape(-1) for side in range(len(kinds)))
            for number, kinds in enumerate(self.kinds)
        )
        return mains, sides

    def _places(self, lane: Lane) -> dict[int, int]:
        return {id(m): n for n, m in enumerate(self.owned[lane.slab][self.me])}

    def _place(self, grid: Tensor, lane: Lane, piece: Piece, start: int) -> None:
        """Write where a piece's units or values lie into the table of its matrix."""
        if lane.main:
            rows, cols, col = piece.rows, piece.cols // self.unit, piece.col // self.unit
            block = torch.arange(rows * cols).reshape(rows, cols) + start // self.unit
            grid[piece.row : piece.row + rows, col : col + cols] = block
            return
        first, count = self._span(lane, piece)
        grid[first : first + count] = torch.arange(count) + start // self.width

    def _disassemble_tables(self) -> tuple[Tensor, Tensor | None]:
        starts: dict[Lane, int] = {}
        units, values = _Index(), _Index()
        base = value = 0
        for lane in self.lanes:
            count = len(self.owned[lane.slab][self.me]) * math.prod(self._lane_shape(lane))
            starts[lane] = base if lane.main else value
            base, value = (base + count, value) if lane.main else (base, value + count)
        mine = self.lanes_of[self.me]
        places = [self._places(lane) for lane in mine]
        for rank in self.near:
            for lane, place in zip(mine, places, strict=True):
                slots = self._slots(lane, rank, self.me, returning=True)
                length = self._section(slots)
                spare = length - sum(slot.size for slot in slots)
                for slot in slots:
                    assert slot.piece is not None
                    size = math.prod(self._lane_shape(lane))
                    start = starts[lane] + place[id(slot.matrix)] * size
                    if lane.main:
                        self._add_block(units, lane, slot.piece, start)
                    else:
                        first, count = self._span(lane, slot.piece)
                        values.add(start + first, count)
                if lane.main:
                    units.pad(spare // self.unit)
                else:
                    values.pad(spare // self.width)
                    units.add(base, length // self.unit)
                    base += length // self.unit
        return units.table(), values.table() if any(self.kinds) else None

    def _add_block(self, units: _Index, lane: Lane, piece: Piece, start: int) -> None:
        pitch, cols = self._lane_shape(lane)[1], piece.cols // self.unit
        start += piece.row * pitch + piece.col // self.unit
        units.add_block(start, piece.rows, pitch, cols)


def _kind(kind: str, slab: Slab) -> str:
    """A side of kind "slice" has one value per slice along the shorter side."""
    if kind == "slice":
        return "row" if slab.rows <= slab.cols else "col"
    return kind


class _Index:
    """An index table under construction."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = [torch.zeros(0, dtype=torch.int64)]

    def add(self, start: int, count: int) -> None:
        self.parts.append(torch.arange(start, start + count))

    def add_block(self, start: int, rows: int, pitch: int, cols: int) -> None:
        grid = torch.arange(rows)[:, None] * pitch + torch.arange(cols)[None, :] + start
        self.parts.append(grid.reshape(-1))

    def pad(self, count: int) -> None:
        if count:
            self.parts.append(torch.zeros(count, dtype=torch.int64))

    def table(self) -> Tensor:
        return torch.cat(self.parts)
