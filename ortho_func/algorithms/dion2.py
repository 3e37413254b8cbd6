"""Dion2: only a fraction of the slices is orthogonalized each step; the rest waits in M.

M ← M + G;  K = the ⌈αn⌉ slices of M along its shorter side with largest L1 norm;
X ← (1 − lr·λ)X − lr·s·orth(M_K) on K;  M_K ← μM_K

"global" selection is made on the whole matrix by its owner: exact, the same on any sharding;
whole matrices travel. With "local" selection each shard chooses its own top
⌈α⌈n/shards⌉⌉ slices along the dim on which it is cut, and only those travel: a fraction α of
the bytes and of the arithmetic, but a result that depends on the number of shards. Local
selection holds where shards are cut along one dim; a matrix that is whole on a rank, cut both
ways, or a block of a parameter is selected globally.

Source: arXiv 2512.16928.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ortho_func.algorithms.rule import Emission, Frame, Hyper, MatrixRule, State, Step
from ortho_func.plan import Travel, slice_count
from ortho_func.primitives.momentum import Scalar, heavy_ball
from ortho_func.primitives.selection import (
    gather_slices,
    scatter_slices,
    slice_mask,
    top_slices,
)

__all__ = ["Dion2Rule", "LocalDion2Rule"]


@dataclass(frozen=True)
class Dion2Rule(MatrixRule):
    """Dion2 with the selection made by the owner of the whole matrix."""

    fraction: float = 0.25
    selection: str = "local"

    name: ClassVar[str] = "dion2"
    sides: ClassVar[tuple[str, ...]] = ("slice",)

    def for_cut(self, cut: str | None) -> MatrixRule:
        """Shards that are cut along one dim select by themselves, if asked to."""
        if cut is None or self.selection == "global":
            return self
        return LocalDion2Rule(**fields_of(self), dim=-2 if cut == "row" else -1)

    def travel(self, **common: Any) -> Travel:
        """Whole matrices, unrounded where they stay: their norms are compared."""
        cost = self.cost(self.fraction)
        return Travel(algorithm=self.name, sides=self.sides, cost=cost, **common)

    def emit(
        self, grads: list[Tensor], state: State, hyper: Hyper, frames: Sequence[Frame]
    ) -> Emission:
        """All of the accumulated momentum."""
        momenta, shown = heavy_ball(state["momentum_buffer"], grads)
        shards = [m.reshape(frame.sent) for m, frame in zip(shown, frames, strict=True)]
        sides = [
            (torch.zeros(_side_shape(frame), device=m.device),)
            for m, frame in zip(momenta, frames, strict=True)
        ]
        return Emission(shards, sides, momenta, {})

    def whole(
        self, x: Tensor, sides: tuple[Tensor, ...], hyper: Hyper
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Select, orthogonalize the selected slices, and say which they were."""
        dim = -2 if x.shape[-2] <= x.shape[-1] else -1
        extent = x.shape[dim]
        chosen = top_slices(x, slice_count(self.fraction, extent), dim)
        o = self.orthogonalizer(gather_slices(x, chosen, dim))
        return scatter_slices(o, chosen, dim, extent), (slice_mask(chosen, extent),)

    def updated_part(self, x: Tensor) -> Tensor:
        """The slices that were selected: those of an update that are not zero."""
        dim = -2 if x.shape[-2] <= x.shape[-1] else -1
        chosen = top_slices(x, slice_count(self.fraction, x.shape[dim]), dim)
        return gather_slices(x, chosen, dim)

    def absorb(
        self,
        params: list[Tensor],
        results: list[Tensor],
        sides: list[tuple[Tensor, ...]],
        emission: Emission,
        hyper: Hyper,
        frames: Sequence[Frame],
    ) -> tuple[Step, State]:
        """Step, and decay the momentum of the slices that were selected."""
        masks = [spread_side(side[0], frame, 0) for side, frame in zip(sides, frames, strict=True)]
        state = {"momentum_buffer": decay_selected(emission.carry, masks, hyper, frames)}
        return self.descend(results, hyper, frames), state


