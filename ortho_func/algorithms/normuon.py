"""NorMuon: Muon with each row divided by the root of its running mean square.

O = orth(B);  V ← β₂V + (1 − β₂)mean_C(O²);  Ô = O/(√V + ε), rescaled to ‖Ô‖_F = ‖O‖_F;
X ← (1 − lr·λ)X − lr·s·Ô

V has one value per row of the matrix. It travels with the matrix, so that the rescaling sees
all rows whatever the sharding.

Source: arXiv 2510.05491, Algorithm 1. There the norm of the step is 0.2·lr·√(RC), which is what
``adjust_lr_fn="match_rms_adamw"`` gives where O is orthogonal, and B = M: ``nesterov=False``; the
authors' code looks ahead. V has no bias correction in either, and ε is added to the root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ortho_func.algorithms.muon import MuonRule
from ortho_func.algorithms.rule import Emission, Frame, Hyper, State, Step
from ortho_func.primitives.normalization import normalize_rows
from ortho_func.primitives.scaling import widen
from ortho_func.primitives.teamwork import (
    followed_by,
    normalize_rows_in_team,
    orthogonalize_in_team,
)

__all__ = ["NorMuonRule"]


@dataclass(frozen=True)
class NorMuonRule(MuonRule):
    """NorMuon as three pure functions."""

    eps: float = 1e-7

    name: ClassVar[str] = "normuon"
    state: ClassVar[dict[str, str]] = {"momentum_buffer": "param", "row_variance": "row"}
    sides: ClassVar[tuple[str, ...]] = ("row",)
    team_sums: ClassVar[int | None] = 1  # of rows' squares, or of the norms
    told: ClassVar[Mapping[int, str]] = {0: "row_variance"}
    scalars: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "momentum", "beta2")

    def _sent(self, shards: list[Tensor], state: State, frames: Sequence[Frame]) -> Emission:
        """What Muon sends, with V beside it."""
        sent = super()._sent(shards, state, frames)
        sides = [
            (widen(v).reshape(frame.shape[:2]),)
            for v, frame in zip(state["row_variance"], frames, strict=True)
        ]
        return sent._replace(sides=sides, carry=[v.shape for v in state["row_variance"]])

    def whole(
        self, x: Tensor, sides: tuple[Tensor, ...], hyper: Hyper
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The normalized factor and the new V."""
        o = self.orthogonalizer(x)
        normal, variance = normalize_rows(o, sides[0], beta2=hyper["beta2"], eps=self.eps)
        return normal, (variance,)

    def whole_in_team(self, x: Tensor, sides: tuple[Tensor, ...], hyper: Hyper) -> Any:
        """The same of shares."""
        assert self.team is not None
        cols = self.team[1]

        def normalized(o: Tensor) -> Any:
            one = normalize_rows_in_team(
                o, sides[0], beta2=hyper["beta2"], eps=self.eps, tall=self.tall, cols=cols
            )
            return followed_by(one, lambda found: (found[0], (found[1],)))

        shares = orthogonalize_in_team(x, self.iteration, tall=self.tall)
        return followed_by(shares, normalized)

    def absorb(
        self,
        params: list[Tensor],
        results: list[Tensor],
        sides: list[tuple[Tensor, ...]],
        emission: Emission,
        hyper: Hyper,
        frames: Sequence[Frame],
    ) -> tuple[Step, State]:
        """Muon's step; V is what came back."""
        variances = [
            side[0].reshape(shape) for side, shape in zip(sides, emission.carry, strict=True)
        ]
        return self.descend(results, hyper, frames), {"row_variance": variances}
