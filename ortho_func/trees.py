"""Names of the leaves of a pytree, and what is said of leaves by name.

Names join the keys on the way to a leaf by dots: ``{"blocks": [{"w": x}]}`` has one leaf,
``blocks.0.w``. A dict of ``named_parameters()`` keeps its names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten_with_path

from ortho_func.geometry import Reading

__all__ = ["Readings", "first_match", "named_leaves", "readings_of"]

T = TypeVar("T")
Readings = Mapping[str, Reading] | Callable[[str, Tensor], Reading | None]


def named_leaves(tree: Any) -> tuple[list[str], list[Any], TreeSpec]:
    """Names and leaves in the tree's order, and its structure; None is a leaf.

    Examples:
        >>> import torch
        >>> named_leaves({"blocks": [{"w": torch.ones(2)}], "head": torch.ones(1)})[0]
        ['blocks.0.w', 'head']
    """
    found, spec = tree_flatten_with_path(tree)
    names = [".".join(_part(key) for key in path) or "parameter" for path, _ in found]
    return names, [leaf for _, leaf in found], spec


def _part(key: Any) -> str:
    for attribute in ("key", "idx", "name"):  # of a mapping, a sequence, a NamedTuple
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def first_match(name: str, patterns: Mapping[str, T]) -> T | None:
    """The value of the first pattern that matches: ``*`` stands for any text.

    Examples:
        >>> first_match("blocks.0.bias", {"*.weight": 1, "blocks.*": 2, "*": 3})
        2
    """
    for pattern, value in patterns.items():
        if _matches(name, pattern):
            return value
    return None


def _matches(name: str, pattern: str) -> bool:
    """Written out, as `fnmatch` cannot be traced by a compiler."""
    head, *parts = pattern.split("*")
    if not parts:
        return name == pattern
    if not name.startswith(head):
        return False
    at = len(head)
    for part in parts[:-1]:
        found = name.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return len(name) - at >= len(parts[-1]) and name.endswith(parts[-1])


def readings_of(
    names: Sequence[str],
    leaves: Sequence[Tensor],
    readings: Readings | None,
    default: Reading | None = None,
) -> list[Reading]:
    """How each leaf is read as matrices, checked against its shape.

    Args:
        names: of the leaves.
        leaves: the parameters; DTensors with their whole shape.
        readings: by name or pattern, or a function of name and leaf; None takes the default.
        default: of leaves that `readings` says nothing of.

    Raises:
        ValueError: a leaf that cannot be read so, or a name in `readings` that is no leaf's.
    """
    chosen = default or Reading()
    if readings is None:
        found = [chosen] * len(names)
    elif isinstance(readings, Mapping):
        for pattern in readings:
            if not any(_matches(name, pattern) for name in names):
                raise ValueError(
                    f"readings speak of {pattern!r}, but there are only {', '.join(names)}."
                )
        found = [first_match(name, readings) or chosen for name in names]
    else:
        found = [readings(name, leaf) or chosen for name, leaf in zip(names, leaves, strict=True)]
    for name, leaf, reading in zip(names, leaves, found, strict=True):
        reading.check(tuple(leaf.shape), name)
    return found
