"""Ranks compare their plans once, at construction, so that a difference is an error, not a hang."""

from __future__ import annotations

import hashlib
from itertools import zip_longest
from typing import Any

import torch

from ortho_func.plan import Plan

__all__ = ["check_agreement"]


def check_agreement(made: Plan, handles: list[Any]) -> None:
    """Raise the same `ValueError` on every rank of a group if their plans differ.

    The only communication of construction: one digest a rank, over each group of the plan.
    """
    seen: dict[str, Any] = {}
    domains: dict[str, Any] = {}
    for handle, spec in zip(handles, made.params, strict=True):
        if handle is not None and handle.size() > 1:
            seen.setdefault(handle.group_name, handle)
            domains.setdefault(handle.group_name, spec.layout.domain)
    for name, handle in seen.items():
        if torch.distributed.get_backend(handle) == "fake":
            continue  # stands in for ranks that do not exist
        _compare(made.lines(domains[name]), handle)


def _compare(mine: list[str], handle: Any) -> None:
    digests: list[Any] = [None] * handle.size()
    text = "\n".join(mine)
    torch.distributed.all_gather_object(digests, _digest(text), group=handle)
    if len(set(digests)) == 1:
        return
    found: list[Any] = [None] * handle.size()
    torch.distributed.all_gather_object(found, mine, group=handle)
    ranks = torch.distributed.get_process_group_ranks(handle)
    for rank, lines in zip(ranks[1:], found[1:], strict=True):
        for here, there in zip_longest(found[0], lines, fillvalue="(nothing)"):
            if here != there:
                raise ValueError(
                    "the ranks disagree about what the optimizer is to do. First difference:\n"
                    f"  rank {ranks[0]}: {here}\n  rank {rank}: {there}\n"
                    "Build it on every rank with the same parameters in the same order and "
                    "with the same options."
                )


def _digest(text: str) -> str:
    """A short digest."""
    return hashlib.sha256(text.encode()).hexdigest()
