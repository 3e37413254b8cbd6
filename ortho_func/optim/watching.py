"""Numbers about each matrix's step, kept on the device for whoever asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ortho_func.algorithms.gauges import GAUGES, Gauges, Meter
from ortho_func.primitives import foreach

__all__ = ["Watch", "labels"]


@dataclass(frozen=True, eq=False)
class Watch:
    """What reads a step, and the table of what it last read; before a step, of NaN."""

    meter: Meter
    table: Tensor

    @staticmethod
    def of(meter: Meter) -> Watch:
        """An empty table."""
        shape = (len(meter.names), len(GAUGES))
        return Watch(meter, torch.full(shape, torch.nan, device=meter.device))

    def begin(self) -> Gauges:
        """To give to a step."""
        return Gauges(self.meter)

    def end_(self, gauges: Gauges) -> None:
        """Write what the step gave. Every rank must call it."""
        foreach.copy_([self.table], [gauges.total()])

    def report(self) -> dict[str, Tensor]:
        """By "gauge/matrix", 0-d tensors that no later step changes."""
        values = self.table.clone()
        return {
            f"{gauge}/{name}": values[row, column]
            for column, gauge in enumerate(GAUGES)
            for row, name in enumerate(self.meter.names)
        }


def labels(groups: Sequence[Mapping[str, Any]], params: Sequence[Tensor]) -> list[str]:
    """The parameters' names; where none were given, "group.number"."""
    found: dict[int, str] = {}
    for number, group in enumerate(groups):
        count = range(len(group["params"]))
        names = group.get("param_names") or [f"{number}.{n}" for n in count]
        found |= {id(p): name for p, name in zip(group["params"], names, strict=True)}
    return [found[id(p)] for p in params]
