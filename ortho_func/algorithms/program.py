"""A plan bound to rules: the matrix step as one function of tensors.

`matrix_step` reads top to bottom as the step does: emit, exchange, whole, exchange, absorb.
Where results go is the caller's: a shell writes them in place, a functional update collects them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ortho_func.algorithms.rule import Emission, Frame, Hyper, MatrixRule
from ortho_func.pipeline import run
from ortho_func.plan import Balance, Matrix, ParamSpec, Plan, Travel, Wire, build_plan, local_cut
from ortho_func.primitives.scaling import Descent, lr_scale
from ortho_func.routing import Batch, Entry, Route, routes

__all__ = ["Program", "Sink", "bind", "matrix_step", "one_device", "plan_for"]


class Sink(Protocol):
    """Where a step's results go, a few entries at a time."""

    def put_state(
        self, name: str, entries: list[Entry], old: list[Tensor], new: list[Tensor]
    ) -> None:
        """New state of these entries' parameters."""

    def put_updates(
        self, entries: list[Entry], params: list[Tensor], updates: list[Tensor]
    ) -> None:
        """What to add to these entries' parameters."""

    def descend(self, entries: list[Entry], params: list[Tensor], descent: Descent) -> None:
        """A step of these entries' parameters, not yet taken."""


@dataclass(frozen=True, eq=False)
class Program:
    """One process's step over the matrices of a plan.

    `rules[g]` is the rule of the plan's group g and `hyper_of[g]` the number of the parameter
    group that holds its hyperparameters.
    """

    plan: Plan
    routes: tuple[Route, ...]
    groups: tuple[str | None, ...]  # by route: the process group's name
    rules: tuple[MatrixRule, ...]
    hyper_of: tuple[int, ...]
    frames: tuple[tuple[Frame, ...], ...]  # by route, by entry
    away: torch.device | None = None  # where matrices travel and are whole, if not at the shards


def plan_for(
    specs: Sequence[ParamSpec],
    rules: Sequence[MatrixRule],
    wires: Sequence[torch.dtype],
    *,
    bucket_bytes: int,
    wire: Wire = "auto",
    balance: Balance = "cost",
) -> tuple[Plan, tuple[MatrixRule, ...], tuple[int, ...]]:
    """Plan the parameters of some groups, splitting a group where its rule depends on the cut.

    Returns:
        The plan, the rule of each of its groups, and which given group each came from.
    """
    found: dict[tuple[int, MatrixRule], int] = {}
    placed = []
    for spec in specs:
        spec.reading.check(spec.layout.shape, spec.name)
        rule = rules[spec.group].for_cut(local_cut(spec.layout, spec.reading))
        number = found.setdefault((spec.group, rule), len(found))
        placed.append(replace(spec, group=number))
    travels: list[Travel] = [rule.travel(wire_dtype=wires[group]) for group, rule in found]
    made = build_plan(
        tuple(placed), tuple(travels), bucket_bytes=bucket_bytes, wire=wire, balance=balance
    )
    return made, tuple(rule for _, rule in found), tuple(group for group, _ in found)


