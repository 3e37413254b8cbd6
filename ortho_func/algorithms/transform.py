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

from ortho_func.algorithms.writes import written
from ortho_func.geometry import box_here, like, local
from ortho_func.primitives.momentum import Scalar
from ortho_func.primitives.rounding import positions

__all__ = [
    "Hyperparameter",
    "Transform",
    "Tree",
    "Update",
    "apply_compensated",
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


def apply_updates(params: Tree, updates: Tree, *, rounding_key: Tensor | None = None) -> Tree:
    """New parameters, X + U, summed in fp32 at least and rounded once to X's dtype.

    Args:
        params: a pytree of floating tensors.
        updates: of the same structure; None leaves a parameter as it is.
        rounding_key: round what is bf16 at random, right in the mean, and draw the bits by this
            0-d int64, another one in each step: the state's `steps`, say. Equal keys give equal
            bits, on replicas and on any sharding. None rounds to nearest.

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
    found = []
    for number, (x, u) in enumerate(zip(leaves, moves, strict=True)):
        random = rounding_key is not None and x.dtype == torch.bfloat16
        key = rounding_key + (number << 32) if random and rounding_key is not None else None
        found.append(x if u is None else _sum(x, u, key))
    return tree_unflatten(found, spec)


def _sum(x: Tensor, u: Tensor, key: Tensor | None) -> Tensor:
    shard = local(x)
    place: tuple[Tensor, ...] = ()
    if key is not None:
        box = box_here(x)
        place = positions(box.start, box.size, tuple(x.shape), shard.device)
    return like(x, written(shard, local(u), key=key, place=place).value)


def apply_compensated(params: Tree, compensation: Tree, updates: Tree) -> tuple[Tree, Tree]:
    """New parameters and compensation, of bf16 parameters that are held in two parts.

    S = X + C + U;  X ← bf16(S);  C ← bf16(S − X)

    Args:
        params: a pytree of floating tensors.
        compensation: of the same structure: C of bf16 parameters, zeros before the first update;
            None for those that are rounded to nearest.
        updates: likewise; None leaves a parameter as it is.

    Returns:
        The same structures, dtypes and, of DTensors, placements.

    Raises:
        ValueError: if the structures differ.

    Source: arXiv 2010.06192, section 4.

    Examples:
        >>> x, c = [torch.ones(1).bfloat16()], [torch.zeros(1).bfloat16()]
        >>> for _ in range(100):
        ...     x, c = apply_compensated(x, c, [torch.tensor([-1e-3])])
        >>> x
        [tensor([0.8984], dtype=torch.bfloat16)]
    """
    leaves, spec = tree_flatten(params)
    found, kept = list(leaves), spec.flatten_up_to(compensation)
    for n, u in enumerate(spec.flatten_up_to(updates)):
        if u is None:
            continue
        x, c = leaves[n], kept[n]
        new = written(local(x), local(u), None if c is None else local(c))
        found[n] = like(x, new.value)
        kept[n] = None if new.compensation is None else like(x, new.compensation)
    return tree_unflatten(found, spec), tree_unflatten(kept, spec)


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
