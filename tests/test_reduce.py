"""Gradients left unsynchronized: the optimizer averages them on the way to a matrix's owner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from layouts import (
    WHOLE,
    Replicate,
    Shard,
    Weights,
    by_fully_shard,
    by_placements,
    exact,
    expected,
    gather,
    relative_error,
    scatter_like,
    whole_tensors,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ortho_func
from ortho_func.geometry import replicated_layout
from ortho_func.plan import ParamSpec, Travel, build_plan
from ortho_func.routing import routes

HYPER = {"lr": 0.1, "weight_decay": 0.2, "adjust_lr_fn": "match_rms_adamw"}


def replicated(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: nn.Parameter(tensor.clone()) for name, tensor in tensors.items()}


def replica_of(parameter: Tensor, rank: int) -> tuple[int, int]:
    """Which replica this rank belongs to, and of how many."""
    if not isinstance(parameter, DTensor):
        return rank, dist.get_world_size()
    mesh, number, count = parameter.device_mesh, 0, 1
    for axis, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            number = number * mesh.size(axis) + mesh.get_local_rank(axis)
            count *= mesh.size(axis)
    return number, count


def own_gradient(whole: Tensor, parameter: Tensor, rank: int, seed: int) -> Tensor:
    """This replica's gradient: they differ, and their mean over replicas is `whole`."""
    number, count = replica_of(parameter, rank)
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn((count, *whole.shape), generator=generator)
    parts += whole - parts.mean(0)
    return scatter_like(parts[number], parameter)


PLACES: dict[str, tuple[int, Any, dict[str, Any], Any, dict[str, Any]]] = {
    "ddp on 2": (2, replicated, {}, {"a": (12, 6), "b": (6, 12), "c": (12, 6)}, {}),
    "ddp on 4": (4, replicated, {}, {"a": (5, 6), "b": (7, 3)}, {}),
    "ddp, heads": (3, replicated, {}, {"a": (12, 6)}, {"num_heads": 4}),
    "ddp, qkv": (2, replicated, {}, {"a": (12, 16)}, {"split_sizes": (8, 2, 2)}),
    "ddp, experts": (2, replicated, {}, {"a": (3, 6, 4)}, {"flatten": False}),
    "hsdp 2x2": (4, by_fully_shard, {"mesh": (2, 2)}, {"a": (20, 6), "b": (6, 20)}, {}),
    "hsdp 2x4": (8, by_fully_shard, {"mesh": (2, 4)}, {"a": (5, 6), "b": (6, 5)}, {}),
    "replicas inside": (
        4, by_placements, {"mesh": (2, 2), "placements": [Shard(0), Replicate()]},
        {"a": (7, 6), "b": (6, 8)}, {},
    ),
    "columns and replicas": (
        6, by_placements, {"mesh": (3, 2), "placements": [Replicate(), Shard(1)]},
        {"a": (7, 6), "b": (6, 9)}, {},
    ),
    "no replicas": (2, by_fully_shard, {"mesh": (2,)}, {"a": (7, 6)}, {}),
}  # fmt: skip


def check(
    rank: int, world: int, place: str, algorithm: str, seed: int, options: dict[str, Any]
) -> tuple[float, float]:
    """The error of the parameters after some steps, and of the state after averaging it."""
    _, how, arguments, shapes, own = PLACES[place]
    tensors = whole_tensors(shapes, seed)
    steps = [whole_tensors(shapes, seed + 1 + n) for n in range(3)]
    parameters = how(tensors, **arguments)
    kind, naive, extra = WHOLE[algorithm]
    optimizer = kind(
        list(parameters.items()), wire_dtype=torch.float32, reduce_gradients=True,
        process_group=dist.group.WORLD,
        **exact(algorithm), **HYPER, **extra, **own, **options,
    )  # fmt: skip
    for number, step in enumerate(steps):
        for place_in_order, (name, p) in enumerate(parameters.items()):
            p.grad = own_gradient(step[name], p, rank, seed + 100 * number + place_in_order)
        optimizer.step()
    right, state = naive(tensors, steps, **HYPER, **extra, **own)
    found = {name: gather(p) for name, p in parameters.items()}
    error = max(relative_error(found[name], right[name]) for name in shapes)
    optimizer.average_state_()
    momenta = {name: optimizer.state[p]["momentum_buffer"] for name, p in parameters.items()}
    moved = max(
        relative_error(gather(momenta[name]), state[name]["momentum_buffer"]) for name in shapes
    )
    return error, moved


