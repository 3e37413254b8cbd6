"""Parameters as training scripts place them: HSDP, FSDP with TP, several meshes, stages, DDP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from layouts import (
    WHOLE,
    Partial,
    Replicate,
    Shard,
    Weights,
    by_fully_shard,
    exact,
    expected,
    gather,
    relative_error,
    scatter_like,
    train,
    whole_tensors,
)
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import ortho_func
from ortho_func.geometry import layout_of, mesh_layout

EXACT = {"wire_dtype": torch.float32}
HYPER = {"lr": 0.1, "weight_decay": 0.2}
TRACED = {"backend": "aot_eager"}  # the graph as it is; what the compiler makes of it is elsewhere


def worst_error(
    parameters: Mapping[str, Tensor],
    tensors: dict[str, Tensor],
    gradients: list[dict[str, Tensor | None]],
    algorithm: str,
    **options: Any,
) -> float:
    """Train, and compare with one process on the whole tensors."""
    own = {key: options[key] for key in ("flatten",) if key in options}
    flatten = {"flatten": False if any(t.ndim > 2 for t in tensors.values()) else None, **own}
    train(
        parameters, gradients, algorithm, **EXACT, **HYPER, **exact(algorithm),
        **{**flatten, **options},
    )  # fmt: skip
    right = expected(tensors, gradients, algorithm, **HYPER, **flatten)
    return max(relative_error(gather(p), right[name]) for name, p in parameters.items())


# ---------------------------------------------------------------------------------------------
# HSDP


class Recorder:
    """An orthogonalizer that remembers how many matrices it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.seen.append(tuple(x.shape))
        return ortho_func.orthogonalize(x)


