"""A program's step as a pure function: results are collected, not written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ortho_func.algorithms.legs import plan_for
from ortho_func.algorithms.program import Program, Spot, bind, matrix_step
from ortho_func.algorithms.rule import Hyper, MatrixRule
from ortho_func.geometry import this_rank
from ortho_func.plan import Plan
from ortho_func.primitives.scaling import Descent, widen

__all__ = ["program_of", "shard_step"]


def program_of(made: Plan, rule: MatrixRule) -> Program:
    """The plan's parameters planned again for a rule and bound to this process.

    Python arithmetic and index tables: done once, where a transform is built, never in a trace.
    """
    if len(made.places) != len(made.params):
        raise ValueError("plan= takes what ortho_func.plan(params) returns.")
    params = tuple(replace(spec, group=0) for spec in made.params)
    legs = plan_for(
        params,
        [rule],
        [made.groups[0].wire_dtype],
        bucket_bytes=made.bucket_bytes,
        wire=made.wire,
        balance=made.balance,
        hops=made.hops,
        team_size=made.team_size,
    )
    return bind(legs, params, rank=this_rank(), places=made.places)


def shard_step(
    program: Program,
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    state: Sequence[dict[str, Tensor]],
    hyper: Hyper,
) -> tuple[list[Tensor | None], list[dict[str, Tensor]]]:
    """One step on this rank's shards; None for parameters without a gradient.

    Arguments are by the plan's parameters. Every rank of the group must call it.
    """
    found = _Collected()
    matrix_step(program, params, grads, state, [hyper], found)
    updates = [None if g is None else found.update(n) for n, g in enumerate(grads)]
    new = [
        {name: found.state(n, name, old) for name, old in s.items()} for n, s in enumerate(state)
    ]
    return updates, new


class _Collected:
    """A sink that keeps results by parameter and by their place in it."""

    in_place = False

    def __init__(self) -> None:
        self.updates: dict[int, dict[Spot, Tensor]] = defaultdict(dict)
        self.states: dict[tuple[int, str], dict[Spot, Tensor]] = defaultdict(dict)

    def state_changes(self, spots: list[Spot]) -> None:
        raise AssertionError("state is collected, not written")

    def put_state(self, name: str, spots: list[Spot], old: list[Tensor], new: list[Tensor]) -> None:
        for spot, before, after in zip(spots, old, new, strict=True):
            self.states[spot.param, name][spot] = after.reshape(before.shape).to(before.dtype)

    def put_updates(self, spots: list[Spot], params: list[Tensor], updates: list[Tensor]) -> None:
        for spot, update in zip(spots, updates, strict=True):
            self.updates[spot.param][spot] = update

    def descend(self, spots: list[Spot], params: list[Tensor], descent: Descent) -> None:
        self.put_updates(spots, params, descent.updates(params))

    def put_params(self, spots: list[Spot], params: list[Tensor], new: list[Tensor]) -> None:
        self.put_updates(spots, params, [widen(y) - x for x, y in zip(params, new, strict=True)])

    def update(self, param: int) -> Tensor:
        return _joined(self.updates[param])

    def state(self, param: int, name: str, old: Tensor) -> Tensor:
        parts = self.states.get((param, name))
        return old if parts is None else _joined(parts)


def _joined(parts: dict[Spot, Tensor]) -> Tensor:
    if len(parts) == 1:
        return next(iter(parts.values()))
    by_order: dict[int, list[Tensor]] = defaultdict(list)
    for spot in sorted(parts):
        by_order[spot.order].append(parts[spot])
    whole = [torch.cat(found) for found in by_order.values()]
    return whole[0] if len(whole) == 1 else torch.cat(whole, dim=next(iter(parts)).dim)
