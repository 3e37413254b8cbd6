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
from ortho_func.primitives.momentum import ema, nesterov

__all__ = ["MuonRule"]


@dataclass(frozen=True)
class MuonRule(MatrixRule):
    """Muon as three pure functions."""

    nesterov: bool = True

    name: ClassVar[str] = "muon"

    def emit(
        self, grads: list[Tensor], state: State, hyper: Hyper, frames: Sequence[Frame]
    ) -> Emission:
        """The momentum, or with Nesterov the look-ahead."""
        momenta = ema(state["momentum_buffer"], grads, hyper["momentum"])
        ahead = nesterov(momenta, grads, hyper["momentum"]) if self.nesterov else momenta
        shards = [b.reshape(frame.sent) for b, frame in zip(ahead, frames, strict=True)]
        return Emission(shards, [()] * len(shards), None, {"momentum_buffer": momenta})