class Gated(nn.Module):
    """Layers whose rows divide by no number of shards; `gate` leaves some shards empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 11, bias=False)
        self.gate = nn.Linear(6, 1, bias=False)
        self.down = nn.Linear(11, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)) * self.gate(x))


def train_hsdp(
    rank: int, world: int, mesh: tuple[int, int], algorithm: str, steps: int
) -> list[Tensor]:
    """All local tensors after some steps on other data on every rank: parameters and state."""
    grid = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    model = Gated()
    fully_shard(model, mesh=grid)
    cls, _, extra = WHOLE[algorithm]
    optimizer = cls(model.parameters(), lr=0.02, **extra)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(5, 6, generator=generator)
        (model(x) - x[:, :1]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [p._local_tensor for p in model.parameters()]
    for p in model.parameters():
        found += [optimizer.state[p][name]._local_tensor for name in sorted(optimizer.state[p])]
    return [tensor.detach().clone() for tensor in found]


@pytest.mark.parametrize(
    ("mesh", "algorithm"), [*(((2, 2), name) for name in WHOLE), ((2, 3), "normuon")]
)
def test_replicas_stay_bitwise_equal(pool: Any, mesh: tuple[int, int], algorithm: str) -> None:
    results = pool.run(train_hsdp, mesh, algorithm, 50, world=math.prod(mesh), timeout=120)
    shards = mesh[1]
    for rank, found in enumerate(results):
        first = results[rank % shards]
        assert all(torch.isfinite(x).all() for x in found)
        assert len(found) == len(first)
        for mine, other in zip(found, first, strict=True):
            assert torch.equal(mine, other), (rank, mine.shape)


def count_matrices(
    rank: int, world: int, mesh: tuple[int, int], algorithm: str
) -> tuple[int, list[float]]:
    shapes = {f"w{n}": (5, 6) for n in range(5)} | {"a": (9, 4), "b": (1, 8), "c": (8, 1)}
    parameters = by_fully_shard(whole_tensors(shapes, 0), mesh)
    recorder = Recorder()
    cls, _, extra = WHOLE[algorithm]
    optimizer = cls(
        list(parameters.items()),
        **{**extra, **exact(algorithm), "orthogonalizer": recorder},
    )
    for step in range(2):
        for name, whole in whole_tensors(shapes, step).items():
            parameters[name].grad = scatter_like(whole, parameters[name])
        optimizer.step()
    return sum(shape[0] for shape in recorder.seen), optimizer.plan.loads()


@pytest.mark.parametrize("algorithm", [name for name in WHOLE if name != "dion"])
def test_a_matrix_is_orthogonalized_once_in_the_whole_mesh(pool: Any, algorithm: str) -> None:
    busiest = {}
    for mesh in [(1, 2), (2, 2), (4, 2)]:
        results = pool.run(count_matrices, mesh, algorithm, world=math.prod(mesh))
        assert sum(count for count, _ in results) == 2 * 8, (mesh, results)
        busiest[mesh] = max(results[0][1])
    assert busiest[4, 2] < busiest[2, 2] < busiest[1, 2]  # replicas share the work


# ---------------------------------------------------------------------------------------------
# FSDP and tensor parallel on one dim


def sharded_rows(
    names: tuple[str, ...], mesh: tuple[int, ...], rows: int, cols: int, whole: Tensor | None = None
) -> DTensor:
    """Real `fully_shard` over a column-wise parallel layer: the rows are cut by both."""
    grid = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    layer = nn.Linear(cols, rows, bias=False)
    with torch.no_grad():
        numbers = torch.arange(float(rows))[:, None].expand(rows, cols)
        layer.weight.copy_(numbers if whole is None else whole)
    parallelize_module(layer, grid["tp"], ColwiseParallel())
    outer = tuple(name for name in names if name != "tp")
    fully_shard(layer, mesh=grid[outer])
    return layer.weight


def rows_held(names: tuple[str, ...], mesh: tuple[int, ...], rows: int) -> list[int]:
    return sharded_rows(names, mesh, rows, 1)._local_tensor.flatten().int().tolist()


def check_rows(rank: int, world: int, names: tuple[str, ...], mesh: tuple[int, ...]) -> None:
    for rows in range(1, 3 * world):
        weight = sharded_rows(names, mesh, rows, 1)
        layout = layout_of(weight)
        box = layout.boxes[layout.domain.ranks.index(rank)]
        planned = list(range(box.start[0], box.start[0] + box.size[0]))
        assert weight._local_tensor.flatten().int().tolist() == planned, (rows, weight.placements)


FSDP_TP = [
    (("fsdp", "tp"), (2, 2)),
    (("fsdp", "tp"), (3, 2)),
    (("fsdp", "tp"), (4, 2)),
    (("fsdp", "tp"), (2, 4)),
    (("tp", "fsdp"), (2, 3)),
    (("replicate", "fsdp", "tp"), (2, 2, 2)),
]


@pytest.mark.parametrize(("names", "mesh"), FSDP_TP)
def test_layout_is_what_the_ranks_hold(
    pool: Any, names: tuple[str, ...], mesh: tuple[int, ...]
) -> None:
    """Also where DTensor's own function says otherwise: 9 rows on 4 x 2, 13 on 3 x 2."""
    pool.run(check_rows, names, mesh, world=math.prod(mesh), timeout=120)