@pytest.mark.parametrize("algorithm", list(WHOLE))
@pytest.mark.parametrize("place", list(PLACES))
def test_equals_synchronized_gradients(pool: Any, place: str, algorithm: str) -> None:
    seed = torch.seed() % 2**31
    for wire in ("dense", "exact"):
        found = pool.run(check, place, algorithm, seed, {"wire": wire}, world=PLACES[place][0])
        errors, moved = zip(*found, strict=True)
        assert max(errors) < 1e-5, (wire, seed, errors)
        assert max(moved) < 1e-5, (wire, seed, moved)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.embed(x))))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    hidden = [(name, p) for name, p in named if p.ndim == 2 and "embed" not in name]
    rest = [(name, p) for name, p in named if p.ndim != 2 or "embed" in name]
    return [{"params": hidden}, {"params": rest, "algorithm": "adamw", "lr": 0.01}]


def train_model(rank: int, synchronized: bool, **options: Any) -> dict[str, Tensor]:
    """Real DDP; without synchronization its forward and backward run under `no_sync`."""
    torch.manual_seed(3)
    model = DistributedDataParallel(Model())
    optimizer = ortho_func.NorMuon(
        groups_of(model.module), lr=0.05, process_group=dist.group.WORLD,
        wire_dtype=torch.float32, compute_dtype=torch.float32,
        reduce_gradients=not synchronized, **options,
    )  # fmt: skip
    data = torch.Generator().manual_seed(100 + rank)
    for _ in range(4):
        tokens = torch.randint(11, (6,), generator=data)
        target = torch.randn(6, 8, generator=data)
        if synchronized:
            (model(tokens) - target).square().mean().backward()
        else:
            with model.no_sync():
                (model(tokens) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}


def check_ddp(rank: int, world: int, options: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    right = train_model(rank, synchronized=True)
    mine = train_model(rank, synchronized=False, **options)
    return max(relative_error(mine[name], right[name]) for name in right), mine


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 64}], ids=["one bucket", "many"])
def test_ddp_under_no_sync_equals_ddp(pool: Any, options: dict[str, Any]) -> None:
    found = pool.run(check_ddp, options, world=4)
    # The Gram iteration in float32 turns one rounding of a gradient into 2e-5.
    assert max(error for error, _ in found) < 1e-4
    for _, mine in found[1:]:
        for name, tensor in mine.items():
            assert torch.equal(tensor, found[0][1][name]), name


def check_compiled(rank: int, world: int) -> tuple[float, int]:
    """Compiled equals eager; the step is one graph, whatever gradients are missing."""
    shapes = {"a": (12, 6), "b": (6, 12)}
    counts = torch._dynamo.testing.CompileCounter()
    results = []
    for compile_ in (False, {"backend": counts}):
        parameters = replicated(whole_tensors(shapes, 5))
        bias = nn.Parameter(torch.ones(7))
        optimizer = ortho_func.Muon(
            [{"params": list(parameters.values())},
             {"params": [bias], "algorithm": "adamw"}],
            lr=0.1, reduce_gradients=True, process_group=dist.group.WORLD,
            wire_dtype=torch.float32, compute_dtype=torch.float32, compile=compile_,
        )  # fmt: skip
        for step in range(3):
            for number, p in enumerate([*parameters.values(), bias]):
                generator = torch.Generator().manual_seed(10 * rank + number + 1000 * step)
                missing = rank == 1 and step == number
                p.grad = None if missing else torch.randn(p.shape, generator=generator)
            optimizer.step()
        results.append([p.detach() for p in (*parameters.values(), bias)])
    return max(relative_error(a, b) for a, b in zip(*results, strict=True)), counts.frame_count


def test_compiled_step_is_one_graph(pool: Any) -> None:
    for error, frames in pool.run(check_compiled, world=2):
        assert error < 1e-5
        assert frames == 1


