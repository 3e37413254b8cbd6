"""Training: one curve on any number of ranks and any layout, and the same run twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from layouts import by_fully_shard, scatter_like, whole_tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import ortho_func
from ortho_func.geometry import local

STEPS = 200
BATCH = 48
# Each layer under an algorithm of its own; what is no matrix under AdamW.
ALGORITHMS = {"up": "muon", "down": "normuon", "wide": "dion2", "narrow": "dion3", "out": "dion"}
ALGORITHMS_AND_OTHERS = (*ALGORITHMS.values(), "adamw", "lion")
LAYOUTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "fsdp on 2": ("fsdp", (2,)),
    "fsdp on 4": ("fsdp", (4,)),
    "fsdp on 8": ("fsdp", (8,)),
    "hsdp": ("hsdp", (2, 2)),
    "tensor parallel": ("tp", (2,)),
    "fsdp x tensor parallel": ("fsdp x tp", (2, 2)),
    "ddp": ("ddp", (3,)),
}


class Net(nn.Module):
    """A few layers whose rows no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 20)
        self.down = nn.Linear(20, 11)
        self.wide = nn.Linear(11, 22)
        self.narrow = nn.Linear(22, 9)
        self.out = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.down(self.up(x).tanh())[:, :10]
        x = torch.cat([x, x[:, :1]], dim=1)
        return self.out(self.narrow(self.wide(x).tanh()))


def wrapped(model: Net, kind: str, mesh: tuple[int, ...]) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind in ("tp", "fsdp x tp"):
        grid = init_device_mesh("cpu", mesh, mesh_dim_names=("fsdp", "tp")[-len(mesh) :])
        ways = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        ways |= {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
        parallelize_module(model, grid["tp"], ways)
        if kind == "fsdp x tp":
            fully_shard(model, mesh=grid["fsdp"])
        return model
    if kind != "one":
        names = ("replicate", "shard")[-len(mesh) :]
        fully_shard(model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))
    return model


def curve(
    rank: int, world: int, kind: str, mesh: tuple[int, ...], steps: int, **options: Any
) -> list[float]:
    """The loss on the whole batch before each step."""
    torch.manual_seed(0)
    model, teacher = Net(), Net()
    x = torch.randn(BATCH, 10)
    with torch.no_grad():
        y = teacher(2 * x)
    trained = wrapped(model, kind, mesh)
    ways = {"one": 1, "tp": 1, "fsdp x tp": mesh[0]}.get(kind, world)  # parts of the batch
    part = BATCH // ways
    first = (rank // (world // ways)) * part
    mine = slice(first, first + part)
    named = list(model.named_parameters())
    groups = [
        {
            "params": [(n, p) for n, p in named if n == f"{layer}.weight"],
            "algorithm": algorithm,
            "selection": "global",
            "fraction": 0.5,
            "rank_fraction": 0.5,
        }
        for layer, algorithm in ALGORITHMS.items()
    ]
    groups.append({"params": [(n, p) for n, p in named if "bias" in n], "algorithm": "adamw"})
    optimizer = ortho_func.Muon(
        groups, **{"lr": 0.004, **options}, weight_decay=0.01,
        wire_dtype=torch.float32, compute_dtype=torch.float32, bucket_bytes=512,
        process_group=dist.group.WORLD if kind == "ddp" else None,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    losses = []
    for _ in range(steps):
        loss = (trained(x[mine]) - y[mine]).square().mean()
        loss.backward()
        total = loss.detach().clone()
        if ways > 1:
            dist.all_reduce(total)
            total /= world
        losses.append(float(total))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses


def apart(found: Sequence[float], right: Sequence[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a - b) / b for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("layout", ["fsdp on 4", "fsdp x tensor parallel", "ddp"])
def test_the_same_curve(pool: Any, layout: str) -> None:
    """40 steps on some layouts; `make soak` takes 200 on all."""
    kind, mesh = LAYOUTS[layout]
    alone = curve(0, 1, "one", (1,), 40)
    assert alone[-1] < 0.7 * alone[0]  # it learns
    for found in pool.run(curve, kind, mesh, 40, world=math.prod(mesh)):
        assert apart(found, alone) < 1e-4


# ---------------------------------------------------------------------------------------------
# Momentum in bfloat16


class Drift(NamedTuple):
    """Losses at the end, by seed of the batches, and the sizes of the weights."""

    losses: list[float]
    sizes: list[float]


def trained_with(
    momentum_dtype: torch.dtype, algorithm: str, steps: int, seeds: Sequence[int]
) -> Drift:
    """Runs that differ in their batches; the loss is the mean over the last tenth of the steps."""
    losses, sizes = [], []
    for seed in seeds:
        torch.manual_seed(0)
        model, teacher = Net(), Net()
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim == 1]
        groups = [
            {"params": matrices, "algorithm": algorithm},
            {"params": others, "algorithm": "adamw"},
        ]
        optimizer = ortho_func.Muon(groups, lr=0.004, momentum_dtype=momentum_dtype)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
        torch.manual_seed(1 + seed)
        last = []
        for _ in range(steps):
            x = torch.randn(16, 10)
            with torch.no_grad():
                y = teacher(2 * x) + 0.1 * torch.randn(16, 5)
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            last.append(float(loss.detach()))
        losses.append(sum(last[-steps // 10 :]) / (steps // 10))
        sizes.append(float(torch.cat([p.detach().flatten() for p in matrices]).norm()))
    return Drift(losses, sizes)


def noise(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    found = torch.tensor(values, dtype=torch.float64)
    return float(found.mean()), float(found.std())


@pytest.mark.parametrize("algorithm", ["normuon"])
def test_momentum_in_bfloat16_does_not_drift(algorithm: str) -> None:
    """No further from fp32 than other batches lead; `make soak` does it for longer, and for all."""
    seeds = (0, 1, 2)
    right = trained_with(torch.float32, algorithm, 100, seeds)
    found = trained_with(torch.bfloat16, algorithm, 100, seeds)
    assert found != right
    (mean, spread), (other, _) = noise(right.losses), noise(found.losses)
    assert abs(other - mean) < spread, (found, right)
    for mine, theirs in zip(found.sizes, right.sizes, strict=True):
        assert abs(mine - theirs) < 2e-3 * theirs


# ---------------------------------------------------------------------------------------------
# The same run twice


def bits(rank: int, world: int, algorithm: str) -> list[Tensor]:
    """Parameters and state after a few steps with default options."""
    shapes = {"a": (18, 7), "b": (5, 9), "c": (12, 12), "d": (1, 8)}
    parameters = by_fully_shard(whole_tensors(shapes, 0), (world,))
    groups = [{"params": list(parameters.items()), "algorithm": algorithm}]
    optimizer = ortho_func.Muon(groups, lr=0.1, bucket_bytes=512)
    for step in range(4):
        for name, whole in whole_tensors(shapes, 1 + step).items():
            parameters[name].grad = scatter_like(whole, parameters[name])
        optimizer.step()
    state = [t for p in parameters.values() for t in optimizer.state[p].values()]
    every = [p.detach() for p in parameters.values()] + state
    return [local(t).clone() for t in every if isinstance(t, Tensor)]


@pytest.mark.parametrize("algorithm", ALGORITHMS_AND_OTHERS)
def test_the_same_run_twice_is_bitwise_the_same(pool: Any, algorithm: str) -> None:
    first, second = (pool.run(bits, algorithm, world=2) for _ in range(2))
    for mine, other in zip(first, second, strict=True):
        assert len(mine) == len(other) > 4
        assert all(map(torch.equal, mine, other))
