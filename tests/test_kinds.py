"""Kinds of faults that users of distributed optimizers met, each with the right value.

`docs/reliability.md` lists them all, with the tests that rule them out: these are the ones that
no other file holds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
import torch._dynamo.config
from layouts import (
    WHOLE,
    Shard,
    by_fully_shard,
    by_placements,
    exact,
    expected,
    gather,
    relative_error,
    scatter_like,
    train,
    whole_tensors,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import ortho_func
from ortho_func import Reading, apply_updates, plan
from ortho_func.primitives.scaling import lr_scale

HYPER = {"lr": 0.1, "weight_decay": 0.2}
EXACT = {"wire_dtype": torch.float32, "compute_dtype": torch.float32}
every = pytest.mark.parametrize("algorithm", list(WHOLE))


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def pair(*shape: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Two parameters of equal values."""
    x = torch.randn(*shape)
    return nn.Parameter(x.clone()), nn.Parameter(x.clone())


# ---------------------------------------------------------------------------------------------
# Ranks that hold little or nothing


def without_tokens(rank: int, world: int, algorithm: str) -> tuple[float, bool]:
    """All experts of one rank saw no token; another group of parameters lies on one rank only."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    shapes = {"up": (4, 5, 6), "down": (4, 6, 5), "few": (1, 5, 6)}
    tensors = whole_tensors(shapes, 0)
    parameters = {
        name: nn.Parameter(distribute_tensor(t.clone(), mesh, [Shard(0)]))
        for name, t in tensors.items()
    }
    gradients: list[Any] = [whole_tensors(shapes, 1 + n) for n in range(3)]
    optimizer = WHOLE[algorithm][0](
        list(parameters.items()), flatten=False,
        **{**WHOLE[algorithm][2], **HYPER, **EXACT, **exact(algorithm)},
    )  # fmt: skip
    before = {name: local(p.detach()).clone() for name, p in parameters.items()}
    for step in gradients:
        for name, p in parameters.items():
            p.grad = None if rank == 1 else scatter_like(step[name], p)
        optimizer.step()
    right = expected(tensors, gradients, algorithm, flatten=False, **HYPER)
    if rank == 1:  # nothing of it has moved
        same = all(torch.equal(local(p.detach()), before[n]) for n, p in parameters.items())
        return 0.0, same
    held = {"up": slice(0, 2), "down": slice(0, 2), "few": slice(0, 1)}
    found = [relative_error(local(p.detach()), right[n][held[n]]) for n, p in parameters.items()]
    return max(found), True


@every
def test_a_rank_whose_experts_saw_no_token(pool: Any, algorithm: str) -> None:
    for error, same in pool.run(without_tokens, algorithm, world=2):
        assert error < 1e-5
        assert same


def row_statistics(rank: int, world: int, absent: int, how: Any) -> tuple[float, bool]:
    """V of rows cut over columns, which every rank keeps, while one of them has no gradient."""
    shape = (4, 6)
    tensors = whole_tensors({"w": shape}, 0)
    gradients = [whole_tensors({"w": shape}, 1 + n)["w"] for n in range(2)]
    weight = by_placements(tensors, (world,), [Shard(1)])["w"]
    optimizer = ortho_func.NorMuon(
        [("w", weight)], orthogonalizer="svd", beta2=0.9, compile=how, **HYPER, **EXACT
    )
    weight.grad = scatter_like(gradients[0], weight)
    optimizer.step()
    kept = local(optimizer.state[weight]["row_variance"]).clone()
    weight.grad = None if rank == absent else scatter_like(gradients[1], weight)
    optimizer.step()
    found = local(optimizer.state[weight]["row_variance"]).flatten()
    if rank == absent:
        return 0.0, torch.equal(found, kept.flatten())
    options = {"beta2": 0.9, **HYPER}
    new, state = reference.normuon(tensors, [{"w": gradients[0]}], **options)
    there = torch.zeros(shape, dtype=torch.bool)
    there[:, 3 * absent : 3 * absent + 3] = True
    state["w"]["momentum_buffer"].masked_fill_(there, 0)
    second = {"w": gradients[1].masked_fill(there, 0)}
    _, state = reference.normuon(new, [second], state, **options)
    return relative_error(found, state["w"]["second_moment"][0].flatten()), True


@pytest.mark.parametrize("how", [False, {"backend": "eager"}], ids=["eager", "compiled"])
@pytest.mark.parametrize("absent", [0, 1])
def test_row_statistics_outlive_a_missing_gradient(pool: Any, absent: int, how: Any) -> None:
    for error, same in pool.run(row_statistics, absent, how, world=2, timeout=120):
        assert error < 1e-5
        assert same


# name -> (world, shape, placement, options): what some rank has of it is empty in a way of its own
EMPTY: dict[str, tuple[int, tuple[int, ...], Shard, dict[str, Any]]] = {
    "blocks of a rank without columns": (3, (12, 2), Shard(1), {"split_sizes": (8, 2, 2)}),
    "blocks of a rank without rows": (4, (5, 6), Shard(0), {"split_sizes": (1, 3, 1)}),
    "a stack's rows": (3, (2, 4, 6), Shard(1), {"flatten": False}),
    "a stack's columns": (3, (2, 6, 4), Shard(2), {"flatten": False}),
    "a stack": (4, (3, 4, 6), Shard(0), {"flatten": False}),
    "a stack of blocks": (3, (2, 4, 6), Shard(1), {"flatten": False, "split_sizes": (1, 3)}),
}


def some_empty(rank: int, world: int, case: str, algorithm: str) -> float:
    _, shape, placement, own = EMPTY[case]
    shapes = {"w": shape, "v": shape}
    tensors = whole_tensors(shapes, 0)
    gradients: list[Any] = [whole_tensors(shapes, 1 + n) for n in range(3)]
    worst = 0.0
    for wire in ("dense", "exact"):
        parameters = by_placements(tensors, (world,), [placement])
        options = {**HYPER, "adjust_lr_fn": "match_rms_adamw"}
        train(
            parameters, gradients, algorithm,
            wire=wire, wire_dtype=torch.float32, **exact(algorithm), **options, **own,
        )  # fmt: skip
        right = expected(tensors, gradients, algorithm, **options, **own)
        found = [relative_error(gather(p), right[name]) for name, p in parameters.items()]
        worst = max(worst, *found)
    return worst


@every
@pytest.mark.parametrize("case", list(EMPTY))
def test_every_way_of_holding_nothing(pool: Any, case: str, algorithm: str) -> None:
    assert max(pool.run(some_empty, case, algorithm, world=EMPTY[case][0])) < 1e-5


def cut_stack(rank: int, world: int, algorithm: str) -> float:
    """Uneven experts in more parts than one rank has experts, as a pure update."""
    shape = (5, 4, 6)
    params = {
        name: p.detach()
        for name, p in by_placements(whole_tensors({"w": shape}, 0), (world,), [Shard(0)]).items()
    }
    gradients = [whole_tensors({"w": shape}, 1 + n) for n in range(3)]
    reading = Reading(flatten=False)
    made = plan(params, bucket_bytes=64, wire_dtype=torch.float32, readings=lambda name, x: reading)
    options = {**WHOLE[algorithm][2], **HYPER, **exact(algorithm)}
    tx = getattr(ortho_func, algorithm)(plan=made, **options)
    state, found = tx.init(params), params
    for grads in gradients:
        updates, state = tx.update(
            {name: scatter_like(g, params[name]) for name, g in grads.items()}, state, found
        )
        found = apply_updates(found, updates)
    right = expected(
        whole_tensors({"w": shape}, 0), list(gradients), algorithm, flatten=False, **HYPER
    )
    return relative_error(gather(found["w"]), right["w"])


@every
def test_a_stack_cut_where_a_rank_has_nothing_of_a_part(pool: Any, algorithm: str) -> None:
    assert max(pool.run(cut_stack, algorithm, world=2)) < 1e-5


# ---------------------------------------------------------------------------------------------
# The scale is the matrix's

# (rows, columns) -> original, match_rms_adamw, spectral_norm
FACTORS = {
    (16, 4): (2.0, 0.8, 2.0),
    (4, 16): (1.0, 0.8, 0.5),
    (64, 9): (2.6667, 1.6, 2.6667),
    (1, 64): (1.0, 1.6, 0.125),
    (64, 1): (8.0, 1.6, 8.0),
}
RULES = ("original", "match_rms_adamw", "spectral_norm")
# shape, how it is read, the rows and columns of its matrices by row block
MATRICES: list[tuple[tuple[int, ...], dict[str, Any], list[tuple[int, int]]]] = [
    *((shape, {}, [shape]) for shape in FACTORS),
    ((64, 1, 3, 3), {"flatten": True}, [(64, 9)]),
    ((8, 4, 3, 3), {"flatten": True}, [(8, 36)]),
    ((4, 2, 1, 5), {"flatten": True}, [(4, 10)]),
    ((3, 16, 4), {"flatten": False}, [(16, 4)]),
    ((2, 3, 16, 4), {"flatten": False}, [(16, 4)]),
    ((48, 16), {"split_sizes": (32, 8, 8)}, [(32, 16), (8, 16), (8, 16)]),
    ((48, 16), {"num_heads": 3}, [(16, 16)] * 3),
]


def ones(x: Tensor) -> Tensor:
    return torch.ones_like(x)


def scales(world: int, rule: str, number: int, dim: int | None) -> float:
    """Largest error of a step of ones against lr and the factor of each row block."""
    shape, own, blocks = MATRICES[number]
    weight: Tensor = nn.Parameter(torch.zeros(shape))
    if dim is not None:
        weight = by_placements({"w": torch.zeros(shape)}, (world,), [Shard(dim)])["w"]
    optimizer = ortho_func.Muon(
        [("w", weight)], lr=0.5, weight_decay=0.0, orthogonalizer=ones, adjust_lr_fn=rule,
        wire_dtype=torch.float32, **own,
    )  # fmt: skip
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    found = gather(weight)
    parts = [found]
    if len(blocks) > 1:
        parts = list(found.split([rows for rows, _ in blocks], dim=-2))
    pairs = zip(parts, blocks, strict=True)
    return max(float((part + 0.5 * lr_scale(*matrix, rule)).abs().max()) for part, matrix in pairs)


def every_scale(rank: int, world: int, rule: str) -> float:
    return max(
        scales(world, rule, number, dim)
        for number, (shape, own, _) in enumerate(MATRICES)
        for dim in range(2 if own.get("flatten") else len(shape))
    )


@pytest.mark.parametrize("rule", RULES)
def test_the_scale_is_that_of_the_matrix(pool: Any, rule: str) -> None:
    for shape, factors in FACTORS.items():
        assert lr_scale(*shape, rule) == pytest.approx(factors[RULES.index(rule)], abs=1e-4)
    assert max(scales(1, rule, number, None) for number in range(len(MATRICES))) < 1e-6
    assert max(pool.run(every_scale, rule, world=2)) < 1e-6


@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
def test_what_is_no_matrix_has_no_shape_scale(algorithm: str) -> None:
    """An (N, d) head moves exactly as far as a (d, N) one: by its learning rate."""
    tall, wide = nn.Parameter(torch.zeros(64, 4)), nn.Parameter(torch.zeros(4, 64))
    group = {"params": [tall, wide], "algorithm": algorithm, "lr": 0.5, "weight_decay": 0.0}
    optimizer = ortho_func.Muon([{**group, "adjust_lr_fn": "match_rms_adamw"}])
    tall.grad, wide.grad = torch.ones_like(tall), torch.ones_like(wide)
    optimizer.step()
    for p in (tall, wide):
        torch.testing.assert_close(p.detach(), torch.full_like(p, -0.5))


# ---------------------------------------------------------------------------------------------
# Numbers


def zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


@pytest.mark.parametrize("algorithm", ["dion2", "dion3"])
@pytest.mark.parametrize("selection", ["global", "local"])
def test_selection_is_carried_and_not_read_off_the_update(algorithm: str, selection: str) -> None:
    """A selected slice whose update is exactly zero has had its turn: its momentum decays."""
    weight = nn.Parameter(torch.zeros(8, 20))
    weight.grad = torch.randn(8, 20)
    optimizer = WHOLE[algorithm][0](
        [weight], fraction=0.25, momentum=0.5, selection=selection, orthogonalizer=zeros
    )
    optimizer.step()
    found = optimizer.state[weight]["momentum_buffer"]
    chosen = weight.grad.abs().sum(dim=1).topk(2).indices
    factor = torch.ones(8, 1)
    factor[chosen] = 0.5
    torch.testing.assert_close(found, weight.grad * factor)


@every
@pytest.mark.parametrize("cautious", [False, True])
def test_decay_as_a_tensor_is_decay_as_a_number(algorithm: str, cautious: bool) -> None:
    first, second = pair(6, 10)
    plain = nn.Parameter(first.detach().clone())
    options = {"lr": 0.1, "cautious": cautious, **EXACT}
    one = WHOLE[algorithm][0]([first], weight_decay=0.3, **options)
    two = WHOLE[algorithm][0]([second], weight_decay=torch.tensor(0.3), **options)
    other = WHOLE[algorithm][0]([plain], weight_decay=0.3, **{**options, "cautious": not cautious})
    for _ in range(2):
        for p in (first, second, plain):
            p.grad = torch.ones(6, 10).tril() if p is first else first.grad.clone()
        for optimizer in (one, two, other):
            optimizer.step()
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(first, plain, rtol=1e-3)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_any_size(algorithm: str, dtype: torch.dtype) -> None:
    """U(cG) = U(G) over the range of float32, and no floor below it."""
    gradient = torch.randn(6, 10, generator=torch.Generator().manual_seed(3)).to(dtype)
    moved = []
    for exponent in (0, -120, -90, -40, 40, 100, 120):
        weight = nn.Parameter(torch.zeros(6, 10, dtype=dtype))
        optimizer = WHOLE[algorithm][0]([weight], lr=1.0, weight_decay=0.0, **EXACT)
        weight.grad = gradient * 2.0**exponent
        optimizer.step()
        moved.append(weight.detach().double())
    assert float(moved[0].norm()) > 0.5
    for one in moved[1:]:
        assert relative_error(one, moved[0]) < (1e-4 if dtype == torch.float32 else 2e-2)


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_looks_clean(algorithm: str, bad: float) -> None:
    """By default it propagates over its matrix, as in torch, and over no other."""
    sick, well = nn.Parameter(torch.ones(6, 10)), nn.Parameter(torch.ones(6, 10))
    optimizer = WHOLE[algorithm][0]([sick, well], lr=0.1)
    sick.grad, well.grad = torch.randn(6, 10), torch.randn(6, 10)
    sick.grad[2, 3] = bad
    optimizer.step()
    assert not sick.isfinite().all()
    assert sick[2].isnan().all()  # the row that it came with, whole
    assert well.isfinite().all()
    assert not torch.equal(well, torch.ones(6, 10))


DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@every
@pytest.mark.parametrize("param", DTYPES)
@pytest.mark.parametrize("grad", DTYPES)
def test_gradients_in_another_dtype(algorithm: str, param: torch.dtype, grad: torch.dtype) -> None:
    """Updates are fp32 at least, state keeps the parameter's dtype, applying rounds once."""
    params = {"w": torch.randn(6, 10).to(param), "none": torch.zeros(0, 4).to(param)}
    grads = {"w": torch.randn(6, 10).to(grad), "none": torch.zeros(0, 4).to(grad)}
    tx = getattr(ortho_func, algorithm)(lr=0.1)
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
        params = apply_updates(params, updates)
    assert params["w"].dtype == param
    assert state.momentum_buffer["w"].dtype == param
    assert params["w"].isfinite().all()


