"""Small transforms to chain before or after an algorithm, or to make one of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ortho_func.algorithms.rule import check_state_dtypes
from ortho_func.algorithms.transform import (
    Hyperparameter,
    Transform,
    Tree,
    checked,
    elementwise,
    first_step,
    needed,
    values_at,
)
from ortho_func.geometry import aligned, local, total
from ortho_func.primitives import momentum as averages
from ortho_func.primitives.momentum import Scalar
from ortho_func.primitives.roots import sqrt
from ortho_func.primitives.scaling import widen

__all__ = [
    "CountState",
    "TraceState",
    "add_decayed_weights",
    "clip_by_global_norm",
    "momentum",
    "scale",
    "scale_by_schedule",
    "stateless",
]


class CountState(NamedTuple):
    """State of a transform that only counts."""

    steps: Tensor  # steps done, 0-d int64


class TraceState(NamedTuple):
    """State of `momentum`."""

    steps: Tensor  # steps done, 0-d int64
    momentum_buffer: Tree  # M, like the parameters


def stateless(function: Callable[[Tree], Tree]) -> Transform:
    """A function of the gradients alone as a transform; its state is empty.

    Examples:
        >>> tx = stateless(lambda grads: elementwise(torch.sign, grads))
        >>> tx.update([torch.tensor([3.0, -2.0])], tx.init([]), None)[0]
        [tensor([ 1., -1.])]
    """

    def update(
        grads: Tree, state: Any, params: Tree | None = None, /, **given: Scalar
    ) -> tuple[Tree, Any]:
        return function(grads), state

    return Transform(lambda params: (), update)


def scale(factor: Scalar) -> Transform:
    """Multiply by a number or a 0-d tensor: U = factor·G.

    Examples:
        >>> scale(-0.1).update([torch.ones(1)], ())[0]
        [tensor([-0.1000])]
    """
    return stateless(lambda grads: elementwise(lambda g: g * factor, grads))


def scale_by_schedule(schedule: Callable[[Tensor], Scalar]) -> Transform:
    """Multiply by a function of the number of steps done: U = schedule(t)·G.

    Examples:
        >>> tx = scale_by_schedule(lambda step: -0.1 / (1 + step))
        >>> _, state = tx.update([torch.ones(1)], tx.init([torch.ones(1)]))
        >>> tx.update([torch.ones(1)], state)[0]
        [tensor([-0.0500])]
    """

    def update(
        grads: Tree, state: CountState, params: Tree | None = None, /, **given: Scalar
    ) -> tuple[Tree, CountState]:
        factor = schedule(state.steps)
        return elementwise(lambda g: g * factor, grads), CountState(state.steps + 1)

    return Transform(lambda params: CountState(first_step(params)), update)


def add_decayed_weights(weight_decay: Hyperparameter) -> Transform:
    """Add decay before the learning rate: U = G + λX.

    `weight_decay` is a number, a 0-d tensor or a schedule, and a keyword of `update`.

    Raises:
        ValueError: for a negative number.

    Examples:
        >>> tx = add_decayed_weights(0.5)
        >>> params = [torch.ones(1)]
        >>> tx.update([torch.ones(1)], tx.init(params), params)[0]
        [tensor([1.5000])]
    """
    hyper = checked({"weight_decay": weight_decay})

    def update(
        grads: Tree, state: CountState, params: Tree | None = None, /, **given: Scalar
    ) -> tuple[Tree, CountState]:
        decay = values_at(hyper, state.steps, given)["weight_decay"]
        decayed = elementwise(lambda x, g: g + decay * widen(x), needed(params), grads)
        return decayed, CountState(state.steps + 1)

    return Transform(lambda params: CountState(first_step(params)), update, frozenset(hyper))


def momentum(
    beta: Hyperparameter = 0.95,
    *,
    nesterov: bool = False,
    momentum_dtype: torch.dtype | None = None,
) -> Transform:
    """Averaged gradients: M ← βM + (1 − β)G;  U = (1 − β)G + βM (Nesterov) or M.

    `beta` is a number, a 0-d tensor or a schedule; `update` takes it as the keyword `momentum`.
    `momentum_dtype` is M's, None the parameter's; the sum is computed in fp32 at least.

    Raises:
        ValueError: for a number outside [0, 1).

    Examples:
        >>> tx = momentum(0.5)
        >>> updates, state = tx.update([torch.ones(1)], tx.init([torch.zeros(1)]))
        >>> updates, state.momentum_buffer
        ([tensor([0.5000])], [tensor([0.5000])])
    """
    hyper = checked({"momentum": beta})
    check_state_dtypes(momentum_dtype, None)

    def update(
        grads: Tree, state: TraceState, params: Tree | None = None, /, **given: Scalar
    ) -> tuple[Tree, TraceState]:
        value = values_at(hyper, state.steps, given)["momentum"]
        old = state.momentum_buffer
        new = elementwise(lambda m, g: averages.ema([m], [g], value)[0], old, grads)
        ahead = new
        if nesterov:
            ahead = elementwise(lambda m, g: averages.nesterov([m], [g], value)[0], new, grads)
        kept = _or_else(new, old)
        return ahead, TraceState(state.steps + 1, kept)

    def init(params: Tree) -> TraceState:
        zeros = partial(torch.zeros_like, dtype=momentum_dtype)
        return TraceState(first_step(params), elementwise(zeros, params))

    return Transform(init, update, frozenset(hyper))


def _or_else(tree: Tree, other: Tree) -> Tree:
    """The first tree's leaves, and the other's where the first has None."""
    leaves, spec = tree_flatten(tree)
    chosen = [b if a is None else a for a, b in zip(leaves, spec.flatten_up_to(other), strict=True)]
    return tree_unflatten(chosen, spec)


def clip_by_global_norm(max_norm: float) -> Transform:
    """Shrink all gradients by one factor so that their joint norm is at most `max_norm`.

    U = G·min(1, max_norm/‖G‖), the norm over all leaves and all shards, in fp32 at least. With
    DTensors that is one all-reduce of a number for each mesh and way of sharding; where ranks may
    miss different gradients, pass the parameters to `update`, or some rank may wait in vain.

    Raises:
        ValueError: unless max_norm is positive.

    Source: arXiv 1211.5063, algorithm 1.

    Examples:
        >>> tx = clip_by_global_norm(1.0)
        >>> tx.update([torch.tensor([3.0]), torch.tensor([4.0])], ())[0]
        [tensor([0.6000]), tensor([0.8000])]
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}.")

    def update(
        grads: Tree, state: Any, params: Tree | None = None, /, **given: Scalar
    ) -> tuple[Tree, Any]:
        leaves, spec = tree_flatten(grads if params is None else params)
        found = spec.flatten_up_to(grads)
        if params is not None:
            found = [g if g is None else aligned(g, x) for g, x in zip(found, leaves, strict=True)]
        norm = _norm(found, leaves)
        # Not max_norm/norm clamped to 1: that is NaN at zero.
        factor = max_norm / norm.clamp_min(max_norm)
        clipped = elementwise(lambda g: (g * factor).to(g.dtype), found)
        return tree_unflatten(clipped, spec), state

    return Transform(lambda params: (), update)


def _norm(grads: list[Any], leaves: list[Any]) -> Tensor:
    """‖G‖ over gradients and shards; leaves say how they are sharded where one is None."""
    pairs = [(g, x) for g, x in zip(grads, leaves, strict=True) if x is not None]
    if not pairs:
        return torch.zeros(())
    values = [
        _square(torch.zeros((), device=local(x).device) if g is None else local(g))
        for g, x in pairs
    ]
    return sqrt(total(values, [x for _, x in pairs]))


def _square(shard: Tensor) -> Tensor:
    return widen(shard).square().sum()
