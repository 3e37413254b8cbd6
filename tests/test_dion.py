"""Dion beyond the table of layouts: what travels, where Q begins, and matrices of low rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from layouts import (
    Replicate,
    Shard,
    by_fully_shard,
    by_placements,
    gather,
    relative_error,
    scatter_like,
    train,
    whole_tensors,
)
from torch import Tensor, nn

import ortho_func
from ortho_func.algorithms.dion import DionRule
from ortho_func.algorithms.legs import plan_for
from ortho_func.factors import parts_of
from ortho_func.geometry import Reading, mesh_layout
from ortho_func.plan import ParamSpec
from ortho_func.routing import routes

HYPER = {"lr": 0.1, "weight_decay": 0.2}


def wire_elements(shape: tuple[int, ...], mesh: tuple[int, ...], placements: Any) -> int:
    """Elements that cross between ranks in both round trips, over all ranks."""
    ranks = tuple(range(torch.Size(mesh).numel()))
    spec = ParamSpec("w", mesh_layout(shape, ranks, mesh, placements))
    legs = plan_for([spec], [DionRule(rank_fraction=0.25)], [torch.float32], bucket_bytes=2**26)
    assert len(legs) == 2
    total = 0
    for leg in legs:
        for rank in ranks:
            for route in routes(leg.plan, rank):
                total += sum(route.send) - route.send[rank] + sum(route.back) - route.back[rank]
    return total


def test_only_thin_factors_travel() -> None:
    """On I × J parts: Y and P cross J·(I·J − 1)/(I·J) times R·r, W and Q likewise."""
    rows, cols, rank = 64, 128, 16
    for i, j in [(4, 1), (1, 4), (2, 2), (4, 2)]:
        found = wire_elements((rows, cols), (i, j), (Shard(0), Shard(1)))
        # every rank but the owner sends its term of Y, and gets its rows of P back
        factors = 2 * (rows * rank * j + cols * rank * i) * (i * j - 1) // (i * j)
        norms = 2 * rank * (i * j - 1)  # beside W, one value a column
        assert found == factors + norms, (i, j)
    assert wire_elements((rows, cols), (2,), (Replicate(),)) < 2 * (rows + cols) * rank


def first_factors(rank: int, world: int, seed: int) -> list[float]:
    """How far Q on shards is from Q on one process, by parameter."""
    shapes = {"a": (7, 6), "b": (5, 9), "e": (3, 4, 6)}
    tensors = whole_tensors(shapes, seed)
    grid = {"mesh": (2, 2), "placements": {
        "a": [Shard(0), Shard(1)], "b": [Shard(1), Replicate()], "e": [Shard(0), Shard(2)],
    }}  # fmt: skip
    options = {"flatten": False, "rank_fraction": 0.5}
    sharded = by_placements(tensors, **grid)
    mine = ortho_func.Dion(list(sharded.items()), **options)
    alone = {name: nn.Parameter(t) for name, t in tensors.items()}
    whole = ortho_func.Dion(list(alone.items()), **options)
    found = []
    for name in shapes:
        q = mine.state[sharded[name]]["right_factor"]
        right = whole.state[alone[name]]["right_factor"]
        assert q.shape == right.shape
        found.append(relative_error(gather(q), right))
        eye = torch.eye(right.shape[-1]).expand(*right.shape[:-2], -1, -1)
        torch.testing.assert_close(right.mT @ right, eye, rtol=0, atol=1e-6)
    return found


def test_every_sharding_begins_alike(pool: Any) -> None:
    for errors in pool.run(first_factors, 3, world=4):
        assert max(errors) == 0.0


def one_step(gradient: Tensor, **options: Any) -> tuple[nn.Parameter, Any]:
    p = nn.Parameter(torch.ones_like(gradient))
    optimizer = ortho_func.Dion([p], **{**HYPER, "adjust_lr_fn": "none", **options})
    p.grad = gradient
    optimizer.step()
    return p.detach(), optimizer.state[p]


def test_without_a_gradient_there_is_only_decay() -> None:
    p, state = one_step(torch.zeros(6, 9))
    torch.testing.assert_close(p, torch.full((6, 9), 1 - 0.1 * 0.2))
    assert not state["momentum_buffer"].any()
    eye = torch.eye(2)
    torch.testing.assert_close(state["right_factor"].T @ state["right_factor"], eye)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e15])
def test_a_matrix_of_lower_rank_moves_along_what_it_has(scale: float) -> None:
    u, v = torch.randn(12), torch.randn(20)
    u, v = u / u.norm(), v / v.norm()
    p, state = one_step(scale * torch.outer(u, v), rank_fraction=0.5, weight_decay=0.0)
    torch.testing.assert_close(p, 1 - 0.1 * torch.outer(u, v), rtol=1e-4, atol=1e-5)
    assert torch.isfinite(state["right_factor"]).all()
    norms = state["right_factor"].norm(dim=0)
    torch.testing.assert_close(norms, torch.ones_like(norms))


def test_what_is_left_out_waits_in_the_momentum() -> None:
    """M = B − (1 − μ)PWᵀ, and P Pᵀ B is the part of B that was taken."""
    gradient = torch.randn(10, 14)
    _, state = one_step(gradient, momentum=0.9, rank_fraction=0.3)
    taken = (gradient - state["momentum_buffer"]) / 0.1
    assert int(torch.linalg.matrix_rank(taken, rtol=1e-4)) == 3
    # an orthogonal projection of B: what is left is orthogonal to what was taken
    torch.testing.assert_close(taken.T @ (gradient - taken), torch.zeros(14, 14), rtol=0, atol=1e-3)


def rounded(rank: int, world: int, seed: int) -> float:
    """bf16 on the wire against fp32: the error of what three steps changed."""
    shapes = {"a": (12, 16), "b": (16, 12)}
    tensors = whole_tensors(shapes, seed)
    gradients = [whole_tensors(shapes, seed + 1 + n) for n in range(3)]
    found = []
    for wire in (torch.float32, torch.bfloat16):
        parameters = by_fully_shard(tensors, (world,))
        train(parameters, gradients, "dion", wire_dtype=wire, lr=0.1, weight_decay=0.0)
        found.append({name: gather(p) - tensors[name] for name, p in parameters.items()})
    return max(relative_error(found[1][name], found[0][name]) for name in shapes)


def test_a_bf16_wire_rounds_and_no_more(pool: Any) -> None:
    assert max(pool.run(rounded, 5, world=2)) < 3e-2


def compiled(rank: int, world: int) -> tuple[float, int]:
    """Compiled equals eager while lr changes and gradients go missing; how many graphs."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    shapes = {"a": (9, 6), "b": (6, 9), "c": (9, 6)}
    results = []
    for how in (False, {"backend": counter}):
        parameters = by_fully_shard(whole_tensors(shapes, 5), (world,))
        optimizer = ortho_func.Dion(
            list(parameters.items()), rank_fraction=0.5, wire_dtype=torch.float32, compile=how
        )
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            for name, whole in whole_tensors(shapes, 60 + step).items():
                here = scatter_like(whole, parameters[name])
                parameters[name].grad = None if (name == "a" and step == 1) else here
            optimizer.step()
        results.append([gather(p) for p in parameters.values()])
    return max(relative_error(a, b) for a, b in zip(*results, strict=True)), counter.frame_count


def test_both_trips_are_one_graph(pool: Any) -> None:
    for error, frames in pool.run(compiled, world=2, timeout=120):
        assert error < 1e-5
        assert frames == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"orthogonalizer": "svd"}, TypeError, "takes no orthogonalizer"),
        ({"ns_steps": 5}, TypeError, "takes no ns_steps"),
        ({"rank_fraction": 0.0}, ValueError, "rank_fraction"),
        ({"rank_fraction": 1.5}, ValueError, "rank_fraction"),
        ({"rank_fraction": "half"}, TypeError, "rank_fraction"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        ortho_func.Dion([nn.Parameter(torch.ones(3, 4))], **options)
    if not isinstance(options.get("rank_fraction"), str):
        with pytest.raises(error, match=message):
            ortho_func.dion(**options)


def test_ranks_of_unequal_blocks() -> None:
    found = parts_of((12, 16), Reading(split_sizes=(6, 3, 3)), 0.5)
    assert [(part.rank, part.blocks, part.column) for part in found] == [(3, 1, 0), (2, 2, 3)]
