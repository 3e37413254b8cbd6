"""The round trip: shards → whole matrices → shards, as a software pipeline over buckets.

Written in program order, so that eager and compiled code overlap alike: the exchange of bucket
k + 1 begins before the arithmetic of bucket k; results come home while the next bucket computes,
and by a second hop while the one after that does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ortho_func.primitives.collectives import all_to_all, wait
from ortho_func.routing import Batch, Route
from ortho_func.teams import team_sum
from ortho_func.wire import Sided, assemble, disassemble, load, unload

__all__ = ["Ways", "in_batches", "run"]


class Ways(NamedTuple):
    """The names of the process groups over which a route's exchanges go."""

    near: str | None  # None: nothing travels
    far: str | None = None  # of the second hop


Emit = Callable[[Route], tuple[list[Tensor], list[list[Tensor]]]]
Whole = Callable[[Batch, Tensor, tuple[Tensor, ...]], Sided]
Sum = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Together = Callable[[Route, list[Sided], Sum], list[Sided]]
Absorb = Callable[[Route, list[Tensor], list[list[Tensor]]], None]


def run(
    routes: Sequence[Route],
    ways: Sequence[Ways],
    *,
    emit: Emit,
    whole: Whole,
    together: Together,
    absorb: Absorb,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Drive every bucket through its round trip.

    Args:
        routes: this rank's routes, in the plan's order; those where nothing travels last.
        ways: by route, the process groups.
        emit: a route's shards and side vectors, just before they are packed.
        whole: what happens to each batch of whole matrices on its owner.
        together: what happens to a route's shares where teams own the matrices: it is given the
            team's sum of [n, values] and scales [n] over all shares that are here, and calls it
            equally often on every rank.
        absorb: what happens to a route's results.
        meanwhile: work without matrices, done while the first exchange is under way.
    """
    trips = [_Trip(route, way) for route, way in zip(routes, ways, strict=True)]
    if torch.compiler.is_compiling():
        _drive(trips, emit, whole, together, absorb, meanwhile)
        return
    try:
        _drive(trips, emit, whole, together, absorb, meanwhile)
    except torch.OutOfMemoryError as error:
        busy = [trip for trip in trips if trip.doing]
        if not busy:  # it was `meanwhile`
            raise
        raise type(error)(
            f"out of memory in bucket {busy[0].route.number}, {busy[0].doing}. A smaller "
            f"bucket_bytes needs less. {error}"
        ) from error


def _drive(
    trips: Sequence[_Trip],
    emit: Emit,
    whole: Whole,
    together: Together,
    absorb: Absorb,
    meanwhile: Callable[[], None] | None,
) -> None:
    travelling = [trip for trip in trips if not trip.route.bucket.local]
    if travelling:
        travelling[0].depart(emit)
    if meanwhile is not None:
        meanwhile()
    for trip in trips:
        if trip.route.bucket.local:
            trip.depart(emit)
            trip.turn(whole, together)
            trip.arrive(absorb)
    homeward: list[_Trip] = []  # the latest first: its second hop begins before others are home
    for number, trip in enumerate(travelling):
        if number + 1 < len(travelling):
            travelling[number + 1].depart(emit)
        trip.turn(whole, together)
        homeward = [trip, *(other for other in homeward if not other.proceed(absorb))]
    while homeward:
        homeward = [trip for trip in homeward if not trip.proceed(absorb)]


class _Trip:
    """One bucket under way: out, turned on its owner, and home."""

    def __init__(self, route: Route, ways: Ways) -> None:
        self.route, self.ways = route, ways
        self.passes = route.bucket.hops == 2  # the second hop is to come
        self.buffer: Tensor | None = None
        self.doing = ""  # what is not finished, for errors

    def depart(self, emit: Emit) -> None:
        self.doing = "on the way to the owners"
        route = self.route
        buffer = load(route, *emit(route))
        if route.bucket.gathers:
            assert self.ways.near is not None
            buffer = self._begin(buffer, route.send, route.arrive, self.ways.near, "first")
        self.buffer, self.doing = buffer, ""

    def turn(self, whole: Whole, together: Together) -> None:
        self.doing = "on whole matrices"
        route, buffer = self.route, self.buffer
        assert buffer is not None
        if route.bucket.gathers:
            buffer = self._wait(buffer, "first")
        found = assemble(route, buffer)
        if route.team is not None:
            results = together(route, found, self._sum)
        else:
            results = [
                whole(batch, matrix, sides) if batch.count else (matrix, sides)
                for batch, (matrix, sides) in zip(route.batches, found, strict=True)
            ]
        buffer = disassemble(route, results)
        if route.bucket.returns:
            assert self.ways.near is not None
            buffer = self._begin(buffer, route.back, route.home, self.ways.near, "second")
        self.buffer, self.doing = buffer, ""

    def _sum(self, value_nx: Tensor, scale_n: Tensor) -> tuple[Tensor, Tensor]:
        """The sums over the teams of this rank's shares, and their scales."""
        tables, group = self.route.team, self.ways.near
        assert tables is not None
        assert group is not None

        def exchanged(x: Tensor, sizes: Sequence[int]) -> Tensor:
            return self._wait(self._begin(x, sizes, sizes, group, "teams'"), "teams'")

        return team_sum(tables, value_nx, scale_n, exchanged)

    def proceed(self, absorb: Absorb) -> bool:
        """The next hop, or home; whether it is home."""
        if self.passes:
            self.pass_on()
            return False
        self.arrive(absorb)
        return True

    def pass_on(self) -> None:
        """All that the owners of this replica sent goes to this rank's peers, and theirs comes."""
        self.doing = "between the two hops home"
        route, buffer = self.route, self.buffer
        assert buffer is not None
        assert self.ways.far is not None
        buffer = self._wait(buffer, "second")
        sizes = (buffer.numel(),) * len(route.far)
        self.buffer = self._begin(
            buffer.repeat(len(sizes)),
            sizes,
            route.passed,
            self.ways.far,
            "second hop of the second",
        )
        self.passes, self.doing = False, ""

    def arrive(self, absorb: Absorb) -> None:
        self.doing = "on the way home"
        route, buffer = self.route, self.buffer
        assert buffer is not None
        if route.bucket.returns:
            buffer = self._wait(buffer, "second")
        dtype = route.bucket.wire_dtype
        if buffer.device.type != "cpu":  # one cast of all; multi-tensor kernels want equal dtypes
            dtype = torch.promote_types(dtype, torch.float32)
        found = unload(route, buffer, dtype=dtype)
        self.buffer = None
        absorb(route, [main for main, _ in found], [sides for _, sides in found])
        self.doing = ""

    def _begin(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int], group: str, which: str
    ) -> Tensor:
        if torch.compiler.is_compiling():
            return all_to_all(x, send, receive, group=group)
        try:
            return all_to_all(x, send, receive, group=group)
        except torch.OutOfMemoryError:
            raise  # `run` says where
        except RuntimeError as error:
            raise self._named(error, which) from error

    def _wait(self, x: Tensor, which: str) -> Tensor:
        if torch.compiler.is_compiling():
            return wait(x)
        try:
            return wait(x)
        except torch.OutOfMemoryError:
            raise  # `run` says where
        except RuntimeError as error:
            raise self._named(error, which) from error

    def _named(self, error: RuntimeError, which: str) -> RuntimeError:
        """The same error, with the place in the step where it happened."""
        bucket = self.route.bucket
        return type(error)(
            f"the {which} all-to-all of bucket {self.route.number} over ranks "
            f"{shortened(bucket.domain.ranks)} failed; a rank may have died, or not have called "
            f"step. The parameters may be half updated: go on from a checkpoint. {error}"
        )


