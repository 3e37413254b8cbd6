"""The plan: who owns which matrix, what travels together, and how it lies on the wire.

A plan is a frozen value computed once from shapes, placements and mesh, without communication.
Every rank computes the same plan and reads its own part (`routing.py`), so no rank ever decides
the shape, order or number of collectives from what it alone knows.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch

from ortho_func.geometry import (
    Domain,
    Layout,
    MatrixGeometry,
    Piece,
    Reading,
    domain_group,
    group_within,
    layout_of,
    local,
    matrices,
    this_rank,
)
from ortho_func.owners import assign_owners, deal_owners, home_of, nearest_owners
from ortho_func.trees import Readings, named_leaves, readings_of

__all__ = [
    "Bucket",
    "Grid",
    "Matrix",
    "ParamSpec",
    "Place",
    "Plan",
    "Share",
    "Slab",
    "TeamSize",
    "Travel",
    "plan",
]

DEFAULT_BUCKET_BYTES = 64 * 1024 * 1024
# On CPUs what is in flight should fit in the cache: benchmarks/buckets.py has the curve.
CPU_BUCKET_BYTES = 8 * 1024 * 1024
# Padding may cost this share of a bucket's bytes before exact splits are chosen instead.
DENSE_WASTE = 0.01

# From so many connections a rank, results go home in two hops where they can. A judgement: at a
# microsecond a message, 64 of them take as long as 3 MB on a link of 50 GB/s.
DIRECT_CONNECTIONS = 64

Wire = Literal["auto", "dense", "exact"]
Balance = Literal["cost", "uniform"]
Hops = Literal["auto", "one", "two"]
TeamSize = int | Literal["auto"]


@dataclass(frozen=True)
class Travel:
    """What travels for the matrices of one group, and what it costs to orthogonalize them.

    `sides` are vectors that accompany each matrix, in fp32: "row" (one value a row) or "col".
    With `fraction`, each rank sends only ceil(fraction * ceil(n / shards)) of its own slices of
    a matrix that is sharded along one dim of n slices.
    """

    algorithm: str = "muon"
    wire_dtype: torch.dtype = torch.bfloat16
    sides: tuple[str, ...] = ()
    fraction: float | None = None
    local_dtype: torch.dtype | None = None  # of matrices that stay; None: the parameter's
    cost: Callable[[int, int], float] | None = None
    sums: int = 0  # where teams own matrices: bytes of all terms of one owner's sums for one

    def flops(self, rows: int, cols: int) -> float:
        """The cost of one matrix; by default that of a quintic iteration, up to a factor."""
        if self.cost is not None:
            return self.cost(rows, cols)
        short, long = min(rows, cols), max(rows, cols)
        return float(4 * short * short * long + 2 * short**3)


class Share(NamedTuple):
    """Of a matrix that a team of ranks owns: which team, which share, and of how many."""

    team: int
    number: int
    count: int  # type: ignore[assignment]  # not tuple.count


@dataclass(frozen=True)
class ParamSpec:
    """One parameter as the plan sees it.

    With a `share` it is one of several parameters that are shares of the same matrices: their
    owners are different ranks, and they are in the same bucket.
    """

    name: str
    layout: Layout
    reading: Reading = field(default_factory=Reading)
    group: int = 0
    dtype: torch.dtype = torch.float32
    bulk: float = 1.0  # bytes that ranks work on meanwhile, over those that travel
    share: Share | None = None


class Matrix(NamedTuple):
    """A matrix to orthogonalize: the `index`-th of its parameter in natural order."""

    param: int
    index: int  # type: ignore[assignment]  # not tuple.index
    geometry: MatrixGeometry  # as it travels: with a fraction, only the selected slices
    owner: int  # rank within the domain


class Grid(NamedTuple):
    """Pieces of equal size in a regular grid: source k holds row part and column part.

    Parts lie row-major over sources ("ij") or column-major ("ji"); trailing parts are padded.
    """

    row_parts: int
    col_parts: int
    order: Literal["ij", "ji"]
    rows: int  # of one padded piece
    cols: int


@dataclass(frozen=True)
class Slab:
    """The matrices of one group and shape in one bucket: one batch on each owner."""

    group: int
    rows: int
    cols: int
    grid: Grid | None  # None where the bucket's wire is exact
    members: tuple[Matrix, ...]
    quota: int | None = None  # uniform balance: every owner's batch, filled up with zero matrices

    def owned(self, owner: int) -> list[Matrix]:
        """The members that `owner` orthogonalizes, in order."""
        return [matrix for matrix in self.members if matrix.owner == owner]


class Item(NamedTuple):
    """The part of a parameter that is in a bucket.

    Of a stack, the matrices whose place in their shard is in first .. last - 1: every shard gives
    a slice of itself, so that no rank has to send all of a bucket.
    """

    param: int
    first: int
    last: int
    whole: bool  # all of the parameter


@dataclass(frozen=True)
class Bucket:
    """Matrices that travel in one pair of exchanges, or in three with two hops home."""

    domain: Domain
    wire_dtype: torch.dtype
    gathers: bool  # an owner lacks a part of a matrix: the first exchange is needed
    returns: bool  # another rank needs a part of a result: the second exchange is needed
    dense: bool
    items: tuple[Item, ...]
    slabs: tuple[Slab, ...]
    terms: int = 1  # how many replicas' contributions an owner adds up
    over: int = 1  # and what it divides the sum by
    hops: int = 1  # home: 2 if results go to the owner's replica, and from there to all others
    team: int = 1  # how many ranks own each matrix together

    @property
    def local(self) -> bool:
        """Whether nothing travels."""
        return not (self.gathers or self.returns)


class Place(NamedTuple):
    """Where this process holds a parameter: its device, and the group over which it travels."""

    device: torch.device
    group: str | None  # the process group's name; None: nothing travels
    near: str | None = None  # where two hops are possible: the group of this rank's replica
    far: str | None = None  # and that of its peers


@dataclass(frozen=True)
class Plan:
    """Everything static about a step, the same on every rank.

    Equality and hash are those of what it was computed from: the parameters' layouts and
    readings, the groups, and the options. See `describe` and `digest`.
    """

    params: tuple[ParamSpec, ...]
    groups: tuple[Travel, ...]
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    wire: Wire = "auto"
    balance: Balance = "cost"
    hops: Hops = "auto"
    team_size: TeamSize = 1  # where the plan is bound to an algorithm
    buckets: tuple[Bucket, ...] = field(compare=False, repr=False, default=())
    places: tuple[Place, ...] = field(compare=False, repr=False, default=())  # by parameter

    def describe(self) -> str:
        """A summary in words: matrices, owners, bytes on the wire, balance."""
        return _describe(self)

    def digest(self) -> str:
        """A short text that differs where two ranks' plans differ."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()

    def lines(self, domain: Domain | None = None) -> list[str]:
        """What the plan was computed from, a line a fact; of one domain's parameters if given."""
        options = ("bucket_bytes", "wire", "balance", "hops")
        out = [" ".join(f"{name}={getattr(self, name)}" for name in options)]
        for spec in self.params:
            if domain is None or spec.layout.domain == domain:
                placed = _fingerprint(spec.layout)
                travel = self.groups[spec.group]
                out.append(
                    f"{spec.name}: shape {spec.layout.shape} {spec.dtype}, shards {placed} over "
                    f"{spec.layout.domain}, {spec.reading}, {travel.algorithm} "
                    f"{travel.wire_dtype} sides={travel.sides} fraction={travel.fraction} "
                    f"unit cost={travel.flops(64, 128)}"
                    + ("" if spec.share is None else f" share {spec.share}")
                )
        return out

    def loads(self, domain: Domain | None = None) -> list[float]:
        """The cost that each rank of a domain orthogonalizes (the first domain by default).

        Includes that of other meshes over the same ranks: owners are chosen for all together.
        """
        domain = domain or self.buckets[0].domain
        loads = [0.0] * domain.size
        for bucket in self.buckets:
            if bucket.domain.ranks == domain.ranks:
                for slab in bucket.slabs:
                    cost = self.groups[slab.group].flops(slab.rows, slab.cols)
                    for matrix in slab.members:
                        loads[matrix.owner] += cost
        return loads

    def with_travel(self, **changes: Any) -> Plan:
        """The same parameters planned again with other facts about what travels."""
        groups = tuple(replace(travel, **changes) for travel in self.groups)
        made = build_plan(
            self.params,
            groups,
            bucket_bytes=self.bucket_bytes,
            wire=self.wire,
            balance=self.balance,
            hops=self.hops,
        )
        return replace(made, places=self.places)


