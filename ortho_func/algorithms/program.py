"""A plan bound to rules: the matrix step as one function of tensors.

`matrix_step` reads top to bottom as the step does: emit, exchange, whole, exchange, absorb.
Where results go is the caller's: a shell writes them in place, a functional update collects them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ortho_func.algorithms.gauges import Gauges, Meter, make_meter
from ortho_func.algorithms.legs import Leg, Subject
from ortho_func.algorithms.nonfinite import finite_or_nan, finite_step
from ortho_func.algorithms.rule import Emission, Frame, Hyper, MatrixRule, Step
from ortho_func.algorithms.writes import (
    COMPENSATION,
    KEY,
    Written,
    places_in,
    remembers,
    widened,
    written,
)
from ortho_func.factors import held
from ortho_func.geometry import Box
from ortho_func.pipeline import Sum, Ways, run
from ortho_func.plan import Matrix, ParamSpec, Place, Plan
from ortho_func.primitives.opaque import copy_where_, descend_where_, opaque
from ortho_func.primitives.scaling import Descent
from ortho_func.routing import Batch, Entry, Route, routes
from ortho_func.shares import Within, within
from ortho_func.wire import Sided

__all__ = ["Program", "Sink", "Spot", "bind", "matrix_step", "meter_of", "one_device"]


class Spot(NamedTuple):
    """Which part of a parameter a result belongs to.

    Results of one parameter with the same `order` follow each other along dim 0, by `first`;
    those of different `order` along `dim`.
    """

    param: int
    order: int
    first: int
    dim: int


class Sink(Protocol):
    """Where a step's results go, a few spots at a time.

    `in_place` says that new state replaces the old, so that rules may write it themselves.
    """

    in_place: bool

    def state_changes(self, spots: list[Spot]) -> None:
        """A rule is about to write the state of these spots itself: only if `in_place`."""

    def put_state(self, name: str, spots: list[Spot], old: list[Tensor], new: list[Tensor]) -> None:
        """New state of these spots."""

    def put_updates(self, spots: list[Spot], params: list[Tensor], updates: list[Tensor]) -> None:
        """What to add to these spots of parameters."""

    def descend(self, spots: list[Spot], params: list[Tensor], descent: Descent) -> None:
        """A step of these spots, not yet taken."""

    def put_params(self, spots: list[Spot], params: list[Tensor], new: list[Tensor]) -> None:
        """New values of these spots of parameters, in their dtypes."""


@dataclass(frozen=True, eq=False)
class Trip:
    """One process's part of a leg: routes, and what rules see of each entry."""

    leg: Leg
    routes: tuple[Route, ...]
    ways: tuple[Ways, ...]  # by route
    frames: tuple[tuple[Frame, ...], ...]  # by route, by entry


@dataclass(frozen=True, eq=False)
class Program:
    """One process's step over the matrices of some parameters.

    `params` and `places` are the caller's: what was planned, and where this process holds it;
    `boxes` says which box of each.
    """

    params: tuple[ParamSpec, ...]
    places: tuple[Place, ...]
    boxes: tuple[Box, ...]
    trips: tuple[Trip, ...]
    away: torch.device | None = None  # where matrices travel and are whole, if not at the shards

    @property
    def plan(self) -> Plan:
        """The plan of the first round trip."""
        return self.trips[0].leg.plan


def bind(
    legs: Sequence[Leg],
    params: Sequence[ParamSpec],
    *,
    rank: int,
    places: Sequence[Place],
    work_devices: Sequence[torch.device] | None = None,
) -> Program:
    """Bind the legs of a step to this process: routes, index tables and shape scales.

    Args:
        legs: what `plan_for` made of the parameters.
        params: the parameters.
        rank: this process's global rank.
        places: by parameter, where its shard lies, and the group over which it travels.
        work_devices: by parameter, where it travels and is whole; where its shard lies unless
            given. (Offloaded shards: state stays with them, the arithmetic on matrices does not.)

    Raises:
        ValueError: if that is not one device for all.
    """
    devices = [place.device for place in places]
    device = one_device(devices if work_devices is None else work_devices)
    trips = tuple(_trip(leg, params, rank, places, device) for leg in legs)
    away = device if any(home != device for home in devices) else None
    layouts = [spec.layout for spec in params]
    boxes = tuple(layout.boxes[layout.domain.ranks.index(rank)] for layout in layouts)
    return Program(tuple(params), tuple(places), boxes, trips, away)


