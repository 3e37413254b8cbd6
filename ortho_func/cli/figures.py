"""The figures of a plan: balance, bytes, time, memory and connections, rank by rank."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ortho_func.algorithms.legs import plan_for
from ortho_func.algorithms.teams import moved
from ortho_func.cli.bounds import least_busiest
from ortho_func.cli.hardware import Hardware
from ortho_func.cli.meshes import Mesh, specs_of
from ortho_func.cli.models import Model
from ortho_func.cli.traffic import Exchange, Peers, exchanges, least_bytes
from ortho_func.optim.options import DEFAULTS, rule_of
from ortho_func.plan import Bucket, Plan, Slab, Travel, slice_count
from ortho_func.primitives.orthogonalize import flops
from ortho_func.routing import routes

__all__ = ["Figures", "Planned", "figures_of", "make_plan"]


@dataclass(frozen=True)
class Planned:
    """A model planned on a mesh, and the processor seconds that took (layouts included)."""

    model: Model
    mesh: Mesh
    options: dict[str, Any]
    plan: Plan
    seconds: float


def make_plan(
    model: Model,
    mesh: Mesh,
    *,
    bucket_bytes: int,
    wire: Any = "auto",
    hops: Any = "auto",
    team_size: Any = 1,
    **options: Any,
) -> Planned:
    """Plan a model on a mesh, as an optimizer with these options would."""
    group = {**DEFAULTS, "algorithm": "muon", **options}
    began = time.process_time()  # one thread: what an idle machine takes
    made = plan_for(
        specs_of(model, mesh),
        [rule_of(group)],
        [group["wire_dtype"]],
        bucket_bytes=bucket_bytes,
        wire=wire,
        hops=hops,
        team_size=team_size,
    )[0].plan
    return Planned(model, mesh, group, made, time.process_time() - began)


@dataclass(frozen=True)
class Figures:
    """What a plan means for its ranks. Tensors have one element a rank; times are in seconds."""

    matrices: int
    shapes: Counter[tuple[int, int]]  # of what is orthogonalized
    costs: tuple[float, ...]  # floating-point operations of each matrix
    owned: Tensor  # matrices
    work: Tensor  # floating-point operations
    sent: Tensor  # bytes that leave the rank
    received: Tensor
    wire_bytes: int  # over all ranks
    least_bytes: int
    arithmetic_time: Tensor
    wire_time: Tensor
    step_time: float  # exchanges and arithmetic overlapped as the step runs them
    memory: Tensor  # bytes of buffers and whole matrices in flight
    connections: Tensor  # other ranks that a rank exchanges anything with
    buckets: Counter[str]  # by how they travel
    table_bytes: int  # index tables of the rank with most work

    @property
    def balance(self) -> float:
        """The busiest rank's work over the larger of the mean and the largest matrix."""
        mean = float(self.work.mean())
        return float(self.work.max()) / max(mean, max(self.costs))

    @property
    def over_least_busiest(self) -> float:
        """The busiest rank's work over a bound that no assignment of whole matrices beats."""
        return float(self.work.max()) / least_busiest(self.costs, len(self.work))

    @property
    def bytes_ratio(self) -> float:
        """Bytes on the wire over the least possible (1 if nothing need travel and nothing does)."""
        if self.least_bytes == 0:
            return 1.0 if self.wire_bytes == 0 else float("inf")
        return self.wire_bytes / self.least_bytes


def figures_of(planned: Planned, hardware: Hardware, *, tables: bool = True) -> Figures:
    """All figures of a plan. `tables=False` leaves out those that need a rank's index tables."""
    made, ranks = planned.plan, planned.mesh.ranks
    peers = Peers(ranks)
    trips = [_trip(planned, bucket, peers, hardware) for bucket in made.buckets]
    work = _sum([trip.work for trip in trips])
    slabs = [slab for bucket in made.buckets for slab in bucket.slabs]
    costs = [_flops(planned, slab) for slab in slabs for _ in slab.members]
    ways = [way for trip in trips for way in (trip.out, *trip.home)]
    sums = _sum([trip.sums for trip in trips])  # half of them are sent
    owned = torch.tensor([m.owner for slab in slabs for m in slab.members])
    return Figures(
        matrices=len(costs),
        shapes=_shapes(slabs),
        costs=tuple(costs),
        owned=torch.bincount(owned, minlength=ranks),
        work=work,
        sent=_sum([way.sent - way.kept for way in ways]) + sums // 2,
        received=_sum([way.received - way.kept for way in ways]) + sums // 2,
        wire_bytes=sum(way.total for way in ways) + int(sums.sum()) // 2,
        least_bytes=least_bytes(made),
        arithmetic_time=hardware.arithmetic_seconds(work),
        wire_time=_sum([trip.out_time + trip.sums_time + trip.home_time for trip in trips]),
        step_time=_step_time(trips, hardware),
        memory=_memory(trips),
        connections=peers.counts(),
        buckets=Counter(_how(bucket) for bucket in made.buckets),
        table_bytes=_table_bytes(made, int(work.argmax())) if tables else 0,
    )


