"""Transforms made of transforms: in a row, by leaf, and with hyperparameters in the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from ortho_func.algorithms.transform import Transform, Tree, first_tensor, needed
from ortho_func.geometry import local
from ortho_func.primitives.momentum import Scalar
from ortho_func.trees import first_match, named_leaves

__all__ = ["InjectState", "Labels", "PartitionState", "chain", "inject", "partition"]

Labels = Mapping[str, str] | Callable[[str, Tensor], str | None]


def chain(*transforms: Transform) -> Transform:
    """Transforms in a row: each gets what the one before made of the gradients.

    Its state is the tuple of theirs. A keyword of `update` goes to all that take it.

    Raises:
        TypeError: in `update`, for a keyword that none takes.

    Source: the idea is that of ``optax.chain``.

    Examples:
        >>> from ortho_func import clip_by_global_norm, scale
        >>> tx = chain(clip_by_global_norm(1.0), scale(-0.1))
        >>> params = [torch.zeros(1), torch.zeros(1)]
        >>> tx.update([torch.tensor([3.0]), torch.tensor([4.0])], tx.init(params), params)[0]
        [tensor([-0.0600]), tensor([-0.0800])]
    """
    hyper = frozenset().union(*(tx.hyper for tx in transforms))

    def init(params: Tree) -> tuple[Any, ...]:
        return tuple(tx.init(params) for tx in transforms)

    def update(
        grads: Tree, state: Any, params: Tree | None = None, /, **given: Scalar
    ) -> tuple[Tree, tuple[Any, ...]]:
        _known(given, hyper)
        updates, after = grads, []
        for tx, before in zip(transforms, state, strict=True):
            updates, new = tx.update(updates, before, params, **_taken(tx, given))
            after.append(new)
        return updates, tuple(after)

    return Transform(init, update, hyper)


class PartitionState(NamedTuple):
    """State of `partition`."""

    inner: dict[str, Any]  # by label, the transform's state over a dict of its leaves by name


def partition(transforms: Mapping[str, Transform], labels: Labels) -> Transform:
    """Different transforms for different leaves.

    Each transform sees its leaves as a flat dict by name, the keys on the way to a leaf joined by
    dots: what it would see of ``dict(model.named_parameters())``. A plan is therefore made of
    such a dict: ``plan({"blocks.0.w": ...})``.

    Args:
        transforms: by label.
        labels: by name or pattern (``*`` stands for any text, the first match counts), or a
            function of name and leaf, the label of each leaf.

    Raises:
        ValueError: at `init`, for a leaf that no label matches, and for a label without a
            transform, naming them.
        TypeError: in `update`, for a keyword that none takes.

    Source: the idea is that of ``optax.partition``.

    Examples:
        >>> from ortho_func import adamw, muon
        >>> tx = partition(
        ...     {"matrix": muon(lr=0.02), "rest": adamw(lr=3e-4)},
        ...     lambda name, x: "matrix" if x.ndim == 2 and name != "head" else "rest",
        ... )
        >>> params = {"w": torch.ones(4, 4), "bias": torch.ones(4), "head": torch.ones(2, 4)}
        >>> state = tx.init(params)
        >>> list(state.inner["matrix"].momentum_buffer), list(state.inner["rest"].exp_avg)
        (['w'], ['bias', 'head'])
    """
    if isinstance(labels, Mapping):
        _check_labels(set(labels.values()), transforms)
    hyper = frozenset().union(*(tx.hyper for tx in transforms.values()))

    def init(params: Tree) -> PartitionState:
        found = _Parts(params, transforms, labels)
        split = found.split(params)
        return PartitionState({label: tx.init(split[label]) for label, tx in transforms.items()})

    def update(
        grads: Tree, state: Any, params: Tree | None = None, /, **given: Scalar
    ) -> tuple[Tree, PartitionState]:
        _known(given, hyper)
        found = _Parts(params, transforms, labels)
        mine, theirs = found.split(params), found.split(grads)
        done = {
            label: tx.update(theirs[label], state.inner[label], mine[label], **_taken(tx, given))
            for label, tx in transforms.items()
        }
        updates = found.join({label: moved for label, (moved, _) in done.items()})
        return updates, PartitionState({label: new for label, (_, new) in done.items()})

    return Transform(init, update, hyper)


class _Parts:
    """Which leaf of a tree has which label."""

    names: list[str]
    spec: TreeSpec
    labels: list[str]

    def __init__(self, params: Tree, transforms: Mapping[str, Transform], labels: Labels) -> None:
        self.names, leaves, self.spec = named_leaves(needed(params))
        self.transforms, self.labels = transforms, []
        for name, leaf in zip(self.names, leaves, strict=True):
            found = first_match(name, labels) if isinstance(labels, Mapping) else labels(name, leaf)
            if found is None:
                raise ValueError(f"no label matches {name} of shape {tuple(leaf.shape)}.")
            self.labels.append(found)
        _check_labels(set(self.labels), transforms)

    def split(self, tree: Tree) -> dict[str, dict[str, Any]]:
        parts: dict[str, dict[str, Any]] = {label: {} for label in self.transforms}
        for name, label, leaf in zip(
            self.names, self.labels, self.spec.flatten_up_to(tree), strict=True
        ):
            parts[label][name] = leaf
        return parts

    def join(self, parts: Mapping[str, Mapping[str, Any]]) -> Tree:
        leaves = [parts[label][name] for name, label in zip(self.names, self.labels, strict=True)]
        return tree_unflatten(leaves, self.spec)


def _check_labels(labels: set[str], transforms: Mapping[str, Transform]) -> None:
    unknown = sorted(str(label) for label in labels - set(transforms))
    if unknown:
        raise ValueError(
            f"no transform for the label {', '.join(unknown)}: there are {', '.join(transforms)}."
        )


class InjectState(NamedTuple):
    """State of `inject`."""

    hyperparams: dict[str, Tensor]  # by name, 0-d: replace one to change it
    inner: Any  # the transform's own state


def inject(transform: Transform, **values: float | Tensor) -> Transform:
    """Keep hyperparameters in the state, where a step's caller can change or map over them.

    A compiled step does not compile again when they change.

    Args:
        transform: what to run.
        values: of its hyperparameters, numbers or 0-d tensors; they take the place of those it
            was built with. Numbers become fp32 tensors on the parameters' device.

    Raises:
        TypeError: for a hyperparameter that the transform does not have.

    Source: the idea is that of ``optax.inject_hyperparams``.

    Examples:
        >>> from ortho_func import muon
        >>> tx = inject(muon(weight_decay=0.0), lr=0.02)
        >>> params = {"w": torch.eye(2)}
        >>> state = tx.init(params)
        >>> state.hyperparams
        {'lr': tensor(0.0200)}
        >>> state.hyperparams["lr"] = torch.tensor(0.0)
        >>> tx.update({"w": torch.eye(2)}, state, params)[0]["w"].abs().max()
        tensor(0.)
    """
    _known(values, transform.hyper)

    def init(params: Tree) -> InjectState:
        found = first_tensor(params)
        device = None if found is None else local(found).device
        held = {
            name: value
            if isinstance(value, Tensor)
            else torch.tensor(float(value), dtype=torch.float32, device=device)
            for name, value in values.items()
        }
        return InjectState(held, transform.init(params))

    def update(
        grads: Tree, state: Any, params: Tree | None = None, /, **given: Scalar
    ) -> tuple[Tree, InjectState]:
        now = {**state.hyperparams, **given}
        updates, inner = transform.update(grads, state.inner, params, **now)
        return updates, InjectState(dict(state.hyperparams), inner)

    return Transform(init, update, transform.hyper)


def _taken(transform: Transform, given: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {name: value for name, value in given.items() if name in transform.hyper}


def _known(given: Mapping[str, Any], hyper: frozenset[str]) -> None:
    unknown = sorted(set(given) - hyper)
    if unknown:
        raise TypeError(
            f"no hyperparameter {', '.join(unknown)}: there are {', '.join(sorted(hyper))}."
        )