@dataclass(frozen=True)
class LocalDion2Rule(Dion2Rule):
    """Dion2 with each shard selecting slices of its own along `dim`."""

    dim: int = -2

    sides: ClassVar[tuple[str, ...]] = ()

    def travel(self, **common: Any) -> Travel:
        """Only the selected slices travel."""
        return Travel(algorithm=self.name, fraction=self.fraction, cost=self.cost(), **common)

    def emit(
        self, grads: list[Tensor], state: State, hyper: Hyper, frames: Sequence[Frame]
    ) -> Emission:
        """The shard's own top slices."""
        momenta, shown = heavy_ball(state["momentum_buffer"], grads)
        shards, chosen = [], []
        for m, frame in zip(shown, frames, strict=True):
            seen = m.reshape(frame.shape)
            index = top_slices(seen, frame.sent[self.dim], self.dim)
            shards.append(gather_slices(seen, index, self.dim))
            chosen.append(index)
        return Emission(shards, [()] * len(shards), (momenta, chosen), {})

    def whole(
        self, x: Tensor, sides: tuple[Tensor, ...], hyper: Hyper
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Orthogonalize the union of the shards' slices."""
        return self.orthogonalizer(x), sides

    def updated_part(self, x: Tensor) -> Tensor:
        """All of it: what was not selected did not travel."""
        return x

    def absorb(
        self,
        params: list[Tensor],
        results: list[Tensor],
        sides: list[tuple[Tensor, ...]],
        emission: Emission,
        hyper: Hyper,
        frames: Sequence[Frame],
    ) -> tuple[Step, State]:
        """Put the slices where they came from."""
        momenta, chosen = emission.carry
        directions, masks = [], []
        for result, index, frame in zip(results, chosen, frames, strict=True):
            extent = frame.shape[self.dim]
            directions.append(scatter_slices(result, index, self.dim, extent))
            masks.append(slice_mask(index, extent).unsqueeze(-1 if self.dim == -2 else -2))
        state = {"momentum_buffer": decay_selected(momenta, masks, hyper, frames)}
        return self.descend(directions, hyper, frames), state


def fields_of(rule: MatrixRule) -> dict[str, Any]:
    """A rule's options, to make its local kin with."""
    return {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}


def decay_selected(
    momenta: Sequence[Tensor], masks: Sequence[Tensor], hyper: Hyper, frames: Sequence[Frame]
) -> list[Tensor]:
    """M·μ where the mask is 1, M where it is 0, in the dtype of these M."""
    lost: Scalar = 1 - hyper["momentum"]
    return [
        (m.reshape(frame.shape) * (1 - lost * mask)).reshape(m.shape).to(m.dtype)
        for m, mask, frame in zip(momenta, masks, frames, strict=True)
    ]


def _side_shape(frame: Frame) -> tuple[int, int]:
    kinds = frame.kinds[0]
    size = sum(
        rows if kind == "row" else frame.shape[2]
        for rows, kind in zip(frame.blocks, kinds, strict=True)
    )
    return frame.shape[0], size


def spread_side(values: Tensor, frame: Frame, side: int) -> Tensor:
    """A side vector [stack, values] as a tensor that broadcasts against [stack, rows, cols]."""
    kinds = set(frame.kinds[side])
    stack, _, cols = frame.shape
    if kinds == {"row"}:
        return values.unsqueeze(-1)
    if len(frame.blocks) == 1:
        return values.unsqueeze(-2)
    sizes = [
        rows if kind == "row" else cols
        for rows, kind in zip(frame.blocks, frame.kinds[side], strict=True)
    ]
    parts = [
        (part.unsqueeze(-1) if kind == "row" else part.unsqueeze(-2)).expand(stack, rows, cols)
        for part, rows, kind in zip(
            values.split(sizes, dim=-1), frame.blocks, frame.kinds[side], strict=True
        )
    ]
    return torch.cat(parts, dim=-2) if parts else values.new_zeros(frame.shape)
