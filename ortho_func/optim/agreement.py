"""Ranks compare what they are about to do, once, so that a difference is an error, not a hang.

A *side* of the comparison is a set of ranks over which parameters lie. Its members exchange one
short word each: a digest of what they would do there and within it, and what went wrong so far.
Every rank walks its sides in one order, the same everywhere, and then back, so that what one
rank met reaches those that share no parameter with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ortho_func.geometry import placed

__all__ = ["Ranks", "agree", "facts_about", "plain"]

Ranks = tuple[int, ...]


class _Word(NamedTuple):
    """What one rank tells the others of a side."""

    digests: dict[Ranks, str]  # of its facts, by side within this one; () is this one
    faults: dict[int, str]  # what went wrong, by the rank that it went wrong on
    alone: bool  # whether this is the only side of the rank


# Among the faults, a disagreement between ranks.
_DISAGREEMENT = -1


def agree(
    sides: Mapping[Ranks, Callable[[], Any]],
    facts: Mapping[Ranks, Sequence[str]],
    common: Sequence[str] = (),
    fault: Exception | None = None,
) -> dict[Ranks, Any]:
    """Find every side's process group, and raise on all ranks if they disagree.

    Args:
        sides: by set of ranks, what finds or makes the process group over it.
        facts: by set of ranks, what is to happen there, a line a fact, in order.
        common: facts that hold on every side.
        fault: an error that this rank met, for all to raise.

    Returns:
        The process groups.

    Raises:
        ValueError: on every rank alike: the first difference, or the first rank's fault.
        Exception: the fault itself, where every rank met the same one.
    """
    rank = dist.get_rank() if sides else 0
    order = tuple(sorted(sides, key=lambda side: (-len(side), side)))
    talk = _Talk(order, facts, common, {} if fault is None else {rank: str(fault)}, set())
    groups: dict[Ranks, Any] = {}
    met = {rank}
    returning = []
    for side in order:
        if side in talk.unshared:
            continue
        groups[side] = sides[side]()
        if _pretended(groups[side]):
            continue
        met.update(side)
        if not talk.exchange(side, groups[side]):
            returning.append(side)
    for side in reversed(returning):
        talk.exchange(side, groups[side])
    if talk.faults:
        _raise(talk.faults, met, fault)
    return groups


def facts_about(name: str, parameter: Tensor, options: Mapping[str, Any]) -> list[str]:
    """What ranks must agree on about one parameter, a line a fact."""
    found = [f"{name}: shape {tuple(parameter.shape)}", f"{name}: {parameter.dtype}"]
    found.append(f"{name}: {placed(parameter)}")
    found += [f"{name}: {option}={plain(value)}" for option, value in options.items()]
    return found


def plain(value: Any) -> str:
    """A value as text that is the same in every process."""
    if isinstance(value, bool):
        return f"{value}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(plain, value))})"
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return f"{float(value)}" if isinstance(value, (int, float)) else f"{value}"


def _pretended(group: Any) -> bool:
    """Whether a group stands in for ranks that do not exist."""
    return group is None or dist.get_backend(group) == "fake"


@dataclass(frozen=True)
class _Talk:
    """What this rank has to say on all its sides, and what it has heard."""

    order: tuple[Ranks, ...]
    facts: Mapping[Ranks, Sequence[str]]
    common: Sequence[str]
    faults: dict[int, str]
    unshared: set[Ranks]  # sides that some of their ranks know nothing of

    def exchange(self, side: Ranks, group: Any) -> bool:
        """Tell the others of a side and hear them; whether none of them has other sides."""
        within = [other for other in self.order if set(other) <= set(side)]
        digests = {() if other == side else other: _digest(self.lines(other)) for other in within}
        words: list[Any] = [None] * len(side)
        word = _Word(digests, dict(self.faults), len(self.order) == 1)
        dist.all_gather_object(words, word, group=group)
        for word in words:
            for rank, text in word.faults.items():
                self.faults.setdefault(rank, text)
        by_rank = dict(zip(side, words, strict=True))
        for key in sorted({key for word in words for key in word.digests}):
            ranks = key or side
            found = [by_rank[rank].digests.get(key) for rank in ranks]
            if None in found:
                self.unshared.add(ranks)
            odd = [rank for rank, digest in zip(ranks, found, strict=True) if digest != found[0]]
            if odd and not self.faults:
                mine = self.lines(ranks)
                self.faults[_DISAGREEMENT] = _explain(ranks[0], odd[0], mine, group)
        return all(word.alone for word in words)

    def lines(self, side: Ranks) -> list[str]:
        """All facts of a side."""
        return [*self.common, *self.facts.get(side, ())]


def _explain(first: int, second: int, mine: list[str], group: Any) -> str:
    """The first difference between two ranks' facts, found by all ranks of a side together."""
    lines = []
    for rank in (first, second):
        held: list[Any] = [mine]
        dist.broadcast_object_list(held, src=rank, group=group)
        lines.append(held[0])
    pairs = zip_longest(*lines, fillvalue="(nothing)")
    differing = ((here, there) for here, there in pairs if here != there)
    here, there = next(differing, ("a process group", "(nothing)"))
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
