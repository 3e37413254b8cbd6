"""Ranks that die, hang or are late, runs that are interrupted, checkpoints that are cut short."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layouts import (
    WHOLE,
    by_fully_shard,
    exact,
    expected,
    gather,
    relative_error,
    scatter_like,
    whole_tensors,
)
from pool import Failed, Pool, RunError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import ortho_func
from ortho_func import pipeline
from ortho_func.geometry import local

SHAPES = {"a": (5, 6), "b": (6, 9), "c": (9, 4), "d": (7, 7)}
HYPER = {"lr": 0.1, "weight_decay": 0.2}


@pytest.fixture
def own_pool() -> Iterator[Pool]:
    """Workers for a test that kills some."""
    workers = Pool()
    yield workers
    workers.close()


def polar(x: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


def train(rank: int, world: int, disturb: Callable[[int], None]) -> float:
    """Three steps; what disturbs happens in the middle of the second, on the owner's side."""
    tensors = whole_tensors(SHAPES, 0)
    gradients: list[Any] = [whole_tensors(SHAPES, 1 + n) for n in range(3)]
    parameters = by_fully_shard(tensors, (world,))
    calls = 0

    def orthogonalize(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if step == 1 and calls == 1:
            disturb(rank)
        return polar(x)

    optimizer = ortho_func.Muon(
        list(parameters.items()), orthogonalizer=orthogonalize, bucket_bytes=64,
        wire_dtype=torch.float32, **HYPER,
    )  # fmt: skip
    for step in range(3):
        calls = 0
        for name, p in parameters.items():
            p.grad = scatter_like(gradients[step][name], p)
        optimizer.step()
    right = expected(tensors, gradients, "muon", **HYPER)
    return max(relative_error(gather(p), right[name]) for name, p in parameters.items())


def die(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def hang(rank: int) -> None:
    if rank == 1:
        time.sleep(1000)


def be_late(rank: int) -> None:
    time.sleep(1.5 * rank)


NAMED = r"the (first|second) all-to-all of bucket \d over ranks 0, 1, 2 failed"


@pytest.mark.parametrize(("disturb", "outcome"), [(die, "died"), (hang, "unfinished")])
def test_the_others_fail_and_say_where(
    own_pool: Pool, disturb: Callable[[int], None], outcome: str
) -> None:
    """A rank that dies or never answers: within the group's timeout, an error that names it."""
    own_pool.run(train, abs, world=3)  # all well, and the workers have started
    start = time.monotonic()
    with pytest.raises(RunError) as caught:
        own_pool.run(train, disturb, world=3, timeout=10)
    assert time.monotonic() - start < 25
    found = caught.value.outcomes
    assert isinstance(found[1], Failed)
    assert found[1].kind == outcome
    for rank in (0, 2):
        assert isinstance(found[rank], Failed)
        assert re.search(NAMED, found[rank].message), found[rank]
    own_pool.run(train, abs, world=3)  # new groups: nothing is left of it


def test_a_late_rank_is_waited_for(pool: Any) -> None:
    start = time.monotonic()
    assert max(pool.run(train, be_late, world=3)) < 1e-5
    assert time.monotonic() - start > 3.0


# ---------------------------------------------------------------------------------------------
# Out of memory

PLACES = {
    "load": "on the way to the owners",
    "assemble": "on whole matrices",
    "disassemble": "on whole matrices",
    "unload": "on the way home",
}


def exhaust(patched: pytest.MonkeyPatch, stage: str, number: int) -> None:
    """From now on, what a stage of the pipeline needs for one bucket is not to be had."""
    real = getattr(pipeline, stage)

    def fails(route: Any, *args: Any, **options: Any) -> Any:
        if route.number == number:
            raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.")
        return real(route, *args, **options)

    patched.setattr(pipeline, stage, fails)


def contents(optimizer: Any, parameters: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """The bits of every parameter's shard, and of its state's."""
    found: dict[str, list[Tensor]] = {}
    for name, p in parameters.items():
        found[f"parameters {name}"] = [local(p).clone()]
        state = optimizer.state[p].values()
        found[f"state of {name}"] = [local(t).clone() for t in state if isinstance(t, Tensor)]
    return found


def named(text: str) -> set[str]:
    """What an error says was written."""
    told = re.search(r"Written on this rank before the error: (.*)\. Of the matrices", text)
    assert told is not None, text
    found = set()
    for part in told[1].split("; "):
        kind = re.match("parameters|state of", part)
        if kind is not None:
            found |= {f"{kind[0]} {name}" for name in part[kind.end() + 1 :].split(", ")}
    return found


def run_out(rank: int, world: int, algorithm: str, stage: str) -> str:
    """Rank 1 has no memory for the second step's second bucket; what the step's error says."""
    tensors, gradients = whole_tensors(SHAPES, 0), whole_tensors(SHAPES, 1)
    parameters = by_fully_shard(tensors, (world,))
    bias = nn.Parameter(torch.ones(3))
    cls, _, options = WHOLE[algorithm]
    groups = [
        {"params": list(parameters.items())},
        {"params": [("bias", bias)], "algorithm": "adamw"},
    ]
    optimizer = cls(groups, bucket_bytes=64, **{**options, **HYPER}, **exact(algorithm))
    for name, p in parameters.items():
        p.grad = scatter_like(gradients[name], p)
    bias.grad = torch.ones(3)
    optimizer.step()
    before = contents(optimizer, parameters)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            exhaust(patched, stage, 1)
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
    told = "".join(caught.value.__notes__)
    after = contents(optimizer, parameters)
    changed = {n for n, old in before.items() if not all(map(torch.equal, old, after[n]))}
    assert changed == named(told), (changed, told)
    assert "AdamW and Lion groups are written." in told
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("algorithm", list(WHOLE))
@pytest.mark.parametrize("stage", list(PLACES))
def test_out_of_memory_says_what_is_written(algorithm: str, stage: str) -> None:
    """In one process, in the second of the buckets."""
    tensors, gradients = whole_tensors(SHAPES, 0), whole_tensors(SHAPES, 1)
    parameters = {name: nn.Parameter(t) for name, t in tensors.items()}
    cls, _, options = WHOLE[algorithm]
    optimizer = cls(list(parameters.items()), bucket_bytes=64, **{**options, **HYPER})
    for name, p in parameters.items():
        p.grad = gradients[name]
    optimizer.step()
    assert len(optimizer.plan.buckets) > 2
    before = contents(optimizer, parameters)
    with pytest.MonkeyPatch.context() as patched:
        exhaust(patched, stage, 1)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory in bucket 1, ") as caught:
            optimizer.step()
    assert PLACES[stage] in str(caught.value)
    assert "20.00 GiB" in str(caught.value)
    after = contents(optimizer, parameters)
    changed = {name for name, old in before.items() if not all(map(torch.equal, old, after[name]))}
    told = "".join(caught.value.__notes__)
    assert changed == named(told), told
    assert {name for name in before if name.startswith("state")} - changed  # not all of it is
    optimizer.step()  # memory has been found: nothing is left half done in the optimizer itself


@pytest.mark.parametrize(("algorithm", "stage"), [("muon", "assemble"), ("dion", "load")])
def test_out_of_memory_on_one_rank(pool: Any, algorithm: str, stage: str) -> None:
    """All errors say what is written on their rank; the others' where they waited in vain."""
    found = pool.run(run_out, algorithm, stage, world=3)
    assert found[1].startswith(
        f"OutOfMemoryError: out of memory in bucket 1, {PLACES[stage]}. A smaller bucket_bytes"
    )
    for rank in (0, 2):
        assert re.search(NAMED, found[rank]), found[rank]


def test_a_function_out_of_memory_has_written_nothing() -> None:
    calls = 0

    def orthogonalize(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.")
        return polar(x)

    tensors, gradients = whole_tensors(SHAPES, 0), whole_tensors(SHAPES, 1)
    tx = ortho_func.muon(orthogonalizer=orthogonalize)
    state = tx.init(tensors)
    copies = [t.clone() for tree in (tensors, state.momentum_buffer) for t in tree.values()]
    with pytest.raises(torch.OutOfMemoryError):
        tx.update(gradients, state, tensors)
    now = [t for tree in (tensors, state.momentum_buffer) for t in tree.values()]
    assert all(map(torch.equal, copies, now))


# ---------------------------------------------------------------------------------------------
# Checkpoints


def saved(folder: Path) -> dict[str, Any]:
    layer = nn.Linear(40, 60, bias=False)
    optimizer = ortho_func.Muon(layer.parameters())
    layer.weight.grad = torch.randn(60, 40)
    optimizer.step()
    state = {"optimizer": get_optimizer_state_dict(layer, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    return state


def cut_data(folder: Path) -> None:
    for file in folder.glob("*.distcp"):
        os.truncate(file, file.stat().st_size // 2)


def lose_data(folder: Path) -> None:
    for file in folder.glob("*.distcp"):
        file.unlink()


def cut_metadata(folder: Path) -> None:
    os.truncate(folder / ".metadata", (folder / ".metadata").stat().st_size // 2)


def lose_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable:UserWarning")
@pytest.mark.parametrize("damage", [cut_data, lose_data, cut_metadata, lose_metadata])
def test_a_checkpoint_cut_short_is_an_error(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    state = saved(tmp_path)
    dcp.load(state, checkpoint_id=tmp_path)
    damage(tmp_path)
    with pytest.raises(BaseException):  # noqa: B017, PT011 - torch's, of several kinds
        dcp.load(state, checkpoint_id=tmp_path)


def test_the_demo_takes_the_newest_complete_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    """The metadata is written last: a checkpoint without it was cut short."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    demo = importlib.import_module("train_gpt")
    for number in (10, 20, 30):
        (tmp_path / f"checkpoint-{number:06d}").mkdir()
    for number in (10, 20):
        (tmp_path / f"checkpoint-{number:06d}" / ".metadata").touch()
    taken = []
    monkeypatch.setattr(demo.dcp, "load", lambda state, checkpoint_id: taken.append(checkpoint_id))
    demo.resume(object(), tmp_path)
    assert taken == [tmp_path / "checkpoint-000020"]
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        demo.resume(object(), tmp_path / "elsewhere")


# ---------------------------------------------------------------------------------------------
# The demo, interrupted

SCRIPT = Path(__file__).parent.parent / "examples" / "train_gpt.py"
SMALL = [
    "--width=72", "--layers=1", "--time=64", "--log-every=1", "--sample=5", "--no-compile",
    "--steps=40", "--validate-every=100", "--save-every=5",
]  # fmt: skip
SECONDS = 120


def start(out: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(SCRIPT), f"--out={out}", *SMALL, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, start_new_session=True)


def checkpoints(out: Path) -> list[str]:
    return sorted(metadata.parent.name for metadata in out.glob("checkpoint-*/.metadata"))


def finish(process: subprocess.Popen[bytes], begun: Callable[[], bool] | None = None) -> int:
    """Wait for the end, having sent Ctrl-C to all ranks as soon as `begun`; a hang ends them."""
    deadline = time.monotonic() + SECONDS
    try:
        while begun is not None and not begun():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if begun is not None:
            os.killpg(process.pid, signal.SIGINT)
        return process.wait(max(1.0, deadline - time.monotonic()))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_ctrl_c_and_resume_is_bitwise_the_same_run(tmp_path: Path) -> None:
    whole, half = tmp_path / "whole", tmp_path / "half"
    assert finish(start(whole)) == 0
    finish(start(half), lambda: bool(checkpoints(half)))
    assert checkpoints(half)[-1] < "checkpoint-000040"  # it was in time
    assert finish(start(half, "--resume")) == 0
    curves = [json.loads((out / "curve.json").read_text()) for out in (whole, half)]
    assert curves[1]["training"] == curves[0]["training"]
    assert len(curves[0]["training"]) == 40
