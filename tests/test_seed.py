"""The problem that started it: shards that are empty on some ranks must not stop the step.

Real `fully_shard` on dim 0; on dim 1, where it refuses uneven shards, `distribute_tensor`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import (
    Shard,
    by_fully_shard,
    by_placements,
    exact,
    expected,
    gather,
    relative_error,
    train,
    whole_tensors,
)
from torch import Tensor

HYPER = {"lr": 0.1, "weight_decay": 0.1}


def place(tensors: dict[str, Tensor], world: int, dim: int) -> dict[str, Tensor]:
    if dim == 0:
        return by_fully_shard(tensors, (world,))
    return by_placements(tensors, (world,), [Shard(1)])


def check(
    rank: int, world: int, shape: tuple[int, int], count: int, dim: int, algorithm: str, seed: int
) -> tuple[tuple[int, ...], float, float]:
    """Some steps with an fp32 and a bf16 wire: the local shape, and the error of each."""
    shapes = {f"w{n}": shape for n in range(count)}
    tensors = whole_tensors(shapes, seed)
    gradients = [whole_tensors(shapes, seed + 1 + n) for n in range(3)]
    for step in gradients:  # slices of clearly different norms: rounding must not turn a choice
        for name, gradient in step.items():
            extent = gradient.shape[dim]
            profile = torch.linspace(1.0, 1.0 + 0.15 * extent, extent)
            step[name] = gradient * (profile[:, None] if dim == 0 else profile)
    right = expected(tensors, gradients, algorithm, **HYPER)
    errors, local = [], ()
    for wire in (torch.float32, torch.bfloat16):
        parameters = place(tensors, world, dim)
        train(
            parameters, gradients, algorithm,
            wire_dtype=wire, **exact(algorithm), **HYPER,
        )  # fmt: skip
        local = tuple(parameters["w0"].to_local().shape)
        found = {name: gather(parameter) for name, parameter in parameters.items()}
        if wire == torch.float32:
            errors.append(max(relative_error(found[n], right[n]) for n in shapes))
        else:  # of what the steps changed, so that the parameter's size hides nothing
            kept = (1 - HYPER["lr"] * HYPER["weight_decay"]) ** len(gradients)
            errors.append(
                max(
                    relative_error(found[n] - kept * tensors[n], right[n] - kept * tensors[n])
                    for n in shapes
                )
            )
    return local, errors[0], errors[1]


@pytest.mark.parametrize("algorithm", ["muon", "normuon", "dion2"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("extent", "world"), [(5, 4), (2, 4), (15, 4)])
def test_uneven_and_empty_shards(
    pool: Any, extent: int, world: int, dim: int, algorithm: str
) -> None:
    seed = torch.seed() % 2**31
    shape = (extent, 24) if dim == 0 else (24, extent)
    results = pool.run(check, shape, 3, dim, algorithm, seed, world=world)
    chunk = -(-extent // world)
    held = [max(0, min(chunk, extent - rank * chunk)) for rank in range(world)]
    assert [local[dim] for local, _, _ in results] == held
    assert max(exact for _, exact, _ in results) < 1e-5, (seed, results)
    # polar(B) has condition about 1/s_min: two roundings of 2^-9, a few times amplified
    assert max(rounded for _, _, rounded in results) < 3e-2, (seed, results)


@pytest.mark.parametrize("algorithm", ["muon", "normuon", "dion2"])
@pytest.mark.parametrize("dim", [0, 1])
def test_thirty_two_gates_on_eight_ranks(pool: Any, dim: int, algorithm: str) -> None:
    seed = torch.seed() % 2**31
    shape = (18, 2304) if dim == 0 else (2304, 18)
    results = pool.run(check, shape, 32, dim, algorithm, seed, world=8, timeout=150)
    assert [local[dim] for local, _, _ in results] == [3] * 6 + [0, 0]
    assert max(exact for _, exact, _ in results) < 1e-5, (seed, results)
    assert max(rounded for _, _, rounded in results) < 3e-2, (seed, results)