def shortened(ranks: Sequence[object], most: int = 8) -> str:
    """The first of many ranks or names, in words.

    Examples:
        >>> shortened(range(1024), 3)
        '0, 1, 2 and 1021 more'
    """
    named = ", ".join(str(rank) for rank in ranks[:most])
    return named if len(ranks) <= most else f"{named} and {len(ranks) - most} more"


def in_batches(
    function: Callable[[Tensor, tuple[Tensor, ...]], Sided],
    matrices: Sequence[Tensor],
    sides: Sequence[tuple[Tensor, ...]],
) -> list[Sided]:
    """The round trip where every matrix is here already: stacked by shape and dtype, and back.

    Args:
        function: from matrices [n, R, C] and their side vectors [n, values] to the same.
        matrices: each [stack, R, C].
        sides: of each of these, its side vectors [stack, values].

    Returns:
        The results, in order.

    Examples:
        >>> stacks = [torch.ones(1, 2, 3), torch.ones(4, 2, 3), torch.ones(1, 3, 3)]
        >>> [x.shape[0] for x, _ in in_batches(lambda x, s: (-x, s), stacks, [(), (), ()])]
        [1, 4, 1]
    """
    by_shape: dict[tuple[int, int, torch.dtype], list[int]] = defaultdict(list)
    for number, x in enumerate(matrices):
        by_shape[x.shape[-2], x.shape[-1], x.dtype].append(number)
    results: dict[int, Sided] = {}
    for numbers in by_shape.values():
        sizes = [matrices[number].shape[0] for number in numbers]
        done, spoken = function(
            _joined([matrices[number] for number in numbers]),
            tuple(_joined(parts) for parts in zip(*(sides[n] for n in numbers), strict=True)),
        )
        parts = done.split(sizes)
        side_parts = [side.split(sizes) for side in spoken]
        for place, number in enumerate(numbers):
            results[number] = parts[place], tuple(side[place] for side in side_parts)
    return [results[number] for number in range(len(matrices))]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