@lru_cache(maxsize=256)
def _fingerprint(layout: Layout) -> str:
    return hashlib.sha256(repr((layout.boxes, layout.sums)).encode()).hexdigest()[:12]


def plan(
    params: Any,
    *,
    readings: Readings | None = None,
    process_group: Any = None,
    wire_dtype: torch.dtype = torch.bfloat16,
    bucket_bytes: int | None = None,
    wire: Wire = "auto",
    balance: Balance = "cost",
    hops: Hops = "auto",
    team_size: TeamSize = 1,
    reduce_gradients: bool = False,
) -> Plan:
    """Plan the distributed step of a pytree of parameters, without communication.

    Args:
        params: any pytree of tensors, such as ``dict(model.named_parameters())``. DTensors bring
            their mesh; plain tensors are replicated over `process_group`, or alone without it.
        readings: how a parameter is read as matrices, by its name (the keys on its way, joined
            by dots) or a pattern with ``*``, or a function of name and tensor; needed for those
            of three or more dims.
        process_group: the group over which plain tensors are replicated (DDP).
        wire_dtype: the dtype in which matrices and results travel.
        bucket_bytes: bound on the matrices that one rank owns in a bucket (a larger one alone
            excepted); by default 64 MiB, on CPUs 8 MiB. Of S even shards a rank sends and gets
            back no more; with replicas (HSDP, DDP) it gets back as many times that as there are
            replicas.
        wire: "dense" pads pieces to equal size, "exact" sends what there is; "auto" takes dense
            where padding costs less than one per cent.
        balance: "cost" gives every rank equally much arithmetic; "uniform" gives every rank the
            same batch of every shape, filled up with zero matrices, so that all ranks trace the
            same graph wherever their shards are of equal shape.
        hops: how results reach the R replicas of S > 1 ranks each (HSDP): "one", from an owner to
            every rank; "two", to the ranks of its own replica and from each of them to its peers
            in the others: S + R - 2 connections a rank instead of R·S - 1, equally many bytes,
            equal results; one bucket more is in flight. "auto" takes two on more than 65 ranks.
            Without replicas (FSDP), with replicas of one rank (DDP) or with `reduce_gradients`
            nothing changes: one hop.
        team_size: how many ranks may own one matrix together, a number or "auto", if the transform
            to which the plan is given can share matrices; see `Muon`.
        reduce_gradients: whether replicas hold gradients of their own (DDP under ``no_sync``).
            Each then sends what it has to the owner, which works on the average, and the
            first exchange takes the place of the gradients' all-reduce.

    Raises:
        ValueError: a parameter that cannot be read as matrices, or a placement such as Partial.

    Examples:
        >>> import torch
        >>> from ortho_func import plan
        >>> made = plan({"w": torch.randn(4, 8), "v": torch.randn(8, 2)})
        >>> [slab.rows for bucket in made.buckets for slab in bucket.slabs]
        [4, 8]
    """
    names, leaves, _ = named_leaves(params)
    specs, groups = [], []
    for name, leaf, reading in zip(
        names, leaves, readings_of(names, leaves, readings), strict=True
    ):
        layout = layout_of(leaf, process_group=process_group, name=name)
        if reduce_gradients:
            layout = layout.averaged()
        specs.append(ParamSpec(name, layout, reading, 0, leaf.dtype))
        groups.append(domain_group(leaf, process_group))
    travel = Travel(wire_dtype=wire_dtype)
    device = local(leaves[0]).device if leaves else torch.device("cpu")
    made = build_plan(
        tuple(specs),
        (travel,),
        bucket_bytes=default_bucket_bytes(device) if bucket_bytes is None else bucket_bytes,
        wire=wire,
        balance=balance,
        hops=hops,
    )
    places = places_of(leaves, made.params, groups, hops)
    return replace(made, places=places, team_size=team_size)


