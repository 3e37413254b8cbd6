"""Muon: orthogonalized momentum.

M ← μM + (1 − μ)G;  B = (1 − μ)G + μM (Nesterov) or M;  X ← (1 − lr·λ)X − lr·s·orth(B)

Source: Jordan 2024, https://kellerjordan.github.io/posts/muon/; the average as in
``torch.optim.Muon``; s and λ from Moonlight, arXiv 2502.16982.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ortho_func.algorithms.rule import Emission, Frame, Hyper, MatrixRule, State
from ortho_func.primitives.momentum import ema, ema_, nesterov
from ortho_func.primitives.opaque import look_ahead_where_

__all__ = ["MuonRule"]


@dataclass(frozen=True)
class MuonRule(MatrixRule):
    """Muon as three pure functions."""

    nesterov: bool = True

    name: ClassVar[str] = "muon"
    team_sums: ClassVar[int | None] = 0
    early: ClassVar[bool] = True

    def emit(
        self, grads: list[Tensor], state: State, hyper: Hyper, frames: Sequence[Frame]
    ) -> Emission:
        """The momentum, or with Nesterov the look-ahead."""
        momenta = ema(state["momentum_buffer"], grads, hyper["momentum"])
        sent = self._sent(self._ahead(momenta, grads, hyper), state, frames)
        return sent._replace(state={"momentum_buffer": momenta})

    def emit_(
        self, grads: list[Tensor], state: State, hyper: Hyper, frames: Sequence[Frame]
    ) -> Emission:
        """The same, with the momentum updated in place."""
        momenta = state["momentum_buffer"]
        ema_(momenta, grads, hyper["momentum"])
        return self._sent(self._ahead(momenta, grads, hyper), state, frames)

    def emit_where_(
        self,
        grads: list[Tensor],
        state: State,
        hyper: Hyper,
        frames: Sequence[Frame],
        present: Tensor,
        numbers: Sequence[int],
    ) -> Emission | None:
        """The same, where there is a gradient."""
        beta = hyper["momentum"]
        assert isinstance(beta, Tensor)
        sent = look_ahead_where_(
            state["momentum_buffer"], grads, present, numbers, beta=beta, ahead=self.nesterov
        )
        return self._sent(sent, state, frames)

    def _ahead(self, momenta: list[Tensor], grads: list[Tensor], hyper: Hyper) -> list[Tensor]:
        """What travels, once the momentum is this step's."""
        return nesterov(momenta, grads, hyper["momentum"]) if self.nesterov else momenta

    def _sent(self, shards: list[Tensor], state: State, frames: Sequence[Frame]) -> Emission:
        return Emission(shards, [()] * len(shards), None, {})
