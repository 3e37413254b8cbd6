"""What every rank sends, receives and computes in a plan: one vector over the ranks each.

Matrices whose pieces lie alike are counted together, so that plans of thousands of ranks and
tens of thousands of matrices take a second, not an hour.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ortho_func.geometry import Layout, MatrixGeometry, Piece
from ortho_func.plan import Bucket, Matrix, Plan, Slab

__all__ = ["Exchange", "Peers", "exchanges", "least_bytes"]

VALUE_BYTES = 4  # of one value of a side vector, fp32


@dataclass(frozen=True)
class Exchange:
    """One exchange of a bucket: bytes in each rank's buffers, by rank.

    `kept` is the part of a rank's buffer that it sends to itself: it never reaches the wire.
    `reach` is the size of the groups that exchange.
    """

    sent: Tensor
    received: Tensor
    kept: Tensor
    reach: int

    @classmethod
    def empty(cls, ranks: int, reach: int) -> Exchange:
        """An exchange in which nothing is sent."""
        sent, received, kept = torch.zeros(3, ranks, dtype=torch.int64)
        return cls(sent, received, kept, reach)

    def add_(self, sizes: Tensor, owners: Tensor, *, home: bool) -> None:
        """Add one matrix of each of `owners`: from all ranks to it, or from it home."""
        spread, gathered = (self.received, self.sent) if home else (self.sent, self.received)
        spread += len(owners) * sizes
        gathered.index_add_(0, owners, sizes.sum().expand(len(owners)))
        self.kept.index_add_(0, owners, sizes[owners])

    def pass_on_(self, held: Tensor, inside: Tensor) -> None:
        """Every rank inside a replica sends what it holds to its peers, itself among them."""
        self.sent.add_(held * inside * self.reach)
        self.kept.add_(held * inside)
        self.received.add_(held)

    @property
    def wire(self) -> Tensor:
        """By rank, the larger of the bytes that it sends to and gets from others."""
        return torch.maximum(self.sent, self.received) - self.kept

    @property
    def total(self) -> int:
        """Bytes that cross between ranks."""
        return int((self.sent - self.kept).sum())


class Peers:
    """Which ranks exchange anything with which, over a whole plan."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.found: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self.passing: dict[int, tuple[Tensor, Tensor]] = {}  # place in a replica, whether it passes

    def add_(self, alike: tuple[int, ...], owners: Tensor, others: Tensor) -> None:
        """Every one of `owners` exchanges with the ranks where `others` is True.

        Where `alike` is the same, so is `others`.
        """
        if alike not in self.found:
            self.found[alike] = torch.zeros_like(others), others
        self.found[alike][0][owners] = True

    def pass_on_(self, layout: Layout, holds: Tensor) -> None:
        """Ranks that hold anything exchange with their peers."""
        if id(layout) not in self.passing:
            first = layout.replica(0)
            places = torch.zeros(self.ranks, dtype=torch.int64)
            for place, rank in enumerate(first):
                places[list(layout.peers(rank))] = place
            self.passing[id(layout)] = places, torch.zeros_like(holds)
        self.passing[id(layout)][1].logical_or_(holds)

    def counts(self) -> Tensor:
        """By rank, how many others it exchanges anything with."""
        pairs = torch.zeros(self.ranks, self.ranks, dtype=torch.bool)
        for owners, others in self.found.values():
            pairs |= owners[:, None] & others
        for places, holds in self.passing.values():
            pairs |= (places[:, None] == places) & holds
        both = pairs | pairs.T
        both.fill_diagonal_(False)
        return both.sum(dim=1)