# ---------------------------------------------------------------------------------------------
# torch's own tools


@every
def test_a_gradient_scaler(algorithm: str) -> None:
    """Scaled and unscaled it is the same step; an overflow on this process leaves it out."""
    first, second = pair(6, 10)
    one = WHOLE[algorithm][0]([first], **HYPER, **EXACT)
    two = WHOLE[algorithm][0]([second], **HYPER, **EXACT)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x = torch.randn(4, 10)
    for number in range(3):
        scaler.scale((x @ first.T).square().sum()).backward()
        (x @ second.T).square().sum().backward()
        if number == 1:
            first.grad[0, 0] = math.inf
            second.grad = None
        scaler.step(one)
        scaler.update()
        two.step()
        one.zero_grad()
        two.zero_grad()
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


@every
@pytest.mark.parametrize("to_none", [False, True])
def test_accumulated_gradients_and_zeroed_ones(algorithm: str, to_none: bool) -> None:
    """Two backward passes are one of their sum; a gradient of zeros decays as AdamW's does."""
    first, second = pair(6, 10)
    one = WHOLE[algorithm][0]([first], momentum=0.0, **HYPER, **EXACT)
    two = WHOLE[algorithm][0]([second], momentum=0.0, **HYPER, **EXACT)
    parts = [torch.randn(6, 10) for _ in range(2)]
    for part in parts:
        (first * part).sum().backward()
    second.grad = parts[0] + parts[1]
    one.step()
    two.step()
    assert torch.equal(first, second)
    one.zero_grad(set_to_none=to_none)
    before = first.detach().clone()
    one.state[first]["momentum_buffer"].zero_()
    one.step()
    decay = 1.0 if to_none else 1 - HYPER["lr"] * HYPER["weight_decay"]
    torch.testing.assert_close(first.detach(), before * decay)