def bind(
    made: Plan,
    rules: Sequence[MatrixRule],
    hyper_of: Sequence[int],
    *,
    rank: int,
    devices: Sequence[torch.device],
    group_names: Sequence[str | None],
    work_devices: Sequence[torch.device] | None = None,
) -> Program:
    """Bind a plan to this process: its routes, index tables and shape scales.

    Args:
        made: the plan.
        rules: by the plan's groups.
        hyper_of: by the plan's groups, the parameter group of its hyperparameters.
        rank: this process's global rank.
        devices: by parameter, where its shard lies.
        group_names: by parameter, the name of the process group over which it travels.
        work_devices: by parameter, where it travels and is whole; where its shard lies unless
            given. (Offloaded shards: state stays with them, the arithmetic on matrices does not.)

    Raises:
        ValueError: if that is not one device for all.
    """
    device = one_device(devices if work_devices is None else work_devices)
    found = routes(made, rank, device)
    names = tuple(
        None if route.bucket.local else group_names[route.bucket.items[0].param] for route in found
    )
    frames = tuple(
        tuple(
            _frame(made, rules, route, entry, rank, devices[entry.item.param])
            for entry in route.entries
        )
        for route in found
    )
    away = device if any(home != device for home in devices) else None
    return Program(made, found, names, tuple(rules), tuple(hyper_of), frames, away)


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
    made: Plan,
    rules: Sequence[MatrixRule],
    route: Route,
    entry: Entry,
    rank: int,
    device: torch.device,
) -> Frame:
    spec = made.params[entry.item.param]
    box = spec.layout.boxes[spec.layout.domain.ranks.index(rank)]
    stack, rows, cols = spec.reading.dims(box.size)
    if len(box.size) > 2 and not spec.reading.flatten:
        stack = entry.last - entry.first
    adjust = rules[spec.group].adjust_lr_fn
    blocks = spec.reading.blocks(spec.reading.dims(spec.layout.shape)[1])
    whole_cols = spec.reading.dims(spec.layout.shape)[2]
    scales = [lr_scale(count, whole_cols, adjust) for _, count in blocks]
    scale: float | Tensor = scales[0]
    if len(set(scales)) > 1:
        held = _block_numbers(route, entry)
        counts = torch.tensor(entry.blocks, dtype=torch.int64)
        values = torch.tensor([scales[number] for number in held], dtype=torch.float32)
        scale = values.repeat_interleave(counts).unsqueeze(-1).to(device)
    return Frame((stack, rows, cols), entry.shape, entry.blocks, entry.kinds, scale)


def _block_numbers(route: Route, entry: Entry) -> list[int]:
    """Which row blocks of its parameter an entry's shard has a piece of."""
    rank = route.rank
    members: list[Matrix] = [
        matrix
        for slab in route.bucket.slabs
        for matrix in slab.members
        if matrix.param == entry.item.param
    ]
    return sorted({
        m.geometry.block for m in members for piece in m.geometry.pieces if piece.rank == rank
    })  # fmt: skip


def view(tensor: Tensor, entry: Entry) -> Tensor:
    """The part of a shard, or of its state, that an entry is about."""
    if entry.item.whole or tensor.shape[0] == entry.last - entry.first:
        return tensor
    return tensor[entry.first : entry.last]


