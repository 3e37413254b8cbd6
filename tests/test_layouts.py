"""Every algorithm on every layout and world size equals one process on the gathered tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import (
    WHOLE,
    Replicate,
    Shard,
    by_fully_shard,
    by_placements,
    by_tensor_parallel,
    exact,
    expected,
    gather,
    relative_error,
    train,
    whole_tensors,
)

MLP = {"up": (20, 6), "down": (6, 20)}
UNEVEN = {"up": (14, 5), "down": (5, 14)}
EXPERTS = {"w1": (6, 8, 4), "w2": (6, 4, 8), "router": (6, 4)}

# name -> (world, shapes, how to place them, its arguments, options)
LAYOUTS: dict[str, tuple[int, Any, Any, dict[str, Any], dict[str, Any]]] = {
    # the seed's cases: real fully_shard, empty and uneven shards
    "fsdp 5 rows on 4": (4, {"w": (5, 12), "v": (8, 12)}, by_fully_shard, {"mesh": (4,)}, {}),
    "fsdp 2 rows on 4": (4, {"w": (2, 12), "v": (12, 2)}, by_fully_shard, {"mesh": (4,)}, {}),
    "fsdp 15 rows on 4": (4, {"w": (15, 7)}, by_fully_shard, {"mesh": (4,)}, {}),
    "fsdp 1 row on 4": (4, {"w": (1, 16), "v": (16, 1)}, by_fully_shard, {"mesh": (4,)}, {}),
    "fsdp on 3": (3, {"a": (9, 4), "b": (4, 9), "c": (9, 4)}, by_fully_shard, {"mesh": (3,)}, {}),
    "fsdp on 2": (2, MLP, by_fully_shard, {"mesh": (2,)}, {}),
    "fsdp on 1": (1, MLP, by_fully_shard, {"mesh": (1,)}, {}),
    "columns, 5 on 4": (
        4, {"w": (12, 5), "v": (7, 15)}, by_placements,
        {"mesh": (4,), "placements": [Shard(1)]}, {},
    ),
    "columns, 2 on 4": (
        4, {"w": (12, 2)}, by_placements, {"mesh": (4,), "placements": [Shard(1)]}, {},
    ),
    "rows and columns": (
        4, {"w": (12, 6), "v": (6, 13)}, by_placements,
        {"mesh": (4,), "placements": {"w": [Shard(0)], "v": [Shard(1)]}}, {},
    ),
    "replicated": (
        2, {"w": (6, 4), "v": (4, 6), "u": (5, 5)}, by_placements,
        {"mesh": (2,), "placements": [Replicate()]}, {},
    ),
    # HSDP
    "hsdp 2x2": (4, MLP, by_fully_shard, {"mesh": (2, 2)}, {}),
    "hsdp 2x4 uneven": (
        8, {"a": (5, 6), "b": (6, 5), "c": (9, 3)}, by_fully_shard, {"mesh": (2, 4)}, {},
    ),
    "hsdp 3x2": (6, UNEVEN, by_fully_shard, {"mesh": (3, 2)}, {}),
    # tensor parallel, alone and with FSDP on another and on the same dim
    "tp": (2, MLP, by_tensor_parallel, {"mesh": (2,)}, {}),
    "tp on 4": (4, {"up": (20, 6), "down": (6, 20)}, by_tensor_parallel, {"mesh": (4,)}, {}),
    "fsdp x tp": (4, MLP, by_tensor_parallel, {"mesh": (2, 2)}, {}),
    "fsdp x tp 4x2": (
        8, {"up": (16, 6), "down": (6, 20)}, by_tensor_parallel, {"mesh": (4, 2)}, {},
    ),
    "fsdp x tp uneven": (4, UNEVEN, by_tensor_parallel, {"mesh": (2, 2)}, {}),
    "both dims": (
        4, {"w": (9, 6), "v": (5, 7)}, by_placements,
        {"mesh": (2, 2), "placements": [Shard(0), Shard(1)]}, {},
    ),
    "both dims, crossed": (
        6, {"w": (9, 6), "v": (5, 7)}, by_placements,
        {"mesh": (3, 2), "placements": [Shard(1), Shard(0)]}, {},
    ),
    # experts
    "experts on 2": (
        2, EXPERTS, by_placements, {"mesh": (2,), "placements": [Shard(0)]}, {"flatten": False},
    ),
    "experts on 4": (
        4, EXPERTS, by_placements, {"mesh": (4,), "placements": [Shard(0)]}, {"flatten": False},
    ),
    "experts on 8, fewer than ranks": (
        8, {"w": (3, 4, 6)}, by_placements, {"mesh": (8,), "placements": [Shard(0)]},
        {"flatten": False},
    ),
    "experts by rows": (
        4, {"w": (3, 6, 4)}, by_placements, {"mesh": (4,), "placements": [Shard(1)]},
        {"flatten": False},
    ),
    "experts by columns": (
        4, {"w": (3, 4, 6)}, by_placements, {"mesh": (4,), "placements": [Shard(2)]},
        {"flatten": False},
    ),
    "experts x fsdp": (
        4, {"w": (4, 8, 6), "v": (5, 3, 8)}, by_placements,
        {"mesh": (2, 2), "placements": [Shard(0), Shard(1)]}, {"flatten": False},
    ),
    "experts replicated": (
        4, {"w": (4, 5, 6)}, by_placements,
        {"mesh": (2, 2), "placements": [Replicate(), Shard(0)]}, {"flatten": False},
    ),
    # rows that are matrices of their own
    "qkv across shards": (
        4, {"qkv": (12, 16)}, by_fully_shard, {"mesh": (4,)}, {"split_sizes": (8, 2, 2)},
    ),
    "qkv, shards smaller than blocks": (
        8, {"qkv": (12, 16)}, by_fully_shard, {"mesh": (8,)}, {"split_sizes": (7, 3, 2)},
    ),
    "qkv by columns": (
        3, {"qkv": (12, 16)}, by_placements, {"mesh": (3,), "placements": [Shard(1)]},
        {"split_sizes": (8, 2, 2)},
    ),
    "heads across shards": (4, {"w": (18, 6)}, by_fully_shard, {"mesh": (4,)}, {"num_heads": 6}),
    "heads, one rank": (1, {"w": (18, 6)}, by_fully_shard, {"mesh": (1,)}, {"num_heads": 6}),
    # convolutions
    "convolution": (
        4, {"w": (6, 4, 3, 3), "v": (5, 3, 2)}, by_fully_shard, {"mesh": (4,)}, {"flatten": True},
    ),
    "convolution by input channels": (
        2, {"w": (6, 4, 3, 3)}, by_placements, {"mesh": (2,), "placements": [Shard(1)]},
        {"flatten": True},
    ),
}  # fmt: skip


def check(
    rank: int, world: int, layout: str, algorithm: str, seed: int, options: dict[str, Any]
) -> float:
    """Largest relative error over the parameters after some steps, NaN poisoned to infinity."""
    _, shapes, place, arguments, own = LAYOUTS[layout]
    tensors = whole_tensors(shapes, seed)
    gradients = [whole_tensors(shapes, seed + 1 + n) for n in range(3)]
    hyper = {"lr": 0.1, "weight_decay": 0.2, "adjust_lr_fn": "match_rms_adamw"}
    parameters = place(tensors, **arguments)
    train(
        parameters, gradients, algorithm,
        wire_dtype=torch.float32, **exact(algorithm), **hyper, **own, **options,
    )  # fmt: skip
    right = expected(tensors, gradients, algorithm, **hyper, **own)
    found = {name: gather(parameter) for name, parameter in parameters.items()}
    assert all(parameter.shape == right[name].shape for name, parameter in found.items())
    return max(relative_error(found[name], right[name]) for name in shapes)


@pytest.mark.parametrize("algorithm", list(WHOLE))
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_equals_one_process(pool: Any, layout: str, algorithm: str, request: Any) -> None:
    seed = torch.seed() % 2**31
    for wire in ("auto", "dense", "exact"):
        errors = pool.run(check, layout, algorithm, seed, {"wire": wire}, world=LAYOUTS[layout][0])
        assert max(errors) < 1e-5, (wire, seed, errors)


def row_ranges(rows: int, world: int) -> list[tuple[int, int]]:
    """What `fully_shard` gives each rank of `rows` rows."""
    chunk = -(-rows // world)
    return [(min(r * chunk, rows), min((r + 1) * chunk, rows)) for r in range(world)]


def check_local(
    rank: int, world: int, shapes: dict[str, tuple[int, ...]], algorithm: str, seed: int, wire: str
) -> float:
    """Local selection against the reference that is told what each rank holds."""
    tensors = whole_tensors(shapes, seed)
    gradients = [whole_tensors(shapes, seed + 1 + n) for n in range(4)]
    hyper = {"lr": 0.1, "weight_decay": 0.2}
    parameters = by_fully_shard(tensors, (world,))
    train(
        parameters, gradients, algorithm,
        orthogonalizer="svd", wire_dtype=torch.float32, selection="local", wire=wire, **hyper,
    )  # fmt: skip
    held = {name: row_ranges(shape[0], world) for name, shape in shapes.items()}
    whole = {
        name: sum(stop > start for start, stop in ranges) == 1 for name, ranges in held.items()
    }
    shards = {name: None if whole[name] else ranges for name, ranges in held.items()}
    right = expected(tensors, gradients, algorithm, shards=shards, **hyper)
    found = {name: gather(parameter) for name, parameter in parameters.items()}
    return max(relative_error(found[name], right[name]) for name in shapes)


@pytest.mark.parametrize("algorithm", ["dion2", "dion3"])
@pytest.mark.parametrize(
    ("world", "shapes"),
    [
        (2, {"w": (12, 7), "v": (7, 12)}),
        (4, {"w": (18, 7), "v": (5, 9), "u": (3, 9), "one": (1, 6)}),
        (8, {"w": (18, 24), "v": (18, 24)}),
    ],
)
def test_local_selection_is_of_each_shards_own_rows(
    pool: Any, world: int, shapes: dict[str, tuple[int, ...]], algorithm: str
) -> None:
    seed = torch.seed() % 2**31
    for wire in ("auto", "dense", "exact"):
        errors = pool.run(check_local, shapes, algorithm, seed, wire, world=world)
        assert max(errors) < 1e-5, (wire, seed, errors)
