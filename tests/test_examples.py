"""Every example of the functional interface runs, and every block of its guide."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from layouts import gather, relative_error, scatter_like, whole_tensors
from test_layouts import LAYOUTS

from ortho_func import Reading, apply_updates, plan

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "functional"
sys.path.insert(0, str(EXAMPLES))


def example(name: str) -> Any:
    return importlib.import_module(name)


def test_none_is_forgotten() -> None:
    tested = set(re.findall(r'example\("(\w+)"\)', Path(__file__).read_text()))
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested | {"student"}


def test_one_graph() -> None:
    losses = example("one_graph").main(backend="aot_eager", steps=20)
    assert sum(losses[-4:]) < 0.95 * sum(losses[:4])


def test_lr_sweep() -> None:
    rates, losses = example("lr_sweep").main(steps=12, count=3)
    assert rates.shape == losses.shape
    assert losses[1] < losses[0]
    assert losses[1] < losses[2]


def test_hypergradient() -> None:
    found = example("hypergradient").main(steps=3, rounds=6)
    assert found[-1][1] < found[0][1]
    assert found[-1][0] > found[0][0]


def test_ensemble() -> None:
    each, together = example("ensemble").main(count=3, steps=12)
    assert each.shape == (3,)
    assert len({float(value) for value in each}) == 3
    assert together <= each.mean()


def own_algorithm(rank: int, world: int) -> dict[str, float]:
    return example("own_algorithm").main()


def test_own_algorithm(pool: Any) -> None:
    alone = example("own_algorithm").main()
    for norms in pool.run(own_algorithm, world=2):
        assert norms == pytest.approx(alone, rel=1e-5)


def own_algorithm_on(rank: int, world: int, layouts: list[str], seed: int) -> dict[str, float]:
    """By layout, the error of shards over whole tensors, in fp32 on the wire."""
    transform, errors = example("own_algorithm").soft_muon, {}
    for layout in layouts:
        _, shapes, place, arguments, options = LAYOUTS[layout]
        whole = whole_tensors(shapes, seed)
        gradients = [whole_tensors(shapes, seed + step) for step in (1, 2)]
        found = []
        for params in (whole, place(whole, **arguments)):
            params = {name: p.detach() for name, p in params.items()}
            readings = dict.fromkeys(params, Reading(**options)) if options else None
            made = plan(params, readings=readings, wire_dtype=torch.float32)
            tx = transform(lr=0.1, plan=made)
            state = tx.init(params)
            for step in gradients:
                grads = {name: scatter_like(step[name], p) for name, p in params.items()}
                updates, state = tx.update(grads, state, params)
                params = apply_updates(params, updates)
            found.append([gather(p) for p in params.values()])
        errors[layout] = max(map(relative_error, found[1], found[0]))
    return errors


@pytest.mark.parametrize("world", sorted({row[0] for row in LAYOUTS.values()}))
def test_own_algorithm_on_every_layout(pool: Any, world: int) -> None:
    seed = torch.seed() % 2**31
    layouts = [name for name, row in LAYOUTS.items() if row[0] == world]
    for errors in pool.run(own_algorithm_on, layouts, seed, world=world):
        assert list(errors) == layouts
        assert max(errors.values()) < 1e-4, (seed, errors)


def fsdp2(rank: int, world: int) -> list[float]:
    return example("fsdp2").main(backend="aot_eager", steps=20)


def test_fsdp2(pool: Any) -> None:
    for losses in pool.run(fsdp2, world=2, timeout=150):
        assert sum(losses[-4:]) < sum(losses[:4])


# The guide.

BLOCKS = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs/functional.md").read_text(), re.M | re.S
)


def execute(source: str) -> None:
    """One block as a program of its own; compiled code by a backend that needs no C++."""
    quick = functools.partial(torch.compile, backend="aot_eager")
    with mock.patch.object(torch, "compile", quick):
        exec(compile(source, "docs/functional.md", "exec"), {"__name__": "__main__"})


def execute_on_rank(rank: int, world: int, source: str) -> None:
    execute(source)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_of_the_guide(number: int, pool: Any) -> None:
    source = BLOCKS[number]
    if "init_process_group" in source:
        pool.run(execute_on_rank, source, world=2, timeout=150)
    else:
        execute(source)


def test_own_algorithm_is_short_and_the_same_in_the_guide() -> None:
    source = (EXAMPLES / "own_algorithm.py").read_text()
    found = re.search(r"# --8<-- \[start:algorithm\]\n(.*?)\n# --8<--", source, re.S)
    assert found
    lines = found.group(1).strip().splitlines()
    assert len(lines) <= 20
    assert any(found.group(1).strip() in block for block in BLOCKS)
