"""Sums over teams: ranks that each own a share of the same matrices.

Every share is in one team with others, a sum has a term on each of them, and every member needs
it. It is computed in parts, one by each member: terms go out and are added up in the team's order,
sums come back. Two exchanges, in which every rank of the domain takes part, with split sizes from
the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Seat", "TeamTables", "team_sum", "team_tables"]


class Seat(NamedTuple):
    """A share's place: its team, and which of the team's shares it is."""

    team: Hashable
    number: int


@dataclass(frozen=True, eq=False)
class TeamTables:
    """One rank's part in the sums of a bucket with n shares here, in teams of `size`.

    `peers` says how many rows are exchanged with each rank, in either direction. A row is a part
    of a term, or of a sum. Own rows come before those that arrive.
    """

    size: int
    peers: tuple[int, ...]
    out: Tensor  # rows of [n · size], a term's parts, that go to others
    terms: Tensor  # [size · n] rows to add up for this rank's part of each sum
    back: Tensor  # rows of [n], parts of sums, that go to others
    parts: Tensor  # [n · size] rows that make up the sums


def team_tables(
    owned: Sequence[Sequence[Seat]], me: int, size: int, device: torch.device | str
) -> TeamTables:
    """The tables of one rank, from the shares that every rank owns, in order."""
    mine = {seat.team: (row, seat.number) for row, seat in enumerate(owned[me])}
    out: list[int] = []
    back: list[int] = []
    peers = []
    arriving: dict[tuple[Hashable, int], int] = {}  # by team and member, which row
    for rank, theirs in enumerate(owned):
        if rank == me:
            peers.append(0)
            continue
        shared = [seat for seat in theirs if seat.team in mine]
        for seat in shared:
            arriving[seat] = len(arriving)
        # To them in the order of my shares, from them in that of theirs.
        numbers = {seat.team: seat.number for seat in shared}
        for seat in owned[me]:
            if seat.team in numbers:
                row = mine[seat.team][0]
                out.append(row * size + numbers[seat.team])
                back.append(row)
        peers.append(len(shared))
    count = len(owned[me])
    terms = [
        row * size + own if member == own else count * size + arriving[team, member]
        for member in range(size)
        for team, (row, own) in mine.items()
    ]
    parts = [
        row if member == own else count + arriving[team, member]
        for team, (row, own) in mine.items()
        for member in range(size)
    ]
    found = (torch.tensor(rows, dtype=torch.int64) for rows in (out, terms, back, parts))
    return TeamTables(size, tuple(peers), *(table.to(device) for table in found))


def team_sum(
    tables: TeamTables,
    value_nx: Tensor,
    scale_n: Tensor,
    exchanged: Callable[[Tensor, Sequence[int]], Tensor],
) -> tuple[Tensor, Tensor]:
    """Sums of ``scale² · value`` over each share's team, relative to the largest scale squared.

    Args:
        tables: of this rank.
        value_nx: the terms, by this rank's shares.
        scale_n: their scales, powers of two.
        exchanged: sends so many elements to each rank and gets as many of each.

    Returns:
        Sums [n, x], in fp32 at least or as they travelled, and their scales [n].
    """
    count, extent = value_nx.shape
    dtype = torch.promote_types(value_nx.dtype, scale_n.dtype)
    part = -(-extent // tables.size)
    padded = torch.nn.functional.pad(value_nx.to(dtype), (0, part * tables.size - extent))
    rows = padded.reshape(count * tables.size, part)
    scales = scale_n.to(dtype).repeat_interleave(tables.size)[:, None]
    rows = torch.cat([rows, scales], dim=1)
    terms = _pool(rows, tables.out, tables.peers, exchanged).index_select(0, tables.terms)
    terms = terms.reshape(tables.size, count, part + 1)
    wide = torch.promote_types(dtype, torch.float32)
    top = terms[..., -1].amax(dim=0) if count else terms.new_zeros(0)
    weights = (terms[..., -1] / top).to(wide).square()
    sums = (terms[..., :-1].to(wide) * weights[..., None]).sum(dim=0)
    rows = torch.cat([sums.to(dtype), top[:, None]], dim=1)
    whole = _pool(rows, tables.back, tables.peers, exchanged).index_select(0, tables.parts)
    whole = whole.reshape(count, tables.size, part + 1)
    return whole[..., :-1].flatten(1)[:, :extent].to(wide), whole[:, 0, -1]


def _pool(
    rows: Tensor,
    out: Tensor,
    peers: Sequence[int],
    exchanged: Callable[[Tensor, Sequence[int]], Tensor],
) -> Tensor:
    """Own rows, and after them those that arrive."""
    sizes = [count * rows.shape[1] for count in peers]
    arrived = exchanged(rows.index_select(0, out).reshape(-1), sizes)
    return torch.cat([rows, arrived.reshape(-1, rows.shape[1])])
