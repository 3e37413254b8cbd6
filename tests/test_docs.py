"""Every block of Python in the README and the docs runs; the site has the pages there are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.glob("*.md") if "```python" in path.read_text())
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)

# What the README's blocks take for granted, each in a process of its own.
FSDP2 = """
import os
import torch, torch.distributed as dist
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

model, batches = Model(), [torch.randn(3, 8) for _ in range(2)]
torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
def loss_of(model, batch):
    return model(batch).square().mean()
"""
FUNCTIONS = """
import torch
model = torch.nn.Linear(6, 4)
def loss(params):
    return sum(p.square().sum() for p in params.values())
"""


def run(code: str, folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]


@pytest.mark.parametrize("page", [p for p in PAGES if p.stem != "functional"], ids=lambda p: p.stem)
def test_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    run("\n".join(BLOCK.findall(page.read_text())), tmp_path)


def test_blocks_of_the_readme(tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    sharded = [b for b in blocks if "fully_shard" in b]
    functions = [b for b in blocks if "fully_shard" not in b]
    assert len(sharded) == len(functions) == 1
    eager = sharded[0].replace("compile=True", "compile=False")  # compiled steps: test_compile.py
    run(FSDP2 + eager + "\ndist.destroy_process_group()\n", tmp_path)
    run(FUNCTIONS + functions[0], tmp_path)


def test_the_site_has_every_page_and_no_other() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"(\w+\.md)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md"))


def test_links_between_pages_lead_somewhere() -> None:
    for path in [*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