def _sum(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(vectors)).sum(dim=0)


def _shapes(slabs: Sequence[Slab]) -> Counter[tuple[int, int]]:
    shapes: Counter[tuple[int, int]] = Counter()
    for slab in slabs:
        shapes[slab.rows, slab.cols] += len(slab.members)
    return shapes


def _how(bucket: Bucket) -> str:
    return "local" if bucket.local else "dense" if bucket.dense else "exact"


def _table_bytes(made: Plan, rank: int) -> int:
    return sum(route.table_bytes for route in routes(made, rank))


@dataclass(frozen=True)
class _Trip:
    """One bucket's round trip, by rank."""

    local: bool
    out: Exchange
    home: tuple[Exchange, ...]  # one or two hops
    work: Tensor
    whole: Tensor  # bytes of whole matrices
    sums: Tensor  # bytes of sums over teams, both ways
    out_time: Tensor
    sums_time: Tensor
    home_time: Tensor


def _trip(planned: Planned, bucket: Bucket, peers: Peers, hardware: Hardware) -> _Trip:
    out, *home = exchanges(planned.plan, bucket, peers)
    work = torch.zeros(bucket.domain.size, dtype=torch.float64)
    whole = torch.zeros_like(work)
    sums = torch.zeros(bucket.domain.size, dtype=torch.int64)
    for slab in bucket.slabs:
        owners = torch.tensor([matrix.owner for matrix in slab.members])
        count = torch.bincount(owners, minlength=bucket.domain.size)
        work += count * _flops(planned, slab)
        whole += count * slab.rows * slab.cols * bucket.wire_dtype.itemsize
        sums += count * int(moved(planned.plan.groups[slab.group], bucket.team))
    sums_time = (sums > 0) * hardware.wire_seconds(sums, bucket.team - 1)
    return _Trip(
        bucket.local, out, tuple(home), work, whole, sums, _wire_time(out, hardware), sums_time,
        _sum([_wire_time(hop, hardware) for hop in home]),
    )  # fmt: skip


def _wire_time(way: Exchange, hardware: Hardware) -> Tensor:
    """Every rank with something to send or get talks to every rank of its group that has."""
    busy = way.wire > 0
    return busy * hardware.wire_seconds(way.wire, min(int(busy.sum()), way.reach) - 1)


def _flops(planned: Planned, slab: Slab) -> float:
    """Floating-point operations of one matrix: of what an algorithm selects of it."""
    travel, options = planned.plan.groups[slab.group], planned.options
    if travel.sums:
        return travel.flops(slab.rows, slab.cols)
    rows, cols = _selected(travel, options, slab.rows, slab.cols)
    method, steps = options["orthogonalizer"], options["ns_steps"]
    return float(flops(rows, cols, method=method, steps=steps))


def _selected(travel: Travel, options: dict[str, Any], rows: int, cols: int) -> tuple[int, int]:
    """The extents of what is orthogonalized: shards that select by themselves have done so."""
    if options["algorithm"] not in ("dion2", "dion3") or travel.fraction is not None:
        return rows, cols
    if options["algorithm"] == "dion3" or rows <= cols:
        return slice_count(options["fraction"], rows), cols
    return rows, slice_count(options["fraction"], cols)


def _step_time(trips: Sequence[_Trip], hardware: Hardware) -> float:
    """The pipeline as it runs: while a bucket computes, the next comes and the last goes home.

    Every exchange waits for its slowest rank, so this is more than any rank's own time.
    """
    turns = [_most(hardware.arithmetic_seconds(t.work) + t.sums_time) for t in trips]
    work = [turn for turn, trip in zip(turns, trips, strict=True) if not trip.local]
    seconds = sum(turn for turn, trip in zip(turns, trips, strict=True) if trip.local)
    travelling = [trip for trip in trips if not trip.local]
    out = [_most(trip.out_time) for trip in travelling] + [0.0]
    home = [0.0] + [_most(trip.home_time) for trip in travelling]
    seconds += out[0] + home[-1]
    for number, busy in enumerate(work):
        seconds += max(busy, out[number + 1] + home[number])
    return seconds


def _most(values: Tensor) -> float:
    return float(values.max())


def _memory(trips: Sequence[_Trip]) -> Tensor:
    """The most at once of a bucket's own buffers and matrices and of its neighbours' buffers."""
    nothing = torch.zeros_like(trips[0].work)
    leaving = [trip.out.sent + trip.out.received for trip in trips] + [nothing]
    hops = [[hop.sent + hop.received for hop in trip.home] for trip in trips]
    coming = [nothing] + [found[0] for found in hops]
    passing = [nothing, nothing] + [found[1] if found[1:] else nothing for found in hops]
    peak = nothing
    for number, trip in enumerate(trips):
        turning = trip.out.received + 2 * trip.whole + trip.home[0].sent
        own = torch.stack([leaving[number], turning, *hops[number]]).amax(dim=0)
        peak = torch.maximum(peak, leaving[number + 1] + own + coming[number] + passing[number])
    return peak
