"""What a step does to each matrix, in numbers, on the device.

U is the update before lr and decay, X ← (1 − lr·λ)X − lr·U. Every rank adds up squares over the
shards that it holds; owners, who see matrices whole, know singular values. One all-reduce of a
small table whose shape follows from the plan makes it all the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ortho_func.algorithms.legs import Subject
from ortho_func.geometry import Box, stack_box
from ortho_func.plan import ParamSpec, Place
from ortho_func.primitives.collectives import all_reduce, wait
from ortho_func.primitives.roots import sqrt
from ortho_func.primitives.scaling import widen
from ortho_func.primitives.spectrum import extreme_singular_values
from ortho_func.routing import Batch

__all__ = ["GAUGES", "Gauges", "Meter", "Owned", "make_meter"]

GAUGES = ("update_rms", "update_max_sv", "update_min_sv", "momentum_norm", "gradient_cosine")
# Of the table that is summed: Σu², Σm², Σgu, Σg², shards with gradients; then both singular values.
SUMS, COLUMNS = 5, 7


class Owned(NamedTuple):
    """A batch that this process owns: its matrices' rows of the table, and the scales of U."""

    rows: Tensor
    scales: Tensor


@dataclass(frozen=True, eq=False)
class Meter:
    """What is static: the table's rows are matrices, those over the same ranks together.

    Args:
        names: by matrix.
        sizes: by matrix, elements.
        rows: by parameter, the table's row of each row of its shard; None where another replica
            counts.
        owned: by a batch's members.
        single: by matrix, whether one owner sees it whole.
        groups: the process groups over which the table's parts are summed, None for what is here
            alone.
        counts: rows of each part.
        device: where the table is.
    """

    names: tuple[str, ...]
    sizes: Tensor
    rows: tuple[Tensor | None, ...]
    owned: Mapping[tuple[tuple[int, int], ...], Owned]
    single: Tensor
    groups: tuple[str | None, ...]
    counts: tuple[int, ...]
    device: torch.device


