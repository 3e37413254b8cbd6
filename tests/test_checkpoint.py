"""Checkpoints: saved by some ranks, loaded by others, and training goes on as if nothing were."""

from __future__ import annotations

import copy
import io
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from layouts import (
    WHOLE,
    Replicate,
    Shard,
    Weights,
    exact,
    gather,
    relative_error,
    scatter_like,
    whole_tensors,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

# Sharded over dim 0: unevenly, with empty shards, through row blocks, over a stack.
SHAPES = {
    "uneven": (5, 16), "empty": (3, 16), "blocks": (9, 8), "experts": (3, 4, 6),
    "frozen": (6, 10), "idle": (4, 10), "bias": (7,), "gain": (6,),
}  # fmt: skip
PLAIN = {"uneven": (5, 16), "empty": (3, 16), "even": (8, 16), "one": (1, 16), "bias": (7,)}
# What a group says besides.
SAID = {
    "blocks": {"split_sizes": (4, 3, 2)},
    "experts": {"flatten": False},
    "bias": {"algorithm": "adamw"},
    "gain": {"algorithm": "lion", "betas": (0.9, 0.99)},
    "w1": {"flatten": False},
    "w2": {"flatten": False},
}
EXPERTS = {"w1": (4, 8, 16), "w2": (3, 6, 8)}
EXACT = {"wire_dtype": torch.float32}
HYPER = {"lr": 0.1, "weight_decay": 0.2}


def by_mesh(tensors: Mapping[str, Tensor], mesh: tuple[int, ...]) -> nn.Module:
    """FSDP2 or, on two axes, HSDP."""
    names = ("replicate", "shard")[-len(mesh) :]
    model = Weights(tensors)
    fully_shard(model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))
    return model


def by_placements(
    tensors: Mapping[str, Tensor], mesh: tuple[int, ...], placements: Any
) -> nn.Module:
    """Anything that `distribute_tensor` can do."""
    names = tuple(f"axis{n}" for n in range(len(mesh)))
    grid = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    model = Weights(tensors)
    for name, p in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(p.detach(), grid, list(placements))))
    return model


def by_layers(tensors: Mapping[str, Tensor], mesh: tuple[int, ...]) -> nn.Module:
    """Two layers under `fully_shard`, on two axes with tensor parallelism below it."""
    grid = init_device_mesh("cpu", mesh, mesh_dim_names=("fsdp", "tp")[: len(mesh)])
    model = nn.Module()
    for name, tensor in tensors.items():
        layer = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
        layer.weight = nn.Parameter(tensor.clone())
        model.add_module(name.split(".")[0], layer)
    if len(mesh) == 2:
        how = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, grid["tp"], how)
    fully_shard(model, mesh=grid["fsdp"] if len(mesh) == 2 else grid)
    return model


@dataclass(frozen=True)
class Where:
    """A mesh of ranks and how parameters lie on it; no mesh is plain parameters."""

    mesh: tuple[int, ...] | None
    placements: tuple[Any, ...] | None = None

    @property
    def world(self) -> int:
        return math.prod(self.mesh or (1,))

    def place(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> nn.Module:
        tensors = whole_tensors(shapes, seed)
        if self.mesh is None:
            return Weights(tensors)
        if self.placements is not None:
            return by_placements(tensors, self.mesh, self.placements)
        return (by_layers if "up.weight" in shapes else by_mesh)(tensors, self.mesh)


def optimizer_for(model: nn.Module, algorithm: str, **options: Any) -> torch.optim.Optimizer:
    cls, _, extra = WHOLE[algorithm]
    if EXACT.items() <= options.items():
        options = {**exact(algorithm), **options}
    groups: dict[str, dict[str, Any]] = {"": {"params": []}}
    for name, p in model.named_parameters():
        group = (
            groups.setdefault(name, {"params": [], **SAID[name]}) if name in SAID else groups[""]
        )
        group["params"].append((name, p))
    return cls([g for g in groups.values() if g["params"]], **{**extra, **HYPER, **options})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps by gradients of their numbers; none for what is idle, or frozen."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for step in steps:
        wholes = whole_tensors(shapes, step)
        for name, p in model.named_parameters():
            if p.requires_grad and name != "idle":
                p.grad = scatter_like(wholes[name].to(p.dtype), p)
        optimizer.step()
        optimizer.zero_grad()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All parameters and their state, whole."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = gather(p).clone()
        for key, value in optimizer.state[p].items():
            found[f"{name}.{key}"] = gather(value).clone()
    return found


def entries(state: Any, prefix: str = "") -> dict[str, str]:
    """Every path of a state dict, and what kind of thing is there."""
    if isinstance(state, Mapping):
        parts = [entries(value, f"{prefix}/{key}") for key, value in state.items()]
        return {path: kind for part in parts for path, kind in part.items()}
    if isinstance(state, Tensor):
        return {prefix: f"{type(state).__name__} {tuple(state.shape)} {state.dtype}"}
    return {prefix: type(state).__name__}


# What runs on the ranks: all algorithms in one checkpoint, each with its model

Saved = dict[str, tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str]]]