def exchanges(made: Plan, bucket: Bucket, peers: Peers | None = None) -> tuple[Exchange, ...]:
    """The exchanges of a bucket: out, home, and with two hops what is passed on."""
    ranks = bucket.domain.size
    layout, two = made.params[bucket.items[0].param].layout, bucket.hops == 2
    reach = len(layout.replica(0)) if two else ranks
    out, home = Exchange.empty(ranks, reach), Exchange.empty(ranks, reach)
    passed = Exchange.empty(ranks, ranks // reach)
    for slab in bucket.slabs:
        for layout, geometry, replica, owners in _alike(made, slab, ranks):
            if bucket.local:
                continue
            sizes = _sizes(made, bucket, slab, geometry, home=True)
            inside = torch.tensor(layout.replicas) == replica
            if bucket.returns:
                home.add_(sizes * inside if two else sizes, owners, home=True)
            if two:
                passed.pass_on_(sizes * len(owners), inside)
            if bucket.gathers:
                gathered = _sizes(made, bucket, slab, geometry, home=False) * inside
                out.add_(gathered, owners, home=False)
            if peers is not None:
                padded = slab.grid is not None and bucket.gathers
                holds = sizes > 0
                if two:
                    peers.pass_on_(layout, holds)
                    peers.add_((id(geometry.pieces), padded, replica), owners, holds & inside)
                else:
                    peers.add_((id(geometry.pieces), padded), owners, holds)
    return (out, home, passed) if two else (out, home)


def _alike(made: Plan, slab: Slab, ranks: int) -> list[tuple[Layout, MatrixGeometry, int, Tensor]]:
    """Matrices with the same pieces whose owners are of one replica, and these owners."""
    found: dict[tuple[int, int, int], list[Matrix]] = defaultdict(list)
    for matrix in slab.members:
        layout = made.params[matrix.param].layout
        key = (id(layout), id(matrix.geometry.pieces), layout.replicas[matrix.owner])
        found[key].append(matrix)
    out = []
    for (_, _, replica), members in found.items():
        layout = made.params[members[0].param].layout
        owners = torch.tensor([matrix.owner for matrix in members])
        out.append((layout, members[0].geometry, replica, owners))
    return out


def _sizes(
    made: Plan, bucket: Bucket, slab: Slab, geometry: MatrixGeometry, *, home: bool
) -> Tensor:
    """By rank, the bytes of its slot of one matrix, side values included."""
    kinds = [
        ("row" if slab.rows <= slab.cols else "col") if kind == "slice" else kind
        for kind in made.groups[slab.group].sides
    ]
    itemsize = bucket.wire_dtype.itemsize
    if slab.grid is not None and (bucket.gathers or not home):
        rows, cols = slab.grid.rows, slab.grid.cols
        values = sum(rows if kind == "row" else cols for kind in kinds)
        return torch.full((bucket.domain.size,), rows * cols * itemsize + values * VALUE_BYTES)
    sizes = torch.zeros(bucket.domain.size, dtype=torch.int64)
    held: Sequence[Piece] = (*geometry.pieces, *geometry.edges)
    sides = [sum(_values(piece, kind, home) for kind in kinds) for piece in held]
    amounts = [p.numel * itemsize + n * VALUE_BYTES for p, n in zip(held, sides, strict=True)]
    sizes[[piece.rank for piece in held]] = torch.tensor(amounts)
    return sizes


def _values(piece: Piece, kind: str, home: bool) -> int:
    """Side values that come with a piece; on the way out one of those that hold them speaks."""
    along, across = (piece.rows, piece.col) if kind == "row" else (piece.cols, piece.row)
    return along if home or across == 0 else 0


def least_bytes(made: Plan) -> int:
    """The least that any choice of owners must move: what an owner holds need not travel.

    On even shards that is (1 - 1/S) of every matrix on the way out and (R - 1/S) on the way
    home, for R replicas of S shards.
    """
    total = 0
    known: dict[tuple[int, int], int] = {}
    for bucket in made.buckets:
        for slab in bucket.slabs:
            for matrix in slab.members:
                spec = made.params[matrix.param]
                key = (id(spec.layout), id(matrix.geometry.pieces))
                if key not in known:
                    known[key] = _least(spec.layout, matrix.geometry.pieces)
                total += known[key] * made.groups[spec.group].wire_dtype.itemsize
    return total


def _least(layout: Layout, pieces: Sequence[Piece]) -> int:
    """Elements that move if the best placed of the holders owns the matrix."""
    replicas: dict[int, int] = defaultdict(int)
    for piece in pieces:
        replicas[layout.replicas[piece.rank]] += piece.numel
    everything = sum(replicas.values())
    return min(
        replicas[layout.replicas[piece.rank]] + everything - 2 * piece.numel for piece in pieces
    )
