"""The wire: who sends what to whom, checked by simulating every rank in one process.

What is right comes from slicing whole tensors, not from the plan's pieces.
Shapes: s stack, r rows, c columns of a parameter seen as matrices.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import matrices as naive_matrices
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ortho_func.geometry import Layout, Reading, matrices, mesh_layout, replicated_layout
from ortho_func.plan import (
    Bucket,
    ParamSpec,
    Plan,
    Travel,
    build_plan,
    local_cut,
    slice_count,
)
from ortho_func.routing import Entry, Route, routes
from ortho_func.wire import assemble, disassemble, load, unload

# In CI the examples are the same in every run; elsewhere they are fresh, and a failure prints them.
EXAMPLES = settings(
    max_examples=300,
    derandomize=bool(os.environ.get("CI")),
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
LARGEST = 100  # values are integers, exact in bfloat16 even when doubled


# A parameter as the naive side sees it.


@dataclass(frozen=True)
class Naive:
    """One parameter by plain slicing: its values' numbers, and which of them each rank holds."""

    spec: ParamSpec
    fraction: float | None

    @cached_property
    def ids(self) -> Tensor:
        """Every element of the parameter is its own number."""
        shape = self.spec.layout.shape
        return torch.arange(torch.Size(shape).numel()).reshape(shape)

    @cached_property
    def whole(self) -> list[Tensor]:
        """The numbers of each matrix, in natural order."""
        reading = self.spec.reading
        return naive_matrices(
            self.ids,
            flatten=reading.flatten,
            split_sizes=reading.split_sizes,
            num_heads=reading.num_heads,
        )

    def shard(self, rank: int) -> Tensor:
        """The numbers that a rank holds, [s, r, c]."""
        box = self.spec.layout.boxes[rank]
        held = self.ids[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
        if held.ndim > 2 and self.spec.reading.flatten:
            return held.reshape(1, held.shape[0], torch.Size(held.shape[1:]).numel())
        stack = torch.Size(held.shape[:-2]).numel()
        return held.reshape(stack, *held.shape[-2:])

    @cached_property
    def cut(self) -> str | None:
        if self.fraction is None:
            return None
        return local_cut(self.spec.layout, self.spec.reading)

    def chosen(self, rank: int) -> Tensor:
        """What travels of a shard: with a fraction its first slices stand for the selected."""
        held = self.shard(rank)
        if self.cut is None or self.fraction is None or held.numel() == 0:
            return held
        rows, cols = self.spec.reading.dims(self.spec.layout.shape)[1:]
        shards = self.spec.layout.replicas.count(self.spec.layout.replicas[0])
        quota = slice_count(self.fraction, -(-(rows if self.cut == "row" else cols) // shards))
        return held[:, :quota] if self.cut == "row" else held[:, :, :quota]

    @cached_property
    def travelling(self) -> list[Tensor]:
        """The numbers of each matrix that travel, [rows, columns]."""
        if self.cut is None:
            return self.whole
        ranks = range(len(self.spec.layout.boxes))
        sent = torch.cat([self.chosen(rank).reshape(-1) for rank in ranks])
        found = []
        for matrix in self.whole:
            keep = torch.isin(matrix, sent)
            found.append(matrix[keep.any(dim=1)][:, keep.any(dim=0)])
        return found

    def blocks(self, rank: int) -> list[tuple[int, range, range]]:
        """By row block of which a rank holds a piece, or is at its edge: block, rows, columns."""
        shape, reading = self.spec.layout.shape, self.spec.reading
        held = self.shard(rank)
        if held.shape[0] == 0:
            return []
        box = self.spec.layout.boxes[rank]
        flat = bool(reading.flatten) and len(shape) > 2
        top = box.start[0] if flat else box.start[-2]
        left = box.start[1] * torch.Size(shape[2:]).numel() if flat else box.start[-1]
        cols = range(left, left + held.shape[2]) if held.shape[2] else range(0)
        found = []
        for number, (first, count) in enumerate(reading.blocks(reading.dims(shape)[1])):
            start, stop = max(first, top), min(first + count, top + held.shape[1])
            if held.shape[1] == 0 or start < stop:
                found.append((number, range(start - first, max(start, stop) - first), cols))
        return found


@dataclass
class Values:
    """Random values of a plan's parameters and side vectors, and what each rank has of them."""

    plan: Plan

    def __post_init__(self) -> None:
        self.naive = [
            Naive(spec, self.plan.groups[spec.group].fraction) for spec in self.plan.params
        ]
        self.numbers = [
            torch.randint(-LARGEST, LARGEST + 1, (naive.ids.numel(),)).float()
            for naive in self.naive
        ]
        # One vector per matrix and side, as long as the larger extent: kinds need not be known.
        self.sides = [
            [
                [torch.randn(max(m.shape)) for _ in self.plan.groups[naive.spec.group].sides]
                for m in naive.travelling
            ]
            for naive in self.naive
        ]

    def matrix(self, param: int, index: int) -> Tensor:
        return self.numbers[param][self.naive[param].travelling[index]]

    def kind(self, param: int, index: int, side: int) -> str:
        kind = self.plan.groups[self.naive[param].spec.group].sides[side]
        rows, cols = self.naive[param].travelling[index].shape
        return kind if kind != "slice" else "row" if rows <= cols else "col"

    def side(self, param: int, index: int, side: int) -> Tensor:
        rows, cols = self.naive[param].travelling[index].shape
        length = rows if self.kind(param, index, side) == "row" else cols
        return self.sides[param][index][side][:length]

    def shard(self, entry: Entry, rank: int) -> Tensor:
        """A rank's part of an entry, [s, r, c]."""
        param = entry.item.param
        held = self.numbers[param][self.naive[param].chosen(rank)]
        return held[entry.first : entry.last]

    def shard_side(self, entry: Entry, rank: int, side: int) -> Tensor:
        """A rank's part of an entry's side vectors, [s, values]."""
        param = entry.item.param
        naive = self.naive[param]
        reading = naive.spec.reading
        blocks = len(reading.blocks(reading.dims(naive.spec.layout.shape)[1]))
        stacks = self.stack_indices(param, rank)[entry.first : entry.last]
        found = [
            self.side(param, stack * blocks + block, side)[slice(along.start, along.stop)]
            for stack in stacks
            for block, rows, cols in naive.blocks(rank)
            for along in [rows if self.kind(param, block, side) == "row" else cols]
        ]
        return torch.cat(found) if found else torch.zeros(0)

    def needs(self, param: int, rank: int) -> bool:
        """Whether a rank has elements of a parameter, or values of its side vectors."""
        naive = self.naive[param]
        sides = self.plan.groups[naive.spec.group].sides
        return naive.shard(rank).numel() > 0 or any(
            len(rows if self.kind(param, block, side) == "row" else cols)
            for side in range(len(sides))
            for block, rows, cols in naive.blocks(rank)
        )

    def stack_indices(self, param: int, rank: int) -> list[int]:
        """The stack indices in a rank's shard, in order."""
        spec = self.plan.params[param]
        lead = spec.layout.shape[:-2]
        if spec.reading.flatten or not lead:
            return [0]
        box = spec.layout.boxes[rank]
        numbers = torch.arange(torch.Size(lead).numel()).reshape(lead)
        part = tuple(slice(a, a + n) for a, n in zip(box.start[:-2], box.size[:-2], strict=True))
        return numbers[part].flatten().tolist()


# The simulation.


def exchange(
    buffers: Sequence[Tensor],
    sizes: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    groups: Sequence[Sequence[int]],
) -> list[Tensor]:
    """An all-to-all in each group; what each rank sends must be what the other expects."""
    for rank, (buffer, split) in enumerate(zip(buffers, sizes, strict=True)):
        assert buffer.numel() == sum(split), (rank, buffer.numel(), split)
    parts = [buffer.split(list(split)) for buffer, split in zip(buffers, sizes, strict=True)]
    found = []
    for rank, group in enumerate(groups):
        arrived = [parts[source][groups[source].index(rank)] for source in group]
        assert [part.numel() for part in arrived] == list(expected[rank]), (rank, expected[rank])
        found.append(torch.cat(arrived))
    return found


def nothing_leaves(sizes: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]) -> None:
    for rank, (split, group) in enumerate(zip(sizes, groups, strict=True)):
        pairs = zip(group, split, strict=True)
        assert all(n == 0 for other, n in pairs if other != rank), (rank, split)


def check_bucket(values: Values, bucket: Bucket, found: Sequence[Route]) -> list[tuple[int, int]]:
    """Send, exchange, assemble, double, and all the way back; the matrices that owners saw."""
    buffers, shards, sides = [], [], []
    near, far = [route.near for route in found], [route.far for route in found]
    for rank, route in enumerate(found):
        shards.append([values.shard(entry, rank).reshape(entry.shape) for entry in route.entries])
        sides.append(
            [
                [
                    values.shard_side(entry, rank, n).reshape(shape)
                    for n, shape in enumerate(entry.sides)
                ]
                for entry in route.entries
            ]
        )
        buffers.append(load(route, shards[-1], sides[-1]))
        assert buffers[-1].dtype == bucket.wire_dtype
    if bucket.gathers:
        send, arrive = [route.send for route in found], [route.arrive for route in found]
        buffers = exchange(buffers, send, arrive, near)
    else:
        nothing_leaves([route.send for route in found], near)

    seen, results = [], []
    for rank, (route, buffer) in enumerate(zip(found, buffers, strict=True)):
        answers = []
        for slab, (x, vectors) in zip(bucket.slabs, assemble(route, buffer), strict=True):
            owned = slab.owned(rank)
            count = len(owned) if slab.quota is None else slab.quota  # filled up with zeros
            assert x.shape == (count, slab.rows, slab.cols)
            for n, member in enumerate(owned):
                seen.append((member.param, member.index))
                assert torch.equal(x[n].float(), values.matrix(member.param, member.index))
                for k, vector in enumerate(vectors):
                    assert torch.equal(vector[n], values.side(member.param, member.index, k))
            answers.append((x * 2, tuple(vector * 2 for vector in vectors)))
        results.append(disassemble(route, answers))

    if bucket.returns:
        back, home = [route.back for route in found], [route.home for route in found]
        results = exchange(results, back, home, near)
    else:
        nothing_leaves([route.back for route in found], near)
    if bucket.hops == 2:
        sizes = [[x.numel()] * len(group) for x, group in zip(results, far, strict=True)]
        copies = [x.repeat(len(group)) for x, group in zip(results, far, strict=True)]
        results = exchange(copies, sizes, [route.passed for route in found], far)
    for rank, (route, result) in enumerate(zip(found, results, strict=True)):
        for n, (shard, vectors) in enumerate(unload(route, result, dtype=torch.float32)):
            assert torch.equal(shard, shards[rank][n] * 2), (rank, route.entries[n])
            for k, vector in enumerate(vectors):
                assert torch.equal(vector, sides[rank][n][k] * 2), (rank, route.entries[n])
    return seen


def check_round_trip(plan: Plan) -> None:
    values = Values(plan)
    by_rank = {
        rank: routes(plan, rank)
        for rank in sorted({rank for spec in plan.params for rank in spec.layout.domain.ranks})
    }
    seen = []
    for number, bucket in enumerate(plan.buckets):
        seen += check_bucket(
            values, bucket, [by_rank[rank][number] for rank in bucket.domain.ranks]
        )
    every = [(p, i) for p, naive in enumerate(values.naive) for i in range(len(naive.whole))]
    assert sorted(seen) == every  # each matrix once, on one owner
    check_entries(plan, values, by_rank)


def check_entries(plan: Plan, values: Values, by_rank: dict[int, tuple[Route, ...]]) -> None:
    """On every rank the buckets' entries are exactly its shards: nothing missing, nothing twice."""
    for rank, found in by_rank.items():
        for param, naive in enumerate(values.naive):
            place = naive.spec.layout.domain.ranks.index(rank)
            if not values.needs(param, place):
                continue
            taken = [
                n
                for route in found
                for entry in route.entries
                if entry.item.param == param
                for n in range(entry.first, entry.last)
            ]
            assert sorted(taken) == list(range(naive.shard(place).shape[0])), (rank, param)


# Random plans.


def mesh_shapes(world: int) -> list[tuple[int, ...]]:
    pairs = [(a, world // a) for a in (2, 3, 4) if world % a == 0 and world > a]
    return [(world,), *pairs, *([(2, 2, 2)] if world == 8 else [])]


@st.composite
def readings(draw: Any, shape: tuple[int, ...]) -> Reading:
    flatten = None if len(shape) == 2 else draw(st.booleans())
    rows = Reading(flatten=flatten).dims(shape)[1]
    how = draw(st.sampled_from(["whole", "whole", "whole", "splits", "heads"]))
    if how == "splits" and rows > 2:
        first = draw(st.integers(1, rows - 2))
        second = draw(st.integers(1, rows - first - 1))
        return Reading(flatten, split_sizes=(first, second, rows - first - second))
    if how == "heads":
        heads = draw(st.sampled_from([n for n in range(1, rows + 1) if rows % n == 0]))
        return Reading(flatten, num_heads=heads)
    return Reading(flatten)


Cuts = Mapping[int, Sequence[int]]  # by tensor dim, the mesh axes that cut it, first cut first


@st.composite
def cuts(draw: Any, mesh: tuple[int, ...], dims: int) -> tuple[tuple[Any, ...], Cuts]:
    """Placements and what they mean: each axis shards some dim or replicates.

    An axis may cut after axes to its right did, as fully_shard cuts what tensor parallelism left.
    """
    placements: list[Any] = []
    orders: dict[int, list[int]] = {}
    for axis in reversed(range(len(mesh))):
        dim = draw(st.sampled_from([*range(dims), *range(dims), None]))
        if dim is None:
            placements.insert(0, Replicate())
            continue
        order = orders.setdefault(dim, [])
        place = draw(st.integers(0, len(order)))
        factor = torch.Size([mesh[before] for before in order[:place]]).numel()
        placements.insert(0, _StridedShard(dim, split_factor=factor) if place else Shard(dim))
        order.insert(place, axis)
    return tuple(placements), orders


@st.composite
def layouts(
    draw: Any, shape: tuple[int, ...], ranks: tuple[int, ...], mesh: tuple[int, ...], dims: int
) -> Layout:
    """Any placements on a mesh, or plain tensors under DDP."""
    if len(mesh) == 1 and draw(st.integers(0, 5)) == 0:
        return replicated_layout(shape, ranks)
    return mesh_layout(shape, ranks, mesh, draw(cuts(mesh, dims))[0])


@st.composite
def travels(draw: Any) -> Travel:
    fraction = draw(st.sampled_from([None, None, 0.3, 0.25, 1.0]))
    sides = ()
    if fraction is None:  # selected slices travel without side vectors
        sides = draw(
            st.sampled_from([(), ("row",), ("slice",), ("row", "slice"), ("col",), ("col", "row")])
        )
    wire_dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
    return Travel(wire_dtype=wire_dtype, sides=sides, fraction=fraction)


@st.composite
def kinds(draw: Any, ranks: tuple[int, ...], groups: int) -> tuple[Layout, Reading, int]:
    """A layout, a reading and a group that some parameters of a plan have in common."""
    mesh = draw(st.sampled_from(mesh_shapes(len(ranks))))
    extent = st.sampled_from([1, 2, 3, 4, 4, 5, 6, 8, 8, 9, 18])
    shape = tuple(draw(extent) for _ in range(draw(st.sampled_from([2, 2, 2, 3, 3, 4]))))
    reading = draw(readings(shape))
    dims = 2 if reading.flatten else len(shape)  # of a convolution only the channels are sharded
    layout = draw(layouts(shape, ranks, mesh, dims))
    return layout, reading, draw(st.integers(0, groups - 1))


@st.composite
def plans(draw: Any) -> Plan:
    world = draw(st.sampled_from([1, 2, 3, 4, 4, 6, 8, 8]))
    ranks = tuple(draw(st.permutations(range(world))))
    groups = tuple(draw(st.lists(travels(), min_size=1, max_size=2)))
    pool = draw(st.lists(kinds(ranks, len(groups)), min_size=1, max_size=3))
    chosen = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=6))
    return build_plan(
        tuple(ParamSpec(f"p{number}", *kind) for number, kind in enumerate(chosen)),
        groups,
        bucket_bytes=draw(st.sampled_from([64, 512, 10**6])),
        wire=draw(st.sampled_from(["auto", "dense", "exact"])),
        balance=draw(st.sampled_from(["cost", "cost", "uniform"])),
    )


# The properties.


@EXAMPLES
@given(plan=plans(), seed=st.integers(0, 2**31))
def test_round_trip_is_the_identity(plan: Plan, seed: int) -> None:
    torch.manual_seed(seed)
    check_round_trip(plan)


@EXAMPLES
@given(plan=plans())
def test_pieces_tile_each_matrix(plan: Plan) -> None:
    for spec in plan.params:
        naive = Naive(spec, None)
        found = matrices(spec.layout, spec.reading)
        assert [(m.rows, m.cols) for m in found] == [tuple(m.shape) for m in naive.whole]
        held: dict[int, list[Tensor]] = {rank: [] for rank in range(len(spec.layout.boxes))}
        for matrix, ids in zip(found, naive.whole, strict=True):
            count = torch.zeros(max(spec.layout.replicas) + 1, *ids.shape, dtype=torch.int64)
            for piece in matrix.pieces:
                rows = slice(piece.row, piece.row + piece.rows)
                cols = slice(piece.col, piece.col + piece.cols)
                count[spec.layout.replicas[piece.rank], rows, cols] += 1
                held[piece.rank].append(ids[rows, cols].flatten())
            present = sorted(set(spec.layout.replicas))
            assert (count[present] == 1).all(), matrix  # once per replica
            assert all(edge.numel == 0 for edge in matrix.edges)
        for rank, parts in held.items():
            shard = naive.shard(rank).flatten()
            flat = torch.cat(parts) if parts else shard.new_zeros(0)
            # Natural order: packing a shard is flattening it.
            assert torch.equal(flat, shard), (spec.name, rank)


# The seed's cases, and others that have gone wrong somewhere, on every rank at once.

ROWS, COLUMNS, COPIES = Shard(0), Shard(1), Replicate()
STRIDED = _StridedShard(0, split_factor=2)

# name -> mesh, placements (a tuple for all, or a list of them), shapes, reading
CASES: dict[str, tuple[tuple[int, ...], Any, list[tuple[int, ...]], Reading]] = {
    "(18, 96) on 8": ((8,), (ROWS,), [(18, 96)] * 16, Reading()),
    "(5, 16) on 4": ((4,), (ROWS,), [(5, 16)] * 2, Reading()),
    "(2, 16) on 4": ((4,), (ROWS,), [(2, 16)], Reading()),
    "(15, 16) on 4": ((4,), (ROWS,), [(15, 16)], Reading()),
    "(1, 16) on 4": ((4,), (ROWS,), [(1, 16), (16, 1)], Reading()),
    "empty and uneven": ((4,), (ROWS,), [(3, 16)] * 3 + [(5, 16)] * 2, Reading()),
    "columns, 5 on 4": ((4,), (COLUMNS,), [(16, 5)] * 3, Reading()),
    "columns, 18 on 8": ((8,), (COLUMNS,), [(64, 18)] * 3, Reading()),
    "one column on 4": ((4,), (COLUMNS,), [(16, 1), (18, 1)], Reading()),
    "copies and shards": (
        (2, 4),
        [(COPIES, ROWS), (ROWS, COLUMNS), (COPIES, COPIES)] * 3,
        [(8, 16), (16, 8), (4, 4)] * 3,
        Reading(),
    ),
    "an owner of what few hold and what all hold": (
        (2, 2),
        [(COPIES, ROWS)] + [(COPIES, COPIES)] * 5,
        [(2, 6, 6)] + [(6, 6)] * 5,
        Reading(flatten=False),
    ),
    "ddp": ((4,), (COPIES,), [(6, 4), (4, 6), (6, 4)], Reading()),
    "hsdp": ((2, 4), (COPIES, ROWS), [(8, 6), (9, 6), (3, 6)] * 3, Reading()),
    "hsdp, replicas inside": ((4, 2), (ROWS, COPIES), [(8, 6), (9, 6), (3, 6)] * 3, Reading()),
    "both dims": ((2, 4), (ROWS, COLUMNS), [(8, 16), (7, 18), (1, 2)] * 3, Reading()),
    "both dims, crossed": ((4, 2), (COLUMNS, ROWS), [(8, 16), (7, 18), (1, 2)] * 3, Reading()),
    "one dim twice": ((4, 2), (ROWS, ROWS), [(16, 3), (13, 3)] * 3, Reading()),
    "fsdp x tp": ((4, 2), (STRIDED, ROWS), [(16, 3), (13, 3), (2, 5)] * 3, Reading()),
    "hsdp x tp": ((2, 2, 2), (COPIES, ROWS, COLUMNS), [(8, 6), (5, 3)] * 5, Reading()),
    "hsdp x tp, one dim": ((2, 2, 2), (COPIES, STRIDED, ROWS), [(8, 6), (5, 3)] * 5, Reading()),
    "whole experts": ((4,), (ROWS,), [(6, 4, 8), (3, 8, 4)], Reading(flatten=False)),
    "experts by rows": ((4,), (COLUMNS,), [(6, 4, 8), (3, 5, 4)], Reading(flatten=False)),
    "experts x fsdp": ((2, 4), (ROWS, COLUMNS), [(4, 8, 6), (3, 5, 8)], Reading(flatten=False)),
    "a stack of stacks": ((4,), (COLUMNS,), [(2, 6, 4, 3)], Reading(flatten=False)),
    "convolutions": ((4,), (ROWS,), [(6, 4, 3, 3), (8, 2, 3)], Reading(flatten=True)),
    "convolutions by inputs": ((4,), (COLUMNS,), [(6, 8, 3), (6, 5, 3)], Reading(flatten=True)),
    "heads": ((4,), (ROWS,), [(24, 5)] * 3, Reading(num_heads=6)),
    "heads across shards": ((8,), (ROWS,), [(18, 5)] * 3, Reading(num_heads=6)),
    "heads by columns": ((4,), (COLUMNS,), [(12, 8), (12, 7)], Reading(num_heads=3)),
    "qkv": ((4,), (ROWS,), [(12, 16)] * 3, Reading(split_sizes=(8, 2, 2))),
    "qkv, hsdp": ((2, 4), (COPIES, ROWS), [(12, 16)] * 3, Reading(split_sizes=(7, 3, 2))),
}


@pytest.mark.parametrize("case", list(CASES))
def test_named_cases(case: str) -> None:
    mesh, placements, shapes, reading = CASES[case]
    world = torch.Size(mesh).numel()
    every = placements if isinstance(placements, list) else [placements] * len(shapes)
    specs = tuple(
        ParamSpec(f"p{n}", mesh_layout(shape, tuple(range(world)), mesh, placed), reading)
        for n, (shape, placed) in enumerate(zip(shapes, every, strict=True))
    )
    for wire, sides, dtype, cap in itertools.product(
        ("auto", "dense", "exact"),
        ((), ("row",), ("slice", "col")),
        (torch.bfloat16, torch.float32),
        (2**20, 256),
    ):
        travel = Travel(sides=sides, wire_dtype=dtype)
        balance = "uniform" if dtype is torch.float32 else "cost"
        plan = build_plan(specs, (travel,), wire=wire, bucket_bytes=cap, balance=balance)
        seed = torch.seed() % 2**31
        torch.manual_seed(seed)
        try:
            check_round_trip(plan)
        except AssertionError as error:
            raise AssertionError(f"{wire} {sides} {dtype} {cap} seed {seed}: {error}") from error


@pytest.mark.parametrize(
    ("mesh", "placements", "order"),
    [
        ((8,), (ROWS,), "ij"),
        ((2, 4), (ROWS, COLUMNS), "ij"),
        ((4, 2), (COLUMNS, ROWS), "ji"),
        ((2, 4), (COPIES, ROWS), "ij"),
    ],
    ids=str,
)
def test_even_shards_are_dense(mesh: Any, placements: Any, order: str) -> None:
    """The cases above that are meant to take the dense path do take it."""
    layout = mesh_layout((16, 8), tuple(range(8)), mesh, placements)
    plan = build_plan((ParamSpec("w", layout),), (Travel(),))
    (bucket,) = plan.buckets
    assert bucket.dense
    assert bucket.slabs[0].grid is not None
    assert bucket.slabs[0].grid.order == order


@settings(EXAMPLES, max_examples=100)
@given(plan=plans())
def test_owners_collect_from_their_own_replica_only(plan: Plan) -> None:
    domain_of = {spec.layout.domain: spec.layout for spec in plan.params}
    found = {rank: routes(plan, rank) for rank in range(len(next(iter(domain_of)).ranks))}
    for number, bucket in enumerate(plan.buckets):
        if len({plan.params[item.param].layout.replicas for item in bucket.items}) > 1:
            continue  # what is a replica of what depends on the parameter
        replicas = plan.params[bucket.items[0].param].layout.replicas
        for place, rank in enumerate(bucket.domain.ranks):
            sent = found[rank][number].send
            strangers = [n for n, replica in enumerate(replicas) if replica != replicas[place]]
            assert all(sent[stranger] == 0 for stranger in strangers), (rank, sent)


def test_every_rank_sends_equally_much_in_a_dense_bucket() -> None:
    """Also those that hold nothing: the send sizes are one and the same list on all ranks."""
    layout = mesh_layout((18, 2304), tuple(range(8)), (8,), (Shard(0),))
    specs = tuple(ParamSpec(f"p{n}", layout) for n in range(32))
    plan = build_plan(specs, (Travel(),), wire="dense")
    sends = {routes(plan, rank)[0].send for rank in range(8)}
    assert sends == {(4 * 3 * 2304,) * 8}  # four matrices an owner, three rows a rank


def test_an_exact_bucket_sends_what_there_is() -> None:
    layout = mesh_layout((18, 2304), tuple(range(8)), (8,), (Shard(0),))
    specs = tuple(ParamSpec(f"p{n}", layout) for n in range(32))
    plan = build_plan(specs, (Travel(),), wire="exact")
    sends = [routes(plan, rank)[0].send for rank in range(8)]
    assert sends == [(4 * 3 * 2304,) * 8] * 6 + [(0,) * 8] * 2


# Layouts: chunks of chunks.


def naive_shard(
    ids: Tensor, mesh: tuple[int, ...], coordinate: Sequence[int], orders: Cuts
) -> Tensor:
    """One rank's elements by `torch.chunk`, cut after cut."""
    for dim, axes in orders.items():
        for axis in axes:
            parts = ids.chunk(mesh[axis], dim)
            at = coordinate[axis]
            ids = parts[at] if at < len(parts) else ids.narrow(dim, 0, 0)
    return ids


@EXAMPLES
@given(data=st.data())
def test_boxes_are_chunks_of_chunks(data: st.DataObject) -> None:
    mesh = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
    # Of an axis of one rank nobody can say when it cut.
    mesh = tuple(max(2, extent) for extent in mesh) if len(mesh) > 1 else mesh
    placements, orders = data.draw(cuts(mesh, len(shape)))
    world = torch.Size(mesh).numel()
    ids = torch.arange(torch.Size(shape).numel()).reshape(shape)
    layout = mesh_layout(shape, tuple(range(world)), mesh, placements)
    held: dict[int, list[int]] = {}
    for rank, coordinate in enumerate(itertools.product(*map(range, mesh))):
        box = layout.boxes[rank]
        mine = ids[tuple(slice(a, a + n) for a, n in zip(box.start, box.size, strict=True))]
        expected = naive_shard(ids, mesh, coordinate, orders)
        assert mine.shape == expected.shape, (rank, box)
        assert torch.equal(mine, expected), (rank, box)
        held.setdefault(layout.replicas[rank], []).extend(mine.flatten().tolist())
    for replica, elements in held.items():
        assert sorted(elements) == ids.flatten().tolist(), replica


@pytest.mark.parametrize("wire", ["auto", "dense", "exact"])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (6, [[0, 1], [3, 4], [2], [5]]),
        (5, [[0, 1], [3], [2], [4]]),
        (8, [[0, 1], [4, 5], [2, 3], [6, 7]]),
        (3, [[0], [2], [1], []]),
        (1, [[0], [], [], []]),
    ],
)
def test_fsdp_with_tensor_parallel_keeps_the_order_of_rows(
    rows: int, expected: list[list[int]], wire: Any
) -> None:
    """Never a plain concatenation by rank."""
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    layout = mesh_layout((rows, 8), (0, 1, 2, 3), (2, 2), placements)
    assert [list(range(b.start[0], b.start[0] + b.size[0])) for b in layout.boxes] == expected
    (matrix,) = matrices(layout, Reading())
    assert [(p.rank, p.row, p.rows) for p in matrix.pieces] == [
        (rank, mine[0], len(mine)) for rank, mine in enumerate(expected) if mine
    ]
    torch.manual_seed(rows)
    check_round_trip(build_plan((ParamSpec("w", layout),), (Travel(sides=("row",)),), wire=wire))


def test_split_factors_that_are_no_order_are_refused() -> None:
    placements = (_StridedShard(0, split_factor=3), Shard(0))
    with pytest.raises(ValueError, match="split factor"):
        mesh_layout((6, 8), (0, 1, 2, 3), (2, 2), placements)