def places_of(
    tensors: Sequence[Any], params: Sequence[ParamSpec], groups: Sequence[Any], hops: Hops
) -> tuple[Place, ...]:
    """Where this process holds parameters that lie over `groups`.

    Makes the groups of two hops, in the same order on all ranks: each needs all of its own.
    """
    rank = this_rank()
    wanted: dict[tuple[Any, ...], Any] = {}
    ways: list[tuple[tuple[int, ...], ...]] = []
    for tensor, spec in zip(tensors, params, strict=True):
        layout, ranks = spec.layout, spec.layout.domain.ranks
        ways.append(())
        if passes_on(layout, hops):
            me = ranks.index(rank)
            hop = (layout.replica(me), layout.peers(me))
            ways[-1] = tuple(tuple(ranks[place] for place in places) for places in hop)
            for number, among in enumerate(ways[-1]):
                wanted.setdefault((-len(ranks), ranks, number, among), tensor)
    names = {
        key[-1]: group_within(wanted[key].device_mesh, key[-1]).group_name for key in sorted(wanted)
    }
    return tuple(
        Place(
            local(tensor).device,
            None if group is None else group.group_name,
            *(names[among] for among in way),
        )
        for tensor, group, way in zip(tensors, groups, ways, strict=True)
    )


def passes_on(layout: Layout, hops: Hops) -> bool:
    """Whether results of parameters laid out so go home in two hops."""
    far = hops == "two" or (hops == "auto" and layout.domain.size - 1 > DIRECT_CONNECTIONS)
    return far and layout.mirrored


def default_bucket_bytes(device: torch.device) -> int:
    """The bound on what is in flight, if the user gives none."""
    return CPU_BUCKET_BYTES if device.type == "cpu" else DEFAULT_BUCKET_BYTES