def functional_check(rank: int, world: int) -> float:
    """A plan with `reduce_gradients` serves the functional form alike."""
    shapes = {"a": (12, 6), "b": (6, 12)}
    tensors = whole_tensors(shapes, 3)
    steps = [whole_tensors(shapes, 30 + n) for n in range(3)]
    parameters: dict[str, Tensor] = {name: t.clone() for name, t in tensors.items()}
    made = ortho_func.plan(
        parameters, process_group=dist.group.WORLD, reduce_gradients=True,
        wire_dtype=torch.float32,
    )  # fmt: skip
    tx = ortho_func.muon(lr=0.1, weight_decay=0.2, orthogonalizer="svd", plan=made)
    state = tx.init(parameters)
    for number, step in enumerate(steps):
        grads = {
            name: own_gradient(step[name], parameters[name], rank, number) for name in parameters
        }
        updates, state = tx.update(grads, state, parameters)
        parameters = ortho_func.apply_updates(parameters, updates)
    right = expected(tensors, steps, "muon", lr=0.1, weight_decay=0.2)
    return max(relative_error(parameters[name], right[name]) for name in shapes)


def test_functional_form(pool: Any) -> None:
    assert max(pool.run(functional_check, world=4)) < 1e-5


def test_a_step_moves_what_a_ring_all_reduce_moves() -> None:
    """2(1 − 1/W) of the matrices' bytes a rank, in both exchanges together."""
    world, side = 8, 16
    layout = replicated_layout((side, side), tuple(range(world))).averaged()
    specs = tuple(ParamSpec(f"w{n}", layout) for n in range(2 * world))
    made = build_plan(specs, (Travel(),))
    numel = 2 * world * side * side
    for rank in range(world):
        (route,) = routes(made, rank)
        sent = sum(route.send) - route.send[rank] + sum(route.back) - route.back[rank]
        assert sent == 2 * (world - 1) * numel // world


def missing_everywhere(rank: int, world: int) -> bool:
    """The first steps without a gradient on one rank leave all replicas equal."""
    torch.manual_seed(1)
    p = nn.Parameter(torch.randn(6, 4))
    optimizer = ortho_func.Dion2(
        [p], lr=0.1, fraction=0.5, reduce_gradients=True, process_group=dist.group.WORLD
    )
    for _ in range(3):
        p.grad = torch.randn(6, 4) if rank == 0 else None
        optimizer.step()
    copies = [torch.empty_like(p) for _ in range(world)]
    dist.all_gather(copies, p.detach())
    return all(torch.equal(copies[0], other) for other in copies)


def test_a_missing_gradient_counts_as_zero(pool: Any) -> None:
    assert all(pool.run(missing_everywhere, world=3))


def frozen_ones(rank: int, world: int, compiled: bool) -> list[bool]:
    """Whether frozen parameters kept their bits; the others moved, and are equal everywhere."""
    torch.manual_seed(1)
    ways = {"muon": (6, 4), "dion": (4, 6), "adamw": (3,), "lion": (2, 2)}
    groups, frozen, trained = [], [], []
    for algorithm, shape in ways.items():
        pair = [nn.Parameter(torch.randn(shape)) for _ in range(2)]
        frozen.append(pair[0].requires_grad_(False))
        trained.append(pair[1])
        groups.append({"params": pair, "algorithm": algorithm})
    optimizer = ortho_func.Muon(
        groups, lr=0.1, weight_decay=0.2, reduce_gradients=True, process_group=dist.group.WORLD,
        compile={"backend": "eager"} if compiled else False,
    )  # fmt: skip
    before = [p.detach().clone() for p in (*frozen, *trained)]
    for _ in range(2):
        for p in trained:
            p.grad = torch.randn_like(p) if rank == 0 else None
        optimizer.step()
    kept = [torch.equal(p, old) for p, old in zip(frozen, before, strict=False)]
    for p, old in zip(trained, before[len(frozen) :], strict=True):
        copies = [torch.empty_like(p) for _ in range(world)]
        dist.all_gather(copies, p.detach())
        kept.append(not torch.equal(p, old) and torch.equal(copies[0], copies[1]))
    return kept


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_frozen_stays(pool: Any, compiled: bool) -> None:
    """It has no gradient on any replica: there is no zero to decay by."""
    for kept in pool.run(frozen_ones, compiled, world=2, timeout=120):
        assert all(kept), kept


def wrong_type(rank: int, world: int) -> str:
    with pytest.raises(TypeError) as found:
        ortho_func.Muon(Weights({"w": torch.ones(2, 2)}).parameters(), reduce_gradients="yes")
    return str(found.value)


def test_a_flag_is_a_flag(pool: Any) -> None:
    assert "reduce_gradients" in pool.run(wrong_type, world=1)[0]
