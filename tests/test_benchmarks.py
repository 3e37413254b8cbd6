"""The benchmarks' own arithmetic; no time is asserted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import measure
import one_process
import orthogonalizers
import page
import peers
import step_figure


def test_calls_alternate_and_warm_rounds_do_not_count() -> None:
    said: list[str] = []
    calls = {name: lambda name=name: said.append(name) for name in ("a", "b")}
    times = measure.alternate(calls, repeats=3, warm=1, before=lambda name: said.append("-"))
    assert said == 4 * ["-", "a", "-", "b"]
    assert {name: len(taken) for name, taken in times.items()} == {"a": 3, "b": 3}


def test_a_ratio_is_of_the_same_round() -> None:
    times = {"peer": [2.0, 40.0, 2.0], "ours": [1.0, 20.0, 1.0]}
    assert measure.median_ratio(times, "peer", "ours") == 2.0


def test_errors_come_from_a_whole_step() -> None:
    """Those of the entries are those of the functions in them, and ours are no worse."""
    entries = {entry.name: entry for entry in peers.ours(compiled=False)}
    mine = peers.errors(entries["ortho_func"])
    theirs = peers.errors(peers.Entry("torch.optim.Muon", "", peers._torch_muon))
    assert peers.no_worse(mine, theirs)
    assert not peers.no_worse(theirs, mine)
    alone = orthogonalizers.errors(orthogonalizers.candidates()["jordan, 5 steps"])
    assert alone == pytest.approx(theirs, rel=0.05)


def test_ours_at_equal_error_is_the_one_with_fewest_steps() -> None:
    errors = {f"ours, {n} steps": [1.0 / n] * 3 for n in (2, 3, 4, 5)} | {"theirs": [0.4] * 3}
    assert orthogonalizers.equal_error(errors, "theirs") == "ours, 3 steps"
    assert orthogonalizers.equal_error({**errors, "theirs": [0.1] * 3}, "theirs") is None


def test_gradients_are_presented_anew() -> None:
    params = peers.parameters([(2, 3), (3, 2)])
    grads = peers.gradients(params)
    peers.set_gradients(params, grads)
    assert params[0].grad is not None
    params[0].grad.zero_()
    params[1].grad = None
    peers.set_gradients(params, grads)
    for p, g in zip(params, grads, strict=True):
        assert isinstance(p.grad, Tensor)
        assert torch.equal(p.grad, g)


def results() -> dict[str, Any]:
    errors = {"ortho_func": [0.1] * 3, "ortho_func, 3 steps": [0.2] * 3,
              "close": [0.1] * 3, "far": [0.3] * 3}  # fmt: skip
    times = {"ortho_func": [2.0], "ortho_func, 3 steps": [1.0], "close": [3.0], "far": [4.0]}
    return {
        "threads": 1,
        "machine": measure.machine(),
        "errors": errors,
        "schedules": dict.fromkeys(errors, "some"),
        "absent": {"missing": "not installed"},
        "cases": {next(iter(one_process.CASES)): {"times": times, "failed": {}}},
    }


def test_only_entries_of_equal_error_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Three steps are faster, but worse than `close`: its ratio is to the default."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(measure, "load", lambda name: results() if name == "one_process" else None)
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(page, "PLOT", tmp_path / "plot.svg")
    page.main()
    written = page.PAGE.read_text()
    assert "| close | 1.50 | 1.50 | ortho_func |" in written
    assert "| far | 2.00 | 4.00 | ortho_func, 3 steps |" in written
    assert "over the best peer (close) | 1.50 | 1.50 | yes |" in written
    assert "Absent: missing (not installed)." in written
    assert page.PLOT.stat().st_size < 100_000


def test_the_drawing_is_the_scripts() -> None:
    assert step_figure.FILE.read_text() == step_figure.svg()
