"""Dion3 (NorDion2): Dion2's selection and error feedback with NorMuon's normalization.

M ← M + G;  K = the ⌈αR⌉ rows of M with largest L1 norm;  O = orth(M_K);
V_K ← β₂V_K + (1 − β₂)mean_C(O²);  Ô = O/(√V_K + ε), rescaled to ‖Ô‖_F = ‖O‖_F;
X ← (1 − lr·λ)X − lr·s·Ô on K;  M_K ← μM_K

V has one value per row, so rows are selected whatever the shape, as in the published
implementation; Dion2 selects along the shorter side. Local selection holds where shards are cut
along rows.

Source: Dion2, arXiv 2512.16928; NorMuon, arXiv 2510.05491; their combination is published as
NorDion2, alias Dion3, in https://github.com/microsoft/dion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ortho_func.algorithms.dion2 import Dion2Rule, decay_selected, fields_of, spread_side
from ortho_func.algorithms.rule import Emission, Frame, Hyper, State, Step
from ortho_func.plan import Travel, slice_count
from ortho_func.primitives.momentum import heavy_ball
from ortho_func.primitives.normalization import normalize_rows
from ortho_func.primitives.scaling import widen
from ortho_func.primitives.selection import (
    gather_slices,
    scatter_slices,
    slice_mask,
    top_slices,
)

__all__ = ["Dion3Rule", "LocalDion3Rule"]


@dataclass(frozen=True)
class Dion3Rule(Dion2Rule):
    """Dion3 with the selection made by the owner of the whole matrix."""

    eps: float = 1e-7

    name: ClassVar[str] = "dion3"
    state: ClassVar[dict[str, str]] = {"momentum_buffer": "param", "row_variance": "row"}
    sides: ClassVar[tuple[str, ...]] = ("row", "row")  # V; which rows were selected
    told: ClassVar[Mapping[int, str]] = {0: "row_variance"}
    scalars: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "momentum", "beta2")

    def for_cut(self, cut: str | None) -> Dion3Rule:
        """Shards that are cut along rows select by themselves, if asked to."""
        if cut != "row" or self.selection == "global":
            return self
        return LocalDion3Rule(**fields_of(self))

    def emit(
        self, grads: list[Tensor], state: State, hyper: Hyper, frames: Sequence[Frame]
    ) -> Emission:
        """All of the accumulated momentum, and V."""
        momenta, shown = heavy_ball(state["momentum_buffer"], grads)
        shards = [m.reshape(frame.sent) for m, frame in zip(shown, frames, strict=True)]
        sides = []
        for v, frame in zip(state["row_variance"], frames, strict=True):
            rows = widen(v).reshape(frame.shape[:2])
            sides.append((rows, torch.zeros_like(rows)))
        return Emission(shards, sides, (momenta, [v.shape for v in state["row_variance"]]), {})

    def whole(
        self, x: Tensor, sides: tuple[Tensor, ...], hyper: Hyper
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Select rows, orthogonalize and normalize them; the new V, and which they were."""
        rows, variance = x.shape[-2], sides[0]
        chosen = top_slices(x, slice_count(self.fraction, rows), -2)
        o = self.orthogonalizer(gather_slices(x, chosen, -2))
        normal, new = normalize_rows(
            o, variance.gather(-1, chosen), beta2=hyper["beta2"], eps=self.eps
        )
        kept = variance.scatter(-1, chosen, new.to(variance.dtype))
        return scatter_slices(normal, chosen, -2, rows), (kept, slice_mask(chosen, rows))

    def updated_part(self, x: Tensor) -> Tensor:
        """The rows that were selected."""
        return gather_slices(x, top_slices(x, slice_count(self.fraction, x.shape[-2]), -2), -2)

    def absorb(
        self,
        params: list[Tensor],
        results: list[Tensor],
        sides: list[tuple[Tensor, ...]],
        emission: Emission,
        hyper: Hyper,
        frames: Sequence[Frame],
    ) -> tuple[Step, State]:
        """Step, decay the momentum of the selected rows; V is what came back."""
        momenta, shapes = emission.carry
        masks = [spread_side(side[1], frame, 1) for side, frame in zip(sides, frames, strict=True)]
        state = {
            "momentum_buffer": decay_selected(momenta, masks, hyper, frames),
            "row_variance": [s[0].reshape(shape) for s, shape in zip(sides, shapes, strict=True)],
        }
        return self.descend(results, hyper, frames), state


@dataclass(frozen=True)
class LocalDion3Rule(Dion3Rule):
    """Dion3 with each shard selecting rows of its own; their V travels with them."""

    sides: ClassVar[tuple[str, ...]] = ("row",)
    told: ClassVar[Mapping[int, str]] = {}  # rows are cut: V is the shard's own

    def travel(self, **common: Any) -> Travel:
        """Only the selected rows travel."""
        return Travel(
            algorithm=self.name,
            fraction=self.fraction,
            sides=self.sides,
            cost=self.cost(),
            **common,
        )

    def emit(
        self, grads: list[Tensor], state: State, hyper: Hyper, frames: Sequence[Frame]
    ) -> Emission:
        """The shard's own top rows, and their V."""
        momenta, shown = heavy_ball(state["momentum_buffer"], grads)
        variances = [widen(v) for v in state["row_variance"]]
        shards, sides, chosen = [], [], []
        for m, v, frame in zip(shown, variances, frames, strict=True):
            seen = m.reshape(frame.shape)
            index = top_slices(seen, frame.sent[1], -2)
            shards.append(gather_slices(seen, index, -2))
            sides.append((v.reshape(frame.shape[:2]).gather(-1, index),))
            chosen.append(index)
        return Emission(shards, sides, (momenta, chosen, variances), {})

    def whole(
        self, x: Tensor, sides: tuple[Tensor, ...], hyper: Hyper
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Orthogonalize and normalize the union of the shards' rows."""
        normal, new = normalize_rows(
            self.orthogonalizer(x), sides[0], beta2=hyper["beta2"], eps=self.eps
        )
        return normal, (new,)

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
        """Put rows and their V where they came from."""
        momenta, chosen, variances = emission.carry
        directions, masks, kept = [], [], []
        for result, side, index, v, frame in zip(
            results, sides, chosen, variances, frames, strict=True
        ):
            rows = frame.shape[1]
            directions.append(scatter_slices(result, index, -2, rows))
            masks.append(slice_mask(index, rows).unsqueeze(-1))
            kept.append(v.reshape(frame.shape[:2]).scatter(-1, index, side[0]).reshape(v.shape))
        state = {
            "momentum_buffer": decay_selected(momenta, masks, hyper, frames),
            "row_variance": kept,
        }
        return self.descend(directions, hyper, frames), state
