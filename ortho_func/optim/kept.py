"""What a compiled step is given each time, put together once and kept while it is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from ortho_func.geometry import aligned, local, same_shards, shards

__all__ = ["Kept", "gradients_of"]

State = Mapping[Tensor, dict[str, Any]]
_GRAD, _LAYOUT = attrgetter("grad"), attrgetter("layout")


class Kept:
    """Shards of parameters and their state, as lists that a compiled step takes.

    Shards may move (a framework that frees and allocates them again) and state may be replaced by
    hand: `holds` sees both, by identity and without a look at any element.
    """

    def __init__(self, params: Sequence[Tensor], state: State) -> None:
        self.params = [local(p) for p in params]
        self.state = [
            {name: local(t) for name, t in state[p].items() if isinstance(t, Tensor)}
            for p in params
        ]
        self._entries = list(state.values())
        self._values = list(_values(state))
        tensors = [*params, *(t for t in self._values if isinstance(t, Tensor))]
        self._shards = shards(tensors)
        self._missing: list[bool] | None = None
        self._present: Any = None
        self.on_cpu = all(p.device.type == "cpu" for p in self.params)

    def holds(self, state: State) -> bool:
        """Whether these are the parameters' shards and state still."""
        return (
            len(state) == len(self._entries)
            and all(map(is_, state.values(), self._entries))
            and sum(map(len, self._entries)) == len(self._values)
            and all(map(is_, _values(state), self._values))
            and same_shards(self._shards)
        )

    def present(self, there: list[bool], device: torch.device) -> Any:
        """Which gradients there are, as bools on the device; made again where that changes."""
        if there != self._missing:
            found = torch.tensor(there)
            # One by one: an index into a tensor would make every parameter's code its own. On the
            # CPU operators take it whole.
            self._present = found if self.on_cpu else list(found.to(device).unbind())
            self._missing = there
        return self._present


def _values(state: State) -> Any:
    return chain.from_iterable(map(dict.values, state.values()))


def gradients_of(params: Sequence[Tensor]) -> list[Tensor | None]:
    """This rank's part of each gradient, with its parameter's placements."""
    found = list(map(_GRAD, params))
    if set(map(type, found)) == {Tensor} and set(map(_LAYOUT, found)) == {torch.strided}:
        return found
    return [None if g is None else local(aligned(g, p)) for g, p in zip(found, params, strict=True)]
