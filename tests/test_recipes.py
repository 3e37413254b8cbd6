"""Every recipe runs; those for another package where it is installed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

RECIPES = Path(__file__).parents[1] / "examples" / "recipes"
sys.path.insert(0, str(RECIPES))

ONE_PROCESS = ("accumulation", "amp", "averaging", "grad_scaler", "step_in_backward")
COMPILED = ("compiled_model", "lr_schedulers")  # by a backend that needs no C++
SHARDED = ("checkpoint", "clipping")
OTHERS = {"accelerate": "with_accelerate", "transformers": "with_transformers",
          "lightning": "with_lightning"}  # fmt: skip


def recipe(name: str) -> Any:
    return importlib.import_module(name)


def test_none_is_forgotten_and_all_are_short() -> None:
    found = {path.stem: path for path in RECIPES.glob("*.py")}
    assert set(found) == {"small", *ONE_PROCESS, *COMPILED, *SHARDED, *OTHERS.values()}
    for path in found.values():
        assert len(path.read_text().splitlines()) <= 70, path


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process(name: str) -> None:
    recipe(name).main()


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name: str) -> None:
    recipe(name).main(backend="aot_eager")


def on_rank(rank: int, world: int, name: str) -> None:
    recipe(name).main()


@pytest.mark.parametrize("name", SHARDED)
def test_sharded(name: str, pool: Any) -> None:
    pool.run(on_rank, name, world=2)


@pytest.mark.filterwarnings("default")  # other packages' own warnings
@pytest.mark.parametrize("package", OTHERS)
def test_with_another_package(package: str) -> None:
    pytest.importorskip(package)
    recipe(OTHERS[package]).main()
