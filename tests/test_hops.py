"""Two hops home: the results of one, over fewer connections."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import Replicate, Shard, by_placements, train, whole_tensors

from ortho_func.plan import Plan

COPIES, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
SHAPES = {"a": (8, 12), "b": (16, 8), "c": (5, 7), "d": (3, 9), "e": (8, 12), "f": (1, 6)}

# A mesh's shape, and the placements on it.
MESHES: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "hsdp 2x2": ((2, 2), (COPIES, ROWS)),
    "hsdp 2x4": ((2, 4), (COPIES, ROWS)),
    "hsdp 4x2": ((4, 2), (COPIES, COLUMNS)),
    "replicas last": ((4, 2), (ROWS, COPIES)),
    "replicas between": ((2, 2, 2), (ROWS, COPIES, COLUMNS)),
    "two axes of replicas": ((2, 2, 2), (COPIES, ROWS, COPIES)),
    "replicas of two axes": ((2, 2, 2), (COPIES, ROWS, COLUMNS)),
}


def bits(
    world: int, mesh: str, algorithm: str, seed: int, **options: Any
) -> tuple[list[torch.Tensor], Plan]:
    """Every local shard and state after two steps."""
    shape, placements = MESHES[mesh]
    parameters = by_placements(whole_tensors(SHAPES, seed), shape, placements)
    gradients = [whole_tensors(SHAPES, seed + step) for step in (1, 2)]
    optimizer = train(parameters, gradients, algorithm, lr=0.1, **options)
    found = [p.to_local().clone() for p in parameters.values()]
    for p in parameters.values():
        found += [
            t.to_local().clone() for t in optimizer.state[p].values() if hasattr(t, "to_local")
        ]
    return found, optimizer.plan


def one_and_two(
    rank: int, world: int, mesh: str, algorithm: str, seed: int, options: dict[str, Any]
) -> tuple[bool, bool]:
    """Whether the bits are equal, and whether both ways were taken."""
    one, plan_of_one = bits(world, mesh, algorithm, seed, hops="one", **options)
    two, plan_of_two = bits(world, mesh, algorithm, seed, hops="two", **options)
    equal = len(one) == len(two) and all(map(torch.equal, one, two))
    ways = {b.hops for b in plan_of_one.buckets}, {b.hops for b in plan_of_two.buckets}
    return equal, ways == ({1}, {2})


@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("muon", {"wire": "exact", "bucket_bytes": 400}),
        ("normuon", {"wire": "dense"}),
        ("normuon", {"wire": "exact", "balance": "uniform"}),
        ("dion2", {"wire": "dense", "balance": "uniform", "wire_dtype": torch.float32}),
    ],
    ids=["muon exact", "normuon dense", "normuon exact uniform", "dion2 dense uniform"],
)
def test_bitwise_equal_to_one_hop(
    pool: Any, mesh: str, algorithm: str, options: dict[str, Any]
) -> None:
    seed = torch.seed() % 2**31
    world = torch.Size(MESHES[mesh][0]).numel()
    found = pool.run(one_and_two, mesh, algorithm, seed, options, world=world)
    assert found == [(True, True)] * world, seed