def build_plan(
    params: tuple[ParamSpec, ...],
    groups: tuple[Travel, ...],
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    wire: Wire = "auto",
    balance: Balance = "cost",
    hops: Hops = "auto",
) -> Plan:
    """Compute owners, buckets and wire layout."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}.")
    if wire not in ("auto", "dense", "exact"):
        raise ValueError(f"wire must be 'auto', 'dense' or 'exact', got {wire!r}.")
    if balance not in ("cost", "uniform"):
        raise ValueError(f"balance must be 'cost' or 'uniform', got {balance!r}.")
    if hops not in ("auto", "one", "two"):
        raise ValueError(f"hops must be 'auto', 'one' or 'two', got {hops!r}.")
    by_ranks: dict[tuple[int, ...], list[int]] = defaultdict(list)  # meshes may share ranks
    for number, spec in enumerate(params):
        spec.reading.check(spec.layout.shape, spec.name)
        by_ranks[spec.layout.domain.ranks].append(number)
    buckets: list[Bucket] = []
    for ranks, numbers in by_ranks.items():
        found = [
            (number, index, geometry)
            for number in numbers
            for index, geometry in enumerate(
                travelling(
                    params[number].layout, params[number].reading, groups[params[number].group]
                )
            )
        ]
        costs = [
            groups[params[number].group].flops(geometry.rows, geometry.cols)
            for number, _, geometry in found
        ]
        teams = [_team_of(params[number], index) for number, index, _ in found]
        homes = [
            home_of(geometry, len(ranks)) if team is None else None
            for (_, _, geometry), team in zip(found, teams, strict=True)
        ]
        if balance == "uniform":
            classes = [
                (params[n].layout.domain.mesh, params[n].group, g.rows, g.cols) for n, _, g in found
            ]
            owners = deal_owners(classes, homes, len(ranks))
        else:
            owners = assign_owners(costs, homes, len(ranks), teams)
            owners = nearest_owners([g for _, _, g in found], costs, owners, len(ranks), teams)
        owned = [
            Matrix(number, index, geometry, owner)
            for (number, index, geometry), owner in zip(found, owners, strict=True)
        ]
        cost_of = {(m.param, m.index): cost for m, cost in zip(owned, costs, strict=True)}
        by_domain: dict[Domain, list[Matrix]] = defaultdict(list)
        for number, members in groupby(owned, key=attrgetter("param")):
            by_domain[params[number].layout.domain] += members
        for domain, inside in by_domain.items():
            buckets += _buckets(params, groups, domain, inside, cost_of, bucket_bytes, wire, hops)
    if balance == "uniform":
        buckets = [_uniform(params, bucket) for bucket in buckets]
    return Plan(params, groups, bucket_bytes, wire, balance, hops, buckets=tuple(buckets))


def _team_of(spec: ParamSpec, index: int) -> tuple[int, int] | None:
    """What the shares of one matrix have in common; None for a matrix with one owner."""
    return None if spec.share is None else (spec.share.team, index)


# ---------------------------------------------------------------------------------------------
# What travels of a matrix


def split_dim(geometry: MatrixGeometry) -> str | None:
    """Along which dim a matrix is cut: "row", "col", None if whole on one rank, else "both"."""
    whole_rows = all(piece.rows == geometry.rows for piece in geometry.pieces)
    whole_cols = all(piece.cols == geometry.cols for piece in geometry.pieces)
    if whole_rows and whole_cols:
        return None
    return "row" if whole_cols else "col" if whole_rows else "both"


def slice_count(fraction: float, extent: int) -> int:
    """How many of `extent` slices a fraction selects: ⌈αn⌉, at least one of any.

    Examples:
        >>> slice_count(0.25, 18), slice_count(0.2, 15), slice_count(0.25, 0)
        (5, 3, 0)
    """
    # 1e-9: 0.2 * 15 is 3.0000000000000004 in binary, and means 3
    return min(extent, max(1, math.ceil(fraction * extent - 1e-9)))


@lru_cache(maxsize=256)
def local_cut(layout: Layout, reading: Reading) -> str | None:
    """Along which dim each shard can select slices of its own: "row", "col", or None.

    None where a shard's matrices are whole, cut both ways, or blocks of one parameter; and where
    shards hold terms of a sum, which only the owner knows.
    """
    if layout.terms > 1:
        return None
    found = matrices(layout, reading)
    alike = {id(geometry.pieces): geometry for geometry in found}
    cuts = {split_dim(geometry) for geometry in alike.values()}
    blocks = any(geometry.block for geometry in found)
    return cuts.pop() if len(cuts) == 1 and not blocks and "both" not in cuts else None


@lru_cache(maxsize=256)
def travelling(layout: Layout, reading: Reading, travel: Travel) -> tuple[MatrixGeometry, ...]:
    """The matrices that travel: whole ones, or with a fraction the slices that shards select."""
    found = matrices(layout, reading)
    cut = local_cut(layout, reading) if travel.fraction is not None else None
    if cut is None or travel.fraction is None:
        return found
    shards, fraction = len(layout.replica(0)), travel.fraction
    chosen: dict[int, MatrixGeometry] = {}
    for geometry in found:
        if id(geometry.pieces) not in chosen:
            chosen[id(geometry.pieces)] = _selected(geometry, shards, fraction, cut)
    return tuple(
        replace(chosen[id(geometry.pieces)], stack=geometry.stack, block=geometry.block)
        for geometry in found
    )


def _selected(geometry: MatrixGeometry, shards: int, fraction: float, cut: str) -> MatrixGeometry:
    extent = geometry.rows if cut == "row" else geometry.cols
    place: dict[int, tuple[int, int]] = {}  # start of a shard's slices -> start, count selected
    at = 0
    spans = sorted({(p.row, p.rows) if cut == "row" else (p.col, p.cols) for p in geometry.pieces})
    for start, own in spans:
        count = min(own, slice_count(fraction, -(-extent // shards)))
        place[start] = (at, count)
        at += count
    pieces = tuple(
        Piece(p.rank, *place[p.row], p.col, p.cols)
        if cut == "row"
        else Piece(p.rank, p.row, p.rows, *place[p.col])
        for p in geometry.pieces
    )
    rows, cols = (at, geometry.cols) if cut == "row" else (geometry.rows, at)
    return MatrixGeometry(geometry.stack, geometry.block, rows, cols, pieces)


# ---------------------------------------------------------------------------------------------
# Buckets


class _Stream(NamedTuple):
    """What all matrices of a bucket have in common."""

    dtype: torch.dtype
    gathers: bool
    returns: bool
    terms: int
    over: int
    replicas: tuple[int, ...]  # of two hops, else ()
    team: tuple[int, int]  # group and number of owners, of matrices with several, else (0, 1)


class _Atom(NamedTuple):
    """What cannot be cut further into buckets: a parameter, a range of a stack, or all shares."""

    items: tuple[Item, ...]
    members: tuple[Matrix, ...]
    stream: _Stream
    cost: float
    share: float  # of what the owner works on: what travels to it, in terms of its own


def _buckets(
    params: Sequence[ParamSpec],
    groups: Sequence[Travel],
    domain: Domain,
    owned: Sequence[Matrix],
    cost_of: dict[tuple[int, int], float],
    bucket_bytes: int,
    wire: Wire,
    hops: Hops,
) -> list[Bucket]:
    holders = _Holders()
    by_param: dict[int, list[Matrix]] = defaultdict(list)
    for matrix in owned:
        by_param[matrix.param].append(matrix)
    streams: dict[_Stream, list[_Atom]] = defaultdict(list)
    shares: dict[int, list[_Atom]] = defaultdict(list)  # by team
    for number, members in by_param.items():
        spec = params[number]
        travel = groups[spec.group]
        cap = bucket_bytes * domain.size
        for atom in _atoms(spec, number, members, travel, cap, cost_of, holders, hops):
            if spec.share is None:
                streams[atom.stream].append(atom)
            else:
                shares[spec.share.team].append(atom)
    for together in shares.values():
        atom = _joined(together)
        streams[atom.stream].append(atom)
    buckets = []
    for stream, atoms in streams.items():
        atoms.sort(key=lambda atom: (-atom.cost, atom.items))
        for chunk in _fill(atoms, stream.dtype.itemsize, bucket_bytes):
            buckets.append(_bucket(params, groups, domain, stream, chunk, wire))
    return sorted(buckets, key=lambda bucket: bucket.local)


def _atoms(
    spec: ParamSpec,
    number: int,
    members: Sequence[Matrix],
    travel: Travel,
    cap: int,
    cost_of: dict[tuple[int, int], float],
    holders: _Holders,
    hops: Hops,
) -> Iterable[_Atom]:
    size = sum(m.geometry.rows * m.geometry.cols for m in members) * travel.wire_dtype.itemsize
    stacks = 1 + max(place_in_shard(spec, m) for m in members)
    ranges = [(0, stacks)]
    if stacks > 1 and size > cap and spec.share is None:
        parts = min(stacks, -(-size // cap))
        edges = [stacks * part // parts for part in range(parts + 1)]
        ranges = list(pairwise(edges))
    for first, last in ranges:
        inside = tuple(m for m in members if first <= place_in_shard(spec, m) < last)
        travels = [holders.moves(spec.layout, m, bool(travel.sides)) for m in inside]
        stays = not any(gathers or returns for gathers, returns in travels)
        layout = spec.layout
        returns = any(t[1] for t in travels)
        stream = _Stream(
            _carrier(spec, travel, stays),
            any(t[0] for t in travels),
            returns,
            layout.terms,
            1 if layout.sums is None else layout.sums.over,
            layout.replicas if returns and spec.share is None and passes_on(layout, hops) else (),
            (0, 1) if spec.share is None else (spec.group, spec.share.count),
        )
        cost = max(cost_of[m.param, m.index] for m in inside)
        item = Item(number, first, last, len(ranges) == 1)
        share = (travel.fraction or 1.0) / (layout.terms * spec.bulk)
        yield _Atom((item,), inside, stream, cost, share)


def _joined(shares: Sequence[_Atom]) -> _Atom:
    """All shares of a team as one atom. They need not travel alike, but do so together."""
    first, streams = shares[0], [atom.stream for atom in shares]
    travelling = [one for one in streams if one.gathers or one.returns]
    stream = (travelling or streams)[0]._replace(
        gathers=any(one.gathers for one in streams), returns=any(one.returns for one in streams)
    )
    return _Atom(
        tuple(item for atom in shares for item in atom.items),
        tuple(matrix for atom in shares for matrix in atom.members),
        stream,
        max(atom.cost for atom in shares),
        first.share,
    )


def place_in_shard(spec: ParamSpec, matrix: Matrix) -> int:
    """The index, within the shards that hold it, of a matrix of a stack over dim 0."""
    if len(spec.layout.shape) != 3 or spec.reading.flatten:
        return 0
    holder = matrix.geometry.pieces[0].rank
    return matrix.geometry.stack - spec.layout.boxes[holder].start[0]


def _carrier(spec: ParamSpec, travel: Travel, stays: bool) -> torch.dtype:
    """The dtype of a bucket's buffers: nothing that stays on its rank is rounded for the wire."""
    if not stays:
        return travel.wire_dtype
    narrow = travel.local_dtype
    # float64's range is more than a narrower dtype has before it is scaled
    return narrow if narrow is not None and spec.dtype == torch.float32 else spec.dtype


