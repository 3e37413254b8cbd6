"""Storage that moves, groups that end: nothing that a step remembers may go stale."""

from __future__ import annotations

import functools
import gc
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import WHOLE, exact, gather, relative_error, whole_tensors
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard

import ortho_func
from ortho_func.algorithms.dion2 import Dion2Rule
from ortho_func.algorithms.legs import plan_for
from ortho_func.algorithms.muon import MuonRule
from ortho_func.algorithms.normuon import NorMuonRule
from ortho_func.algorithms.program import bind, matrix_step
from ortho_func.geometry import mesh_layout, replicated_layout
from ortho_func.plan import ParamSpec, Place

EXACT = {"orthogonalizer": "svd", "wire_dtype": torch.float32, "compute_dtype": torch.float32}
HYPER = {"lr": 0.1, "weight_decay": 0.2}
TRACED = {"backend": "aot_eager"}


class Net(nn.Module):
    """Uneven and empty shards, on two levels of `fully_shard`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 9, bias=False)
        self.down = nn.Linear(9, 5, bias=False)
        self.head = nn.Linear(5, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.down(torch.tanh(self.up(x)))))


def sharded_net(world: int, dtype: torch.dtype = torch.float32, **options: Any) -> Net:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    model = Net().to(dtype)
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


class Follower:
    """The naive reference, one step behind the optimizer: told gradients and moved values."""

    def __init__(self, model: nn.Module, algorithm: str) -> None:
        _, self.naive, self.extra = WHOLE[algorithm]
        self.state: Any = None
        self.look(model)

    def look(self, model: nn.Module) -> None:
        """Take the parameters as they are now."""
        self.values = {name: gather(p).clone() for name, p in model.named_parameters()}

    def step(self, model: nn.Module) -> None:
        """The step that the optimizer is about to make."""
        gradients = {name: gather(p.grad).clone() for name, p in model.named_parameters()}
        self.values, self.state = self.naive(
            self.values, [gradients], self.state, **HYPER, **self.extra
        )

    def error(self, model: nn.Module) -> float:
        """The largest relative error of the model's parameters."""
        found = {name: gather(p) for name, p in model.named_parameters()}
        return max(relative_error(found[name], self.values[name]) for name in found)


def backward(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * rank + step)
    dtype = next(model.parameters()).dtype
    x = torch.randn(16, 6, generator=generator).to(dtype)
    (model(x) - x[:, :2]).square().sum().backward()


# ---------------------------------------------------------------------------------------------
# What moves the storage


def load_copies(model: nn.Module) -> None:
    """`load_state_dict` copies into the parameters that there are."""
    model.load_state_dict({name: p.detach() * 0.5 for name, p in model.state_dict().items()})


def empty_and_load(model: nn.Module) -> None:
    """`to_empty` gives every parameter new storage."""
    kept = {name: p.detach().clone() for name, p in model.state_dict().items()}
    model.to_empty(device="cpu")
    model.load_state_dict({name: p * 2 for name, p in kept.items()})


def new_locals(model: nn.Module) -> None:
    """As FSDP2 does where it finds that a parameter's local tensor is no longer its own."""
    for p in model.parameters():
        p._local_tensor = p._local_tensor.clone()


def new_data(model: nn.Module) -> None:
    """The old way to move a parameter."""
    for p in model.parameters():
        p.data = p.data * 1.5


def there_and_back(model: nn.Module) -> None:
    """Another dtype and back."""
    model.to(torch.float64)
    model.to(torch.float32)


def reinitialized(model: nn.Module) -> None:
    """In place, on the local shards."""
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().mul_(-1)


def nothing_moved(model: nn.Module) -> None:
    """Unsharded and sharded again, as between any two steps."""
    for module in model.modules():
        if hasattr(module, "unshard"):
            module.unshard()
            module.reshard()


MOVES: list[Callable[[nn.Module], None]] = [
    load_copies,
    empty_and_load,
    new_locals,
    new_data,
    there_and_back,
    reinitialized,
    nothing_moved,
]


