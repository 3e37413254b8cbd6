"""Algorithms for what is no matrix, as the shells run them: eager in place, traced and masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ortho_func.algorithms.adamw import adamw_
from ortho_func.algorithms.lion import lion_step
from ortho_func.algorithms.rule import Hyper

__all__ = ["AdamWRule", "ElementRule", "LionRule"]

States = Sequence[dict[str, Tensor]]


@dataclass(frozen=True)
class ElementRule:
    """The static part of an element-wise algorithm.

    `state` says of what shape each state tensor is: "param", or "scalar" in fp32; the two dtypes
    are those of averages of gradients and of their squares, None that of the parameter.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    cautious: bool = False
    momentum_dtype: torch.dtype | None = None
    variance_dtype: torch.dtype | None = None

    name: ClassVar[str]
    state: ClassVar[dict[str, str]]

    def step_(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], state: States, hyper: Hyper
    ) -> None:
        """One step, written in place."""
        raise NotImplementedError

    def masked_step_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: States,
        hyper: Hyper,
        present: Sequence[Tensor],
    ) -> None:
        """One step, written in place where `present`, a 0-d bool a parameter, is true."""
        if not params:
            return
        kept = [{name: tensor.clone() for name, tensor in one.items()} for one in state]
        moved = [p.clone() for p in params]
        self.step_(moved, grads, kept, hyper)
        self._put(params, moved, present)
        for name in self.state:
            self._put([one[name] for one in state], [one[name] for one in kept], present)

    def _put(self, old: Sequence[Tensor], new: Sequence[Tensor], present: Sequence[Tensor]) -> None:
        chosen = [
            torch.where(present[n], after, before)
            for n, (before, after) in enumerate(zip(old, new, strict=True))
        ]
        torch._foreach_copy_(list(old), chosen)


@dataclass(frozen=True)
class AdamWRule(ElementRule):
    """AdamW, by torch's own implementation."""

    name: ClassVar[str] = "adamw"
    state: ClassVar[dict[str, str]] = {
        "step": "scalar", "exp_avg": "param", "exp_avg_sq": "param",
    }  # fmt: skip

    def step_(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], state: States, hyper: Hyper
    ) -> None:
        """One step in place."""
        adamw_(
            params,
            grads,
            [one["exp_avg"] for one in state],
            [one["exp_avg_sq"] for one in state],
            [one["step"] for one in state],
            lr=hyper["lr"],
            weight_decay=hyper["weight_decay"],
            betas=self.betas,
            eps=self.eps,
            cautious=self.cautious,
        )


@dataclass(frozen=True)
class LionRule(ElementRule):
    """Lion."""

    name: ClassVar[str] = "lion"
    state: ClassVar[dict[str, str]] = {"momentum_buffer": "param"}

    def step_(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], state: States, hyper: Hyper
    ) -> None:
        """One step in place."""
        if not params:
            return
        momenta = [one["momentum_buffer"] for one in state]
        updates, new = lion_step(
            params,
            grads,
            momenta,
            lr=hyper["lr"],
            weight_decay=hyper["weight_decay"],
            betas=self.betas,
            cautious=self.cautious,
        )
        torch._foreach_copy_(momenta, new)
        torch._foreach_add_(list(params), updates)