def matrix_step(
    program: Program,
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    state: Sequence[dict[str, Tensor]],
    hypers: Sequence[Hyper],
    sink: Sink,
    *,
    present: Sequence[Tensor] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """One step over every matrix of a program.

    Args:
        program: the plan bound to this process.
        params: by the plan's parameters, this rank's shards.
        grads: likewise; None sends zeros and leaves the parameter and its state alone.
        state: likewise, by name.
        hypers: by parameter group, floats or 0-d tensors.
        sink: takes new state and updates.
        present: 0-d bools, by parameter, whether it has a gradient: what None says, as tensors, so
            that a compiled step serves every set of missing gradients. Then no gradient is None.
        meanwhile: work to do while the first exchange is under way.
    """
    emissions: list[list[_GroupEmission]] = [[] for _ in program.routes]

    def emit(route: Route) -> tuple[list[Tensor], list[list[Tensor]]]:
        frames = program.frames[route.number]
        shards: list[Tensor | None] = [None] * len(route.entries)
        sides: list[list[Tensor]] = [[] for _ in route.entries]
        for group, numbers in _by_group(route.entries).items():
            rule = program.rules[group]
            active = [n for n in numbers if grads[route.entries[n].item.param] is not None]
            one = _Active(rule, [route.entries[n] for n in active], [frames[n] for n in active])
            sent = one.emit(params, grads, state, hypers[program.hyper_of[group]], sink, present)
            emissions[route.number].append(_GroupEmission(group, active, one, sent))
            for n, shard, side in zip(active, sent.shards, sent.sides, strict=True):
                shards[n], sides[n] = shard, list(side)
            for n in set(numbers) - set(active):
                entry = route.entries[n]
                like = params[entry.item.param]
                shards[n] = like.new_zeros(entry.shape)
                sides[n] = [torch.zeros(shape, device=like.device) for shape in entry.sides]
        complete = [shard for shard in shards if shard is not None]
        if program.away is not None:
            complete = [shard.to(program.away) for shard in complete]
            sides = [[side.to(program.away) for side in found] for found in sides]
        return complete, sides

    def whole(
        batch: Batch, x: Tensor, sides: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return program.rules[batch.group].whole(x, sides, hypers[program.hyper_of[batch.group]])

    def absorb(route: Route, results: list[Tensor], sides: list[list[Tensor]]) -> None:
        if program.away is not None:
            homes = [params[entry.item.param].device for entry in route.entries]
            results = [result.to(home) for result, home in zip(results, homes, strict=True)]
            sides = [[s.to(home) for s in found] for found, home in zip(sides, homes, strict=True)]
        for found in emissions[route.number]:
            found.one.absorb(
                params,
                state,
                [results[n] for n in found.numbers],
                [tuple(sides[n]) for n in found.numbers],
                found.emission,
                hypers[program.hyper_of[found.group]],
                sink,
                present,
            )
        emissions[route.number] = []

    run(program.routes, program.groups, emit=emit, whole=whole, absorb=absorb, meanwhile=meanwhile)


def _by_group(entries: Sequence[Entry]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for number, entry in enumerate(entries):
        groups.setdefault(entry.group, []).append(number)
    return groups


@dataclass
class _Active:
    """The entries of one group of a route whose parameters have gradients."""

    rule: MatrixRule
    entries: list[Entry]
    frames: list[Frame]

    def views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [view(tensors[entry.item.param], entry) for entry in self.entries]

    def state(self, state: Sequence[dict[str, Tensor]], name: str) -> list[Tensor]:
        return [view(state[entry.item.param][name], entry) for entry in self.entries]

    def emit(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        state: Sequence[dict[str, Tensor]],
        hyper: Hyper,
        sink: Sink,
        present: Sequence[Tensor] | None,
    ) -> Emission:
        old = {name: self.state(state, name) for name in self.rule.state}
        here = [grads[entry.item.param] for entry in self.entries]
        views = [view(g, e) for g, e in zip(here, self.entries, strict=True) if g is not None]
        sent = self.rule.emit(views, old, hyper, self.frames)
        if present is not None:
            masks = self.masks(present)
            zeroed = [torch.where(m, s, 0) for m, s in zip(masks, sent.shards, strict=True)]
            sent = sent._replace(shards=zeroed)
        self.put_state(old, sent.state, sink, present)
        return sent

    def absorb(
        self,
        params: Sequence[Tensor],
        state: Sequence[dict[str, Tensor]],
        results: list[Tensor],
        sides: list[tuple[Tensor, ...]],
        sent: Emission,
        hyper: Hyper,
        sink: Sink,
        present: Sequence[Tensor] | None,
    ) -> None:
        if not self.entries:  # no gradient here: the others' exchange needed this rank, no more
            return
        old = self.views(params)
        step, new = self.rule.absorb(old, results, sides, sent, hyper, self.frames)
        if isinstance(step, Descent) and present is None:
            sink.descend(self.entries, old, step)
        else:
            updates = step.updates(old) if isinstance(step, Descent) else step
            if present is not None:
                masks = self.masks(present)
                updates = [torch.where(m, u, 0) for m, u in zip(masks, updates, strict=True)]
            sink.put_updates(self.entries, old, updates)
        before = {name: self.state(state, name) for name in new}
        self.put_state(before, new, sink, present)

    def masks(self, present: Sequence[Tensor]) -> list[Tensor]:
        return [present[entry.item.param] for entry in self.entries]

    def put_state(
        self,
        old: dict[str, list[Tensor]],
        new: dict[str, list[Tensor]],
        sink: Sink,
        present: Sequence[Tensor] | None,
    ) -> None:
        for name, values in new.items():
            kept = values
            if present is not None:
                kept = [
                    torch.where(m, v, o)
                    for m, v, o in zip(self.masks(present), values, old[name], strict=True)
                ]
            if self.entries:
                sink.put_state(name, self.entries, old[name], kept)


@dataclass
class _GroupEmission:
    group: int
    numbers: list[int]
    one: _Active
    emission: Emission