def train_and_move(
    rank: int,
    world: int,
    move: Callable[[nn.Module], None],
    algorithm: str,
    how: bool | dict[str, str],
) -> list[float]:
    model = sharded_net(world)
    follower = Follower(model, algorithm)
    cls, _, extra = WHOLE[algorithm]
    options = {**EXACT, **exact(algorithm)}
    if algorithm == "dion":
        del options["orthogonalizer"]
    optimizer = cls(  # before the first forward, in which FSDP2 looks at its parameters again
        model.named_parameters(), compile=how, **options, **HYPER, **extra
    )
    errors = []
    for step in range(6):
        if step == 3:
            move(model)
            follower.look(model)
        backward(model, rank, step)
        follower.step(model)
        optimizer.step()
        optimizer.zero_grad()
        errors.append(follower.error(model))
    return errors


@pytest.mark.parametrize("algorithm", ["muon", "normuon", "dion2"])
@pytest.mark.parametrize("move", MOVES)
def test_train_move_train_on(pool: Any, move: Callable[[nn.Module], None], algorithm: str) -> None:
    for errors in pool.run(train_and_move, move, algorithm, False, world=3):
        assert max(errors) < 1e-4, errors


def test_a_compiled_step_follows(pool: Any) -> None:
    for errors in pool.run(train_and_move, empty_and_load, "normuon", TRACED, world=3, timeout=200):
        assert max(errors) < 1e-4, errors


def shard_after_building(rank: int, world: int, look: bool) -> tuple[float, int, int]:
    """The optimizer is built on a whole model, and then its groups get the shards."""
    model = Net()
    optimizer = ortho_func.NorMuon(model.parameters(), beta2=0.9, **HYPER, **EXACT)
    numbers = {p: n for n, p in enumerate(model.parameters())}
    for layer in (model.up, model.down, model):
        fully_shard(layer)
    new = list(model.parameters())
    for group in optimizer.param_groups:
        group["params"] = [new[numbers[p]] for p in group["params"]]
    if look:  # as a wrapper does before the first step
        optimizer.load_state_dict(optimizer.state_dict())
    follower = Follower(model, "normuon")
    for step in range(3):
        backward(model, rank, step)
        follower.step(model)
        optimizer.step()
        optimizer.zero_grad()
    return follower.error(model), len(optimizer.state), len(new)


@pytest.mark.parametrize("look", [False, True])
def test_parameters_that_a_wrapper_replaces(pool: Any, look: bool) -> None:
    """As Accelerate does: the step is planned again, and old state is let go."""
    for error, held, count in pool.run(shard_after_building, look, world=2):
        assert error < 1e-4
        assert held == count


def train_in(rank: int, world: int, dtype: torch.dtype, mixed: bool) -> list[float]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mp_policy": policy} if mixed else {}
    model = sharded_net(world, dtype, **options)
    follower = Follower(model, "normuon")
    exact = {**EXACT, "wire_dtype": dtype, "compute_dtype": dtype}
    optimizer = ortho_func.NorMuon(model.named_parameters(), beta2=0.9, **exact, **HYPER)
    errors = []
    for step in range(4):
        backward(model, rank, step)
        follower.step(model)
        optimizer.step()
        optimizer.zero_grad()
        errors.append(follower.error(model))
    assert all(p.dtype == dtype for p in model.parameters())
    for state in optimizer.state.values():
        assert state["row_variance"].dtype == torch.promote_types(dtype, torch.float32)
    return errors


@pytest.mark.parametrize(
    ("dtype", "mixed", "bound"),
    [
        (torch.float64, False, 1e-6),  # V travels in fp32
        (torch.float32, True, 1e-4),
        (torch.bfloat16, False, 0.1),
    ],
)
def test_dtypes_chosen_before_building(
    pool: Any, dtype: torch.dtype, mixed: bool, bound: float
) -> None:
    for errors in pool.run(train_in, dtype, mixed, world=3):
        assert max(errors) < bound, errors