@dataclass(frozen=True)
class Case:
    """What is saved, of which algorithms and with which options, in which form and where."""

    directory: str
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)
    names: tuple[str, ...] = tuple(WHOLE)
    flat: bool = False
    options: Mapping[str, Any] = field(default_factory=lambda: EXACT)

    @property
    def form(self) -> StateDictOptions:
        return StateDictOptions(flatten_optimizer_state_dict=self.flat)


def save(rank: int, world: int, where: Where, case: Case) -> Saved:
    """Train, save, train on: what was saved, what came of it, and what the state dict holds."""
    trained, found, saved = {}, {}, {}
    for name in case.names:
        model = where.place(case.shapes, 0)
        optimizer = optimizer_for(model, name, **case.options)
        train(model, optimizer, range(1, 2))
        if "frozen" in case.shapes:
            model.frozen.requires_grad_(False)
        train(model, optimizer, range(2, 4))
        check_variances(model, optimizer)
        weights, state = get_state_dict(model, optimizer, options=case.form)
        saved[name] = {"model": weights, "optim": state}
        trained[name] = model, optimizer, snapshot(model, optimizer), entries(state)
    dcp.save(saved, checkpoint_id=case.directory)
    for name, (model, optimizer, then, keys) in trained.items():
        train(model, optimizer, range(4, 7))
        found[name] = then, snapshot(model, optimizer), keys
    return found


def load(rank: int, world: int, where: Where, case: Case) -> Saved:
    """Other weights and a fresh optimizer, loaded before any step; then train on."""
    built, found, saved = {}, {}, {}
    for name in case.names:
        model = where.place(case.shapes, 99)
        if "frozen" in case.shapes:
            model.frozen.requires_grad_(False)
        optimizer = optimizer_for(model, name, **{**case.options, "lr": 7.0})
        weights, state = get_state_dict(model, optimizer, options=case.form)
        saved[name] = {"model": weights, "optim": state}
        built[name] = model, optimizer
    dcp.load(saved, checkpoint_id=case.directory)
    for name, (model, optimizer) in built.items():
        dtypes = {key: t.dtype for key, t in snapshot(model, optimizer).items()}
        set_state_dict(
            model, optimizer, model_state_dict=saved[name]["model"],
            optim_state_dict=saved[name]["optim"], options=case.form,
        )  # fmt: skip
        then = snapshot(model, optimizer)
        assert {key: t.dtype for key, t in then.items()} == dtypes
        assert {group["lr"] for group in optimizer.param_groups} == {HYPER["lr"]}
        train(model, optimizer, range(4, 7))
        found[name] = then, snapshot(model, optimizer), entries(saved[name]["optim"])
    return found


