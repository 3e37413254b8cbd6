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


# ---------------------------------------------------------------------------------------------
# The functional form


def with_bad(shapes: dict[str, tuple[int, ...]], bad: float) -> list[dict[str, Tensor]]:
    """Three steps' gradients; in the second, something is not finite in a matrix of each."""
    gradients = [whole_tensors(shapes, 1 + n) for n in range(3)]
    gradients[1]["bad"][1, 0] = bad
    if "experts" in shapes:
        gradients[1]["experts"][1, 0, 0] = bad
    return gradients


def functional(
    parameters: dict[str, Tensor], gradients: list[dict[str, Tensor]], tx: Any
) -> list[tuple[dict[str, Tensor], Any]]:
    """Parameters and state after each step."""
    found, state = [], tx.init(parameters)
    for step in gradients:
        grads = {name: scatter_like(step[name], p) for name, p in parameters.items()}
        updates, state = tx.update(grads, state, parameters)
        parameters = ortho_func.apply_updates(parameters, updates)
        found.append((parameters, state))
    return found


SHAPES = {"bad": (5, 6), "good": (5, 6), "experts": (3, 4, 6)}


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("algorithm", list(WHOLE))
def test_the_functional_form_skips_too(algorithm: str, bad: float) -> None:
    make, options = getattr(ortho_func, algorithm), WHOLE[algorithm][2]
    hyper = {"lr": 0.1, "weight_decay": 0.2, "flatten": False, **options, **exact(algorithm)}
    tensors, gradients = whole_tensors(SHAPES, 0), with_bad(SHAPES, bad)
    first, second, third = functional(tensors, gradients, make(nonfinite="skip", **hyper))
    clean = [{**step} for step in gradients]
    clean[1] = whole_tensors(SHAPES, 2)
    right = functional(tensors, clean, make(**hyper))
    old = {"w": first[0], **{n: t for n, t in first[1]._asdict().items() if n != "steps"}}
    new = {"w": second[0], **{n: t for n, t in second[1]._asdict().items() if n != "steps"}}
    for name, before in old.items():
        after = new[name]
        assert torch.equal(after["bad"], before["bad"])
        assert torch.equal(after["experts"][1], before["experts"][1])
        assert not torch.equal(after["experts"][0], before["experts"][0])
    for name in ("good", "experts"):  # what has nothing bad in it goes on as ever
        rest = slice(None) if name == "good" else [0, 2]
        assert relative_error(third[0][name][rest], right[2][0][name][rest]) < 1e-5
    assert all(bool(t.isfinite().all()) for t in third[0].values())
    # And it is what the optimizer of the same name does.
    weights = {name: torch.nn.Parameter(t.clone()) for name, t in tensors.items()}
    optimizer = WHOLE[algorithm][0](list(weights.items()), nonfinite="skip", **hyper)
    for step in gradients:
        for name, p in weights.items():
            p.grad = step[name]
        optimizer.step()
    for name, p in weights.items():
        assert relative_error(third[0][name], p.detach()) < 1e-5


def functional_on_shards(rank: int, world: int, algorithm: str, bad: float) -> tuple[float, bool]:
    """The error against one process, and whether what was skipped kept its bits."""
    make, options = getattr(ortho_func, algorithm), WHOLE[algorithm][2]
    hyper = {"lr": 0.1, "weight_decay": 0.2, "nonfinite": "skip", **options, **exact(algorithm)}
    shapes = {"bad": (5, 6), "good": (5, 6)}
    tensors, gradients = whole_tensors(shapes, 0), with_bad(shapes, bad)
    placed = by_fully_shard(tensors, (world,))
    planned = ortho_func.plan(placed, wire_dtype=torch.float32)
    found = functional(
        {name: p.detach() for name, p in placed.items()}, gradients, make(plan=planned, **hyper)
    )
    right = functional(tensors, gradients, make(**hyper))
    error = max(relative_error(gather(found[2][0][n]), right[2][0][n]) for n in tensors)
    return error, torch.equal(gather(found[1][0]["bad"]), gather(found[0][0]["bad"]))