def train_after_change(rank: int, world: int, dtype: torch.dtype) -> list[float]:
    model = sharded_net(world)
    follower = Follower(model, "normuon")
    optimizer = ortho_func.NorMuon(model.named_parameters(), beta2=0.9, **EXACT, **HYPER)
    errors = []
    model.to(dtype)  # FSDP2 itself allows it until the first forward
    follower.look(model)
    for step in range(4):
        backward(model, rank, step)
        follower.step(model)
        optimizer.step()
        optimizer.zero_grad()
        errors.append(follower.error(model))
    return errors


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-5), (torch.bfloat16, 0.1)])
def test_dtype_changed_after_building(pool: Any, dtype: torch.dtype, bound: float) -> None:
    for errors in pool.run(train_after_change, dtype, world=3):
        assert max(errors) < bound, errors


def offloaded(rank: int, world: int) -> tuple[float, set[str]]:
    """Shards that FSDP2 keeps on the CPU; here the mesh is a CPU's too, so nothing moves."""
    model = sharded_net(world, offload_policy=CPUOffloadPolicy(pin_memory=False))
    follower = Follower(model, "normuon")
    optimizer = ortho_func.NorMuon(model.named_parameters(), beta2=0.9, **EXACT, **HYPER)
    for step in range(3):
        backward(model, rank, step)
        follower.step(model)
        optimizer.step()
        optimizer.zero_grad()
    devices = {str(t.device) for state in optimizer.state.values() for t in state.values()}
    return follower.error(model), devices


def test_offloaded_shards(pool: Any) -> None:
    for error, devices in pool.run(offloaded, world=2):
        assert error < 1e-5
        assert devices == {"cpu"}


class Devices:
    """An orthogonalizer, and a place for results, that note where tensors are."""

    in_place = False

    def __init__(self) -> None:
        self.whole: set[str] = set()
        self.results: set[str] = set()

    def __call__(self, x: Tensor) -> Tensor:
        self.whole.add(x.device.type)
        return x

    def put_state(self, name: str, entries: Any, old: list[Tensor], new: list[Tensor]) -> None:
        self.results.update(t.device.type for t in (*old, *new))

    def put_updates(self, entries: Any, params: list[Tensor], updates: list[Tensor]) -> None:
        self.results.update(t.device.type for t in (*params, *updates))

    def descend(self, entries: Any, params: list[Tensor], descent: Any) -> None:
        self.put_updates(entries, params, descent.updates(params))


@pytest.mark.parametrize("work", ["cpu", "meta"])
@pytest.mark.parametrize("wire", ["dense", "exact"])
@pytest.mark.parametrize("kind", [MuonRule, NorMuonRule, Dion2Rule])
def test_the_work_is_where_the_mesh_is(kind: Any, wire: Any, work: str) -> None:
    """An accelerator stood for by "meta", under fake tensors: operations on two devices raise."""
    notes = Devices()
    shapes = [(5, 4), (6, 4), (2, 6)]
    layouts = [mesh_layout(shape, (0, 1, 2), (3,), (Shard(0),)) for shape in shapes]
    layouts.append(mesh_layout((4, 6), (0, 1, 2), (3,), (Replicate(),)))
    specs = [ParamSpec(f"w{n}", layout) for n, layout in enumerate(layouts)]
    for rank in range(3):
        with FakeTensorMode():
            legs = plan_for(
                specs, [kind(orthogonalizer=notes)], [torch.bfloat16],
                bucket_bytes=2**20, wire=wire,
            )  # fmt: skip
            program = bind(
                legs, specs, rank=rank, places=[Place(torch.device("cpu"), "0")] * 4,
                work_devices=[torch.device(work)] * 4,
            )  # fmt: skip
            assert (program.away is None) == (work == "cpu")
            params = [torch.zeros(layout.boxes[rank].size) for layout in layouts]
            state = [
                {
                    name: torch.zeros_like(p) if kept == "param" else torch.zeros(p.shape[0], 1)
                    for name, kept in legs[0].rules[0].state.items()
                }
                for p in params
            ]
            grads = [None, *(torch.zeros_like(p) for p in params[1:])]
            names = ("lr", "weight_decay", "momentum", "beta2")
            hyper = {name: torch.tensor(0.9) for name in names}  # as a compiled step has them
            matrix_step(program, params, grads, state, [hyper], notes)
    assert notes.whole == {work}
    assert notes.results == {"cpu"}


