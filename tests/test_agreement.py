"""Ranks that are about to do different things all raise, at construction, and say what differs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import Partial, Replicate, Shard, by_fully_shard, gather, scatter_like, whole_tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import ortho_func
from ortho_func import geometry

SHAPES = {"a": (5, 4), "b": (4, 6), "c": (6, 6), "d": (3, 4)}


def named(world: int) -> list[tuple[str, Tensor]]:
    return list(by_fully_shard(whole_tensors(SHAPES, 0), (world,)).items())


def negative(x: Tensor) -> Tensor:
    return -x


def identity(x: Tensor) -> Tensor:
    return x


# ---------------------------------------------------------------------------------------------
# Parameters


def swapped(params: list[Any]) -> list[Any]:
    return [params[1], params[0], *params[2:]]


def without_second(params: list[Any]) -> list[Any]:
    return [params[0], *params[2:]]


def without_last(params: list[Any]) -> list[Any]:
    return params[:-1]


def only_first(params: list[Any]) -> list[Any]:
    return params[:1]


def with_extra(params: list[Any]) -> list[Any]:
    mesh = params[0][1].device_mesh
    adapter = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()], src_data_rank=None)
    return [*params, ("adapter", nn.Parameter(adapter))]


def in_another_group(params: list[Any]) -> list[Any]:
    others = [("bias", nn.Parameter(params[0][1].detach().clone()))]
    return [{"params": params[1:]}, {"params": others, "algorithm": "adamw"}]


def build_changed(
    rank: int, world: int, change: Callable[[list[Any]], Any], odd: int, names: bool
) -> None:
    params = named(world)
    if not names:
        params = [p for _, p in params]
    ortho_func.NorMuon(change(params) if rank == odd else params)


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize(
    ("change", "first", "second"),
    [
        (swapped, "a: shape", "b: shape"),
        (without_second, "b: shape", "c: shape"),
        (without_last, "d: shape", "(nothing)"),
        (only_first, "b: shape", "(nothing)"),
        (with_extra, "(nothing)", "adapter: shape"),
        (in_another_group, "a: shape", "b: shape"),
    ],
)
def test_other_parameters(
    pool: Any, change: Callable[[list[Any]], Any], first: str, second: str, odd: int
) -> None:
    messages = pool.expect_error(
        build_changed, change, odd, True, world=3, raises=ValueError, match="the ranks disagree"
    )
    assert len(set(messages)) == 1  # the same on every rank
    regular = 0 if odd else 1
    lines = {line.strip().split(":")[0]: line for line in messages[0].split("\n")[1:3]}
    assert first in lines[f"rank {regular}"]
    assert second in lines[f"rank {odd}"]


def test_another_order_without_names(pool: Any) -> None:
    pool.expect_error(
        build_changed, swapped, 1, False, world=3, raises=ValueError,
        match=r"rank 0: parameter 0 of group 0: shape \(5, 4\)\n  rank 1: .* shape \(4, 6\)",
    )  # fmt: skip


def build_replicated(rank: int, world: int, change: Callable[[list[Any]], Any]) -> None:
    params = [(name, nn.Parameter(t)) for name, t in whole_tensors(SHAPES, 0).items()]
    chosen = change(params) if rank == 1 else params
    ortho_func.Muon(chosen, process_group=dist.group.WORLD)


def nothing(params: list[Any]) -> list[Any]:
    return []


@pytest.mark.parametrize(
    ("change", "match"),
    [(swapped, "disagree"), (without_last, "disagree"), (nothing, "rank 1: .*empty parameter")],
)
def test_replicated_tensors(pool: Any, change: Callable[[list[Any]], Any], match: str) -> None:
    pool.expect_error(build_replicated, change, world=3, raises=ValueError, match=match)


# ---------------------------------------------------------------------------------------------
# Options

STATIC: dict[str, tuple[Any, Any]] = {
    "nesterov": (True, False),
    "cautious": (False, True),
    "adjust_lr_fn": ("original", "match_rms_adamw"),
    "orthogonalizer": (identity, negative),
    "ns_steps": (None, 4),
    "eps": (1e-7, 1e-8),
    "wire_dtype": (torch.bfloat16, torch.float32),
    "compute_dtype": (torch.bfloat16, torch.float32),
    "num_heads": (None, 1),
    "split_sizes": (None, [3, 2]),
    "algorithm": ("muon", "dion2"),
    "fraction": (0.25, 0.5),
    "selection": ("local", "global"),
    "bucket_bytes": (2**20, 2**10),
    "wire": ("dense", "exact"),
    "balance": ("cost", "uniform"),
    "hops": ("one", "two"),
}


def build_with(rank: int, world: int, option: str, values: tuple[Any, Any], odd: int) -> None:
    (_, p), *_ = named(world)
    group = {"params": [("a", p)], "algorithm": "dion2" if option in ("fraction",) else "muon"}
    settings: dict[str, Any] = {}
    where = settings if option in ("bucket_bytes", "wire", "balance", "hops") else group
    where[option] = values[rank == odd]
    ortho_func.Muon([group], **settings)


@pytest.mark.parametrize("option", list(STATIC))
def test_other_options(pool: Any, option: str) -> None:
    messages = pool.expect_error(
        build_with, option, STATIC[option], 1, world=2, raises=ValueError, match=f"{option}="
    )
    assert len(set(messages)) == 1


def other_scalars(rank: int, world: int) -> None:
    """What may change from step to step is nobody else's business: schedulers set it any time."""
    scalars = {"lr": 0.1 * (rank + 1), "weight_decay": 0.1 * rank, "momentum": 0.9 + 0.01 * rank}
    optimizer = ortho_func.NorMuon(named(world), beta2=0.9 + 0.01 * rank, **scalars)
    for _, p in named(world):
        p.grad = torch.ones_like(p)
    optimizer.step()