@pytest.mark.parametrize("algorithm", list(WHOLE))
def test_the_functional_form_skips_on_shards(pool: Any, algorithm: str) -> None:
    for error, same in pool.run(functional_on_shards, algorithm, math.inf, world=2):
        assert error < 1e-5
        assert same


@pytest.mark.parametrize("algorithm", ["muon", "dion"])
def test_the_functional_form_that_skips_is_one_graph(algorithm: str) -> None:
    tx = getattr(ortho_func, algorithm)(lr=0.1, nonfinite="skip")
    tensors, grads = whole_tensors({"bad": (5, 6)}, 0), with_bad({"bad": (5, 6)}, math.nan)
    state = tx.init(tensors)
    traced = torch.compile(tx.update, backend="eager", fullgraph=True)
    for step in grads:
        (mine, new), (right, _) = traced(step, state, tensors), tx.update(step, state, tensors)
        torch.testing.assert_close(mine, right)
        state = new


# ---------------------------------------------------------------------------------------------
# What is no matrix: each element is on its own


def one_element(bad: float, compiled: bool, algorithm: str, form: str) -> list[list[Tensor]]:
    """After each step: the weight and its state but for the count."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 3))
    gradients = [torch.randn(4, 3) for _ in range(3)]
    gradients[1][2, 1] = bad
    found = []
    if form == "optimizer":
        groups = [{"params": [weight], "algorithm": algorithm}]
        traced = TRACED if compiled else False
        optimizer = ortho_func.Muon(groups, nonfinite="skip", weight_decay=0.2, compile=traced)
        for grad in gradients:
            weight.grad = grad
            optimizer.step()
            kept = [t.clone() for t in optimizer.state[weight].values() if t.shape == weight.shape]
            found.append([weight.detach().clone(), *kept])
        return found
    tx = getattr(ortho_func, algorithm)(lr=1e-3, weight_decay=0.2, nonfinite="skip")
    if algorithm == "lion":
        tx = ortho_func.lion(lr=1e-3, weight_decay=0.2, betas=(0.9, 0.95), nonfinite="skip")
    params, state = [weight.detach()], tx.init([weight.detach()])
    update = torch.compile(tx.update, backend="eager", fullgraph=True) if compiled else tx.update
    for grad in gradients:
        updates, state = update([grad], state, params)
        params = ortho_func.apply_updates(params, updates)
        kept = [t for tree in state[1:] for t in tree if t.shape == weight.shape]
        found.append([params[0], *kept])
    return found


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", ["optimizer", "functional"])
@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_what_is_no_matrix_skips_elements(
    bad: float, algorithm: str, form: str, compiled: bool
) -> None:
    """1e30 is finite, and its square is not."""
    found = one_element(bad, compiled, algorithm, form)
    clean = one_element(0.0, compiled, algorithm, form)
    others = torch.ones(4, 3, dtype=torch.bool)
    others[2, 1] = False
    for tensors, right in zip(found, clean, strict=True):
        for mine, theirs in zip(tensors, right, strict=True):
            assert mine.isfinite().all()
            assert torch.equal(mine[others], theirs[others])
    if not (algorithm == "lion" and math.isfinite(bad)):
        for before, after in zip(found[0], found[1], strict=True):
            assert before[2, 1] == after[2, 1]
        assert found[1][0][2, 1] != found[2][0][2, 1]  # and it goes on afterwards


@pytest.mark.parametrize("algorithm", [*WHOLE, "adamw", "lion"])
def test_there_is_no_third_way(algorithm: str) -> None:
    with pytest.raises(ValueError, match="nonfinite must be 'propagate' or 'skip', got 'zero'"):
        getattr(ortho_func, algorithm)(nonfinite="zero")
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="nonfinite must be 'propagate' or 'skip', got None"):
        ortho_func.Muon([{"params": [weight], "algorithm": algorithm}], nonfinite=None)