class _Holders:
    """Which ranks of which family hold pieces, found once for all matrices cut alike."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, int], dict[int, set[int]]] = {}

    def moves(self, layout: Layout, matrix: Matrix, sided: bool) -> tuple[bool, bool]:
        """Whether the owner lacks a part of the matrix, and whether others need a part of it."""
        owner, geometry = matrix.owner, matrix.geometry
        mine = self.of(layout, geometry).get(layout.families[owner], set())
        held = owner in mine
        edges = sided and any(edge.rank != owner for edge in geometry.edges)
        return len(mine) > held, len(geometry.pieces) > held or edges

    def of(self, layout: Layout, geometry: MatrixGeometry) -> dict[int, set[int]]:
        """By family, the ranks that hold a piece."""
        key = (id(layout), id(geometry.pieces))
        if key not in self.found:
            ranks: dict[int, set[int]] = defaultdict(set)
            for piece in geometry.pieces:
                ranks[layout.families[piece.rank]].add(piece.rank)
            self.found[key] = ranks
        return self.found[key]


def _fill(atoms: Iterable[_Atom], itemsize: int, cap: int) -> Iterable[list[_Atom]]:
    """Cut a sequence of atoms so that no owner works on more than `cap` bytes at once.

    An owner's first atom counts as fitting: it cannot be cut, and matrices larger than the cap
    still share a bucket with those of other owners, which work on them at the same time.
    """
    chunk: list[_Atom] = []
    received: dict[int, int] = defaultdict(int)
    for atom in atoms:
        adds: dict[int, int] = defaultdict(int)
        for matrix in atom.members:
            size = matrix.geometry.rows * matrix.geometry.cols * itemsize
            adds[matrix.owner] += int(size / atom.share)
        if any(received[owner] and received[owner] + size > cap for owner, size in adds.items()):
            yield chunk
            chunk, received = [], defaultdict(int)
        chunk.append(atom)
        for owner, size in adds.items():
            received[owner] += size
    if chunk:
        yield chunk


def _bucket(
    params: Sequence[ParamSpec],
    groups: Sequence[Travel],
    domain: Domain,
    stream: _Stream,
    atoms: Sequence[_Atom],
    wire: Wire,
) -> Bucket:
    gathers = stream.gathers
    classes: dict[tuple[int, int, int], list[Matrix]] = defaultdict(list)
    for atom in atoms:
        for matrix in atom.members:
            shape = (matrix.geometry.rows, matrix.geometry.cols)
            classes[params[matrix.param].group, *shape].append(matrix)
    grids = {key: _common_grid(params, members, gathers) for key, members in classes.items()}
    sided = any(groups[key[0]].sides for key in classes)
    alike = _alike(params, [m for found in classes.values() for m in found], gathers, sided)
    dense = alike and _is_dense(classes, grids, wire, sided)
    slabs = tuple(
        Slab(*key, grids[key] if dense else None, tuple(members))
        for key, members in classes.items()
    )
    items = tuple(item for atom in atoms for item in atom.items)
    return Bucket(
        domain, stream.dtype, gathers, stream.returns, dense, items, slabs,
        stream.terms, stream.over, 2 if stream.replicas else 1, stream.team[1],
    )  # fmt: skip


def _is_dense(
    classes: dict[tuple[int, int, int], list[Matrix]],
    grids: dict[tuple[int, int, int], Grid | None],
    wire: Wire,
    sided: bool,
) -> bool:
    """Whether every rank can send equally much: possible, and padding at most DENSE_WASTE."""
    regular = [grid for grid in grids.values() if grid is not None]
    if wire == "exact" or len(regular) < len(grids):
        return False
    if sided and any(grid.rows * grid.cols % 2 for grid in regular):
        return False  # fp32 values behind an odd number of 2-byte elements are misaligned
    if wire == "dense":
        return True
    exact = padded = 0
    for (group, rows, cols), found in classes.items():
        grid = grids[group, rows, cols]
        assert grid is not None
        exact += rows * cols * len(found)
        padded += grid.row_parts * grid.rows * grid.col_parts * grid.cols * len(found)
    return padded <= (1 + DENSE_WASTE) * exact


def _alike(
    params: Sequence[ParamSpec], members: Sequence[Matrix], gathers: bool, sided: bool
) -> bool:
    """Whether all matrices of each owner come from, and go to, the same ranks."""
    layouts = {id(layout): layout for m in members for layout in [params[m.param].layout]}
    if len({(layout.replicas, layout.families) for layout in layouts.values()}) > 1:
        return False
    if not gathers and sided and any(matrix.geometry.edges for matrix in members):
        return False  # side values go to ranks that get no part of the matrix
    holders: dict[int, tuple[int, ...]] = {}
    return gathers or all(
        holders.setdefault(matrix.owner, found) == found
        for matrix in members
        for found in [tuple(piece.rank for piece in matrix.geometry.pieces)]
    )


def _uniform(params: Sequence[ParamSpec], bucket: Bucket) -> Bucket:
    """Fill up every owner's batch to the largest, where every rank takes part alike."""
    replicated = all(
        len(matrix.geometry.pieces) == bucket.domain.size
        for slab in bucket.slabs
        for matrix in slab.members
    )
    if not bucket.dense or not (bucket.gathers or replicated):
        return bucket
    slabs = []
    for slab in bucket.slabs:
        counts = [0] * bucket.domain.size
        for matrix in slab.members:
            counts[matrix.owner] += 1
        slabs.append(replace(slab, quota=max(counts)))
    return replace(bucket, slabs=tuple(slabs))


