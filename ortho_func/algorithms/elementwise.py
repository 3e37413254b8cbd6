"""Algorithms for what is no matrix, as the shells run them: eager in place, traced and masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import ClassVar

import torch
from torch import Tensor

from ortho_func.algorithms.adamw import adamw_
from ortho_func.algorithms.lion import lion_step
from ortho_func.algorithms.nonfinite import finite_elements
from ortho_func.algorithms.rule import Hyper
from ortho_func.primitives.opaque import define, opaque, there

__all__ = ["AdamWRule", "ElementRule", "LionRule"]

States = Sequence[dict[str, Tensor]]


@dataclass(frozen=True)
class ElementRule:
    """The static part of an element-wise algorithm.

    `state` says of what shape each state tensor is: "param", or "scalar" in fp32; the two dtypes
    are those of averages of gradients and of their squares, None that of the parameter. With
    `nonfinite="skip"` an element that would not be finite, or its state, stays as it was.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    cautious: bool = False
    momentum_dtype: torch.dtype | None = None
    variance_dtype: torch.dtype | None = None
    nonfinite: str = "propagate"

    name: ClassVar[str]
    state: ClassVar[dict[str, str]]

    def write_(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], state: States, hyper: Hyper
    ) -> None:
        """The algorithm's step, written in place."""
        raise NotImplementedError

    def step_(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], state: States, hyper: Hyper
    ) -> None:
        """One step, written in place."""
        if self.nonfinite == "skip":
            self._chosen_step_(params, grads, state, hyper, None)
        else:
            self.write_(params, grads, state, hyper)

    def masked_step_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: States,
        hyper: Hyper,
        present: Sequence[Tensor] | Tensor,
        numbers: Sequence[int],
    ) -> None:
        """One step, written in place where `present` of these numbers, bools, is true."""
        if not params:
            return
        if isinstance(present, Tensor) and opaque([present], params, grads):
            torch.ops.ortho_func.elementwise_where_(
                self.name, list(params), list(grads),
                [one[name] for name in self.state for one in state], present, list(numbers),
                hyper["lr"], hyper["weight_decay"], list(self.betas), self.eps, self.cautious,
                self.nonfinite,
            )  # fmt: skip
            return
        self._chosen_step_(params, grads, state, hyper, [present[n] for n in numbers])

    def _chosen_step_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        state: States,
        hyper: Hyper,
        present: Sequence[Tensor] | None,
    ) -> None:
        """One step on copies, of which only what is to change is written."""
        if not params:
            return
        kept = [{name: tensor.clone() for name, tensor in one.items()} for one in state]
        moved = [p.clone() for p in params]
        self.write_(moved, grads, kept, hyper)
        masks: list[Tensor | None] = [None] * len(params) if present is None else [*present]
        counted, elements = masks, masks
        if self.nonfinite == "skip":
            finite = [self._finite(p, one) for p, one in zip(moved, kept, strict=True)]
            elements = [
                one if mask is None else mask & one for mask, one in zip(masks, finite, strict=True)
            ]
        _put_(params, moved, elements)
        for name, kind in self.state.items():
            chosen = counted if kind == "scalar" else elements
            _put_([one[name] for one in state], [one[name] for one in kept], chosen)

    def _finite(self, moved: Tensor, state: dict[str, Tensor]) -> Tensor:
        found = [state[name] for name, kind in self.state.items() if kind == "param"]
        return finite_elements([moved, *found])


def _put_(old: Sequence[Tensor], new: Sequence[Tensor], masks: Sequence[Tensor | None]) -> None:
    """Write the new values; where there is a mask, those where it is true."""
    chosen = [
        after if mask is None else torch.where(mask, after, before)
        for before, after, mask in zip(old, new, masks, strict=True)
    ]
    torch._foreach_copy_(list(old), chosen)


@dataclass(frozen=True)
class AdamWRule(ElementRule):
    """AdamW, by torch's own implementation."""

    name: ClassVar[str] = "adamw"
    state: ClassVar[dict[str, str]] = {
        "step": "scalar", "exp_avg": "param", "exp_avg_sq": "param",
    }  # fmt: skip

    def write_(
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

    def write_(
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


RULES = {rule.name: rule for rule in (AdamWRule, LionRule)}


def _elementwise_where_(
    name: str,
    params: list[Tensor],
    grads: list[Tensor],
    state: list[Tensor],
    present: Tensor,
    numbers: list[int],
    lr: Tensor,
    weight_decay: Tensor,
    betas: list[float],
    eps: float,
    cautious: bool,
    nonfinite: str,
) -> None:
    """A rule's eager step where there is a gradient; `state` by name, then by parameter."""
    here = there(present, numbers)
    if not any(here):
        return
    rule = RULES[name]((betas[0], betas[1]), eps, cautious, nonfinite=nonfinite)
    count = len(params)
    known = [
        {key: state[at * count + n] for at, key in enumerate(rule.state)} for n in range(count)
    ]
    hyper = {"lr": float(lr), "weight_decay": float(weight_decay)}
    rule.step_(
        list(compress(params, here)),
        list(compress(grads, here)),
        list(compress(known, here)),
        hyper,
    )


define(
    "elementwise_where_(str name, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state, "
    "Tensor present, int[] numbers, Tensor lr, Tensor weight_decay, float[] betas, float eps, "
    "bool cautious, str nonfinite) -> ()",
    _elementwise_where_,
    lambda *_: None,
)
