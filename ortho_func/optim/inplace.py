"""Where an optimizer's results go: into parameters and state, with a note of what is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ortho_func.algorithms.program import Spot
from ortho_func.pipeline import shortened
from ortho_func.primitives.scaling import Descent, descend_

__all__ = ["InPlace", "Record"]


class InPlace:
    """A sink that writes results where they belong."""

    in_place = True

    def state_changes(self, spots: list[Spot]) -> None:
        """A rule is about to write the state of these spots itself."""

    def put_state(self, name: str, spots: list[Spot], old: list[Tensor], new: list[Tensor]) -> None:
        """Write new state."""
        torch._foreach_copy_(old, new)

    def put_updates(self, spots: list[Spot], params: list[Tensor], updates: list[Tensor]) -> None:
        """Add updates to parameters."""
        torch._foreach_add_(params, updates)

    def descend(self, spots: list[Spot], params: list[Tensor], descent: Descent) -> None:
        """Take a step."""
        descend_(params, descent)

    def put_params(self, spots: list[Spot], params: list[Tensor], new: list[Tensor]) -> None:
        """Write new values."""
        torch._foreach_copy_(params, new)


@dataclass
class Record(InPlace):
    """The same, and which parameters' values and state are written, be it only in part.

    `others` says how far the parameters are that are no matrices. In a step that fails, `told`
    is what the error adds.
    """

    names: Sequence[str]
    params: set[int] = field(default_factory=set)
    state: set[int] = field(default_factory=set)
    others: str = "untouched"

    def state_changes(self, spots: list[Spot]) -> None:
        """A rule is about to write the state of these spots itself."""
        self.state |= {spot.param for spot in spots}

    def put_state(self, name: str, spots: list[Spot], old: list[Tensor], new: list[Tensor]) -> None:
        """Write new state."""
        self.state_changes(spots)
        super().put_state(name, spots, old, new)

    def put_updates(self, spots: list[Spot], params: list[Tensor], updates: list[Tensor]) -> None:
        """Add updates to parameters."""
        self.params |= {spot.param for spot in spots}
        super().put_updates(spots, params, updates)

    def descend(self, spots: list[Spot], params: list[Tensor], descent: Descent) -> None:
        """Take a step."""
        self.params |= {spot.param for spot in spots}
        super().descend(spots, params, descent)

    def put_params(self, spots: list[Spot], params: list[Tensor], new: list[Tensor]) -> None:
        """Write new values."""
        self.params |= {spot.param for spot in spots}
        super().put_params(spots, params, new)

    def told(self) -> str:
        """What is written of this rank's parameters, in a sentence or two.

        Examples:
            >>> Record(["a", "b", "c"], params={0}, state={0, 2}).told()
            'Written on this rank before the error: parameters a; state of a, c. Of the matrices, \
all else is as before the step; AdamW and Lion groups are untouched.'
        """
        written = "; ".join(
            f"{what} {shortened([self.names[n] for n in sorted(numbers)], 20)}"
            for what, numbers in (("parameters", self.params), ("state of", self.state))
            if numbers
        )
        return (
            f"Written on this rank before the error: {written or 'no matrix'}. Of the matrices, "
            f"all else is as before the step; AdamW and Lion groups are {self.others}."
        )
