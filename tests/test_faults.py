"""Ranks that die, hang or are late, runs that are interrupted, checkpoints that are cut short."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from layouts import by_fully_shard, expected, gather, relative_error, scatter_like, whole_tensors
from pool import Failed, Pool, RunError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import ortho_func

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
    import re

    for rank in (0, 2):
        assert isinstance(found[rank], Failed)
        assert re.search(NAMED, found[rank].message), found[rank]
    own_pool.run(train, abs, world=3)  # new groups: nothing is left of it


def test_a_late_rank_is_waited_for(pool: Any) -> None:
    start = time.monotonic()
    assert max(pool.run(train, be_late, world=3)) < 1e-5
    assert time.monotonic() - start > 3.0


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