def _trip(
    leg: Leg, params: Sequence[ParamSpec], rank: int, places: Sequence[Place], device: torch.device
) -> Trip:
    found = routes(leg.plan, rank, device)
    ways = tuple(
        _ways(route, places[leg.subjects[route.bucket.items[0].param].param]) for route in found
    )
    frames = tuple(
        tuple(_frame(leg, params, route, entry, rank, places) for entry in route.entries)
        for route in found
    )
    return Trip(leg, found, ways, frames)


def _ways(route: Route, place: Place) -> Ways:
    if route.bucket.local and route.team is None:
        return Ways(None)
    return Ways(place.near, place.far) if route.bucket.hops == 2 else Ways(place.group)


def one_device(devices: Sequence[torch.device]) -> torch.device:
    """The device that all matrices share, or `ValueError`."""
    found = sorted(set(map(str, devices)))
    if len(found) > 1:
        raise ValueError(
            f"the matrices of one optimizer lie on {', '.join(found)}: they must share a device. "
            "Build one optimizer for each."
        )
    return devices[0] if devices else torch.device("cpu")


def _frame(
    leg: Leg,
    params: Sequence[ParamSpec],
    route: Route,
    entry: Entry,
    rank: int,
    places: Sequence[Place],
) -> Frame:
    spec, subject = leg.plan.params[entry.item.param], leg.subjects[entry.item.param]
    rule, place = leg.rules[spec.group], spec.layout.domain.ranks.index(rank)
    box = spec.layout.boxes[place]
    stack, rows, cols = spec.reading.dims(box.size)
    if len(box.size) > 2 and not spec.reading.flatten:
        stack = entry.last - entry.first
    shape = (stack, rows, cols)
    if subject.part is not None:
        whole, part = params[subject.param], subject.part
        scale = rule.scale(part.rows // part.blocks, part.cols)
        here = held(whole.layout, whole.reading, part, place)
        return Frame(shape, entry.shape, entry.blocks, entry.kinds, scale, here)
    share: Within | None = None
    if subject.cut is not None and spec.share is not None:
        share = within(params[subject.param], subject.cut, spec.share, place)
        spec = params[subject.param]
    blocks = spec.reading.blocks(spec.reading.dims(spec.layout.shape)[1])
    whole_cols = spec.reading.dims(spec.layout.shape)[2]
    scales = [rule.scale(count, whole_cols) for _, count in blocks]
    if len(set(scales)) == 1 or not entry.blocks:
        return Frame(shape, entry.shape, entry.blocks, entry.kinds, scales[0], within=share)
    numbers = _block_numbers(route, entry)
    counts = torch.tensor(entry.blocks, dtype=torch.int64)
    values = torch.tensor([scales[number] for number in numbers], dtype=torch.float32)
    by_row = values.repeat_interleave(counts).unsqueeze(-1).to(places[subject.param].device)
    return Frame(shape, entry.shape, entry.blocks, entry.kinds, by_row)


def _block_numbers(route: Route, entry: Entry) -> list[int]:
    """Which row blocks of its parameter an entry's shard has a piece of, be it empty."""
    rank = route.rank
    members: list[Matrix] = [
        matrix
        for slab in route.bucket.slabs
        for matrix in slab.members
        if matrix.param == entry.item.param
    ]
    return sorted({
        member.geometry.block
        for member in members
        for piece in (*member.geometry.pieces, *member.geometry.edges)
        if piece.rank == rank
    })  # fmt: skip


def meter_of(program: Program, names: Sequence[str], *, rank: int) -> Meter:
    """What reads the gauges of a program's matrices; `names` are its parameters'."""
    last = program.trips[-1]
    batches = [
        (batch, [_scale(program, last.leg, batch.group, *member) for member in batch.members])
        for route in last.routes
        for batch in route.batches
    ]
    device = program.places[0].device if program.away is None else program.away
    return make_meter(
        program.params, program.boxes, program.places, names, batches, last.leg.subjects,
        rank=rank, device=device,
    )  # fmt: skip


def _scale(program: Program, leg: Leg, group: int, param: int, index: int) -> float:
    """The shape scale of lr of a matrix of a leg's plan."""
    subject, rule = leg.subjects[param], leg.rules[group]
    if subject.part is not None:
        return rule.scale(subject.part.rows // subject.part.blocks, subject.part.cols)
    spec = program.params[subject.param]
    _, rows, cols = spec.reading.dims(spec.layout.shape)
    blocks = spec.reading.blocks(rows)
    return rule.scale(blocks[index % len(blocks)][1], cols)


@dataclass(frozen=True)
class Inputs:
    """What a step is given: see `matrix_step`."""

    program: Program
    params: Sequence[Tensor]
    grads: Sequence[Tensor | None]
    state: Sequence[dict[str, Tensor]]
    hypers: Sequence[Hyper]
    present: Sequence[Tensor] | Tensor | None
    gauges: Gauges | None


def matrix_step(
    program: Program,
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    state: Sequence[dict[str, Tensor]],
    hypers: Sequence[Hyper],
    sink: Sink,
    *,
    present: Sequence[Tensor] | Tensor | None = None,
    meanwhile: Callable[[], None] | None = None,
    gauges: Gauges | None = None,
) -> None:
    """One step over every matrix of a program.

    Args:
        program: the legs bound to this process.
        params: by the caller's parameters, this rank's shards.
        grads: likewise; None sends zeros and leaves the parameter and its state alone.
        state: likewise, by name.
        hypers: by parameter group, floats or 0-d tensors.
        sink: takes new state and updates.
        present: 0-d bools, by parameter, whether it has a gradient: what None says, as tensors, so
            that a compiled step serves every set of missing gradients. Then no gradient is None.
            As one 1-D tensor, for CPU tensors in a compiled step: `opaque`.
        meanwhile: work to do while the first exchange is under way.
        gauges: collect what the step does to each matrix.
    """
    given = Inputs(program, params, grads, state, hypers, present, gauges)
    carried: Carried = {}
    for number, trip in enumerate(program.trips):
        carried = _run_trip(
            trip, program.away, given, sink, carried, meanwhile if number == 0 else None
        )


# What a leg passes on, by its plan's parameters: parts of a stack by their first matrix.
Carried = dict[int, dict[int, Tensor]]


def _run_trip(
    trip: Trip,
    away: torch.device | None,
    given: Inputs,
    sink: Sink,
    carried: Carried,
    meanwhile: Callable[[], None] | None,
) -> Carried:
    """One round trip of every bucket; returns what the next is to get."""
    emissions: list[list[_GroupEmission]] = [[] for _ in trip.routes]
    passed: Carried = {}
    subjects = trip.leg.subjects

    def emit(route: Route) -> tuple[list[Tensor], list[list[Tensor]]]:
        frames = trip.frames[route.number]
        shards: list[Tensor | None] = [None] * len(route.entries)
        sides: list[list[Tensor]] = [[] for _ in route.entries]
        for group, numbers in _by_group(route.entries).items():
            rule, hyper = trip.leg.rules[group], given.hypers[trip.leg.hyper_of[group]]
            about = {n: subjects[route.entries[n].item.param] for n in numbers}
            here = {n: given.grads[subject.param] is not None for n, subject in about.items()}
            active = [n for n in numbers if rule.shared or here[n]]
            one = _Active(
                rule,
                hyper,
                [route.entries[n] for n in active],
                [frames[n] for n in active],
                [about[n] for n in active],
                given,
                sink,
                _masks(given, [about[n] for n in active], [here[n] for n in active]),
            )
            sent = one.emit(carried)
            emissions[route.number].append(_GroupEmission(active, one, sent))
            for n, shard, side in zip(active, sent.shards, sent.sides, strict=True):
                shards[n], sides[n] = shard, list(side)
            for n in set(numbers) - set(active):
                entry = route.entries[n]
                like = given.params[subjects[entry.item.param].param]
                shards[n] = like.new_zeros(entry.shape)
                held = given.state[subjects[entry.item.param].param]
                sides[n] = [
                    _slice(_told(held[rule.told[number]], frames[n]), entry).reshape(shape)
                    if number in rule.told
                    else torch.zeros(shape, device=like.device)
                    for number, shape in enumerate(entry.sides)
                ]
        complete = [shard for shard in shards if shard is not None]
        if away is not None:
            complete = [shard.to(away) for shard in complete]
            sides = [[side.to(away) for side in found] for found in sides]
        return complete, sides

    def whole(
        batch: Batch, x: Tensor, sides: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        rule, hyper = trip.leg.rules[batch.group], given.hypers[trip.leg.hyper_of[batch.group]]
        if rule.nonfinite == "skip":
            found = finite_or_nan(lambda x: rule.whole(x, sides, hyper), x)
        else:
            found = rule.whole(x, sides, hyper)
        if given.gauges is not None and rule.then is None:
            given.gauges.owner(batch, rule.updated_part(found[0]))
        return found

    def together(route: Route, found: list[Sided], total: Sum) -> list[Sided]:
        rule = trip.leg.rules[route.batches[0].group]  # the same for all: they share a team's sums
        hyper = given.hypers[trip.leg.hyper_of[route.batches[0].group]]
        here = [number for number, batch in enumerate(route.batches) if batch.count]
        chains = {n: rule.whole_in_team(*found[n], hyper) for n in here}
        for _ in range(rule.rounds):
            chains = _summed(chains, found[0][0], total)
        return [chains.get(number, nothing) for number, nothing in enumerate(found)]

    def absorb(route: Route, results: list[Tensor], sides: list[list[Tensor]]) -> None:
        if away is not None:
            homes = [given.params[subjects[e.item.param].param].device for e in route.entries]
            results = [result.to(home) for result, home in zip(results, homes, strict=True)]
            sides = [[s.to(home) for s in found] for found, home in zip(sides, homes, strict=True)]
        for found in emissions[route.number]:
            found.one.absorb(
                [results[n] for n in found.numbers],
                [tuple(sides[n]) for n in found.numbers],
                found.emission,
                passed,
            )
        emissions[route.number] = []

    run(
        trip.routes,
        trip.ways,
        emit=emit,
        whole=whole,
        together=together,
        absorb=absorb,
        meanwhile=meanwhile,
    )
    return passed


def _summed(chains: dict[int, Any], like: Tensor, total: Sum) -> dict[int, Any]:
    """Each chain after its next sum; all are summed at once. Without any, the others' sums pass."""
    if not chains:
        total(like.new_zeros(0, 0), like.new_zeros(0))
        return {}
    parts = list(chains.values())
    counts = [part.value.shape[0] for part in parts]
    value = torch.cat([part.value.flatten(1) for part in parts])
    sums, scales = total(value, torch.cat([part.scale for part in parts]))
    return {
        number: part.then(x.reshape(part.value.shape), scale)
        for (number, part), x, scale in zip(
            chains.items(), sums.split(counts), scales.split(counts), strict=True
        )
    }


def _by_group(entries: Sequence[Entry]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for number, entry in enumerate(entries):
        groups.setdefault(entry.group, []).append(number)
    return groups


def _masks(given: Inputs, subjects: Sequence[Subject], here: Sequence[bool]) -> list[Tensor] | None:
    """By entry, whether there is a gradient, as 0-d tensors; None if there is one for all."""
    if given.present is not None:
        return [given.present[subject.param] for subject in subjects]
    if all(here):
        return None
    return [
        torch.tensor(there, device=given.params[subject.param].device)
        for there, subject in zip(here, subjects, strict=True)
    ]


def _told(tensor: Tensor, frame: Frame) -> Tensor:
    """What of state with one value a row a frame is about."""
    return tensor if frame.within is None else frame.within.of(tensor, "row")


def _slice(tensor: Tensor, entry: Entry) -> Tensor:
    """Of a stack, the matrices that are in an entry."""
    if entry.item.whole or tensor.shape[0] == entry.last - entry.first:
        return tensor
    return tensor[entry.first : entry.last]


@dataclass(frozen=True)
class _Active:
    """The entries of one group of a route whose parameters have gradients."""

    rule: MatrixRule
    hyper: Hyper
    entries: list[Entry]
    frames: list[Frame]
    subjects: list[Subject]
    given: Inputs
    sink: Sink
    masks: list[Tensor] | None  # by entry, whether there is a gradient; None: for all

    def view(self, number: int, tensor: Tensor, kind: str = "param") -> Tensor:
        """What of its parameter, or of a tensor like it, an entry is about."""
        held, within = self.frames[number].held, self.frames[number].within
        if held is not None:
            tensor = held.factor_of(tensor) if kind == "factor" else held.rows_of(tensor)
        if within is not None:
            tensor = within.of(tensor, kind)
        return _slice(tensor, self.entries[number])

    def params(self) -> list[Tensor]:
        """The entries' parts of the parameters."""
        return [self.view(n, self.given.params[s.param]) for n, s in enumerate(self.subjects)]

    def grads(self) -> list[Tensor]:
        """The entries' parts of the gradients."""
        found = []
        for number, subject in enumerate(self.subjects):
            grad = self.given.grads[subject.param]
            if grad is None:
                grad = torch.zeros_like(self.given.params[subject.param])
            found.append(self.view(number, grad))
        return found

    def state(self, name: str) -> list[Tensor]:
        """The entries' parts of the state of this name."""
        kind = self.rule.state[name]
        return [
            self.view(n, self.given.state[s.param][name], kind) for n, s in enumerate(self.subjects)
        ]

    def spots(self, kind: str = "param") -> list[Spot]:
        """Where the entries' results belong."""
        return [
            Spot(
                subject.param,
                subject.order,
                entry.first,
                _dim(frame, kind),
            )
            for entry, frame, subject in zip(self.entries, self.frames, self.subjects, strict=True)
        ]

    def emit(self, carried: Carried) -> Emission:
        old = {name: self.state(name) for name in self.rule.state}
        extra = {}
        if self.rule.carried:
            extra[self.rule.carried] = [
                _slice(_in_order(carried[subject.before]), entry)
                for entry, subject in zip(self.entries, self.subjects, strict=True)
            ]
        masks = self.masks
        at_once = self.rule.nonfinite == "propagate"  # else once it is known what is skipped
        if at_once and (answers := self.answers(*old.values())) is not None:
            sent_ = self.rule.emit_where_(
                self.grads(), {**old, **extra}, self.hyper, self.frames, answers, self.numbers()
            )
            if sent_ is not None:
                return sent_
        if masks is None and self.sink.in_place and at_once:
            if self.rule.early:
                self.sink.state_changes(self.spots())
            return self.rule.emit_(self.grads(), {**old, **extra}, self.hyper, self.frames)
        sent = self.rule.emit(self.grads(), {**old, **extra}, self.hyper, self.frames)
        if masks is not None:
            zeroed = [torch.where(m, s, 0) for m, s in zip(masks, sent.shards, strict=True)]
            sent = sent._replace(shards=zeroed)
        if at_once:
            self.put_state(sent.state)
        return sent

    def absorb(
        self,
        results: list[Tensor],
        sides: list[tuple[Tensor, ...]],
        sent: Emission,
        passed: Carried,
    ) -> None:
        if not self.entries:  # no gradient here: the others' exchange needed this rank, no more
            return
        masks, old = self.masks, self.params()
        step, new = self.rule.absorb(old, results, sides, sent, self.hyper, self.frames)
        directed = step
        if self.rule.nonfinite == "skip" and self.rule.then is None:
            new = {**sent.state, **new}
            kept = {name: self.state(name) for name in new}
            known = self.widened(old)
            step, new = finite_step(step, new, known, results, self.frames, kept)
        if self.rule.then is not None:
            assert not isinstance(step, Descent)
            for entry, value in zip(self.entries, step, strict=True):
                passed.setdefault(entry.item.param, {})[entry.first] = value
        elif any(remembers(self.given.state[subject.param]) for subject in self.subjects):
            self.write(old, step)
        elif (
            isinstance(step, Descent)
            and (answers := self.answers(old, step.directions)) is not None
            and not any(isinstance(scale, Tensor) for scale in step.scales)
        ):
            descend_where_(old, step, answers, self.numbers())
        elif isinstance(step, Descent) and masks is None:
            self.sink.descend(self.spots(), old, step)
        else:
            updates = step.updates(old) if isinstance(step, Descent) else step
            if masks is not None:
                updates = [torch.where(m, u, 0) for m, u in zip(masks, updates, strict=True)]
            self.sink.put_updates(self.spots(), old, updates)
        self.put_state(new)
        if isinstance(directed, Descent) and self.given.gauges is not None:
            self.measure(directed, self.given.gauges)

    def measure(self, step: Descent, gauges: Gauges) -> None:
        """Of a step that has been taken: state is what it is now."""
        momenta, grads = self.state("momentum_buffer"), self.grads()
        for n, (subject, move) in enumerate(zip(self.subjects, step.moves(), strict=True)):
            rows = gauges.meter.rows[subject.param]
            if rows is not None:
                present = None if self.masks is None else self.masks[n]
                gauges.shard(self.view(n, rows, "row"), move, momenta[n], grads[n], present)

    def compensations(self) -> list[Tensor | None]:
        """By entry, what rounding cut off of it until now, if that is kept."""
        found = [self.given.state[subject.param].get(COMPENSATION) for subject in self.subjects]
        return [None if held is None else self.view(n, held) for n, held in enumerate(found)]

    def widened(self, params: list[Tensor]) -> list[Tensor]:
        """The entries' parts of the parameters, as exactly as they are known."""
        return [widened(*pair) for pair in zip(params, self.compensations(), strict=True)]

    def write(self, params: list[Tensor], step: Step) -> None:
        """Take a step, with each parameter rounded as its state says."""
        updates = step.updates(self.widened(params)) if isinstance(step, Descent) else step
        if self.masks is not None:
            updates = [torch.where(m, u, 0) for m, u in zip(self.masks, updates, strict=True)]
        held, spots = self.compensations(), self.spots()
        after = [self.written(n, x, updates[n], held[n]) for n, x in enumerate(params)]
        self.sink.put_params(spots, params, [one.value for one in after])
        pairs = [
            (spot, old, one.compensation) for spot, old, one in zip(spots, held, after, strict=True)
        ]
        kept = [(spot, old, new) for spot, old, new in pairs if old is not None and new is not None]
        if kept:
            where, old, new = (list(column) for column in zip(*kept, strict=True))
            self.sink.put_state(COMPENSATION, where, old, new)

    def written(self, number: int, x: Tensor, update: Tensor, held: Tensor | None) -> Written:
        subject, program = self.subjects[number], self.given.program
        state, spec = self.given.state[subject.param], program.params[subject.param]
        terms = places_in(state, spec.layout.shape, program.boxes[subject.param])
        place = [self.view(number, term) for term in terms]
        return written(x, update, held, state.get(KEY), place)

    def answers(self, *lists: Sequence[Tensor]) -> Tensor | None:
        """Which gradients there are, as one tensor, where the operators of `opaque` serve."""
        answers = self.given.present
        if isinstance(answers, Tensor) and self.sink.in_place and opaque([answers], *lists):
            return answers
        return None

    def numbers(self) -> list[int]:
        """Where `answers` speaks of the entries' parameters."""
        return [subject.param for subject in self.subjects]

    def put_state(self, new: dict[str, list[Tensor]]) -> None:
        masks = self.masks
        for name, values in new.items():
            old, kept = self.state(name), values
            plain = name not in self.rule.shared and not any(f.within for f in self.frames)
            if plain and (answers := self.answers(old, values)) is not None:
                copy_where_(old, values, answers, self.numbers())
                continue
            if masks is not None and name not in self.rule.shared:
                kept = [torch.where(m, v, o) for m, v, o in zip(masks, values, old, strict=True)]
            kind = self.rule.state[name]
            own = [n for n, frame in enumerate(self.frames) if self.says(n, frame, kind)]
            if own:
                spots = self.spots(kind)
                self.sink.put_state(
                    name, [spots[n] for n in own], [old[n] for n in own], [kept[n] for n in own]
                )

    def says(self, number: int, frame: Frame, kind: str) -> bool:
        """Whether an entry's state is written: of what all shares have in common, the first's."""
        common = kind == "row" and frame.within is not None and not frame.within.tall
        return not common or self.subjects[number].order == 0


def _dim(frame: Frame, kind: str) -> int:
    """Along which dim the parts or shares of a parameter follow each other."""
    if frame.held is not None:
        return -1 if kind == "factor" else frame.held.row_dim
    return 0 if frame.within is None else frame.within.dim


def _in_order(parts: dict[int, Tensor]) -> Tensor:
    """The parts of a stack, one after the other."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    return torch.cat([parts[first] for first in sorted(parts)])


@dataclass
class _GroupEmission:
    numbers: list[int]
    one: _Active
    emission: Emission