def test_scalars_are_not_compared(pool: Any) -> None:
    pool.run(other_scalars, world=3)


# ---------------------------------------------------------------------------------------------
# What cannot be done, on all ranks or on one


def sharded(world: int, **options: Any) -> DTensor:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    return distribute_tensor(torch.ones(world, 4, **options), mesh, [Shard(0)])


def partial(world: int) -> Tensor:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    return DTensor.from_local(torch.ones(4, 4), mesh, [Partial()], run_check=False)


def integers(world: int) -> Tensor:
    return sharded(world, dtype=torch.int32)


def complexes(world: int) -> Tensor:
    return sharded(world, dtype=torch.complex64)


def one_dim(world: int) -> Tensor:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    return distribute_tensor(torch.ones(8), mesh, [Shard(0)])


def three_dims(world: int) -> Tensor:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    return distribute_tensor(torch.ones(4, 4, 4), mesh, [Shard(0)])


def kernel_dim(world: int) -> Tensor:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    return distribute_tensor(torch.ones(4, 4, 3, 3), mesh, [Shard(2)])


WRONG: dict[str, tuple[Callable[[int], Tensor], dict[str, Any], str]] = {
    "partial": (partial, {}, "placement Partial|placement P"),
    "integers": (integers, {}, "int32"),
    "complex": (complexes, {}, "complex64"),
    "one dim": (one_dim, {}, "two or more dims.*FSDP1"),
    "three dims": (three_dims, {}, "flatten=False .*flatten=True"),
    "kernel dim": (kernel_dim, {"flatten": True}, "kernel dim"),
    "split sizes": (sharded, {"split_sizes": [2, 5]}, "split_sizes"),
    "heads": (sharded, {"num_heads": 7}, "num_heads"),
    "number": (sharded, {"lr": -1.0}, "lr must lie in"),
    "name": (sharded, {"algorithm": "moun"}, "algorithm must be one of"),
}


def build_wrong(rank: int, world: int, case: str, everywhere: bool) -> None:
    make, options, _ = WRONG[case]
    found = make(world)  # on all ranks: placing a tensor is collective
    params = named(world)
    wrong = {"params": [("odd", nn.Parameter(found, requires_grad=found.is_floating_point()))]}
    groups = [{"params": params}, {**wrong, **options}]
    ortho_func.Muon(groups if everywhere or rank == 1 else groups[:1])


@pytest.mark.parametrize("case", list(WRONG))
def test_wrong_on_all_ranks_and_on_one(pool: Any, case: str) -> None:
    match = WRONG[case][2]
    messages = pool.expect_error(
        build_wrong, case, True, world=2, raises=ValueError, match=f"(?s){match}"
    )
    assert not messages[0].startswith("rank")  # nobody else is to blame
    messages = pool.expect_error(
        build_wrong, case, False, world=2, raises=ValueError, match=f"(?s)rank 1: .*({match})"
    )
    assert len(set(messages)) == 1


def build_wrong_type(rank: int, world: int, everywhere: bool) -> None:
    ortho_func.Muon(named(world), nesterov="yes" if everywhere or rank == 1 else True)


def test_type_errors(pool: Any) -> None:
    pool.expect_error(build_wrong_type, True, world=2, raises=TypeError, match="nesterov")
    match = "rank 1: nesterov"
    pool.expect_error(build_wrong_type, False, world=2, raises=ValueError, match=match)