@pytest.mark.parametrize("dims", [(0, 0), (0, 1), (1, 0), (0, None), (1, None), (None, 1)])
@pytest.mark.parametrize("mesh", [(2, 2), (4, 2), (3, 2), (2, 4)])
def test_layout_is_dtensors_own(mesh: tuple[int, int], dims: tuple[int | None, int | None]) -> None:
    """For every placement without a split factor, DTensor's function is right."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    placements = tuple(Replicate() if dim is None else Shard(dim) for dim in dims)
    for rows in range(1, 20):
        shape = (rows, 21 - rows)
        layout = mesh_layout(shape, tuple(range(math.prod(mesh))), mesh, placements)
        for flat, box in enumerate(layout.boxes):
            at = [flat // mesh[1], flat % mesh[1]]
            size, start = _compute_local_shape_and_global_offset(shape, mesh, at, placements)
            assert (box.size, box.start) == (tuple(size), tuple(start)), (shape, flat)


def train_rows(
    rank: int,
    world: int,
    names: tuple[str, ...],
    mesh: tuple[int, ...],
    rows: int,
    algorithm: str,
    seed: int,
) -> float:
    """Train a layer both ways cut; gradients and results by the rows that are really here."""
    held = rows_held(names, mesh, rows)
    whole = whole_tensors({"w": (rows, 5)}, seed)
    weight = sharded_rows(names, mesh, rows, 5, whole["w"])
    gradients = [whole_tensors({"w": (rows, 5)}, seed + 1 + n) for n in range(3)]
    cls, _, extra = WHOLE[algorithm]
    options = {**extra, **HYPER, **EXACT, **exact(algorithm)}
    optimizer = cls([("w", weight)], **options)
    for step in gradients:
        weight.grad = torch.zeros_like(weight)
        weight.grad._local_tensor.copy_(step["w"][held])
        optimizer.step()
    right = expected(whole, gradients, algorithm, **HYPER)["w"][held]
    return float((weight._local_tensor - right).abs().max()) if held else 0.0


@pytest.mark.parametrize("algorithm", ["muon", "normuon"])
@pytest.mark.parametrize(
    ("names", "mesh", "rows"),
    [
        (("fsdp", "tp"), (4, 2), 9),
        (("fsdp", "tp"), (3, 2), 13),
        (("fsdp", "tp"), (2, 2), 6),
        (("tp", "fsdp"), (2, 3), 7),
        (("replicate", "fsdp", "tp"), (2, 2, 2), 5),
    ],
)
def test_rows_cut_twice(
    pool: Any, names: tuple[str, ...], mesh: tuple[int, ...], rows: int, algorithm: str
) -> None:
    errors = pool.run(train_rows, names, mesh, rows, algorithm, rows, world=math.prod(mesh))
    assert max(errors) < 1e-5, errors


def build_from_wrong_shard(rank: int, world: int, bad: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    rows = 3 if rank == bad else 2
    weight = DTensor.from_local(
        torch.ones(rows, 4), mesh, [Shard(0)], run_check=False, shape=(2 * world, 4), stride=(4, 1)
    )
    ortho_func.Muon([("gate", nn.Parameter(weight))])


def build_from_strange_order(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    weight = DTensor.from_local(
        torch.ones(2, 4),
        mesh,
        [_StridedShard(0, split_factor=3), Shard(0)],
        run_check=False,
        shape=(8, 4),
        stride=(4, 1),
    )
    ortho_func.Muon([("gate", nn.Parameter(weight))])


def test_a_shard_of_another_shape_is_an_error_everywhere(pool: Any) -> None:
    for bad in (0, 2):
        messages = pool.expect_error(
            build_from_wrong_shard, bad, world=3, raises=ValueError, match=r"gate .*shard of shape"
        )
        assert len(set(messages)) == 1
        assert f"rank {bad}: gate" in messages[0]
    pool.expect_error(
        build_from_strange_order, world=4, raises=ValueError, match="gate .*no order of cutting"
    )


# ---------------------------------------------------------------------------------------------
# Several meshes


DENSE = {"up": (10, 6), "down": (6, 10), "gate": (3, 6)}
EXPERTS = {"w1": (4, 6, 4), "w2": (5, 3, 6)}


def experts_and_dense(rank: int, world: int, algorithm: str, seed: int, wire: str) -> float:
    """Experts over ep x fsdp, dense layers over one flat axis of the same ranks."""
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ep", "fsdp"))
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    tensors = whole_tensors({**DENSE, **EXPERTS}, seed)
    gradients = [whole_tensors({**DENSE, **EXPERTS}, seed + 1 + n) for n in range(3)]
    dense = Weights({name: tensors[name] for name in DENSE})
    fully_shard(dense, mesh=flat)
    parameters: dict[str, Tensor] = dict(dense.named_parameters())
    for name in EXPERTS:
        placed = distribute_tensor(tensors[name].clone(), grid, [Shard(0), Shard(1)])
        parameters[name] = nn.Parameter(placed)
    mixed = dict(sorted(parameters.items()))  # down, gate, up, w1, w2
    return worst_error(mixed, tensors, gradients, algorithm, wire=wire)


@pytest.mark.parametrize(("world", "algorithm"), [*((4, name) for name in WHOLE), (6, "normuon")])
def test_experts_and_dense_layers_on_meshes_of_their_own(
    pool: Any, world: int, algorithm: str
) -> None:
    for wire in ("auto", "exact"):
        errors = pool.run(experts_and_dense, algorithm, world, wire, world=world)
        assert max(errors) < 1e-5, errors


def experts_within_dense(rank: int, world: int, seed: int) -> float:
    """Experts on a 1-D sub-mesh (other experts elsewhere), dense layers over all ranks."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "ep"))
    tensors = whole_tensors({**DENSE, **EXPERTS}, seed)
    gradients = [whole_tensors({**DENSE, **EXPERTS}, seed + 1 + n) for n in range(3)]
    dense = Weights({name: tensors[name] for name in DENSE})
    fully_shard(dense, mesh=grid)
    parameters: dict[str, Tensor] = {}
    for name in EXPERTS:
        placed = distribute_tensor(tensors[name].clone(), grid["ep"], [Shard(0)])
        parameters[name] = nn.Parameter(placed)
    parameters |= dict(dense.named_parameters())
    return worst_error(parameters, tensors, gradients, "normuon")


