"""What a functional optimizer is: a pair of pure functions over pytrees of tensors.

    state = tx.init(params)
    updates, state = tx.update(grads, state, params)
    params = apply_updates(params, updates)

Nothing is written in place and nothing asks the host for a value, so updates compose with
``torch.func`` and ``torch.compile``. The idea is that of optax's ``GradientTransformation``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ortho_func.geometry import like, local
from ortho_func.primitives.momentum import Scalar
from ortho_func.primitives.scaling import widen

__all__ = [
    "Hyperparameter",
    "Transform",
    "Tree",
    "Update",
    "apply_updates",
    "check_epsilon",
    "check_flags",
    "check_fractions",
    "checked",
    "elementwise",
    "first_step",
    "first_tensor",
    "needed",
    "values_at",
]

Tree = Any  # a pytree of tensors
Hyperparameter = float | Tensor | Callable[[Tensor], Scalar]
# From gradients, state, parameters and, by keyword, hyperparameters to updates and new state.
Update = Callable[..., tuple[Tree, Any]]


class Transform(NamedTuple):
    """An optimizer, or a part of one: ``init(params)`` and ``update(grads, state, params)``.

    `init` makes the state, a pytree of tensors. `update` takes gradients (or what another
    transform made of them), state and parameters, and returns what takes the gradients' place,
    in the end what `apply_updates` adds to the parameters, and new state. Both are pure. A
    gradient of None leaves its parameter and state alone. `hyper` names the hyperparameters that
    `update` also takes as keywords, in place of those it was built with.

    Source: the idea is that of optax, https://github.com/google-deepmind/optax.

    Examples:
        >>> def update(grads, state, params=None):
        ...     return elementwise(lambda g: -0.1 * g.sign(), grads), state
        >>> sign_descent = Transform(lambda params: (), update)
        >>> params = {"w": torch.tensor([1.0, -1.0])}
        >>> updates, _ = sign_descent.update({"w": torch.tensor([3.0, 0.5])}, (), params)
        >>> apply_updates(params, updates)["w"]
        tensor([ 0.9000, -1.1000])
    """

    init: Callable[[Tree], Any]
    update: Update
    hyper: frozenset[str] = frozenset()


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """New parameters, X + U, summed in fp32 at least and rounded once to X's dtype.

    Args:
        params: a pytree of floating tensors.
        updates: of the same structure; None leaves a parameter as it is.

    Returns:
        The same structure, dtypes and, of DTensors, placements.

    Raises:
        ValueError: if the structures differ.

    Examples:
        >>> apply_updates([torch.ones(2)], [torch.tensor([0.5, -0.5])])
        [tensor([1.5000, 0.5000])]
    """
    leaves, spec = tree_flatten(params)
    moves = spec.flatten_up_to(updates)
    found = [x if u is None else _sum(x, u) for x, u in zip(leaves, moves, strict=True)]
    return tree_unflatten(found, spec)


def _sum(x: Tensor, u: Tensor) -> Tensor:
    shard = local(x)
    return like(x, (widen(shard) + local(u)).to(shard.dtype))


def elementwise(function: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """Map an element-wise function over the leaves of trees of one structure.

    DTensors are mapped by their shards and keep the first tree's placements. Where any of the
    trees has None, so has the result.

    Raises:
        ValueError: if the structures differ.

    Examples:
        >>> elementwise(torch.add, {"w": torch.ones(2), "b": None}, {"w": torch.ones(2), "b": None})
        {'w': tensor([2., 2.]), 'b': None}
    """
    leaves, spec = tree_flatten(tree)
    rest = [spec.flatten_up_to(other) for other in others]
    found: list[Tensor | None] = []
    for x, *ys in zip(leaves, *rest, strict=True):
        missing = x is None or any(y is None for y in ys)
        found.append(None if missing else like(x, function(local(x), *(local(y) for y in ys))))
    return tree_unflatten(found, spec)


def first_tensor(tree: Tree) -> Tensor | None:
    """The first leaf that is a tensor; it says where a state's scalars lie."""
    return next((leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)), None)


def first_step(params: Tree) -> Tensor:
    """The number of steps done, 0-d int64, on the parameters' device."""
    found = first_tensor(params)
    return torch.zeros((), dtype=torch.int64, device=None if found is None else local(found).device)


def needed(params: Tree | None) -> Tree:
    """The parameters, or an error that asks for them."""
    if params is None:
        raise ValueError("this transform needs the parameters: update(grads, state, params).")
    return params


def values_at(
    hyper: Mapping[str, Hyperparameter], count: Tensor, given: Mapping[str, Scalar]
) -> dict[str, Scalar]:
    """Hyperparameters at a step: what is given, else the schedule's value, else the number."""
    unknown = set(given) - set(hyper)
    if unknown:
        raise TypeError(
            f"update takes {', '.join(hyper)} as keywords, not {', '.join(sorted(unknown))}."
        )
    found: dict[str, Scalar] = {}
    for name, value in hyper.items():
        if name in given:
            found[name] = given[name]
        elif isinstance(value, Tensor) or not callable(value):
            found[name] = value
        else:
            found[name] = value(count)
    return found


def checked(hyper: Mapping[str, Hyperparameter]) -> Mapping[str, Hyperparameter]:
    """Raise for a hyperparameter that is out of range or no number, tensor or schedule."""
    for name, value in hyper.items():
        if isinstance(value, Tensor):
            if value.ndim:
                raise ValueError(f"{name} as a tensor must be 0-d, got shape {tuple(value.shape)}.")
        elif not callable(value):
            _check_number(name, value)
    return hyper


def check_flags(**flags: object) -> None:
    """Raise `TypeError` for what is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}.")


def check_fractions(**fractions: object) -> None:
    """Raise for what is no number in (0, 1]."""
    for name, value in fractions.items():
        if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
            raise TypeError(f"{name} must be a number, got {value!r}.")
        if not 0 < float(value) <= 1:
            raise ValueError(f"{name} must lie in (0, 1], got {value}.")


def check_epsilon(eps: object) -> None:
    """Raise for what is no number of zero or more."""
    _check_number("eps", eps)


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, a 0-d tensor or a schedule, got {value!r}.")
    bound = 1.0 if name in ("momentum", "beta2") else math.inf
    if not 0 <= value < bound:
        raise ValueError(f"{name} must lie in [0, {bound:g}), got {value}.")
