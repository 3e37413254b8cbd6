"""Every recipe runs; those for another package where it is installed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

RECIPES = Path(__file__).parents[1] / "examples" / "recipes"
sys.path.insert(0, str(RECIPES))

ONE_PROCESS = ("accumulation", "amp", "averaging", "grad_scaler", "step_in_backward")
COMPILED = {"compiled_model": 2, "lr_schedulers": 1}  # how many graphs they compile
SHARDED = ("checkpoint", "clipping", "grad_scaler", "step_in_backward")
OTHERS = {
    "accelerate": "with_accelerate",
    "lightning": "with_lightning",
    "torchtitan": "with_torchtitan",
    "transformers": "with_transformers",
}
# Accelerate shards on accelerators only; on CPUs one has to tell it that it does.
PRETEND = """
import accelerate, with_accelerate
from torch.distributed.tensor import DTensor
first, prepare = accelerate.Accelerator.__init__, accelerate.Accelerator.prepare
def init(self, *args, fsdp_plugin=None, **options):
    first(self, *args, **options)
    kind = accelerate.DistributedType.FSDP
    accelerate.PartialState._shared_state["distributed_type"] = kind
    self.state.distributed_type, self.state.fsdp_plugin = kind, fsdp_plugin
def prepared(self, *args):
    found = prepare(self, *args)
    assert all(isinstance(p, DTensor) for p in found[0].parameters())
    return found
accelerate.Accelerator.__init__, accelerate.Accelerator.prepare = init, prepared
with_accelerate.main()
"""


def recipe(name: str) -> Any:
    return importlib.import_module(name)


def test_none_is_forgotten_and_all_are_short() -> None:
    found = {path.stem: path for path in RECIPES.glob("*.py")}
    assert set(found) == {"small", *ONE_PROCESS, *COMPILED, *SHARDED, *OTHERS.values()}
    page = (RECIPES.parents[1] / "docs" / "recipes.md").read_text()
    for name, path in found.items():
        assert len(path.read_text().splitlines()) <= 90, path
        assert f"examples/recipes/{name}.py" in page


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process(name: str) -> None:
    recipe(name).main()


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name: str) -> None:
    """By a backend that needs no C++, and no more than once each."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    recipe(name).main(backend=counter)
    assert counter.frame_count == COMPILED[name]


def on_rank(rank: int, world: int, name: str) -> None:
    recipe(name).main()


@pytest.mark.parametrize("name", SHARDED)
def test_sharded(name: str, pool: Any) -> None:
    pool.run(on_rank, name, world=2)


@pytest.mark.filterwarnings("default")  # other packages' own warnings
@pytest.mark.parametrize("package", OTHERS)
def test_with_another_package(package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    recipe(OTHERS[package]).main()


def test_accelerate_shards_what_the_optimizer_was_built_of(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    script = tmp_path / "pretend.py"
    script.write_text(PRETEND)
    paths = os.pathsep.join([str(RECIPES), str(RECIPES.parents[1])])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*command, "--nproc-per-node=2", str(script)], check=True, timeout=120,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
