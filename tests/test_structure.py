"""Imports point down only, and what touches DTensor or collectives stays where it is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ortho_func"

# Each layer may import from those after it, and from its own folder where `WITHIN` says so.
LAYERS = (
    ("cli", "__main__"),
    ("param_groups",),
    ("optim",),
    ("algorithms",),
    ("pipeline",),
    ("wire",),
    ("routing",),
    ("primitives",),
    ("teams",),
    ("factors", "shares"),
    ("plan",),
    ("owners",),
    ("geometry", "trees"),
    ("coefficients",),
)
# Layers whose files build on each other: primitives do not, but for the list operations and
# helpers named here.
SHARED_PRIMITIVES = {
    "foreach",
    "iterations",
    "momentum",
    "normalization",
    "opaque",
    "orthogonalize",
    "roots",
    "rounding",
    "scaling",
}


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


# Within a folder: what a file may build on besides the bases, which anyone may.
BASES = {"rule", "transform"}
SIBLINGS = {
    "trees": {"geometry"},
    "primitives.momentum": {"foreach"},
    "primitives.normalization": {"momentum", "roots"},
    "primitives.iterations": {"roots"},
    "primitives.orthogonalize": {"iterations"},
    "primitives.teamwork": {"iterations", "momentum", "normalization", "orthogonalize", "roots"},
    "primitives.packing": {"foreach", "opaque"},
    "primitives.opaque": {"foreach", "momentum", "scaling"},
    "primitives.scaling": {"foreach", "momentum"},
    "primitives.spectrum": {"rounding", "scaling"},
    "algorithms.gauges": {"legs"},
    "algorithms.normuon": {"muon"},
    "algorithms.dion3": {"dion2"},
    "algorithms.elementwise": {"adamw", "lion", "nonfinite"},
    "algorithms.pointwise": {"adamw", "lion", "nonfinite"},
    "algorithms.program": {"gauges", "legs", "nonfinite", "writes"},
    "algorithms.transform": {"writes"},
    "algorithms.legs": {"teams"},
    "algorithms.local": {"legs", "nonfinite"},
    "algorithms.distributed": {"legs", "program"},
    "algorithms.matrixwise": {"distributed", "local", "program"},
    "algorithms.functional": {
        "dion",
        "dion2",
        "dion3",
        "matrixwise",
        "muon",
        "nonfinite",
        "normuon",
    },
    "optim.shell": {
        "agreement",
        "inplace",
        "kept",
        "options",
        "reduction",
        "watching",
        "writing",
    },
    "optim.optimizers": {"shell"},
}


def siblings(path: Path) -> set[str]:
    """The files of its own layer that a file imports, by their last name."""
    here, known = layer_of(module_of(path)), {module_of(other) for other in FILES}
    found = set()
    for name in imports(path):
        module = name if name in known else name.rpartition(".")[0]
        if module in known and layer_of(module) == here:
            found.add(module.rpartition(".")[2])
    return found


@pytest.mark.parametrize("path", FILES, ids=[module_of(path) for path in FILES])
def test_siblings_build_on_each_other_as_the_table_says(path: Path) -> None:
    module = module_of(path).removeprefix("ortho_func.")
    if module.startswith(("cli", "__main__")):
        return  # a program, not a library
    assert siblings(path) - BASES <= SIBLINGS.get(module, set())


def test_the_table_of_siblings_is_up_to_date_and_has_no_cycle() -> None:
    built: dict[str, set[str]] = {}
    by_name = {module_of(path).removeprefix("ortho_func."): path for path in FILES}
    assert set(SIBLINGS) <= set(by_name)
    for module, allowed in SIBLINGS.items():
        assert allowed <= siblings(by_name[module]), module
        built[module.rpartition(".")[2]] = allowed
    done: set[str] = set()
    while left := {name for name in built if name not in done}:
        ready = {name for name in left if not (built[name] & set(built)) - done}
        assert ready, f"a cycle among {sorted(left)}"
        done |= ready


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


def test_waiting_for_a_gradient_in_flight_is_all_that_geometry_knows_of_collectives() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and "functional_collectives" in (node.module or ""):
                assert module_of(path) == "ortho_func.geometry"
                assert [alias.name for alias in node.names] == ["AsyncCollectiveTensor"]


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
    subprocess.run([sys.executable, "-c", setting + STEP], check=True, timeout=240)


def test_import_adds_nothing_heavy() -> None:
    """Neither the compiler nor the command line, nor anything beyond torch and einops."""
    code = """
import sys
import einops, torch, torch.distributed.tensor
before = set(sys.modules)
import ortho_func
added = {name for name in set(sys.modules) - before if not name.startswith("ortho_func")}
assert not added, sorted(added)
assert not [name for name in sys.modules if name.startswith("ortho_func.cli")]
assert not [name for name in sys.modules if name.startswith(("torch._inductor.", "triton"))]
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=240)


def test_mistakes_are_errors_without_assertions_too() -> None:
    """`python -O` drops asserts: what a user does wrong must not depend on them."""
    code = """
import torch
from ortho_func import Muon, plan
def refused(action):
    try:
        action()
    except ValueError:
        return True
    return False
weight = torch.nn.Parameter(torch.randn(2, 3, 4))
if __debug__ or not all(map(refused, [
    lambda: Muon([weight]),
    lambda: Muon([weight], flatten=False, lr=-1.0),
    lambda: plan({"w": weight}),
    lambda: Muon([torch.nn.Parameter(torch.randn(3))]),
])):
    raise SystemExit(1)
"""
    subprocess.run([sys.executable, "-O", "-c", code], check=True, timeout=240)


def test_import_brings_no_dtensor_along() -> None:
    """``torch.distributed.tensor`` takes longer to import than all of the library."""
    code = "import sys, ortho_func; assert 'torch.distributed.tensor' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("folder", ["ortho_func", "examples", "benchmarks"])
def test_nothing_is_unpickled(folder: str) -> None:
    """A file that is loaded runs no code: `torch.load` says weights_only, and is all there is."""
    for path in sorted((PACKAGE.parent / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names]
                assert not {"pickle", "dill", "joblib", "shelve", "marshal"} & {
                    *names, getattr(node, "module", None),
                }, path  # fmt: skip
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                said = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert said.get("weights_only") == "True", path


def test_dependencies_are_two() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    assert [re.split("[<>=]", one)[0] for one in project["dependencies"]] == ["torch", "einops"]
    assert project["license-files"] == ["LICENSE"]
    assert (PACKAGE.parent / "LICENSE").is_file()