class Gauges:
    """One step's numbers being collected."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.rows: list[Tensor] = []
        self.values: list[Tensor] = []

    def _add(self, rows: Tensor, values: Tensor) -> None:
        self.rows.append(rows.to(self.meter.device))
        self.values.append(values.to(self.meter.device))

    def owner(self, batch: Batch, x_nRC: Tensor) -> None:
        """The singular values of what a batch became, before the scale; NaN where x is."""
        owned = self.meter.owned.get(batch.members)
        if owned is None:  # no matrix, or shares of some
            return
        found = extreme_singular_values(x_nRC[: len(batch.members)])
        ends = torch.stack(found, dim=1).float() * owned.scales.unsqueeze(1)
        self._add(owned.rows, torch.nn.functional.pad(ends, (SUMS, 0)))

    def shard(
        self,
        rows: Tensor,
        update: Tensor,
        momentum: Tensor,
        gradient: Tensor,
        present: Tensor | None,
    ) -> None:
        """The sums over a shard, or a part of one.

        Args:
            rows: the table's row of each row of it.
            update: U; it and the next two have the same shape, [..., rows, columns …].
            momentum: M after the step.
            gradient: G.
            present: 0-d bool, whether there is a gradient; None if there is.
        """
        if update.numel() == 0:
            return
        u, m, g = (widen(x).reshape(rows.numel(), -1) for x in (update, momentum, gradient))
        sums = [(u * u).sum(1), (m * m).sum(1), (g * u).sum(1), (g * g).sum(1)]
        values = torch.stack([*sums, torch.ones_like(sums[0])], dim=1).float()
        if present is not None:
            values = torch.where(present, values, 0)
        self._add(rows.flatten(), torch.nn.functional.pad(values, (0, COLUMNS - SUMS)))

    def total(self) -> Tensor:
        """The numbers, [matrices, len(GAUGES)], the same on all ranks, which must all call it."""
        meter = self.meter
        table = torch.zeros(len(meter.names), COLUMNS, device=meter.device)
        if self.rows:
            table = table.index_add(0, torch.cat(self.rows), torch.cat(self.values))
        parts = zip(table.split(meter.counts), meter.groups, strict=True)
        begun = [
            (part, False) if group is None else (all_reduce(part.contiguous(), group=group), True)
            for part, group in parts
        ]
        return self._finished(torch.cat([wait(x) if travels else x for x, travels in begun]))

    def _finished(self, table: Tensor) -> Tensor:
        squares, momenta, products, gradients, shards, largest, smallest = table.unbind(1)
        lengths = sqrt(squares) * sqrt(gradients)
        cosine = products / torch.where(lengths == 0, 1, lengths)
        rms = sqrt(squares / self.meter.sizes)
        ends = [torch.where(self.meter.single, value, torch.nan) for value in (largest, smallest)]
        found = torch.stack([rms, *ends, sqrt(momenta), cosine], dim=1)
        return torch.where(shards.unsqueeze(1) > 0, found, torch.nan)


def make_meter(
    params: Sequence[ParamSpec],
    boxes: Sequence[Box],
    places: Sequence[Place],
    names: Sequence[str],
    batches: Sequence[tuple[Batch, Sequence[float]]],
    subjects: Sequence[Subject],
    *,
    rank: int,
    device: torch.device,
) -> Meter:
    """The meter of one process.

    Args:
        params: the matrices' parameters.
        boxes: by parameter, what of it is here.
        places: by parameter, where.
        names: by parameter.
        batches: of the last round trip, and by member the shape scale of lr.
        subjects: of the last round trip.
        rank: this process's global rank.
        device: of the table.
    """
    groups: list[str | None] = list(dict.fromkeys(place.group for place in places))
    shared = {subject.param for subject in subjects if subject.cut is not None}
    first, counts = [0] * len(params), dict.fromkeys(groups, 0)
    found: list[str] = []
    sizes: list[int] = []
    single: list[bool] = []
    for n in sorted(range(len(params)), key=lambda n: groups.index(places[n].group)):
        stacks, rows, cols = params[n].reading.dims(params[n].layout.shape)
        blocks = params[n].reading.blocks(rows) if rows * cols else ()
        first[n], count = len(found), stacks * len(blocks)
        found += [names[n] if count == 1 else f"{names[n]}/{index}" for index in range(count)]
        sizes += [size * cols for _ in range(stacks) for _, size in blocks]
        single += [n not in shared] * count
        counts[places[n].group] += count
    owned = {}
    for batch, scales in batches:
        about = [(subjects[param], index) for param, index in batch.members]
        if not about or about[0][0].cut is not None:
            continue
        at = [first[one.param] + _index(params[one.param], one, index) for one, index in about]
        owned[batch.members] = Owned(
            torch.tensor(at, device=device), torch.tensor(scales, device=device)
        )
    everything = zip(params, boxes, first, places, strict=True)
    slots = [_rows(spec, box, at).to(place.device) for spec, box, at, place in everything]
    return Meter(
        names=tuple(found),
        sizes=torch.tensor(sizes, dtype=torch.float32, device=device),
        rows=tuple(
            at if _counts(spec, rank) else None for at, spec in zip(slots, params, strict=True)
        ),
        owned=owned,
        single=torch.tensor(single, dtype=torch.bool, device=device),
        groups=tuple(groups),
        counts=tuple(counts[group] for group in groups),
        device=device,
    )


def _counts(spec: ParamSpec, rank: int) -> bool:
    """Whether this process's shard counts: of replicas, the first's do."""
    layout = spec.layout
    return layout.replicas[layout.domain.ranks.index(rank)] == min(layout.replicas)


def _index(spec: ParamSpec, subject: Subject, index: int) -> int:
    """The number among its parameter's matrices of a matrix of a plan's parameter."""
    part = subject.part
    if part is None:
        return index
    blocks = spec.reading.blocks(spec.reading.dims(spec.layout.shape)[1])
    before = sum(start < part.row for start, _ in blocks)
    stack, block = divmod(index, part.blocks)
    return stack * len(blocks) + before + block


def _rows(spec: ParamSpec, box: Box, first: int) -> Tensor:
    """The table's row of each row of a shard, in the shape of state with a value a row."""
    shape, reading = spec.layout.shape, spec.reading
    seen = stack_box(shape, box, reading)
    blocks = reading.blocks(reading.dims(shape)[1])
    sizes = torch.tensor([size for _, size in blocks])
    block_of = torch.arange(len(blocks)).repeat_interleave(sizes)
    stack = torch.tensor(sorted(seen.stack), dtype=torch.int64)
    rows = first + stack[:, None] * len(blocks) + block_of[seen.row : seen.row + seen.rows]
    keep = 1 if reading.flatten else len(shape) - 1
    return rows.reshape([n if dim < keep else 1 for dim, n in enumerate(box.size)])
