"""Gradients that replicas have not averaged yet, averaged a chunk at a time.

What an all-reduce holds at once is bounded: parameters are cut into chunks of `bucket_bytes`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ortho_func.geometry import local, replica_groups
from ortho_func.primitives.collectives import all_reduce, wait
from ortho_func.primitives.packing import pack, unpack

__all__ = ["Chunk", "alone", "chunks"]


@dataclass(frozen=True)
class Chunk:
    """Some of a list of tensors, averaged over the same groups by one all-reduce each."""

    numbers: tuple[int, ...]
    groups: tuple[str, ...] = ()  # names of the process groups, one for each axis of replicas
    over: int = 1

    def pick(self, values: Sequence[Any]) -> list[Any]:
        """The chunk's part of a list."""
        return [values[number] for number in self.numbers]

    def average(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The mean over replicas of the chunk's tensors. Every rank of the groups must call it."""
        if self.over == 1 or not tensors:
            return list(tensors)
        flat, receipt = pack(tensors)
        for group in self.groups:
            flat = wait(all_reduce(flat, group=group))
        return unpack(flat / self.over, receipt)


def alone(count: int) -> tuple[Chunk, ...]:
    """All of a list, with nothing to average."""
    return (Chunk(tuple(range(count))),)


def chunks(params: Sequence[Tensor], process_group: Any, *, bucket_bytes: int) -> tuple[Chunk, ...]:
    """Parameters cut into chunks, each of one dtype and set of replicas and at most so large."""
    alike: dict[Any, list[int]] = defaultdict(list)
    for number, p in enumerate(params):
        groups = replica_groups(p, process_group)
        names = tuple(group.group_name for group in groups)
        over = 1
        for group in groups:
            over *= group.size()
        alike[names, over, p.dtype].append(number)
    found = []
    for (names, over, _), numbers in alike.items():
        if over == 1:
            found.append(Chunk(tuple(numbers)))
            continue
        for part in _parts(params, numbers, bucket_bytes):
            found.append(Chunk(tuple(part), names, over))
    return tuple(found)


def _parts(params: Sequence[Tensor], numbers: Sequence[int], most: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    held = 0
    for number in numbers:
        shard = local(params[number])
        size = shard.numel() * shard.element_size()
        if parts[-1] and held + size > most:
            parts.append([])
            held = 0
        parts[-1].append(number)
        held += size
    return parts
