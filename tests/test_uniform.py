"""balance="uniform": the same results, and the same graph on every rank."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from layouts import (
    WHOLE,
    by_fully_shard,
    by_placements,
    expected,
    gather,
    relative_error,
    train,
    whole_tensors,
)
from test_layouts import LAYOUTS, check

from ortho_func.plan import plan

CHOSEN = ("fsdp 5 rows on 4", "fsdp on 3", "columns, 5 on 4", "hsdp 2x2", "fsdp x tp", "replicated")


@pytest.mark.parametrize("algorithm", list(WHOLE))
@pytest.mark.parametrize("layout", CHOSEN)
def test_same_results(pool: Any, layout: str, algorithm: str) -> None:
    seed = torch.seed() % 2**31
    for wire in ("auto", "dense"):
        settings = {"wire": wire, "balance": "uniform"}
        errors = pool.run(check, layout, algorithm, seed, settings, world=LAYOUTS[layout][0])
        assert max(errors) < 1e-5, (wire, seed, errors)


def graph_of_a_step(
    rank: int, world: int, shapes: dict[str, tuple[int, ...]], balance: str
) -> tuple[str, float]:
    """The code of the step's graph on this rank, and the error of its result."""
    graphs: list[str] = []

    def capture(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module.print_readable(print_output=False))
        return module.forward

    tensors = whole_tensors(shapes, 3)
    gradients = [whole_tensors(shapes, 4)]
    parameters = by_fully_shard(tensors, (world,))
    train(
        parameters, gradients, "normuon", lr=0.1, balance=balance, wire_dtype=torch.float32,
        orthogonalizer=torch.nn.Identity(), compile={"backend": capture}, bucket_bytes=2048,
    )  # fmt: skip
    right = expected(tensors, gradients, "normuon", lr=0.1, orth=lambda x: x)
    error = max(relative_error(gather(parameters[name]), right[name]) for name in shapes)
    assert len(graphs) == 1
    return re.sub(r"#.*", "", graphs[0]), error


def test_every_rank_traces_the_same_graph(pool: Any) -> None:
    """Six matrices of one shape and three of another on four ranks: no rank has the same share."""
    shapes = {**{f"a{n}": (8, 12) for n in range(6)}, **{f"b{n}": (16, 4) for n in range(3)}}
    uniform = pool.run(graph_of_a_step, shapes, "uniform", world=4)
    assert len({text for text, _ in uniform}) == 1
    assert max(error for _, error in uniform) < 1e-5
    by_cost = pool.run(graph_of_a_step, shapes, "cost", world=4)
    assert len({text for text, _ in by_cost}) > 1, "the comparison cannot fail"
    assert max(error for _, error in by_cost) < 1e-5


def test_unknown_balance_is_refused() -> None:
    with pytest.raises(ValueError, match="balance must be"):
        plan({"w": torch.zeros(2, 3)}, balance="equal")  # type: ignore[arg-type]


def placed_experts(rank: int, world: int) -> int:
    """Whole experts stay home under uniform balance too: buckets that travel."""
    tensors = whole_tensors({"w": (6, 3, 4)}, 1)
    parameters = by_placements(tensors, (world,), [torch.distributed.tensor.Shard(0)])
    optimizer = train(parameters, [], "muon", flatten=False, balance="uniform")
    return sum(not bucket.local for bucket in optimizer.plan.buckets)


def test_whole_experts_stay_home(pool: Any) -> None:
    assert pool.run(placed_experts, world=4) == [0] * 4