@torch._dynamo.config.patch(recompile_limit=2)
def test_as_many_compiled_optimizers_as_one_likes() -> None:
    """Recompilations are counted by optimizer, not over all that a process ever builds."""
    for number in range(4):
        weight = nn.Parameter(torch.randn(2 + number, 3))
        optimizer = ortho_func.Muon([weight], compile={"backend": "eager"})
        weight.grad = torch.randn_like(weight)
        before = weight.detach().clone()
        optimizer.step()
        assert not torch.equal(weight, before)


# ---------------------------------------------------------------------------------------------
# State of something else


def no_momentum(saved: dict[str, Any]) -> None:
    del saved["state"][0]["momentum_buffer"]


def nothing_of_one(saved: dict[str, Any]) -> None:
    del saved["state"][1]


def nothing_at_all(saved: dict[str, Any]) -> None:
    saved["state"].clear()


def other_shape(saved: dict[str, Any]) -> None:
    saved["state"][0]["momentum_buffer"] = torch.ones(1, 10)  # which would broadcast


def transposed(saved: dict[str, Any]) -> None:
    saved["state"][0]["momentum_buffer"] = torch.ones(10, 6)


@every
@pytest.mark.parametrize("change", [no_momentum, nothing_of_one, nothing_at_all, other_shape,
                                    transposed])  # fmt: skip