def _common_grid(
    params: Sequence[ParamSpec], members: Sequence[Matrix], gathers: bool
) -> Grid | None:
    """The regular grid that the pieces of all these matrices form, if they do."""
    found: Grid | None = None
    seen: set[Any] = set()
    for matrix in members:
        spec, geometry = params[matrix.param], matrix.geometry
        key = (id(spec.layout), None if gathers else matrix.owner, id(geometry.pieces))
        if key in seen:
            continue
        seen.add(key)
        # Results go to every replica: their ranks must hold the cells in the same order.
        owners = _first_ranks(spec.layout) if gathers else (matrix.owner,)
        grids = {grid_of(geometry, spec.layout.replica(r) if gathers else (r,)) for r in owners}
        grid = grids.pop()
        blocks = len(spec.reading.blocks(spec.reading.dims(spec.layout.shape)[1]))
        if grid is None or grids or (found is not None and grid != found):
            return None
        padded = grid.row_parts > 1 or grid.cols * grid.col_parts > geometry.cols
        if blocks > 1 and padded:
            return None  # padding between the blocks of a shard
        found = grid
    return found


@lru_cache(maxsize=256)
def _first_ranks(layout: Layout) -> tuple[int, ...]:
    """The first rank of each replica."""
    firsts: dict[int, int] = {}
    for rank, replica in enumerate(layout.replicas):
        firsts.setdefault(replica, rank)
    return tuple(firsts.values())


