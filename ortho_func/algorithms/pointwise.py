"""Algorithms for what is no matrix as transforms: AdamW and Lion, on shards as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ortho_func.algorithms.adamw import adamw_step
from ortho_func.algorithms.lion import lion_step
from ortho_func.algorithms.nonfinite import check_nonfinite, finite_elements
from ortho_func.algorithms.rule import check_state_dtypes
from ortho_func.algorithms.transform import (
    Hyperparameter,
    Transform,
    Tree,
    check_epsilon,
    check_flags,
    checked,
    first_step,
    needed,
    values_at,
)
from ortho_func.geometry import aligned, like, local
from ortho_func.primitives.momentum import Scalar
from ortho_func.primitives.scaling import widen

__all__ = ["AdamWState", "LionState", "adamw", "lion"]

Tensors = list[Tensor]
First = Callable[[Tensor], Tensor]  # from a parameter to its state before the first step
# From shards, their gradients, state by name and hyperparameters to updates and new state.
Step = Callable[[Tensors, Tensors, list[Tensors], dict[str, Scalar]], tuple[Tensors, list[Tensors]]]


class AdamWState(NamedTuple):
    """State of `adamw`."""

    steps: Tensor  # updates done, 0-d int64: what schedules see
    leaf_steps: Tree  # of each parameter, 0-d fp32: fewer where gradients were None
    exp_avg: Tree  # mean of the gradients, like the parameters
    exp_avg_sq: Tree  # mean of their squares, like the parameters


class LionState(NamedTuple):
    """State of `lion`."""

    steps: Tensor  # updates done, 0-d int64
    momentum_buffer: Tree  # M, like the parameters


def adamw(
    lr: Hyperparameter = 1e-3,
    weight_decay: Hyperparameter = 0.1,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    cautious: bool = False,
    momentum_dtype: torch.dtype | None = None,
    variance_dtype: torch.dtype | None = None,
    nonfinite: str = "propagate",
) -> Transform:
    """AdamW as a transform, for what is no matrix; the steps of ``torch.optim.AdamW``.

    m ← β₁m + (1 − β₁)G;  v ← β₂v + (1 − β₂)G²;
    U = −lr·(m/(1 − β₁ᵗ))/(√(v/(1 − β₂ᵗ)) + ε) − lr·λ·X

    Args:
        lr: a number, a 0-d tensor or a schedule, as in `muon`.
        weight_decay: λ, likewise.
        betas: β₁ and β₂.
        eps: ε.
        cautious: decay only where update and parameter agree in sign.
        momentum_dtype: dtype of m, None is the parameter's; computed in fp32 at least.
        variance_dtype: dtype of v, likewise.
        nonfinite: "propagate", or "skip": an element that would not be finite, or m or v of it,
            stays as it was, update 0. The number of steps t counts on.

    Returns:
        A `Transform`; its state is an `AdamWState`. Leaves of any shape, DTensors included,
        need no plan.

    Raises:
        ValueError: for a number out of range.

    Source: arXiv 1711.05101, as in ``torch.optim.AdamW``.

    Examples:
        >>> tx = adamw(lr=0.1, weight_decay=0.0)
        >>> params = [torch.zeros(2)]
        >>> tx.update([torch.tensor([3.0, -0.2])], tx.init(params), params)[0]
        [tensor([-0.1000,  0.1000])]
    """
    pair = _betas(betas)
    check_state_dtypes(momentum_dtype, variance_dtype)
    check_epsilon(eps)
    check_nonfinite(nonfinite)
    check_flags(cautious=cautious)

    def step(
        params: Tensors, grads: Tensors, state: list[Tensors], hyper: dict[str, Scalar]
    ) -> tuple[Tensors, list[Tensors]]:
        wide = [widen(x) for x in params]
        new, averages, squares, counts = adamw_step(
            wide, grads, state[1], state[2], state[0],
            lr=hyper["lr"], weight_decay=hyper["weight_decay"], betas=pair, eps=eps,
            cautious=cautious,
        )  # fmt: skip
        updates = [after - before for after, before in zip(new, wide, strict=True)]
        return updates, [counts, averages, squares]

    hyper = checked({"lr": lr, "weight_decay": weight_decay})
    firsts = [_count, _like(momentum_dtype), _like(variance_dtype)]
    chosen = step if nonfinite == "propagate" else _finite(step, counts=1)
    return _elementwise_transform(AdamWState, firsts, chosen, hyper)


def lion(
    lr: Hyperparameter = 1e-4,
    weight_decay: Hyperparameter = 0.1,
    *,
    betas: tuple[float, float] = (0.9, 0.99),
    cautious: bool = False,
    momentum_dtype: torch.dtype | None = None,
    nonfinite: str = "propagate",
) -> Transform:
    """Lion, the sign of an interpolated momentum, as a transform.

    U = −lr·sign(β₁M + (1 − β₁)G) − lr·λ·X;  M ← β₂M + (1 − β₂)G

    Args:
        lr: a number, a 0-d tensor or a schedule, as in `muon`.
        weight_decay: λ, likewise.
        betas: β₁ and β₂.
        cautious: decay only where update and parameter agree in sign.
        momentum_dtype: dtype of M, None is the parameter's; computed in fp32 at least.
        nonfinite: "propagate", or "skip": an element that would not be finite, or M of it, stays
            as it was, update 0.

    Returns:
        A `Transform`; its state is a `LionState`. Leaves of any shape, DTensors included, need
        no plan.

    Raises:
        ValueError: for a number out of range.

    Source: arXiv 2302.06675, Algorithm 2.

    Examples:
        >>> tx = lion(lr=0.1, weight_decay=0.0)
        >>> params = [torch.zeros(2)]
        >>> tx.update([torch.tensor([3.0, -0.2])], tx.init(params), params)[0]
        [tensor([-0.1000,  0.1000])]
    """
    pair = _betas(betas)
    check_state_dtypes(momentum_dtype, None)
    check_nonfinite(nonfinite)
    check_flags(cautious=cautious)

    def step(
        params: Tensors, grads: Tensors, state: list[Tensors], hyper: dict[str, Scalar]
    ) -> tuple[Tensors, list[Tensors]]:
        updates, momenta = lion_step(
            params, grads, state[0],
            lr=hyper["lr"], weight_decay=hyper["weight_decay"], betas=pair, cautious=cautious,
        )  # fmt: skip
        return updates, [momenta]

    hyper = checked({"lr": lr, "weight_decay": weight_decay})
    chosen = step if nonfinite == "propagate" else _finite(step, counts=0)
    return _elementwise_transform(LionState, [_like(momentum_dtype)], chosen, hyper)


def _betas(betas: Sequence[float]) -> tuple[float, float]:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas must be two numbers, got {betas!r}.")
    for beta in betas:
        if isinstance(beta, bool) or not isinstance(beta, (int, float)):
            raise TypeError(f"betas must be two numbers, got {betas!r}.")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}.")
    return float(betas[0]), float(betas[1])


def _finite(step: Step, counts: int) -> Step:
    """The step without the elements that would not be finite.

    The first `counts` state tensors of a parameter are numbers of steps, which go on.
    """

    def chosen(
        params: Tensors, grads: Tensors, state: list[Tensors], hyper: dict[str, Scalar]
    ) -> tuple[Tensors, list[Tensors]]:
        updates, new = step(params, grads, state, hyper)
        masks = [finite_elements(one) for one in zip(updates, *new[counts:], strict=True)]
        kept = [
            [torch.where(*one) for one in zip(masks, after, before, strict=True)]
            for after, before in zip(new[counts:], state[counts:], strict=True)
        ]
        moved = [torch.where(m, u, 0) for m, u in zip(masks, updates, strict=True)]
        return moved, [*new[:counts], *kept]

    return chosen


def _elementwise_transform(
    kind: Callable[..., Any],
    firsts: Sequence[First],
    step: Step,
    hyper: Mapping[str, Hyperparameter],
) -> Transform:
    """A transform of an algorithm on shards: state of kind (steps, *trees), begun by `firsts`."""

    def init(params: Tree) -> Any:
        leaves, spec = tree_flatten(params)
        trees = [tree_unflatten([first(x) for x in leaves], spec) for first in firsts]
        return kind(first_step(params), *trees)

    def update(
        grads: Tree, state: Any, params: Tree | None = None, /, **given: Scalar
    ) -> tuple[Tree, Any]:
        leaves, spec = tree_flatten(needed(params))
        found = spec.flatten_up_to(grads)
        here = [n for n, g in enumerate(found) if g is not None]
        old = [spec.flatten_up_to(tree) for tree in state[1:]]
        moved, new = step(
            [local(leaves[n]) for n in here],
            [local(aligned(found[n], leaves[n])) for n in here],
            [[local(trees[n]) for n in here] for trees in old],
            values_at(hyper, state[0], given),
        )
        updates: list[Any] = [None] * len(leaves)
        for n, u in zip(here, moved, strict=True):
            updates[n] = like(leaves[n], u)
        for trees, values in zip(old, new, strict=True):
            for n, value in zip(here, values, strict=True):
                trees[n] = like(trees[n], value)
        after = [tree_unflatten(trees, spec) for trees in old]
        return tree_unflatten(updates, spec), kind(state[0] + 1, *after)

    return Transform(init, update, frozenset(hyper))


def _count(parameter: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=local(parameter).device)


def _like(dtype: torch.dtype | None) -> First:
    return partial(torch.zeros_like, dtype=dtype, memory_format=torch.preserve_format)