def test_experts_on_a_part_of_the_mesh(pool: Any) -> None:
    assert max(pool.run(experts_within_dense, 3, world=4)) < 1e-5


def on_flattened_mesh(rank: int, world: int, seed: int) -> float:
    grid = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    flat = grid["dp", "cp"]._flatten("dp_cp")
    tensors = whole_tensors(DENSE, seed)
    gradients = [whole_tensors(DENSE, seed + 1 + n) for n in range(3)]
    module = Weights(tensors)
    fully_shard(module, mesh=flat)
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    for name in ("up", "gate"):  # as the user's other axes see the same ranks
        placed = distribute_tensor(tensors[name].clone(), grid["dp", "cp"], [Replicate(), Shard(0)])
        parameters[name] = nn.Parameter(placed)
    before = len(dist.distributed_c10d._world.pg_map)
    error = worst_error(parameters, tensors, gradients, "muon")
    assert len(dist.distributed_c10d._world.pg_map) == before  # the flattened mesh has a group
    return error


def test_flattened_mesh(pool: Any) -> None:
    assert max(pool.run(on_flattened_mesh, 1, world=8)) < 1e-5


def on_two_axes_of_three(rank: int, world: int, seed: int) -> float:
    """Nobody made a group over these ranks: one is made, once for all parameters and steps."""
    grid = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    mesh = grid["dp", "tp"]
    tensors = whole_tensors(DENSE, seed + (rank // 4))  # other stages hold other numbers
    gradients = [whole_tensors(DENSE, seed + 2 + n) for n in range(3)]
    parameters = {
        name: nn.Parameter(distribute_tensor(tensor.clone(), mesh, [Shard(0), Shard(1)]))
        for name, tensor in tensors.items()
    }
    before = len(dist.distributed_c10d._world.pg_map)
    errors = [worst_error(parameters, tensors, gradients, "normuon")]
    second = train(parameters, gradients, "muon", **EXACT, **exact("muon"))
    second.add_param_group({"params": [("own", nn.Parameter(torch.ones(3, 3)))]})
    assert len(dist.distributed_c10d._world.pg_map) == before + 1
    dist.all_reduce(torch.ones(1))
    later = dist.new_group(list(range(world)))  # ranks still count groups alike
    dist.all_reduce(torch.ones(1), group=later)
    return max(errors)


def test_two_axes_of_three(pool: Any) -> None:
    assert max(pool.run(on_two_axes_of_three, 1, world=8)) < 1e-5


def stage(
    rank: int, world: int, shapes: list[Any], names: tuple[str, ...], mesh: tuple[int, ...]
) -> float:
    """A pipeline: each stage has parameters of its own, and some have no matrix or nothing."""
    grid = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    number = rank // math.prod(mesh[1:])
    mine = shapes[number]
    error = 0.0
    if mine is not None:
        tensors = whole_tensors(mine, number)
        gradients = [whole_tensors(mine, number + 10 + n) for n in range(3)]
        placements = [Shard(0)] * (len(mesh) - 1)
        parameters = {
            name: nn.Parameter(distribute_tensor(tensor.clone(), grid[names[1:]], placements))
            for name, tensor in tensors.items()
        }
        matrices = {name: p for name, p in parameters.items() if p.ndim > 1}
        others = {name: p for name, p in parameters.items() if p.ndim == 1}
        groups = [
            {"params": list(found.items()), "algorithm": algorithm}
            for found, algorithm in ((matrices, "muon"), (others, "adamw"))
            if found
        ]
        optimizer = ortho_func.Muon(groups, **EXACT, **exact("muon"), **HYPER)
        for step in gradients:
            for name, p in parameters.items():
                p.grad = scatter_like(step[name], p)
            optimizer.step()
        if matrices:
            wholes = {name: tensors[name] for name in matrices}
            right = expected(wholes, gradients, "muon", **HYPER)
            error = max(relative_error(gather(p), right[name]) for name, p in matrices.items())
    for _ in range(2):  # the stages still agree about the world's collectives
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == world
    return error


BIAS = {"bias": (5,)}


@pytest.mark.parametrize(
    "shapes",
    [[DENSE | BIAS, DENSE], [DENSE | BIAS, BIAS], [DENSE | BIAS, None]],
    ids=["both", "no matrix in the second", "nothing in the second"],
)
def test_pipeline_stages(pool: Any, shapes: list[Any]) -> None:
    assert max(pool.run(stage, shapes, ("pp", "fsdp"), (2, 2), world=4)) < 1e-5
    assert max(pool.run(stage, shapes, ("pp", "dp", "fsdp"), (2, 2, 2), world=8)) < 1e-5


def with_absent_ranks(rank: int, world: int, algorithm: str) -> float:
    """One list of parameters on all ranks, of which each holds some: meshes exclude ranks."""
    tensors = whole_tensors({"a": (5, 4), "b": (4, 6), "c": (6, 3)}, 0)
    gradients = [whole_tensors({"a": (5, 4), "b": (4, 6), "c": (6, 3)}, 1 + n) for n in range(3)]
    meshes = {
        "a": DeviceMesh("cpu", [0, 1]),
        "b": DeviceMesh("cpu", [2, 3]),
        "c": DeviceMesh("cpu", [[0, 1], [2, 3]]),
    }
    parameters = {
        name: nn.Parameter(
            distribute_tensor(t.clone(), meshes[name], [Shard(0)] * meshes[name].ndim)
        )
        for name, t in tensors.items()
    }
    cls, _, extra = WHOLE[algorithm]
    optimizer = cls(list(parameters.items()), **{**extra, **EXACT, **HYPER, **exact(algorithm)})
    mine = [name for name, mesh in meshes.items() if mesh.get_coordinate() is not None]
    assert len(mine) == 2
    for step in gradients:
        for name in mine:
            parameters[name].grad = scatter_like(step[name], parameters[name])
        optimizer.step()
    keys = [sorted(state) for state in optimizer.state_dict()["state"].values()]
    assert keys == [keys[0]] * 3  # on every rank
    right = expected(tensors, gradients, algorithm, **HYPER)
    return max(relative_error(gather(parameters[name]), right[name]) for name in mine)


@pytest.mark.parametrize("algorithm", list(WHOLE))
def test_meshes_that_exclude_ranks(pool: Any, algorithm: str) -> None:
    assert max(pool.run(with_absent_ranks, algorithm, world=4)) < 1e-5


def with_plain_tensors(rank: int, world: int) -> float:
    """Plain matrices beside sharded ones: each process has them to itself."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("one", "fsdp"))
    tensors = whole_tensors({"a": (5, 4), "own": (4, 6), "one": (6, 3), "both": (7, 3)}, 0)
    gradients = [
        whole_tensors({n: tuple(t.shape) for n, t in tensors.items()}, 1 + k) for k in range(3)
    ]
    parameters = {
        "own": nn.Parameter(tensors["own"].clone()),
        "a": nn.Parameter(distribute_tensor(tensors["a"].clone(), mesh["fsdp"], [Shard(0)])),
        "one": nn.Parameter(distribute_tensor(tensors["one"].clone(), mesh["one"], [Shard(0)])),
        "both": nn.Parameter(
            distribute_tensor(tensors["both"].clone(), mesh, [Shard(0), Shard(0)])
        ),
    }
    return worst_error(parameters, tensors, gradients, "normuon")


def test_plain_tensors_beside_sharded_ones(pool: Any) -> None:
    assert max(pool.run(with_plain_tensors, world=3)) < 1e-5


# ---------------------------------------------------------------------------------------------
# DDP


class Layers(nn.Module):
    """Some layers of one shape, side by side."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(count)
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(
            [torch.tanh(layer(x) - x.roll(n, 1)) for n, layer in enumerate(self.layers)]
        )


def train_ddp(
    rank: int, world: int, count: int, algorithm: str, group: Any, seed: int
) -> tuple[float, int]:
    """The largest error against one process, and the collectives of the last step."""
    model = Layers(count)
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    wrapped = DistributedDataParallel(model)
    cls, _, extra = WHOLE[algorithm]
    options = {**extra, **EXACT, **HYPER, **exact(algorithm)}
    optimizer = cls(model.named_parameters(), process_group=group, **options)
    generator = torch.Generator().manual_seed(seed + rank)
    gradients: list[dict[str, Tensor | None]] = []
    for _ in range(3):
        wrapped(torch.randn(32, 6, generator=generator)).square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        with CommDebugMode() as comms:
            optimizer.step()
        optimizer.zero_grad()
    right = expected(tensors, gradients, algorithm, **HYPER)
    errors = [relative_error(p.detach(), right[name]) for name, p in model.named_parameters()]
    for p in model.parameters():  # and bitwise the same on every rank
        first = p.detach().clone()
        dist.broadcast(first, 0)
        assert group is None or torch.equal(first, p.detach())
    return max(errors), comms.get_total_counts()


def every_count(rank: int, world: int, algorithm: str) -> list[tuple[float, int]]:
    return [
        train_ddp(rank, world, count, algorithm, dist.group.WORLD, count) for count in range(1, 10)
    ]


@pytest.mark.parametrize(
    ("world", "algorithm"), [*((world, "muon") for world in (1, 2, 3, 4)), (3, "normuon")]
)
def test_ddp_equals_one_process(pool: Any, world: int, algorithm: str) -> None:
    for results in pool.run(every_count, algorithm, world=world, timeout=120):
        assert max(error for error, _ in results) < 1e-5
        # nothing is sent in the first exchange: the results alone travel, in one exchange
        assert {count for _, count in results} == {0 if world == 1 else 1}


def each_alone(rank: int, world: int, algorithm: str) -> tuple[float, int]:
    return train_ddp(rank, world, 4, algorithm, None, 0)


@pytest.mark.parametrize("algorithm", list(WHOLE))
def test_without_process_group_each_process_works_alone(pool: Any, algorithm: str) -> None:
    for error, collectives in pool.run(each_alone, algorithm, world=2):
        assert error < 1e-5
        assert collectives == 0


def in_sub_groups(rank: int, world: int, order: str) -> float:
    """Two halves of the world, each replicated over a process group of its own."""
    halves = [[3, 1], [2, 0]] if order == "given" else [[1, 3], [0, 2]]
    groups = [dist.new_group(half, sort_ranks=order != "given") for half in halves]
    number = 0 if rank in (1, 3) else 1
    shapes = {f"w{n}": (4 + n, 5) for n in range(3)}
    tensors = whole_tensors(shapes, number)
    gradients = [whole_tensors(shapes, number + 5 + n) for n in range(3)]
    parameters = {name: nn.Parameter(t.clone()) for name, t in tensors.items()}
    return worst_error(parameters, tensors, gradients, "normuon", process_group=groups[number])


@pytest.mark.parametrize("order", ["sorted", "given"])
def test_process_groups_of_some_ranks(pool: Any, order: str) -> None:
    assert max(pool.run(in_sub_groups, order, world=4)) < 1e-5


# ---------------------------------------------------------------------------------------------
# The user's own collectives, and gradients that are not there yet


def interleaved(rank: int, world: int, how: bool | dict[str, Any]) -> float:
    shapes = (
        {f"a{n}": (9, 5) for n in range(4)} | {f"b{n}": (5, 9) for n in range(4)} | {"c": (2, 5)}
    )
    tensors = whole_tensors(shapes, 0)
    gradients = [whole_tensors(shapes, 1 + n) for n in range(3)]
    parameters = by_fully_shard(tensors, (world,))
    optimizer = ortho_func.NorMuon(
        list(parameters.items()),
        beta2=0.9,
        compile=how,
        bucket_bytes=64,
        **EXACT,
        **exact("normuon"),
        **HYPER,
    )
    assert len(optimizer.plan.buckets) > 1
    for step in gradients:
        for name, p in parameters.items():
            p.grad = scatter_like(step[name], p)
        total, pieces = torch.ones(1000), [torch.empty(3) for _ in range(world)]
        pending = [dist.all_reduce(total, async_op=True)]
        pending.append(dist.all_gather(pieces, torch.full((3,), float(rank)), async_op=True))
        optimizer.step()
        later = torch.full((4,), float(rank))
        pending.append(dist.broadcast(later, world - 1, async_op=True))
        for work in pending:
            work.wait()
        assert torch.equal(total, torch.full((1000,), float(world)))
        assert torch.equal(torch.cat(pieces), torch.arange(float(world)).repeat_interleave(3))
        assert torch.equal(later, torch.full((4,), world - 1.0))
    right = expected(tensors, gradients, "normuon", **HYPER)
    return max(relative_error(gather(p), right[name]) for name, p in parameters.items())


@pytest.mark.parametrize("how", [False, TRACED], ids=["eager", "compiled"])
def test_steps_between_the_users_collectives(pool: Any, how: Any) -> None:
    assert max(pool.run(interleaved, how, world=3, timeout=200)) < 1e-5


def in_flight(rank: int, world: int, how: bool | dict[str, Any]) -> float:
    """Gradients from a redistribution that nobody waited for, and unreduced ones."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    shapes = {"a": (8, 5), "b": (4, 9), "c": (2, 5), "bias": (6,)}  # evenly: no unpadding waits
    tensors = whole_tensors(shapes, 0)
    gradients = [whole_tensors(shapes, 1 + n) for n in range(3)]
    parameters = {
        name: nn.Parameter(distribute_tensor(t.clone(), mesh, [Shard(0)]))
        for name, t in tensors.items()
    }
    matrices = [(name, p) for name, p in parameters.items() if p.ndim > 1]
    bias = {"params": [("bias", parameters["bias"])], "algorithm": "adamw", "betas": (0.9, 0.999)}
    optimizer = ortho_func.Muon(
        [{"params": matrices}, bias], compile=how, **EXACT, **exact("muon"), **HYPER
    )
    for number, step in enumerate(gradients):
        for name, p in parameters.items():
            share = step[name] * (rank + 1) / (world * (world + 1) / 2)
            partial = DTensor.from_local(share, mesh, [Partial()], run_check=False)
            if number == 1:
                p.grad = partial
            else:
                p.grad = partial.redistribute(mesh, [Shard(0)], async_op=True)
                assert isinstance(p.grad._local_tensor, AsyncCollectiveTensor)
        optimizer.step()
    right = expected({name: tensors[name] for name, _ in matrices}, gradients, "muon", **HYPER)
    right |= reference.adamw({"bias": tensors["bias"]}, gradients, **HYPER)[0]
    return max(relative_error(gather(p), right[name]) for name, p in parameters.items())


@pytest.mark.parametrize("how", [False, TRACED], ids=["eager", "compiled"])
def test_gradients_in_flight_and_partial_gradients(pool: Any, how: Any) -> None:
    assert max(pool.run(in_flight, how, world=2, timeout=200)) < 1e-5
