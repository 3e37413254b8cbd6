"""Numbers about each matrix's step: those of the formula, on every layout, eager and compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import (
    WHOLE,
    Replicate,
    Shard,
    by_fully_shard,
    by_placements,
    exact,
    scatter_like,
    whole_tensors,
)
from test_compile import Seen, Trace, collectives, no_graph_breaks
from torch import Tensor, nn

from ortho_func import Muon, NorMuon, extreme_singular_values, orthogonalize
from ortho_func.primitives.scaling import lr_scale

SHAPES = {"w": (6, 10), "qkv": (8, 6), "stack": (3, 4, 5), "conv": (4, 3, 2, 2), "late": (5, 7)}
MATRICES = ["w", "qkv/0", "qkv/1", "stack/0", "stack/1", "stack/2", "conv", "late"]
GAUGES = ("update_rms", "update_max_sv", "update_min_sv", "momentum_norm", "gradient_cosine")
EXACT = {"wire_dtype": torch.float32, "compute_dtype": torch.float32, "lr": 0.1}


# Singular values.


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 3), rows=st.integers(1, 40), cols=st.integers(1, 40),
    seed=st.integers(0, 10**6), power=st.integers(-30, 30), rank=st.integers(0, 40),
)  # fmt: skip
def test_bounds_and_small_matrices(
    count: int, rows: int, cols: int, seed: int, power: int, rank: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    thin = min(rank, rows, cols)
    left, right = (torch.randn(count, n, thin, generator=generator) for n in (rows, cols))
    full = torch.randn(count, rows, cols, generator=generator)
    x = (left @ right.mT if thin < min(rows, cols) else full) * 10.0**power
    right_values = torch.linalg.svdvals(x.double())
    largest, smallest = extreme_singular_values(x)
    top = right_values[:, 0]
    assert (largest <= top * (1 + 1e-5)).all()
    assert (largest >= top * 0.98).all()
    assert (smallest >= right_values[:, -1] - 1e-3 * top).all()
    if min(rows, cols) <= 16:
        torch.testing.assert_close(largest.double(), top, rtol=1e-4, atol=0)
        assert ((smallest - right_values[:, -1]).abs() <= 2e-3 * top).all()


@pytest.mark.parametrize("size", [4, 10, 16])
def test_small_values_near_one_another(size: int) -> None:
    """Of 1% and less of the largest, λ = σ² differ by a ten-thousandth of it, and less."""
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(50, size, size))[0] for _ in range(2))
    for second in (0.02, 0.01, 0.005):
        values = torch.cat([torch.linspace(1, 0.1, size - 2), torch.tensor([second, 0.0])])
        largest, smallest = extreme_singular_values(left * values @ right)
        assert ((largest - 1).abs() <= 1e-5).all()
        assert (smallest <= 1e-3).all(), second


def test_accuracy_on_what_it_is_for() -> None:
    torch.manual_seed(0)
    for shape in ((4, 64, 64), (2, 256, 512), (2, 300, 120), (2, 400, 400)):
        gaussian = torch.randn(shape)
        u, s, v = torch.linalg.svd(gaussian, full_matrices=False)
        steep = u * torch.logspace(0, -3, s.shape[-1]) @ v
        for x, most in (
            (orthogonalize(gaussian.to(torch.bfloat16)), 0.04),
            (orthogonalize(steep), 0.04),
            (gaussian, 0.08),
        ):
            values = torch.linalg.svdvals(x.double())
            largest, smallest = extreme_singular_values(x)
            assert ((largest - values[:, 0]).abs() <= 0.01 * values[:, 0]).all()
            assert (smallest >= values[:, -1] - 1e-3 * values[:, 0]).all()
            assert (smallest - values[:, -1] <= most * values[:, 0]).all()


def test_equal_values_zeros_and_what_is_not_finite() -> None:
    x = torch.stack([torch.eye(30) * 1e25, torch.zeros(30, 30), torch.full((30, 30), torch.nan)])
    largest, smallest = extreme_singular_values(x)
    torch.testing.assert_close(largest[0], torch.tensor(1e25))
    torch.testing.assert_close(smallest[0], torch.tensor(1e25))
    assert largest[1] == smallest[1] == 0
    assert largest[2].isnan()
    assert smallest[2].isnan()
    for shape in ((0, 3, 4), (2, 0, 4), (2, 4, 0)):
        assert all(y.shape == shape[:1] for y in extreme_singular_values(torch.ones(shape)))


# The optimizers.


def groups_of(params: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [
        {"params": ["w", "late"]},
        {"params": ["qkv"], "split_sizes": (6, 2)},
        {"params": ["stack"], "flatten": False},
        {"params": ["conv"], "flatten": True},
    ]
    for group in groups:
        group["params"] = [(name, params[name]) for name in group["params"] if name in params]
    return [group for group in groups if group["params"]]


def whole_parameters(seed: int = 0, names: Sequence[str] = tuple(SHAPES)) -> dict[str, Any]:
    found = whole_tensors(SHAPES, seed)
    return {name: nn.Parameter(found[name]) for name in names}


def run(algorithm: str, params: dict[str, Any], seed: int, **options: Any) -> Any:
    """Three steps; "late" has no gradient in the last."""
    cls, _, extra = WHOLE[algorithm]
    given = {**extra, **exact(algorithm), **EXACT, "metrics": True, **options}
    optimizer = cls(groups_of(params), **given)
    for step in range(3):
        grads = whole_tensors(SHAPES, seed + step)
        for name, p in params.items():
            absent = name == "late" and step == 2
            p.grad = None if absent else scatter_like(grads[name], p)
        optimizer.step()
    return optimizer


def matrices_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {"w": tensors["w"], "late": tensors["late"], "conv": tensors["conv"].flatten(1)}
    found |= {f"qkv/{n}": x for n, x in enumerate(tensors["qkv"].split((6, 2)))}
    return found | {f"stack/{n}": x for n, x in enumerate(tensors["stack"])}


@pytest.mark.parametrize("algorithm", list(WHOLE))
def test_they_are_what_they_say(algorithm: str) -> None:
    """From the parameters before and after a step, their state and their gradients."""
    params = whole_parameters()
    optimizer = run(algorithm, params, 1, weight_decay=0.0)
    before = {n: p.detach().double() for n, p in params.items()}
    for name, x in whole_tensors(SHAPES, 9).items():
        params[name].grad = x
    optimizer.step()
    after = {n: p.detach().double() for n, p in params.items()}
    moved = matrices_of({n: (before[n] - after[n]) / 0.1 for n in params})
    momenta = matrices_of({n: optimizer.state[p]["momentum_buffer"] for n, p in params.items()})
    grads = matrices_of({n: p.grad.double() for n, p in params.items()})
    found = optimizer.metrics()
    assert set(found) == {f"{gauge}/{name}" for gauge in GAUGES for name in MATRICES}
    for name, u in moved.items():
        values = torch.linalg.svdvals(u)
        there = values[values > 1e-4 * values[0]]  # Dion2's and Dion's updates have a lower rank
        cosine = (u * grads[name]).sum() / u.norm() / grads[name].norm()
        right = (u.square().mean().sqrt(), there[0], there[-1], momenta[name].norm(), cosine)
        for gauge, value in zip(GAUGES, right, strict=True):
            got = found[f"{gauge}/{name}"]
            assert got.shape == ()
            torch.testing.assert_close(got.double(), value.double(), rtol=2e-3, atol=1e-4)
        assert cosine > 0


def test_missing_gradients_are_nan_and_numbers_are_kept() -> None:
    optimizer = Muon(groups_of(whole_parameters()), metrics=True)
    assert all(value.isnan() for value in optimizer.metrics().values())
    optimizer = run("muon", whole_parameters(), 0)
    found = optimizer.metrics()
    for key, value in found.items():
        assert value.isnan() == key.endswith("/late"), key
    kept = {key: value.clone() for key, value in found.items()}
    optimizer.step()
    for key, value in kept.items():
        torch.testing.assert_close(found[key], value, equal_nan=True, rtol=0, atol=0)


def test_names_options_and_optimizers_without() -> None:
    layers = [nn.Linear(4, 3), nn.Linear(3, 2)]
    groups = [
        {"params": [one.weight for one in layers]},
        {"params": [one.bias for one in layers], "algorithm": "adamw"},
    ]
    found = Muon(groups, metrics=True).metrics()
    assert {key.split("/", 1)[1] for key in found} == {"0.0", "0.1"}
    with pytest.raises(ValueError, match="build the optimizer with metrics=True"):
        Muon(groups).metrics()
    with pytest.raises(TypeError, match="metrics must be True or False"):
        Muon(groups, metrics=1)
    with pytest.raises(ValueError, match="no rank has the average"):
        Muon(groups, metrics=True, reduce_gradients=True)
    assert Muon([{"params": [layers[0].bias], "algorithm": "lion"}], metrics=True).metrics() == {}


def test_a_scale_of_the_shape_is_in_the_update() -> None:
    p = nn.Parameter(torch.randn(12, 4))
    p.grad = torch.randn(12, 4)
    optimizer = Muon([("p", p)], adjust_lr_fn="match_rms_adamw", orthogonalizer="svd", metrics=True)
    optimizer.step()
    found = optimizer.metrics()
    scale = torch.tensor(lr_scale(12, 4, "match_rms_adamw"))
    torch.testing.assert_close(found["update_max_sv/p"], scale, rtol=1e-3, atol=0)
    torch.testing.assert_close(found["update_rms/p"], torch.tensor(0.2), rtol=1e-3, atol=0)


@pytest.mark.parametrize("algorithm", ["normuon", "dion"])
def test_compiled_once_and_equal(algorithm: str) -> None:
    backend, found = Trace(), []
    with no_graph_breaks():
        for option in (False, {"backend": backend}):
            params = whole_parameters(names=("w", "late"))
            found.append(run(algorithm, params, 3, compile=option).metrics())
    assert len(backend.traced) == 1
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, equal_nan=True, rtol=1e-3, atol=1e-4)


def test_nothing_is_read_back() -> None:
    params = whole_parameters()
    optimizer = run("normuon", params, 0)
    with Seen():  # fails on a read
        optimizer.step()
        optimizer.metrics()


def test_skipped_matrices_are_nan_alone() -> None:
    params = whole_parameters()
    optimizer = Muon(groups_of(params), metrics=True, nonfinite="skip")
    for name, x in whole_tensors(SHAPES, 1).items():
        params[name].grad = x
    params["w"].grad[0, 0] = torch.nan
    optimizer.step()
    for key, value in optimizer.metrics().items():
        skipped = key.endswith("/w") and "momentum" not in key
        assert value.isnan() == skipped, key


# On ranks.


def placed(kind: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if kind == "hsdp":
        return by_fully_shard(tensors, (2, 2))
    if kind == "ddp":
        return {name: nn.Parameter(x.clone()) for name, x in tensors.items()}
    cuts: dict[str, list[Any]] = {
        "w": [Shard(0), Shard(1)],
        "qkv": [Shard(1), Shard(0)],
        "stack": [Shard(0), Shard(1)],
        "conv": [Replicate(), Shard(0)],
        "late": [Shard(0), Shard(0)],
    }
    return by_placements(tensors, (2, 2), cuts)


def on_ranks(rank: int, world: int, algorithm: str, kind: str, seed: int, options: Any) -> Any:
    tensors = whole_tensors(SHAPES, seed)
    group = dist.group.WORLD if kind == "ddp" else None
    many = run(algorithm, placed(kind, tensors), seed, process_group=group, **options).metrics()
    one = run(algorithm, {n: nn.Parameter(x) for n, x in tensors.items()}, seed).metrics()
    return many, one


@pytest.mark.parametrize("kind", ["hsdp", "ddp", "two dims"])
@pytest.mark.parametrize("algorithm", list(WHOLE))
def test_those_of_one_process_on_every_rank(pool: Any, algorithm: str, kind: str) -> None:
    seed = torch.seed() % 2**31
    options: dict[str, Any] = {"bucket_bytes": 256} if kind == "two dims" else {}
    if kind == "hsdp":
        options = {"hops": "two", "balance": "cost" if algorithm == "dion" else "uniform"}
    results = pool.run(on_ranks, algorithm, kind, seed, options, world=4)
    for many, one in results:
        assert list(many) != []
        assert set(many) == set(one)
        for key, value in one.items():
            torch.testing.assert_close(
                many[key], value, equal_nan=True, rtol=5e-3, atol=1e-3, msg=f"{key}, {seed}"
            )
            assert value.isnan() == key.endswith("/late")
            same = torch.equal(many[key], results[0][0][key])
            assert same or value.isnan()


def compiled_on_ranks(rank: int, world: int) -> Any:
    """One graph, with a gradient that is missing on one rank only."""
    shapes = {name: SHAPES[name] for name in ("w", "late")}
    params = by_fully_shard(whole_tensors(shapes, 1), (world,))
    backend = Trace()
    torch._dynamo.reset()
    optimizer = Muon(groups_of(params), metrics=True, compile={"backend": backend}, **EXACT)
    for step in range(3):
        for name, x in whole_tensors(shapes, 5 + step).items():
            absent = (name == "w" and rank == 0) or (name == "late" and step == 2)
            params[name].grad = None if absent else scatter_like(x, params[name])
        optimizer.step()
    return len(backend.traced), optimizer.metrics()


def test_compiled_on_ranks(pool: Any) -> None:
    results = pool.run(compiled_on_ranks, world=2)
    for count, found in results:
        assert count == 1
        for key, value in found.items():
            assert value.isnan() == key.endswith("/late"), key
            assert torch.equal(value, results[0][1][key]) or value.isnan()


def traffic(rank: int, world: int, metrics: bool) -> list[str]:
    params = by_fully_shard(whole_tensors(SHAPES, 1), (world,))
    optimizer = NorMuon(groups_of(params), metrics=metrics, bucket_bytes=256)
    seen = []
    for present in (True, False):
        for name, x in whole_tensors(SHAPES, 5).items():
            params[name].grad = scatter_like(x, params[name]) if present and rank else None
        with Seen() as mode:
            optimizer.step()
        seen.append(collectives(mode.events))
    assert seen[0] == seen[1]
    return seen[0]


def test_one_all_reduce_and_only_if_asked_for(pool: Any) -> None:
    for with_, without in zip(
        pool.run(traffic, True, world=2), pool.run(traffic, False, world=2), strict=True
    ):
        assert "all_reduce" not in without
        assert with_.count("all_reduce") == 1
        assert [one for one in with_ if one == "all_to_all_single"] == [
            one for one in without if one == "all_to_all_single"
        ]


def in_teams(rank: int, world: int) -> Any:
    tensors = whole_tensors({"w": (8, 24), "s": (6, 6)}, 5)
    found = []
    for params, size in (
        (by_fully_shard(tensors, (world,)), world),
        ({n: nn.Parameter(x) for n, x in tensors.items()}, 1),
    ):
        optimizer = Muon(list(params.items()), team_size=size, metrics=True, **EXACT)
        for name, x in whole_tensors({"w": (8, 24), "s": (6, 6)}, 8).items():
            params[name].grad = scatter_like(x, params[name])
        optimizer.step()
        found.append(optimizer.metrics())
    return found


def test_teams_know_all_but_singular_values(pool: Any) -> None:
    for many, one in pool.run(in_teams, world=2):
        assert many["update_max_sv/w"].isnan()
        for key in ("update_rms/w", "momentum_norm/w", "gradient_cosine/w"):
            torch.testing.assert_close(many[key], one[key], rtol=1e-2, atol=1e-3)
