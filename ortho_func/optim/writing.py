"""Element-wise steps and their parameters' rounding, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ortho_func.algorithms.elementwise import ElementRule
from ortho_func.algorithms.rule import Hyper
from ortho_func.algorithms.writes import (
    COMPENSATION,
    KEY,
    first_writes,
    places_in,
    remembers,
    widened,
    written,
)
from ortho_func.geometry import Box, box_here
from ortho_func.primitives import foreach

__all__ = ["Shard", "masked_step_", "remember_writes", "shard_of", "step_"]

States = Sequence[dict[str, Tensor]]
# What a rule does in place to some parameters, with their gradients and state.
Step = Callable[[list[Tensor], list[Tensor], list[dict[str, Tensor]]], None]


class Shard(NamedTuple):
    """Which box of a parameter of which shape is here."""

    shape: tuple[int, ...]
    box: Box


def shard_of(parameter: Tensor) -> Shard:
    """The shard of a parameter that this rank holds."""
    return Shard(tuple(parameter.shape), box_here(parameter))


def remember_writes(state: dict[str, Any], how: str, parameter: Tensor, number: int) -> None:
    """Make the state that a way of writing needs, and drop that of another."""
    first = first_writes(how, parameter, number)
    for name in (COMPENSATION, KEY):
        if name not in first:
            state.pop(name, None)
        elif name not in state:
            state[name] = first[name]


def step_(
    rule: ElementRule,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state: States,
    hyper: Hyper,
    shards: Sequence[Shard],
) -> None:
    """One step of an element-wise rule, with each parameter rounded as its state says."""

    def plain(xs: list[Tensor], gs: list[Tensor], held: list[dict[str, Tensor]]) -> None:
        rule.step_(xs, gs, held, hyper)

    simple = [n for n, one in enumerate(state) if not remembers(one)]
    plain([params[n] for n in simple], [grads[n] for n in simple], [state[n] for n in simple])
    for n in sorted({*range(len(params))} - {*simple}):
        _wide_step_(plain, params[n], grads[n], state[n], shards[n])


def masked_step_(
    rule: ElementRule,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state: States,
    hyper: Hyper,
    shards: Sequence[Shard],
    present: Sequence[Tensor] | Tensor,
    numbers: Sequence[int],
) -> None:
    """The same where `present` of these numbers, bools, is true."""
    simple = [n for n, one in enumerate(state) if not remembers(one)]
    rule.masked_step_(
        [params[n] for n in simple],
        [grads[n] for n in simple],
        [state[n] for n in simple],
        hyper,
        present,
        [numbers[n] for n in simple],
    )
    for n in sorted({*range(len(params))} - {*simple}):
        masked = partial(_masked, rule, hyper, present, numbers[n])
        _wide_step_(masked, params[n], grads[n], state[n], shards[n])


def _masked(
    rule: ElementRule,
    hyper: Hyper,
    present: Sequence[Tensor] | Tensor,
    number: int,
    xs: list[Tensor],
    gs: list[Tensor],
    state: list[dict[str, Tensor]],
) -> None:
    rule.masked_step_(xs, gs, state, hyper, present, [number])


def _wide_step_(
    step: Step, x: Tensor, grad: Tensor, state: dict[str, Tensor], shard: Shard
) -> None:
    """A step on one parameter made wide, and what comes of it written back."""
    held = state.get(COMPENSATION)
    before = widened(x, held)
    after = before.clone()
    step([after], [grad], [state])
    # Equal infinities have no difference.
    update = torch.where(after == before, 0, after - before)
    place = places_in(state, shard.shape, shard.box)
    new = written(x, update, held, state.get(KEY), place)
    foreach.copy_([x], [new.value])
    if held is not None and new.compensation is not None:
        foreach.copy_([held], [new.compensation])
