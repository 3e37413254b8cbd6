"""How bf16 parameters are written: what state a parameter has says it.

A parameter with a `compensation` is held in two parts; one with a `rounding_key` is rounded at
random. Any other is rounded to nearest. Rules compute on `widened` parameters, and what they make
of them is `written` back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ortho_func.geometry import Box, local
from ortho_func.primitives import foreach
from ortho_func.primitives.rounding import compensated_add, positions, random_bits, stochastic_round
from ortho_func.primitives.scaling import widen

__all__ = [
    "BF16_WRITES",
    "COMPENSATION",
    "KEY",
    "Written",
    "advance_",
    "check_writes",
    "first_writes",
    "places_in",
    "remembers",
    "widened",
    "written",
]

BF16_WRITES = ("nearest", "stochastic", "compensated")
COMPENSATION, KEY = "compensation", "rounding_key"


class Written(NamedTuple):
    """A parameter's new value, and its new compensation if it has one."""

    value: Tensor
    compensation: Tensor | None


def check_writes(how: str) -> None:
    """Raise `ValueError` for another name."""
    if how not in BF16_WRITES:
        names = ", ".join(map(repr, BF16_WRITES))
        raise ValueError(f"bf16_writes must be one of {names}, got {how!r}.")


def first_writes(how: str, parameter: Tensor, number: int) -> dict[str, Tensor]:
    """The state that a way of writing needs, before the first step.

    Args:
        how: one of `BF16_WRITES`.
        parameter: only one in bf16 needs any.
        number: which parameter of the optimizer it is; each draws random bits of its own.
    """
    if parameter.dtype != torch.bfloat16 or how == "nearest":
        return {}
    if how == "compensated":
        return {COMPENSATION: torch.zeros_like(parameter, memory_format=torch.preserve_format)}
    device = local(parameter).device
    return {KEY: torch.tensor(number << 32, dtype=torch.int64, device=device)}


def remembers(state: Mapping[str, Tensor]) -> bool:
    """Whether a parameter with this state is not simply rounded to nearest."""
    return COMPENSATION in state or KEY in state


def places_in(state: Mapping[str, Tensor], shape: Sequence[int], box: Box) -> tuple[Tensor, ...]:
    """Where a shard's elements lie in the whole parameter, if that matters; see `positions`."""
    if KEY not in state:
        return ()
    return positions(box.start, box.size, shape, state[KEY].device)


def widened(x: Tensor, compensation: Tensor | None) -> Tensor:
    """The parameter as exactly as it is known, in fp32 at least."""
    return widen(x) if compensation is None else widen(x) + widen(compensation)


def written(
    x: Tensor,
    update: Tensor,
    compensation: Tensor | None = None,
    key: Tensor | None = None,
    place: Sequence[Tensor] = (),
) -> Written:
    """A parameter after an update, rounded once.

    Args:
        x: the parameter, or a part of it.
        update: what to add.
        compensation: of an equal part of it, if it is held in two.
        key: if it is rounded at random.
        place: then, the terms of its elements' positions in the whole parameter.
    """
    if compensation is not None:
        return Written(*compensated_add(x, compensation, update))
    total = widen(x) + update
    if key is None:
        return Written(total.to(x.dtype), None)
    return Written(stochastic_round(total, random_bits(sum(place[1:], place[0]), key)), None)


def advance_(states: Sequence[Mapping[str, Tensor]]) -> None:
    """The next step draws other bits, of parameters without gradients too: ranks stay alike."""
    keys = [state[KEY] for state in states if KEY in state]
    if keys:
        foreach.add_(keys, 1)
