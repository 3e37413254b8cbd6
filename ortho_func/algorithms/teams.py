"""Which matrices are owned by teams of ranks, and how large these are.

Where there are fewer large matrices than ranks, the largest alone sets the time of the step. Its
products of the long side are shared by a team; those of the short side each member computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ortho_func.algorithms.rule import MatrixRule
from ortho_func.owners import assign_owners, busiest
from ortho_func.plan import ParamSpec, Share, TeamSize, Travel
from ortho_func.shares import Cut, cut_of, share_spec

__all__ = ["check_team_size", "moved", "shares_of", "team_sizes"]

# What a byte of the Gram matrices' sums costs in "auto", in floating-point operations: 400 TFLOP/s
# over 50 GB/s, as `python -m ortho_func plan` assumes too. A judgement.
OPERATIONS_PER_BYTE = 8000.0
# A team must take so much off the busiest rank.
LEAST_GAIN = 0.05


def check_team_size(size: TeamSize, balance: str) -> None:
    """Raise `TypeError` or `ValueError` for what is no size of a team."""
    if size != "auto" and (isinstance(size, bool) or not isinstance(size, int)):
        raise TypeError(f"team_size must be a whole number or 'auto', got {size!r}.")
    if size != "auto" and size < 1:
        raise ValueError(f"team_size must be at least 1, got {size}.")
    if size != 1 and balance == "uniform":
        raise ValueError("team_size other than 1 needs balance='cost': teams differ by rank.")


def team_sizes(
    specs: Sequence[ParamSpec], rules: Sequence[MatrixRule], size: TeamSize
) -> list[int]:
    """By parameter, how many ranks own each of its matrices together.

    The least sizes with which no owner has to do more than some cap for one matrix; of all caps,
    the one that leaves the busiest rank with least, if each step down takes five per cent off it.
    """
    found = [1] * len(specs)
    by_ranks: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, spec in enumerate(specs):
        by_ranks[spec.layout.domain.ranks].append(number)
    for ranks, numbers in by_ranks.items():
        if len(ranks) > 1 and size != 1:
            _Choice(specs, rules, numbers, len(ranks), size).decide(found)
    return found


def moved(travel: Travel, count: int) -> float:
    """Bytes that one of so many owners of a matrix sends, and gets, of its sums.

    Of each sum a member sends all but its own part, and gets as many; then sums come back.
    """
    return 4.0 * travel.sums * (count - 1) / count


def shares_of(
    number: int, spec: ParamSpec, rule: MatrixRule, size: int
) -> list[tuple[ParamSpec, MatrixRule, Cut]]:
    """The shares of a parameter, each with its rule."""
    cut, parts = cut_of(spec.layout.shape, spec.reading), _Parts.of(spec, rule)
    assert cut is not None
    assert parts.teamed is not None
    members = [Share(number, member, size) for member in range(size)]
    return [(share_spec(spec, cut, one), parts.teamed, cut) for one in members]


class _Choice:
    """The parameters over the same ranks."""

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        rules: Sequence[MatrixRule],
        numbers: Sequence[int],
        world: int,
        size: TeamSize,
    ) -> None:
        self.world = world
        self.most = world if size == "auto" else min(size, world)
        self.byte = OPERATIONS_PER_BYTE if size == "auto" else 0.0
        self.parts = {n: _Parts.of(specs[n], rules[specs[n].group]) for n in numbers}
        self.costs = {
            parts: {n: self._cost(parts, n) for n in (1, *_sizes_up_to(self._most(parts)))}
            for parts in set(self.parts.values())
        }

    def decide(self, sizes: list[int]) -> None:
        """Write the sizes of these parameters' teams."""
        alike: dict[_Parts, list[int]] = defaultdict(list)
        for number, parts in self.parts.items():
            alike[parts].append(number)
        costs = self.costs
        best = self._busiest(sizes)
        # From no teams on: what one owner of a matrix may have to do, lower and lower.
        for cap in sorted({cost for found in costs.values() for cost in found.values()})[::-1]:
            tried = list(sizes)
            for parts, members in alike.items():
                fitting = [size for size, cost in costs[parts].items() if cost <= cap]
                size = min(fitting, default=min(costs[parts], key=lambda n: costs[parts][n]))
                for member in members:
                    tried[member] = size
            then = self._busiest(tried)
            if then < (1 - LEAST_GAIN) * best:
                sizes[:], best = tried, then

    def _most(self, parts: _Parts) -> int:
        return 1 if parts.teamed is None else min(self.most, parts.slices)

    def _cost(self, parts: _Parts, count: int) -> float:
        """What one owner of one matrix does, and waits for."""
        if count == 1:
            return parts.rule.travel().flops(parts.rows, parts.cols)
        assert parts.teamed is not None
        travel = parts.teamed.travel()
        return travel.flops(parts.rows, -(-parts.cols // count)) + self.byte * moved(travel, count)

    def _busiest(self, sizes: Sequence[int]) -> float:
        """What the busiest rank has to do."""
        costs: list[float] = []
        teams: list[object] = []
        for number, parts in self.parts.items():
            count = sizes[number]
            for matrix in range(parts.matrices):
                costs += [self.costs[parts][count]] * count
                teams += [(number, matrix) if count > 1 else None] * count
        owners = assign_owners(costs, [None] * len(costs), self.world, teams)
        return busiest(costs, owners, self.world)


class _Parts(NamedTuple):
    """A parameter's matrices: how many there are, of which shape, and how they can be shared."""

    rule: MatrixRule
    teamed: MatrixRule | None  # its rule for teams; None: each has one owner
    matrices: int
    rows: int
    cols: int
    slices: int

    @staticmethod
    def of(spec: ParamSpec, rule: MatrixRule) -> _Parts:
        """Those of a parameter; of row blocks of several sizes, as if they were alike."""
        stacks, rows, cols = spec.reading.dims(spec.layout.shape)
        blocks = len(spec.reading.blocks(rows))
        rows //= blocks
        cut = cut_of(spec.layout.shape, spec.reading)
        if cut is None:
            return _Parts(rule, None, stacks * blocks, rows, cols, 0)
        return _Parts(rule, rule.in_teams(rows, cols), blocks, rows, cols, cut.slices)


def _sizes_up_to(most: int) -> list[int]:
    """Powers of two, and the largest size itself.

    Examples:
        >>> _sizes_up_to(6), _sizes_up_to(1)
        ([2, 4, 6], [])
    """
    powers = [2**n for n in range(1, most.bit_length()) if 2**n <= most]
    return sorted({*powers, most} - {0, 1})