def grid_of(geometry: MatrixGeometry, sources: Sequence[int]) -> Grid | None:
    """The grid in which `sources` hold the matrix: chunks in order, padding only at the end."""
    held = {piece.rank: piece for piece in (*geometry.pieces, *geometry.edges)}
    cells = [held.get(rank) for rank in sources]
    rows = max(piece.rows for piece in geometry.pieces)
    cols = max(piece.cols for piece in geometry.pieces)
    count = len(sources)
    for row_parts in [count, *(n for n in range(1, count) if count % n == 0)]:
        for order in ("ij", "ji"):
            grid = Grid(row_parts, count // row_parts, order, rows, cols)
            if all(_fits(geometry, grid, k, piece) for k, piece in enumerate(cells)):
                return grid
    return None


def _fits(geometry: MatrixGeometry, grid: Grid, k: int, piece: Piece | None) -> bool:
    """Whether source k's piece is the grid's k-th cell, cut off at the matrix's end."""
    if grid.order == "ij":
        i, j = divmod(k, grid.col_parts)
    else:
        j, i = divmod(k, grid.row_parts)
    row, col = i * grid.rows, j * grid.cols
    rows = max(0, min(grid.rows, geometry.rows - row))
    cols = max(0, min(grid.cols, geometry.cols - col))
    if piece is None:
        return rows * cols == 0
    return (
        (piece.rows, piece.cols) == (rows, cols)
        and (rows == 0 or piece.row == row)
        and (cols == 0 or piece.col == col)
    )


# ---------------------------------------------------------------------------------------------
# In words


def _describe(made: Plan) -> str:
    total = sum(len(slab.members) for bucket in made.buckets for slab in bucket.slabs)
    count = len(made.buckets)
    lines = [f"{len(made.params)} parameters, {total} matrices, {count} bucket{'s' * (count != 1)}"]
    domains = dict.fromkeys(bucket.domain for bucket in made.buckets)
    for domain in domains:
        own = [bucket for bucket in made.buckets if bucket.domain == domain]
        loads = made.loads(domain)
        mean = sum(loads) / len(loads)
        counts: dict[tuple[str, int, int], int] = defaultdict(int)
        busy = [0] * domain.size
        for bucket in own:
            for slab in bucket.slabs:
                counts[made.groups[slab.group].algorithm, slab.rows, slab.cols] += len(slab.members)
                for matrix in slab.members:
                    busy[matrix.owner] += 1
        lines.append(f"  {domain.size} rank(s), mesh {'x'.join(map(str, domain.mesh))}:")
        lines += [f"    {n:5d} x {r} x {c} ({a})" for (a, r, c), n in counts.items()]
        lines.append(
            f"    matrices a rank {min(busy)} to {max(busy)}; busiest rank "
            f"{max(loads) / mean if mean else 1:.3f} of the mean"
        )
        lines += _owners_in_words(domain, own)
        wires = [wire_bytes(made, bucket) for bucket in own]
        for bucket, (out, back) in zip(own, wires, strict=True):
            how = "stays local" if bucket.local else "dense" if bucket.dense else "exact splits"
            how += ", two hops home" if bucket.hops == 2 else ""
            how += f", teams of {bucket.team}" if bucket.team > 1 else ""
            lines.append(
                f"    bucket of {sum(len(s.members) for s in bucket.slabs)} matrices, {how}: "
                f"{out / 2**20:.3f} MiB out, {back / 2**20:.3f} MiB back over all ranks"
            )
    return "\n".join(lines)


def _owners_in_words(domain: Domain, buckets: Sequence[Bucket], most: int = 8) -> list[str]:
    """What each of the first ranks owns."""
    owned: list[dict[tuple[int, int], int]] = [defaultdict(int) for _ in range(domain.size)]
    for bucket in buckets:
        for slab in bucket.slabs:
            for matrix in slab.members:
                owned[matrix.owner][slab.rows, slab.cols] += 1
    lines = [
        f"    rank {domain.ranks[rank]} owns "
        + (", ".join(f"{n} x {r} x {c}" for (r, c), n in found.items()) or "nothing")
        for rank, found in enumerate(owned[:most])
    ]
    return lines + ([f"    and {domain.size - most} more ranks"] if domain.size > most else [])


def wire_bytes(made: Plan, bucket: Bucket) -> tuple[int, int]:
    """Bytes of matrices that cross between ranks in the first and in the second exchange."""
    out = back = 0
    held: dict[tuple[int, int], tuple[dict[int, int], dict[int, int]]] = {}
    for slab in bucket.slabs:
        for matrix in slab.members:
            layout, pieces = made.params[matrix.param].layout, matrix.geometry.pieces
            key = (id(layout), id(pieces))
            if key not in held:  # matrices cut alike are counted once
                held[key] = _amounts(layout, bucket, slab, pieces)
            by_rank, by_family = held[key]
            kept = by_rank.get(matrix.owner, 0)
            out += by_family.get(layout.families[matrix.owner], 0) - kept if bucket.gathers else 0
            back += sum(by_family.values()) - kept
    return out * bucket.wire_dtype.itemsize, back * bucket.wire_dtype.itemsize


def _amounts(
    layout: Layout, bucket: Bucket, slab: Slab, pieces: Sequence[Piece]
) -> tuple[dict[int, int], dict[int, int]]:
    """Elements that travel of a matrix: by the rank, and by the family, that has them."""
    by_rank = {piece.rank: piece.numel for piece in pieces}
    if slab.grid is not None and bucket.gathers:
        by_rank = dict.fromkeys(range(bucket.domain.size), slab.grid.rows * slab.grid.cols)
    by_family: dict[int, int] = defaultdict(int)
    for rank, size in by_rank.items():
        by_family[layout.families[rank]] += size
    return by_rank, by_family