def build_on_devices(rank: int, world: int) -> None:
    params = named(world)
    with pytest.MonkeyPatch.context() as patch:  # stands for a machine with an accelerator
        if rank == 1:
            patch.setattr(geometry, "work_device", lambda tensor: torch.device("cuda", 0))
        ortho_func.Muon(params)


def test_a_mesh_of_several_kinds_of_devices(pool: Any) -> None:
    pool.expect_error(
        build_on_devices, world=2, raises=ValueError, match=r"(?s)rank 0: .*on cpu.*rank 1: .*cuda"
    )


# ---------------------------------------------------------------------------------------------
# Several meshes


def on_rows_and_columns(rank: int, world: int, odd: int, what: str) -> None:
    """Parameters over the rows and over the columns of a grid; one rank has another one."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    groups = []
    for axis in ("row", "column"):
        placed = distribute_tensor(torch.ones(6, 4), grid[axis], [Shard(0)])
        groups.append({"params": [(axis, nn.Parameter(placed))]})
    if rank == odd and what == "option":
        groups[1]["nesterov"] = False
    if rank == odd and what == "fault":
        groups[1]["lr"] = -1.0
    ortho_func.Muon(groups)


@pytest.mark.parametrize("what", ["option", "fault"])
def test_ranks_that_share_no_parameter_with_the_odd_one(pool: Any, what: str) -> None:
    for odd in range(4):
        match = "nesterov=" if what == "option" else f"rank {odd}: lr must"
        pool.expect_error(
            on_rows_and_columns, odd, what, world=4, raises=ValueError, match=match, timeout=30
        )


def without_experts(rank: int, world: int, axes: str) -> None:
    """One rank lacks everything that lies on the experts' mesh."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "fsdp"))
    dense = distribute_tensor(torch.ones(8, 4), grid, [Replicate(), Shard(0)])
    mesh = grid["ep"] if axes == "ep" else init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    experts = distribute_tensor(torch.ones(4, 3, 4), mesh, [Shard(0)])
    params = [("dense", nn.Parameter(dense)), ("experts", nn.Parameter(experts))]
    ortho_func.Muon(params[:1] if rank == 3 else params, flatten=False)


@pytest.mark.parametrize("axes", ["ep", "all"])
def test_a_rank_without_anything_on_one_mesh(pool: Any, axes: str) -> None:
    pool.expect_error(
        without_experts, axes, world=4, raises=ValueError, match="experts: shape", timeout=30
    )


# ---------------------------------------------------------------------------------------------
# When ranks talk


def collectives(rank: int, world: int) -> tuple[int, int, int]:
    params = named(world)
    with CommDebugMode() as building:
        optimizer = ortho_func.NorMuon(params)
    for _, p in params:
        p.grad = torch.ones_like(p)
    counts = []
    for _ in range(2):
        with CommDebugMode() as stepping:
            optimizer.step()
        counts.append(stepping.get_total_counts())
    assert counts[0] == counts[1]
    if rank == 0:  # what a rank loads by itself is no reason to talk, or others would have to
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    return building.get_total_counts(), counts[0], len(optimizer.plan.buckets)


def test_ranks_talk_once_at_construction(pool: Any) -> None:
    for building, stepping, buckets in pool.run(collectives, world=3):
        assert building <= 2  # one word each: its length and itself
        assert stepping == 2 * buckets


def add_group(rank: int, world: int) -> None:
    params = named(world)
    optimizer = ortho_func.Muon(params[:2])
    heads = [None, 3][rank == 1]
    with pytest.raises(ValueError, match="num_heads="):
        optimizer.add_param_group({"params": params[2:3], "num_heads": heads})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": params[2:3], "num_heads": 3})
    before = {name: gather(p).clone() for name, p in params}
    for step in range(2):
        for name, whole in whole_tensors(SHAPES, step).items():
            parameter = dict(params)[name]
            parameter.grad = scatter_like(whole, parameter)
        optimizer.step()
        optimizer.param_groups[0]["nesterov"] = False  # on all ranks: planned and agreed anew
    moved = [name for name, p in params if not torch.equal(gather(p), before[name])]
    assert moved == ["a", "b", "c"]


def test_groups_added_later(pool: Any) -> None:
    pool.run(add_group, world=3)


def test_errors_come_at_once(pool: Any) -> None:
    pool.run(collectives, world=3)  # workers are up
    start = time.monotonic()
    pool.expect_error(build_changed, swapped, 1, True, world=3, raises=ValueError)
    assert time.monotonic() - start < 20
