"""`nonfinite="skip"`: a matrix with something not finite sits the step out, everywhere alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from layouts import (
    WHOLE,
    Replicate,
    Shard,
    by_fully_shard,
    by_placements,
    exact,
    gather,
    relative_error,
    scatter_like,
    whole_tensors,
)
from torch import Tensor

import ortho_func

HYPER = {"lr": 0.1, "weight_decay": 0.2, "wire_dtype": torch.float32}
TRACED = {"backend": "eager"}
# name -> world, shape, how to place it, its arguments, options, where it is bad, what is skipped
Where = tuple[Any, ...]
CASES: dict[str, tuple[int, Any, Any, dict[str, Any], dict[str, Any], Where, Where]] = {
    "fsdp": (2, (5, 6), by_fully_shard, {"mesh": (2,)}, {}, (4, 1), ()),
    "empty shards": (4, (2, 6), by_fully_shard, {"mesh": (4,)}, {}, (0, 5), ()),
    "hsdp": (4, (6, 5), by_fully_shard, {"mesh": (2, 2)}, {}, (0, 0), ()),
    "columns": (
        3, (6, 4), by_placements, {"mesh": (3,), "placements": [Shard(1)]}, {}, (2, 3), (),
    ),
    "replicated": (
        2, (6, 4), by_placements, {"mesh": (2,), "placements": [Replicate()]}, {}, (2, 3), (),
    ),
    "one expert": (
        2, (3, 4, 6), by_placements, {"mesh": (2,), "placements": [Shard(1)]},
        {"flatten": False}, (1, 2, 3), (1,),
    ),
    "one row block": (
        2, (9, 6), by_placements, {"mesh": (2,), "placements": [Shard(0)]},
        {"split_sizes": (3, 3, 3)}, (4, 2), (slice(3, 6),),
    ),
}  # fmt: skip
BAD = (math.nan, math.inf, -math.inf)


def everything(optimizer: Any, p: Tensor) -> dict[str, Tensor]:
    return {"w": p.detach(), **optimizer.state[p]}


def skipping(
    rank: int, world: int, case: str, algorithm: str, options: dict[str, Any]
) -> tuple[float, float, bool]:
    """Of the skipped part, whether its bits are the same; of the rest, the error, and movement."""
    _, shape, place, arguments, own, where, skipped = CASES[case]
    shapes = {"bad": shape, "good": shape}
    tensors = whole_tensors(shapes, 0)
    results = []
    for bad in (None, *BAD):  # without anything bad it is what must happen to the rest
        gradients = [whole_tensors(shapes, 1 + n) for n in range(3)]
        if bad is not None:
            gradients[1]["bad"][where] = bad
        parameters = place(tensors, **arguments)
        optimizer = WHOLE[algorithm][0](
            list(parameters.items()), nonfinite="skip",
            **{**WHOLE[algorithm][2], **exact(algorithm), **HYPER, **own, **options},
        )  # fmt: skip
        for number, step in enumerate(gradients):
            for name, p in parameters.items():
                p.grad = scatter_like(step[name], p)
            if number == 1:
                before = {
                    k: gather(t).clone()
                    for k, t in everything(optimizer, parameters["bad"]).items()
                }
            optimizer.step()
            if number == 1:
                after = {
                    k: gather(t).clone()
                    for k, t in everything(optimizer, parameters["bad"]).items()
                }
        results.append((before, after, {n: gather(p).clone() for n, p in parameters.items()}))
    (_, right, end), *found = results
    same, error = True, 0.0
    for before, after, last in found:
        for key, kept in before.items():
            same &= torch.equal(
                after[key][_rows(skipped, key, own)], kept[_rows(skipped, key, own)]
            )
        error = max(error, relative_error(last["good"], end["good"]))
        if skipped:  # the other matrices of the same parameter have moved
            rest = torch.ones(shape, dtype=torch.bool)
            rest[skipped] = False
            error = max(error, relative_error(after["w"][rest], right["w"][rest]))
        assert all(bool(t.isfinite().all()) for t in last.values())
    moved = relative_error(end["bad"], found[0][2]["bad"])
    return error, moved, same


def _rows(skipped: Where, key: str, own: dict[str, Any]) -> Where:
    """Dion's right factors of row blocks lie side by side."""
    if key == "right_factor" and "split_sizes" in own:
        return (slice(None), slice(2, 4))  # of three times r = ⌈0.4·3⌉
    return skipped


@pytest.mark.parametrize("algorithm", list(WHOLE))
@pytest.mark.parametrize("case", list(CASES))
def test_skipped_on_all_ranks_alike(pool: Any, case: str, algorithm: str) -> None:
    for error, moved, same in pool.run(skipping, case, algorithm, {}, world=CASES[case][0]):
        assert error < 1e-5
        assert moved > 1e-3
        assert same


@pytest.mark.parametrize("algorithm", ["dion2", "dion3"])
def test_skipped_where_shards_select(pool: Any, algorithm: str) -> None:
    for error, moved, same in pool.run(
        skipping, "fsdp", algorithm, {"selection": "local"}, world=2
    ):
        assert error < 1e-5
        assert moved > 1e-3
        assert same


@pytest.mark.parametrize("algorithm", ["normuon", "dion"])
def test_skipped_in_a_compiled_step(pool: Any, algorithm: str) -> None:
    for error, moved, same in pool.run(
        skipping, "fsdp", algorithm, {"compile": TRACED}, world=2, timeout=200
    ):
        assert error < 1e-5
        assert moved > 1e-3
        assert same


@pytest.mark.parametrize("algorithm", list(WHOLE))
def test_without_anything_bad_it_changes_nothing(algorithm: str) -> None:
    found = []
    for nonfinite in ("propagate", "skip"):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(6, 10))
        optimizer = WHOLE[algorithm][0]([weight], nonfinite=nonfinite, **HYPER)
        for _ in range(3):
            weight.grad = torch.randn(6, 10)
            optimizer.step()
        found.append(everything(optimizer, weight))
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-5, atol=1e-6)


def test_a_model_that_can_be_trained_on() -> None:
    """An overflow in one step of many does no harm."""
    weight = torch.nn.Parameter(torch.randn(6, 10))
    optimizer = ortho_func.Muon([weight], nonfinite="skip")
    for step in range(6):
        weight.grad = torch.randn(6, 10)
        if step % 2:
            weight.grad *= math.inf
        optimizer.step()
    assert weight.isfinite().all()
    assert optimizer.state[weight]["momentum_buffer"].isfinite().all()
