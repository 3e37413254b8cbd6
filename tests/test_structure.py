"""Imports point down only, and what touches DTensor or collectives stays where it is."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ortho_func"

# Each layer may import from those after it, and from its own folder where `WITHIN` says so.
LAYERS = (
    ("cli", "__main__"),
    ("optim",),
    ("algorithms",),
    ("pipeline",),
    ("wire",),
    ("routing",),
    ("primitives",),
    ("plan",),
    ("geometry", "trees"),
    ("coefficients",),
)
# Layers whose files build on each other: primitives do not, but for the list operations and
# helpers named here.
SHARED_PRIMITIVES = {"momentum", "foreach", "roots", "scaling"}


def layer_of(module: str) -> int:
    top = module.split(".")[1] if "." in module else "__init__"
    return next((n for n, names in enumerate(LAYERS) if top in names), -1)


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            folder = (PACKAGE.parent / node.module.replace(".", "/")).is_dir()
            found += [f"{node.module}.{alias.name}" for alias in node.names] if folder else []
            found += [] if folder else [node.module]
    return found


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=[module_of(path) for path in FILES])
def test_imports_point_down(path: Path) -> None:
    here = layer_of(module_of(path))
    assert here >= 0, f"{path}: in no layer"
    for name in imports(path):
        if not name.startswith("ortho_func."):
            continue
        there = layer_of(name)
        assert there >= here, f"{module_of(path)} imports {name}"
        if "primitives" in LAYERS[here] and there == here:
            assert name.split(".")[-1] in SHARED_PRIMITIVES, f"{module_of(path)} imports {name}"


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return found | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_only_geometry_inspects_dtensor() -> None:
    using = {module_of(path) for path in FILES if "DTensor" in names_in(path)}
    assert {name for name in using if not name.startswith("ortho_func.cli")} == {
        "ortho_func.geometry"
    }


def test_only_one_file_touches_functional_collectives() -> None:
    using = {module_of(path) for path in FILES if "_c10d_functional" in names_in(path)}
    assert using == {"ortho_func.primitives.collectives"}


def test_nothing_imports_triton() -> None:
    for path in FILES:
        assert not any(name.split(".")[0] == "triton" for name in imports(path)), path


STEP = """
import warnings
warnings.simplefilter("error")
import torch
from ortho_func import Dion2, Dion3, Muon, NorMuon
for kind in (Muon, NorMuon, Dion2, Dion3):
    layer = torch.nn.Linear(6, 4)
    optimizer = kind([{"params": [layer.weight]}, {"params": [layer.bias], "algorithm": "adamw"}])
    layer(torch.randn(3, 6)).square().mean().backward()
    before = layer.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, layer.weight)
"""


@pytest.mark.parametrize(
    "setting",
    [
        "import sys; sys.modules['triton'] = None",
        "import torch.distributed; torch.distributed.is_available = lambda: False",
    ],
    ids=["without triton", "without distributed"],
)
def test_imports_and_steps(setting: str) -> None:
    subprocess.run([sys.executable, "-c", setting + STEP], check=True, timeout=120)
