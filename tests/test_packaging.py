"""The wheel and the types, as a user has them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TYPING = ROOT / "tests" / "annotated"


def checked(file: str, tmp_path: Path) -> str:
    """What mypy says of a file outside of the project's own settings."""
    settings = tmp_path / "mypy.ini"
    settings.write_text("[mypy]\nstrict = true\n")
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", settings, "--no-error-summary",
         "--cache-dir", ROOT / ".mypy_cache", TYPING / file],
        cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )  # fmt: skip
    assert not found.stderr, found.stderr
    return found.stdout


def test_types_that_are_right(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    assert checked("good.py", tmp_path) == ""


def test_types_that_are_wrong(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    lines = (TYPING / "bad.py").read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    told = {int(n) for n in re.findall(r"bad\.py:(\d+): error", checked("bad.py", tmp_path))}
    assert told == wrong


STEP = """
import sys
for extra in ("matplotlib", "rich", "tqdm", "hypothesis", "pytest", "numpy"):
    sys.modules[extra] = None
import torch
import ortho_func
assert ortho_func.__file__.startswith(sys.argv[1]), ortho_func.__file__
layer = torch.nn.Linear(6, 4)
optimizer = ortho_func.NorMuon(ortho_func.param_groups(layer), lr=0.1)
layer(torch.randn(3, 6)).square().mean().backward()
before = layer.weight.detach().clone()
optimizer.step()
assert not torch.equal(before, layer.weight)
"""


def test_the_wheel_holds_the_package_and_works_without_extras(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path,
         ROOT],
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(tmp_path / "installed")
        metadata = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        needs = re.findall(r"^Requires-Dist: (\w+)[^;\n]*$", archive.read(metadata).decode(), re.M)
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "ortho_func").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == package
    assert "ortho_func/py.typed" in names
    assert sorted(needs) == ["einops", "torch"]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STEP, str(tmp_path / "installed")],
        check=True, timeout=240, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
    )  # fmt: skip
