"""A rule on whole parameters in one process: no plan, no exchange, the same three functions.

Frames follow from shapes alone, so a compiler can trace a step from scratch, and `vmap` and
`grad` see nothing but tensor arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ortho_func.algorithms.rule import Frame, Hyper, MatrixRule
from ortho_func.geometry import Reading
from ortho_func.pipeline import in_batches
from ortho_func.primitives.scaling import Descent, lr_scale
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
    frames = [
        local_frame(tuple(x.shape), reading, rule, x.device)
        for x, reading in zip(params, readings, strict=True)
    ]
    old = {name: [one[name] for one in state] for name in rule.state}
    sent = rule.emit(list(grads), old, hyper, frames)
    found = _whole(rule, sent.shards, sent.sides, frames, hyper)
    results, sides = [main for main, _ in found], [side for _, side in found]
    step, absorbed = rule.absorb(list(params), results, sides, sent, hyper, frames)
    updates = step.updates(params) if isinstance(step, Descent) else step
    new = {**old, **sent.state, **absorbed}
    return updates, [{name: new[name][n] for name in rule.state} for n in range(len(params))]


def local_frame(
    shape: tuple[int, ...], reading: Reading, rule: MatrixRule, device: torch.device
) -> Frame:
    """How the rule sees a parameter that is whole here."""
    stack, rows, cols = reading.dims(shape)
    blocks = tuple(count for _, count in reading.blocks(rows))
    kinds = tuple(tuple(_kind(side, count, cols) for count in blocks) for side in rule.sides)
    scales = [lr_scale(count, cols, rule.adjust_lr_fn) for count in blocks]
    scale: float | Tensor = scales[0]
    if len(set(scales)) > 1:
        parts = zip(blocks, scales, strict=True)
        scale = torch.cat([torch.full((count, 1), s, device=device) for count, s in parts])
    return Frame((stack, rows, cols), (stack, rows, cols), blocks, kinds, scale)


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
        matrices += shard.split(frame.blocks, dim=-2)
        cut = [side.split(_extents(frame, n), dim=-1) for n, side in enumerate(found)]
        block_sides += zip(*cut, strict=True) if cut else [()] * len(frame.blocks)
    done = iter(in_batches(lambda x, s: rule.whole(x, s, hyper), matrices, block_sides))
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
