"""Ranks compare what they are about to do, once, so that a difference is an error, not a hang.

A *side* of the comparison is a set of ranks over which parameters lie. Its members exchange one
short word each: a digest of what they would do there and within it, and what went wrong so far.
Every rank walks its sides in one order, the same everywhere, and then back, so that what one
rank met reaches those that share no parameter with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ortho_func.geometry import placed

__all__ = ["Ranks", "agree", "facts_about"]

Ranks = tuple[int, ...]


class _Word(NamedTuple):
    """What one rank tells the others of a side."""

    digests: dict[Ranks, str]  # of its facts, by side, of all sides within this one
    faults: dict[int, str]  # what went wrong, by the rank that it went wrong on
    alone: bool  # whether this is the only side of the rank


# Among the faults, a disagreement between ranks.
_DISAGREEMENT = -1


def agree(
    sides: Mapping[Ranks, Callable[[], Any]],
    facts: Mapping[Ranks, Sequence[str]],
    fault: Exception | None = None,
) -> dict[Ranks, Any]:
    """Find every side's process group, and raise on all ranks if they disagree.

    Args:
        sides: by set of ranks, what finds or makes the process group over it.
        facts: by set of ranks, what is to happen there, a line a fact, in order.
        fault: an error that this rank met, for all to raise.

    Returns:
        The process groups.

    Raises:
        ValueError: on every rank alike: the first difference, or the first rank's fault.
        Exception: the fault itself, where every rank met the same one.
    """
    rank = dist.get_rank() if sides else 0
    faults = {} if fault is None else {rank: str(fault)}
    order = sorted(sides, key=lambda side: (-len(side), side))
    groups: dict[Ranks, Any] = {}
    met = {rank}
    returning = []
    for side in order:
        groups[side] = sides[side]()
        if _pretended(groups[side]):
            continue
        met.update(side)
        if not _exchange(side, order, facts, faults, groups[side]):
            returning.append(side)
    for side in reversed(returning):
        _exchange(side, order, facts, faults, groups[side])
    if faults:
        _raise(faults, met, fault)
    return groups


def facts_about(name: str, parameter: Tensor, options: Mapping[str, Any]) -> list[str]:
    """What ranks must agree on about one parameter, a line a fact."""
    found = [f"{name}: shape {tuple(parameter.shape)}", f"{name}: {parameter.dtype}"]
    found.append(f"{name}: {placed(parameter)}")
    found += [f"{name}: {option}={_plain(value)}" for option, value in options.items()]
    return found


def _plain(value: Any) -> str:
    """A value as text that is the same in every process."""
    if isinstance(value, bool):
        return f"{value}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_plain, value))})"
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return f"{float(value)}" if isinstance(value, (int, float)) else f"{value}"


def _pretended(group: Any) -> bool:
    """Whether a group stands in for ranks that do not exist."""
    return group is None or dist.get_backend(group) == "fake"


def _exchange(
    side: Ranks,
    order: Sequence[Ranks],
    facts: Mapping[Ranks, Sequence[str]],
    faults: dict[int, str],
    group: Any,
) -> bool:
    """Tell the others, hear them, and add to the faults; whether no rank has other sides."""
    within = [other for other in order if set(other) <= set(side)]
    mine = _Word({s: _digest(facts.get(s, ())) for s in within}, dict(faults), len(order) == 1)
    words: list[Any] = [None] * len(side)
    dist.all_gather_object(words, mine, group=group)
    for word in words:
        for rank, text in word.faults.items():
            faults.setdefault(rank, text)
    if not faults:
        by_rank = dict(zip(side, words, strict=True))
        differing = _first_difference(by_rank)
        if differing is not None:
            faults[_DISAGREEMENT] = _explain(*differing, facts, group)
    return all(word.alone for word in words)


def _first_difference(words: Mapping[int, _Word]) -> tuple[Ranks, int, int] | None:
    """The first side about which two ranks disagree, and the two."""
    for side in sorted({side for word in words.values() for side in word.digests}):
        first, *others = side
        for other in others:
            if words[first].digests.get(side) != words[other].digests.get(side):
                return side, first, other
    return None


def _explain(
    side: Ranks, first: int, second: int, facts: Mapping[Ranks, Sequence[str]], group: Any
) -> str:
    """The first difference between two ranks, found by all together."""
    lines = []
    for rank in (first, second):
        held: list[Any] = [list(facts.get(side, ()))]
        dist.broadcast_object_list(held, src=rank, group=group)
        lines.append(held[0])
    pairs = zip_longest(*lines, fillvalue="(nothing)")
    here, there = next((here, there) for here, there in pairs if here != there)
    return (
        "the ranks disagree about what the optimizer is to do. First difference:\n"
        f"  rank {first}: {here}\n  rank {second}: {there}\n"
        "Build it on every rank with the same parameters in the same order and with the same "
        "options."
    )


def _raise(faults: Mapping[int, str], met: set[int], own: Exception | None) -> None:
    texts = {faults.get(rank) for rank in met} | set(faults.values())
    if own is not None and len(texts) == 1:
        raise own
    rank = min(faults)
    text = faults[rank] if rank == _DISAGREEMENT else f"rank {rank}: {faults[rank]}"
    raise ValueError(text) from own


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
