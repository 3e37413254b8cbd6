"""Who owns which matrix: longest processing time first, and what stays where it is."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence

from ortho_func.geometry import MatrixGeometry, Piece

__all__ = ["assign_owners", "busiest", "deal_owners", "home_of", "nearest_owners"]


def home_of(geometry: MatrixGeometry, world: int) -> int | None:
    """The one rank that holds the matrix whole, if exactly one does."""
    if len(geometry.pieces) != 1 or world == 1:
        return None
    return geometry.pieces[0].rank


def assign_owners(
    costs: Sequence[float],
    homes: Sequence[int | None],
    world: int,
    teams: Sequence[Hashable] | None = None,
) -> list[int]:
    """Longest processing time first over all matrices; ties by order, then by rank.

    A matrix that is whole on one rank already stays there, unless that would leave the busiest
    rank with more than five per cent over what free assignment reaches. What has the same team,
    other than None, has no home and goes to different ranks.
    """
    free = _longest_first(costs, [None] * len(costs), world, teams)
    if all(home is None for home in homes):
        return free
    pinned = _longest_first(costs, homes, world, teams)
    if busiest(costs, pinned, world) <= 1.05 * busiest(costs, free, world):
        return pinned
    return free


def nearest_owners(
    geometries: Sequence[MatrixGeometry],
    costs: Sequence[float],
    owners: Sequence[int],
    world: int,
    teams: Sequence[Hashable] | None = None,
) -> list[int]:
    """The same loads, with matrices of equal cost exchanged so that owners hold a piece of theirs.

    An owner that holds none receives the whole matrix. Changes nothing where all ranks hold some.
    A team's shares are exchanged within it.
    """
    by_cost: dict[float, list[int]] = defaultdict(list)
    by_team: dict[Hashable, list[int]] = defaultdict(list)
    for number, geometry in enumerate(geometries):
        if teams is not None and teams[number] is not None:
            by_team[teams[number]].append(number)
        elif len(geometry.pieces) < world:
            by_cost[costs[number]].append(number)
    nearest = list(owners)
    for numbers in by_cost.values():
        _exchange_owners(geometries, numbers, nearest)
    for numbers in by_team.values():
        _seat(geometries, numbers, nearest)
    return nearest


def _seat(geometries: Sequence[MatrixGeometry], numbers: Sequence[int], owners: list[int]) -> None:
    """Each share in turn to that member of its team, of those left, that holds most of it."""
    left = sorted(owners[number] for number in numbers)
    for number in numbers:
        held = {piece.rank: piece.numel for piece in geometries[number].pieces}
        owners[number] = max(left, key=lambda rank: held.get(rank, 0))
        left.remove(owners[number])


def _exchange_owners(
    geometries: Sequence[MatrixGeometry], numbers: Sequence[int], owners: list[int]
) -> None:
    """Deal these matrices' owners among them again: each takes from the largest pile it holds."""
    piles: dict[tuple[Piece, ...], deque[int]] = {}  # matrices cut alike, in order
    seen: dict[int, deque[int]] = {}  # by identity, for speed: equal pieces share a pile
    for number in numbers:
        pieces = geometries[number].pieces
        if id(pieces) not in seen:
            seen[id(pieces)] = piles.setdefault(pieces, deque())
        seen[id(pieces)].append(number)
    held: dict[int, list[deque[int]]] = defaultdict(list)  # by rank
    for pieces, pile in piles.items():
        for piece in pieces:
            held[piece.rank].append(pile)
    strangers = []
    for owner in [owners[number] for number in numbers]:
        pile = max(held[owner], key=len, default=deque())
        if pile:
            owners[pile.popleft()] = owner
        else:
            strangers.append(owner)
    left = sorted(number for pile in piles.values() for number in pile)
    for number, owner in zip(left, strangers, strict=True):
        owners[number] = owner


def deal_owners(classes: Sequence[Hashable], homes: Sequence[int | None], world: int) -> list[int]:
    """Deal each class of equal matrices to the ranks in turn; what is whole on a rank stays."""
    dealt: dict[Hashable, int] = defaultdict(int)
    owners = []
    for key, home in zip(classes, homes, strict=True):
        owners.append(dealt[key] % world if home is None else home)
        dealt[key] += home is None
    return owners


def _longest_first(
    costs: Sequence[float],
    homes: Sequence[int | None],
    world: int,
    teams: Sequence[Hashable] | None,
) -> list[int]:
    owners = [0] * len(costs)
    loads = [0.0] * world
    for number, home in enumerate(homes):
        if home is not None:
            owners[number] = home
            loads[home] += costs[number]
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    members: dict[Hashable, list[int]] = defaultdict(list)
    for number, team in enumerate(teams or ()):
        if team is not None:
            members[team].append(number)
    placed: set[int] = set()
    for number in sorted(range(len(costs)), key=lambda i: -costs[i]):
        if homes[number] is not None or number in placed:
            continue
        together = [number] if teams is None else members.get(teams[number], [number])
        idle = [heapq.heappop(heap) for _ in together]
        for member, (load, rank) in zip(together, idle, strict=True):
            owners[member] = rank
            heapq.heappush(heap, (load + costs[member], rank))
        if len(together) > 1:
            placed.update(together)
    return owners


def busiest(costs: Sequence[float], owners: Sequence[int], world: int) -> float:
    """What the rank with most to do has to do."""
    loads = [0.0] * world
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return max(loads)