def test_state_that_lacks_something_is_refused(
    algorithm: str, change: Callable[[dict[str, Any]], None]
) -> None:
    """Nothing is silently left at zero, or as it was; and a refused load changes nothing."""
    weights = [("gate", nn.Parameter(torch.randn(6, 10))), ("up", nn.Parameter(torch.randn(4, 4)))]
    optimizer = WHOLE[algorithm][0](weights)
    for _, p in weights:
        p.grad = torch.randn_like(p)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(saved)
    change(saved)
    with pytest.raises(ValueError, match=r"the state to load has no .* for (gate|up)"):
        optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)
    optimizer.load_state_dict(before)


def without_gathering(rank: int, world: int, algorithm: str, seed: int) -> tuple[int, float]:
    """How often a step on replicas of shards asks for a whole tensor, and its error."""
    shapes = {"up": (20, 6), "down": (6, 20)}
    tensors, gradients = whole_tensors(shapes, seed), [whole_tensors(shapes, seed + 1)]
    parameters = by_fully_shard(tensors, (2, 2))
    asked = []
    options = {"lr": 0.1, "wire_dtype": torch.float32, **exact(algorithm)}
    with pytest.MonkeyPatch.context() as monkey:
        for name in ("full_tensor", "redistribute"):
            monkey.setattr(DTensor, name, lambda *_, **__: asked.append(1))
        train(parameters, gradients, algorithm, **options)
    right = expected(tensors, gradients, algorithm, lr=0.1)
    error = max(relative_error(gather(p), right[name]) for name, p in parameters.items())
    return len(asked), error


@pytest.mark.parametrize("algorithm", list(WHOLE))
def test_no_tensor_is_gathered_by_dtensor(pool: Any, algorithm: str) -> None:
    seed = torch.seed() % 2**31
    for asked, error in pool.run(without_gathering, algorithm, seed, world=4):
        assert asked == 0
        assert error < 1e-5, seed
