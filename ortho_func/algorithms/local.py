"""A rule on whole parameters in one process: no plan, no exchange, the same three functions.

Frames follow from shapes alone, so a compiler can trace a step from scratch, and `vmap` and
`grad` see nothing but tensor arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from ortho_func.algorithms.legs import Subject
from ortho_func.algorithms.nonfinite import finite_or_nan, finite_step
from ortho_func.algorithms.rule import Frame, Hyper, MatrixRule
from ortho_func.factors import Part, held
from ortho_func.geometry import Reading, replicated_layout
from ortho_func.pipeline import in_batches
from ortho_func.primitives.scaling import Descent
from ortho_func.wire import Sided

__all__ = ["local_step"]


def local_step(
    rule: MatrixRule,
    readings: Sequence[Reading],
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state: Sequence[dict[str, Tensor]],
    hyper: Hyper,
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """One step: what to add to each parameter, and its new state."""
    subjects = [
        Subject(n, part, order)
        for n, (x, reading) in enumerate(zip(params, readings, strict=True))
        for order, part in enumerate(_parts(rule, tuple(x.shape), reading))
    ]
    passed: list[Tensor] = []
    written: dict[str, list[Tensor]] = {}
    trip: MatrixRule | None = rule
    updates: Sequence[Tensor] = []
    while trip is not None:
        frames = [
            local_frame(trip, tuple(params[s.param].shape), readings[s.param], s.part,
                        params[s.param].device)
            for s in subjects
        ]  # fmt: skip
        old = {
            name: _views([one[name] for one in state], subjects, frames, kind)
            for name, kind in trip.state.items()
        }
        here = {**old, trip.carried: passed} if trip.carried else old
        sent = trip.emit(_views(grads, subjects, frames), here, hyper, frames)
        found = _whole(trip, sent.shards, sent.sides, frames, hyper)
        results, sides = [main for main, _ in found], [side for _, side in found]
        views = _views(params, subjects, frames)
        step, absorbed = trip.absorb(views, results, sides, sent, hyper, frames)
        new_state = {**sent.state, **absorbed}
        if rule.nonfinite == "skip" and trip.then is None:
            step, new_state = finite_step(step, new_state, views, results, frames, old)
        updates = step.updates(views) if isinstance(step, Descent) else step
        passed = list(updates)
        written |= new_state
        trip = trip.then
    moved = _by_param(updates, subjects, frames, [torch.zeros_like(x) for x in params])
    new = {name: [one[name] for one in state] for name in rule.state}
    for name, values in written.items():
        new[name] = _by_param(values, subjects, frames, new[name], rule.state[name])
    return moved, [{name: new[name][n] for name in rule.state} for n in range(len(params))]


def _parts(
    rule: MatrixRule, shape: tuple[int, ...], reading: Reading
) -> tuple[Part, ...] | tuple[None]:
    return (None,) if rule.then is None else rule.parts(shape, reading)


def _views(
    tensors: Sequence[Tensor],
    subjects: Sequence[Subject],
    frames: Sequence[Frame],
    kind: str = "param",
) -> list[Tensor]:
    """What of parameters, or of tensors like them, each subject is."""
    found = []
    for subject, frame in zip(subjects, frames, strict=True):
        tensor = tensors[subject.param]
        if frame.held is not None:
            seen = frame.held.factor_of if kind == "factor" else frame.held.rows_of
            tensor = seen(tensor)
        found.append(tensor)
    return found


def _by_param(
    values: Sequence[Tensor],
    subjects: Sequence[Subject],
    frames: Sequence[Frame],
    without: Sequence[Tensor],
    kind: str = "param",
) -> list[Tensor]:
    """The values of each parameter's parts, joined; `without` has those of one without parts."""
    parts: dict[int, list[int]] = defaultdict(list)
    for number, subject in enumerate(subjects):
        parts[subject.param].append(number)
    found = list(without)
    for param, numbers in parts.items():
        held = frames[numbers[0]].held
        if held is None or len(numbers) == 1:
            found[param] = values[numbers[0]]
        else:
            dim = -1 if kind == "factor" else held.row_dim
            found[param] = torch.cat([values[n] for n in numbers], dim=dim)
    return found


def local_frame(
    rule: MatrixRule,
    shape: tuple[int, ...],
    reading: Reading,
    part: Part | None,
    device: torch.device,
) -> Frame:
    """How the rule sees a parameter that is whole here, or a part of one."""
    stack, rows, cols = reading.dims(shape)
    if part is not None:
        return _part_frame(rule, shape, reading, part)
    blocks = tuple(count for _, count in reading.blocks(rows))
    kinds = tuple(tuple(_kind(side, count, cols) for count in blocks) for side in rule.sides)
    scales = [rule.scale(count, cols) for count in blocks]
    scale: float | Tensor = scales[0]
    if len(set(scales)) > 1:
        parts = zip(blocks, scales, strict=True)
        scale = torch.cat([torch.full((count, 1), s, device=device) for count, s in parts])
    return Frame((stack, rows, cols), (stack, rows, cols), blocks, kinds, scale)


def _part_frame(rule: MatrixRule, shape: tuple[int, ...], reading: Reading, part: Part) -> Frame:
    """Of the first trip, the rows of every block; of the second, one factor after the other."""
    stack, size = reading.dims(shape)[0], part.rows // part.blocks
    here = held(replicated_layout(shape, (0,)), reading, part, 0)
    sent, blocks = (stack, part.rows, part.rank), (size,) * part.blocks
    if rule.then is None:
        sent, blocks = (stack * part.blocks, part.cols, part.rank), (part.cols,)
    kinds = tuple((side,) * len(blocks) for side in rule.sides)
    return Frame(sent, sent, blocks, kinds, rule.scale(size, part.cols), here)


def _kind(side: str, rows: int, cols: int) -> str:
    """A side of kind "slice" has one value per slice along the shorter side."""
    if side == "slice":
        return "row" if rows <= cols else "col"
    return side


def _whole(
    rule: MatrixRule,
    shards: Sequence[Tensor],
    sides: Sequence[tuple[Tensor, ...]],
    frames: Sequence[Frame],
    hyper: Hyper,
) -> list[Sided]:
    """`rule.whole` over every row block, and the blocks joined again."""
    matrices: list[Tensor] = []
    block_sides: list[tuple[Tensor, ...]] = []
    for shard, found, frame in zip(shards, sides, frames, strict=True):
        matrices += shard.reshape(frame.sent).split(frame.blocks, dim=-2)
        cut = [side.split(_extents(frame, n), dim=-1) for n, side in enumerate(found)]
        block_sides += zip(*cut, strict=True) if cut else [()] * len(frame.blocks)

    def whole(x: Tensor, sides: tuple[Tensor, ...]) -> Sided:
        if rule.nonfinite == "skip":
            return finite_or_nan(lambda x: rule.whole(x, sides, hyper), x)
        return rule.whole(x, sides, hyper)

    done = iter(in_batches(whole, matrices, block_sides))
    return [_joined([next(done) for _ in frame.blocks]) for frame in frames]


def _extents(frame: Frame, side: int) -> list[int]:
    return [
        rows if kind == "row" else frame.shape[2]
        for rows, kind in zip(frame.blocks, frame.kinds[side], strict=True)
    ]


def _joined(blocks: Sequence[Sided]) -> Sided:
    if len(blocks) == 1:
        return blocks[0]
    sides = zip(*(side for _, side in blocks), strict=True)
    return torch.cat([x for x, _ in blocks], dim=-2), tuple(torch.cat(s, dim=-1) for s in sides)