def test_matrices_on_two_devices_are_an_error() -> None:
    specs = [ParamSpec(name, replicated_layout((4, 6), (0,))) for name in "ab"]
    legs = plan_for(specs, [MuonRule()], [torch.bfloat16], bucket_bytes=2**20)
    with pytest.raises(ValueError, match="lie on cpu, meta: they must share a device"):
        bind(
            legs, specs, rank=0,
            places=[Place(torch.device("cpu"), None), Place(torch.device("meta"), None)],
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Groups that end


def library_globals() -> Iterator[tuple[str, Any]]:
    """Everything that a module of the library, or a cache of its functions, holds on to."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "ortho_func":
            continue
        for key, value in vars(module).items():
            if isinstance(value, (types.ModuleType, type)) or key.startswith("__"):
                continue
            if isinstance(value, functools._lru_cache_wrapper):
                yield f"cache of {name}.{key}", gc.get_referents(value)
            elif not callable(value):
                yield f"{name}.{key}", value


def within(value: Any, seen: set[int]) -> Iterator[Any]:
    """A value and all that it holds."""
    if id(value) in seen or isinstance(value, (types.ModuleType, type, types.FunctionType)):
        return
    seen.add(id(value))
    yield value
    for inner in gc.get_referents(value):
        yield from within(inner, seen)


def train_with_new_groups(rank: int, world: int, directory: str) -> list[float]:
    """Leave the group right after a step and join another one, three times in one process."""
    errors = []
    for turn in range(3):
        if turn:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(f"{directory}/{turn}", world),
                rank=rank,
                world_size=world,
            )
        grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(0)
        model = Net()
        fully_shard(model, mesh=grid)
        follower = Follower(model, "normuon")
        optimizer = ortho_func.NorMuon(
            model.named_parameters(), beta2=0.9, bucket_bytes=64, **EXACT, **HYPER
        )
        for step in range(2):
            backward(model, rank, step)
            follower.step(model)
            optimizer.step()
            optimizer.zero_grad()
        errors.append(follower.error(model))
        optimizer.step()  # without gradients, and at once out of the group
        assert torch._C._distributed_c10d._get_work_registry_size() == 0
        start = time.monotonic()
        dist.destroy_process_group()
        assert time.monotonic() - start < 5
    caches = [name for name, _ in library_globals() if name.startswith("cache of")]
    assert any("mesh_layout" in name for name in caches)
    held = (DeviceMesh, dist.ProcessGroup, dist.Work, torch.fx.GraphModule, Tensor)
    for name, value in library_globals():
        found = [type(inner).__name__ for inner in within(value, set()) if isinstance(inner, held)]
        assert not found, (name, found)
    return errors


def test_groups_end_and_begin(pool: Any, tmp_path: Path) -> None:
    for errors in pool.run(train_with_new_groups, str(tmp_path), world=4):
        assert max(errors) < 1e-5, errors


def step_and_leave(rank: int, world: int, directory: str, how: bool | dict[str, str]) -> float:
    start = 0.0
    for turn in range(2):
        if turn:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(f"{directory}/{turn}", world),
                rank=rank,
                world_size=world,
            )
        tensors = whole_tensors({"a": (5, 4), "b": (4, 6)}, 0)
        parameters = [nn.Parameter(t) for t in tensors.values()]
        optimizer = ortho_func.Muon(
            parameters, process_group=dist.group.WORLD, compile=how, **EXACT
        )
        for p in parameters:
            p.grad = torch.ones_like(p).tril()
        optimizer.step()
        start = time.monotonic()
        dist.destroy_process_group()
        torch.compiler.reset()
    return time.monotonic() - start


@pytest.mark.parametrize("how", [False, TRACED], ids=["eager", "compiled"])
def test_leaving_right_after_a_step(pool: Any, tmp_path: Path, how: Any) -> None:
    assert max(pool.run(step_and_leave, str(tmp_path), how, world=2, timeout=200)) < 5