def check_variances(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every rank has V of the rows it holds a part of, and no others."""
    for p in model.parameters():
        v = optimizer.state[p].get("row_variance")
        if isinstance(v, DTensor):
            assert v.shape == (*p.shape[:-1], 1)
            assert v.to_local().shape == (*p.to_local().shape[:-1], 1)


def check(saved: Saved, loaded: Saved, *, bitwise: bool, what: Any) -> None:
    """All came back, and training went on as if nothing had been."""
    for name, (then, later, keys) in saved.items():
        found, after, found_keys = loaded[name]
        assert list(found_keys) == list(keys), (what, name)
        for key, value in then.items():
            assert torch.equal(found[key], value), (what, name, key)
        for key, value in later.items():
            assert after[key].dtype == value.dtype
            if bitwise:
                assert torch.equal(after[key], value), (what, name, key)
            assert relative_error(after[key], value) < 1e-4, (what, name, key)


def resume(pool: Any, case: Case, first: Where, others: list[Where]) -> Saved:
    """Save in one place and resume in others; what was saved."""
    ranks = pool.run(save, first, case, world=first.world)
    saved: Saved = ranks[0]
    for rank in ranks:  # on ranks with empty shards too
        assert all(rank[name][2] == keys for name, (_, _, keys) in saved.items())
    for other in others:
        for loaded in pool.run(load, other, case, world=other.world):
            check(saved, loaded, bitwise=other == first, what=other)
    return saved


@pytest.mark.parametrize(
    ("flat", "first", "others"),
    [
        (False, (4,), [(4,), (2,), (3,), (1,), (2, 2), None]),
        (True, (2,), [(4,)]),
        (False, (2, 2), [(2, 2), (4,)]),
    ],
    ids=["four", "two", "replicas"],
)
def test_resumed_on_other_ranks(
    pool: Any, tmp_path: Path, flat: bool, first: tuple[int, ...], others: list[Any]
) -> None:
    """Every algorithm, AdamW and Lion beside it; row blocks, a stack, frozen and idle ones."""
    saved = resume(pool, Case(str(tmp_path), flat=flat), Where(first), list(map(Where, others)))
    for name, (then, _, _) in saved.items():
        assert then["frozen.momentum_buffer"].any(), name
        assert not then["idle.momentum_buffer"].any(), name


def test_default_options_go_on_bitwise(pool: Any, tmp_path: Path) -> None:
    """The default orthogonalizer and wire, in bf16."""
    case = Case(str(tmp_path), names=("normuon", "dion2"), flat=True, options={})
    resume(pool, case, Where((4,)), [Where((4,))])


def test_state_of_a_chosen_dtype(pool: Any, tmp_path: Path) -> None:
    """bf16 momenta and variances of fp32 parameters: bit for bit, on any number of ranks."""
    options = {**EXACT, "momentum_dtype": torch.bfloat16, "variance_dtype": torch.bfloat16}
    case = Case(str(tmp_path), names=("normuon",), options=options)
    saved = resume(pool, case, Where((4,)), [Where((4,))])
    then, _, keys = saved["normuon"]
    assert then["uneven.momentum_buffer"].dtype == torch.bfloat16
    assert then["uneven.row_variance"].dtype == torch.bfloat16
    assert then["bias.exp_avg_sq"].dtype == torch.bfloat16
    for loaded in pool.run(load, Where((2,)), case, world=2):
        found, _, found_keys = loaded["normuon"]
        assert found_keys == keys
        assert all(torch.equal(found[key], value) for key, value in then.items())


# ---------------------------------------------------------------------------------------------
# Other placements

MATRICES = {"wide": (6, 16), "five": (16, 5), "two": (7, 2)}
TP = {"up.weight": (7, 6), "down.weight": (6, 7)}
ROWS, COLUMNS, BOTH = (Shard(0),), (Shard(1),), (Shard(0), Shard(1))
PLACED: dict[str, tuple[Any, Where, list[Where]]] = {
    "columns": (
        MATRICES,
        Where((4,), COLUMNS),
        [Where((4,), COLUMNS), Where((3,), ROWS), Where((1,), (Replicate(),))],
    ),
    "rows and columns": (
        MATRICES,
        Where((2, 2), BOTH),
        [Where((2, 2), (Shard(1), Shard(0))), Where((3,), COLUMNS), Where((2,), ROWS)],
    ),
    "experts": (
        EXPERTS,
        Where((2, 2), BOTH),
        [Where((1, 2), BOTH), Where((4, 1), BOTH), Where((3,), (Shard(2),))],
    ),
    # rows cut twice, and columns cut by one axis: V is whole where columns are cut
    "tensor parallel with fsdp": (
        TP,
        Where((2, 2)),
        [Where((2, 2)), Where((2,)), Where((3,))],
    ),
}


@pytest.mark.parametrize("case", list(PLACED))
def test_other_placements(pool: Any, tmp_path: Path, case: str) -> None:
    """Momentum, V and Q follow their rows, columns and experts to other ranks."""
    shapes, first, others = PLACED[case]
    saved = resume(pool, Case(str(tmp_path), shapes), first, others)
    then, _, _ = saved["normuon"]
    for name, variance in variances_of(shapes).items():
        assert relative_error(then[f"{name}.row_variance"], variance) < 1e-5


def variances_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """V after three steps, by the naive reference."""
    gradients = [whole_tensors(shapes, n) for n in range(1, 4)]
    _, naive, extra = WHOLE["normuon"]
    _, state = naive(whole_tensors(shapes, 0), gradients, flatten=False, **{**HYPER, **extra})
    return {
        name: torch.stack(list(state[name]["second_moment"])).reshape(*shape[:-1], 1)
        for name, shape in shapes.items()
    }


def other_dtype(rank: int, world: int, directory: str) -> dict[str, tuple[torch.dtype, bool]]:
    """bf16 parameters with an fp32 momentum, set by hand: dtypes here stay what they are."""
    tensors = {name: t.bfloat16() for name, t in whole_tensors(PLAIN, 0).items()}
    models = [by_mesh(tensors, (world,)) for _ in range(2)]
    optimizers = [optimizer_for(model, "normuon") for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        for p in model.parameters():
            if p.ndim > 1:
                state = optimizer.state[p]
                state["momentum_buffer"] = state["momentum_buffer"].float()
    train(models[0], optimizers[0], range(3))
    state = get_optimizer_state_dict(models[0], optimizers[0])
    dcp.save({"optim": state}, checkpoint_id=directory)
    state = get_optimizer_state_dict(models[1], optimizers[1])
    dcp.load({"optim": state}, checkpoint_id=directory)
    set_optimizer_state_dict(models[1], optimizers[1], state)
    first, second = (snapshot(m, o) for m, o in zip(models, optimizers, strict=True))
    train(models[1], optimizers[1], range(3, 5))
    return {
        key: (value.dtype, torch.equal(value, first[key]))
        for key, value in second.items()
        if "." in key
    }


def test_dtypes_are_kept(pool: Any, tmp_path: Path) -> None:
    for found in pool.run(other_dtype, str(tmp_path), world=3):
        assert all(equal for _, equal in found.values())
        assert found["uneven.momentum_buffer"][0] == torch.float32
        assert found["uneven.row_variance"][0] == torch.float32
        assert found["bias.exp_avg"][0] == torch.bfloat16
        assert found["bias.step"][0] == torch.float32


# ---------------------------------------------------------------------------------------------
# Without torch.distributed.checkpoint


def by_torch_save(rank: int, world: int) -> None:
    """`state_dict` through `torch.save`, by keyword, with a scheduler and a tensor lr."""
    models = [by_mesh(whole_tensors(PLAIN, 0), (world,)) for _ in range(2)]
    first = optimizer_for(models[0], "normuon", lr=torch.tensor(0.1), **EXACT)
    schedule = torch.optim.lr_scheduler.LambdaLR(first, lambda step: 0.5**step)
    for step in range(3):
        train(models[0], first, range(step, step + 1))
        schedule.step()
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)  # no code runs
    assert all(isinstance(group["lr"], float) for group in saved["param_groups"])
    assert all("initial_lr" in group for group in saved["param_groups"])
    models[1].load_state_dict(models[0].state_dict())
    live = torch.tensor(3.0)
    second = optimizer_for(models[1], "normuon", lr=live, **EXACT)
    kept = copy.deepcopy(saved)
    second.load_state_dict(state_dict=saved)
    assert entries(saved) == entries(kept)
    assert second.param_groups[0]["lr"] is live  # a compiled step reads it
    assert float(live) == pytest.approx(0.1 * 0.5**3)
    assert all("initial_lr" in group for group in second.param_groups)
    for model, optimizer in zip(models, (first, second), strict=True):
        train(model, optimizer, range(3, 6))
    pairs = zip(
        snapshot(models[0], first).items(), snapshot(models[1], second).values(), strict=True
    )
    assert all(torch.equal(mine, other) for (_, mine), other in pairs)


def test_state_dict_through_torch_save(pool: Any) -> None:
    pool.run(by_torch_save, world=3)


def live_after_load(rank: int, world: int) -> float:
    """An optimizer that was built before `load_state_dict` updates the parameters there are."""
    tensors = whole_tensors(PLAIN, 0)
    model = by_mesh(tensors, (world,))
    optimizer = optimizer_for(model, "normuon", **EXACT)
    train(model, optimizer, range(1, 3))
    halved = {name: p.detach() / 2 for name, p in model.state_dict().items()}
    model.load_state_dict(halved)
    state = get_optimizer_state_dict(model, optimizer)
    storages = [local.untyped_storage().data_ptr() for local in locals_of(model, optimizer)]
    set_optimizer_state_dict(model, optimizer, state)
    assert storages == [x.untyped_storage().data_ptr() for x in locals_of(model, optimizer)]
    start = {name: gather(p).clone() for name, p in model.named_parameters() if p.ndim > 1}
    _, naive, extra = WHOLE["normuon"]
    wholes = {name: tensors[name] for name in start}
    gradients = [whole_tensors(PLAIN, n) for n in range(1, 5)]
    _, told = naive(wholes, gradients[:2], **{**HYPER, **extra})
    right, _ = naive(start, gradients[2:], told, **{**HYPER, **extra})
    train(model, optimizer, range(3, 5))
    found = dict(model.named_parameters())
    return max(relative_error(gather(found[name]), right[name]) for name in start)


def locals_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = []
    for p in model.parameters():
        found.append(p._local_tensor)
        values = optimizer.state[p].values()
        found += [v._local_tensor if isinstance(v, DTensor) else v for v in values]
    return found


def test_state_is_loaded_in_place(pool: Any) -> None:
    assert max(pool.run(live_after_load, world=4)) < 1e-5


# ---------------------------------------------------------------------------------------------
# Other ways to save


def whole_on_one_rank(rank: int, world: int, directory: str) -> tuple[Any, Any]:
    """The whole state on rank 0, through `torch.save`, and from there to all ranks."""
    shapes = {name: shape for name, shape in SHAPES.items() if name != "frozen"}
    models = [by_mesh(whole_tensors(shapes, seed), (world,)) for seed in (0, 99)]
    first, second = (optimizer_for(model, "dion", **EXACT) for model in models)
    train(models[0], first, range(1, 4))
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(models[0], first, options=whole)
    path = Path(directory) / "checkpoint.pt"
    if rank == 0:
        torch.save({"model": weights, "optim": state}, path)
        saved = torch.load(path, weights_only=True)
    else:
        assert not weights
        assert not state
        saved = {"model": {}, "optim": {}}
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # one by one: torch's `set_state_dict` leaves out a model whose state a rank does not have
    set_model_state_dict(models[1], saved["model"], options=spread)
    set_optimizer_state_dict(models[1], second, saved["optim"], options=spread)
    for model, optimizer in zip(models, (first, second), strict=True):
        train(model, optimizer, range(4, 6))
    return snapshot(models[0], first), snapshot(models[1], second)


def test_a_whole_state_dict_on_one_rank(pool: Any, tmp_path: Path) -> None:
    for right, found in pool.run(whole_on_one_rank, str(tmp_path), world=3):
        assert all(torch.equal(found[key], value) for key, value in right.items())


def train_while_saving(rank: int, world: int, directory: str) -> tuple[Any, Any]:
    """`async_save`, and steps while it writes; then back to what was saved.

    Its thread talks to the other ranks: over a group of its own, where training talks over gloo.
    """
    group = torch.distributed.new_group(backend="gloo")
    model = by_mesh(whole_tensors(SHAPES, 0), (world,))
    optimizer = optimizer_for(model, "normuon", **EXACT)
    train(model, optimizer, range(1, 3))
    then = snapshot(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optim": state}
    written = dcp.async_save(saved, checkpoint_id=directory, process_group=group)
    train(model, optimizer, range(3, 6))
    written.result()
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return then, snapshot(model, optimizer)


def test_saved_while_training_goes_on(pool: Any, tmp_path: Path) -> None:
    for then, found in pool.run(train_while_saving, str(tmp_path), world=2):
        assert all(torch.equal(found[key], value) for key, value in then.items())


def load_what_one_rank_cut(rank: int, world: int, directory: str) -> tuple[str, str]:
    """What a damaged file of another rank, and missing metadata, are to this one."""
    model = by_mesh(whole_tensors(SHAPES, 0), (world,))
    optimizer = optimizer_for(model, "muon", **EXACT)
    state = {"optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=directory)
    found = []
    for file in (next(Path(directory).glob("__1_*.distcp")), Path(directory) / ".metadata"):
        if rank == 0:
            os.truncate(file, file.stat().st_size // 2)
        torch.distributed.barrier()
        with pytest.raises(BaseException) as error:  # noqa: PT011 - torch's, of several kinds
            dcp.load(state, checkpoint_id=directory)
        found.append(type(error.value).__name__)
    return tuple(found)


def test_cut_short_by_one_rank_is_an_error_on_all(pool: Any, tmp_path: Path) -> None:
    names = pool.run(load_what_one_rank_cut, str(tmp_path), world=2)
    assert names == [("CheckpointException", "CheckpointException")] * 2


def test_an_option_that_an_older_checkpoint_lacks_stays() -> None:
    """And state of a parameter that has had no step, None, is that of the beginning."""
    layer = nn.Linear(4, 6, bias=False)
    optimizer = WHOLE["dion"][0](layer.parameters(), lr=0.1, cautious=True)
    first = copy.deepcopy(optimizer.state_dict())
    layer.weight.grad = torch.randn(6, 4)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for name in ("cautious", "nonfinite"):
        del saved["param_groups"][0][name]
    optimizer.load_state_dict({**saved, "state": {0: None}})
    assert optimizer.param_groups[0]["cautious"] is True
    torch.testing.assert_close(optimizer.state_dict()["state"], first["state"], rtol=0, atol=0)
