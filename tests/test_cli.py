"""The command line: model shapes, meshes, tables, plots, and the doctor."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ortho_func.cli import doctor, table
from ortho_func.cli.doctor import Check
from ortho_func.cli.hardware import Hardware, find_hardware
from ortho_func.cli.main import main
from ortho_func.cli.meshes import find_mesh, specs_of
from ortho_func.cli.models import MODELS, Weight, find_model
from ortho_func.cli.table import Table
from ortho_func.geometry import Reading

# Published numbers of parameters, less what other algorithms train: embeddings and heads; norms;
# biases; routers with their biases.
COUNTS = {
    "gpt2-small": 124_439_808 - (50257 + 1024) * 768 - 12 * 9984 - 2 * 768,
    "llama3-8b": 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096,
    "llama3-70b": 70_553_706_496 - 2 * 128256 * 8192 - 161 * 8192,
    "qwen3-30b-a3b": 30_532_122_624
    - 2 * 151936 * 2048
    - 48 * (128 * 2048 + 2 * 2048 + 2 * 128)
    - 2048,
    "deepseek-v3": 671_026_419_200
    - 2 * 129280 * 7168
    - 58 * (256 * 7168 + 256)
    - 61 * (2 * 7168 + 1536 + 512)
    - 7168,
}


@pytest.mark.parametrize("name", list(MODELS))
def test_models_have_the_published_number_of_parameters(name: str) -> None:
    model = find_model(name)
    assert sum(math.prod(weight.shape) for weight in model.weights) == COUNTS[name]
    assert len({weight.name for weight in model.weights}) == len(model.weights)
    assert model.source.startswith("https://")


def test_shapes_from_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "gates.txt"
    path.write_text(
        "# two kinds\ngate 18x2304 2\n\ndown 64x256 row  # of TP\nexperts 8x4x6 1 none\n"
    )
    model = find_model(str(path))
    assert model.name == "gates"
    assert model.weights == (
        Weight("gate.0", (18, 2304)),
        Weight("gate.1", (18, 2304)),
        Weight("down", (64, 256), "row"),
        Weight("experts", (8, 4, 6), "none"),
    )


def test_shapes_from_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    qkv = {"shape": [48, 32], "split_sizes": [32, 8, 8], "count": 2}
    path.write_text(
        json.dumps({"w": [4, 8], "qkv": qkv, "c": {"shape": [4, 2, 3], "flatten": True}})
    )
    model = find_model(str(path))
    assert [weight.shape for weight in model.weights] == [(4, 8), (48, 32), (48, 32), (4, 2, 3)]
    assert model.weights[1].reading == Reading(flatten=False, split_sizes=(32, 8, 8))
    assert not model.weights[3].is_stack


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("llama9", "is no model .*llama3-8b.*no file"),
        ("4xy8", "is no shape"),
        ("0*4x8", "is no count"),
        ("4", "two or more dims"),
        ("4x0", "must be positive"),
    ],
)
def test_what_is_no_model_is_refused(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        find_model(text)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.txt", "w 4x8 2 3 4", "expected 'name shape"),
        ("a.txt", "# nothing\n", "names no weights"),
        ("a.json", '{"w": {"shape": [4, 8], "tied": true}}', "unknown keys"),
        ("a.json", '{"w": {"shape": [4, 8], "split": "both"}}', "split must be"),
        ("a.json", '{"w": {"shape": [4, 8], "num_heads": 3}}', "num_heads=3"),
    ],
)
def test_what_no_file_can_say(tmp_path: Path, name: str, content: str, match: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=match):
        find_model(str(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "ranks", "match"),
    [
        ("pp:2", 8, "mesh must be one of"),
        ("hsdp", 8, "needs an extent"),
        ("hsdp:3", 8, "not divisible by 3"),
        ("fsdp:2", 8, "takes no extent"),
        ("fsdp", 0, "at least 1"),
    ],
)
def test_what_is_no_mesh_is_refused(text: str, ranks: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        find_mesh(text, ranks)


def held(mesh: str, ranks: int, weight: Weight) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [tuple(box) for box in find_mesh(mesh, ranks).layout(weight).boxes]


def test_meshes_place_weights_as_wrappers_do() -> None:
    column, row = Weight("up", (8, 4)), Weight("down", (4, 8), "row")
    experts = Weight("experts", (4, 8, 6))
    assert held("fsdp", 4, column)[1] == ((2, 0), (2, 4))
    assert held("hsdp:2", 4, column) == 2 * held("fsdp", 2, column)
    # tensor parallelism cuts first: rank (f, t) holds the f-th part of the t-th part
    assert [start[0] for start, _ in held("fsdp-tp:2", 4, column)] == [0, 4, 2, 6]
    assert held("fsdp-tp:2", 4, row)[3] == ((2, 4), (2, 4))
    assert held("ep:2", 4, experts)[3] == ((2, 4, 0), (2, 4, 6))
    assert held("ep:2", 4, column) == held("fsdp", 4, column)
    assert held("fsdp", 8, experts)[3] == ((0, 3, 0), (4, 1, 6))  # more ranks than experts
    assert held("ddp", 2, column) == [((0, 0), (8, 4))] * 2
    assert len(specs_of(find_model("gpt2-small"), find_mesh("fsdp", 8))) == 48


def test_hardware() -> None:
    assert find_hardware("") == Hardware()
    assert find_hardware("gbps=25, latency_us=0") == Hardware(gbps=25.0, latency_us=0.0)
    for text, match in (
        ("speed=1", "none of tflops"),
        ("gbps=x", "no number"),
        ("gbps=0", "positive"),
    ):
        with pytest.raises(ValueError, match=match):
            find_hardware(text)


# The plan command.


def test_plan_prints_a_table(capsys: Any) -> None:
    arguments = ["--ranks", "8", "64", "--mesh", "fsdp", "hsdp:8", "--algorithm", "normuon"]
    assert main(["plan", "llama3-8b", *arguments]) == 0
    text = capsys.readouterr().out
    lines = {line[:40].strip(): line[40:] for line in text.splitlines()}
    assert "fsdp on 8" in text
    assert "hsdp:8 on 64" in text
    assert lines["matrices"].split() == ["224"] * 4
    assert text.count("14336x4096") == text.count("4096x14336") == 1
    for name in (
        "bytes / least possible",
        "connections a rank",
        "results go home in",
        "step, overlapped",
        "time to plan",
    ):
        assert name in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["--method", "jordan", "--steps", "5"],
        ["--algorithm", "dion2", "--fraction", "0.5", "--selection", "global"],
        ["--algorithm", "dion3", "--wire", "exact", "--wire-dtype", "float32"],
        ["--bucket-mb", "0.01", "--hardware", "tflops=1,gbps=1"],
    ],
)
def test_plan_takes_options(arguments: list[str], capsys: Any) -> None:
    assert main(["plan", "6*64x32,4x16x8", *arguments]) == 0
    assert "64x32" in capsys.readouterr().out or "dion" in arguments[1]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["llama9"], "is no model"),
        (["4x8", "--mesh", "hsdp"], "needs an extent"),
        (["4x8", "--hardware", "x=1"], "none of tflops"),
        (["4x8", "--bucket-mb", "0"], "bucket_bytes must be at least 1"),
        (["4x8", "--steps", "-1"], "steps"),
    ],
)
def test_plan_says_what_is_wrong(arguments: list[str], match: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])
    assert caught.value.code == 2
    assert match in capsys.readouterr().err


def test_plan_draws(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "load.png"
    assert main(["plan", "gpt2-small", "--ranks", "4", "8", "--plot", str(path)]) == 0
    assert path.read_bytes()[1:4] == b"PNG"
    assert str(path) in capsys.readouterr().out


def without(monkeypatch: Any, missing: str) -> None:
    """Let a package seem not to be installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == missing else find(name, *rest),
    )


def test_plan_says_what_drawing_needs(monkeypatch: Any, capsys: Any) -> None:
    without(monkeypatch, "matplotlib")
    with pytest.raises(SystemExit):
        main(["plan", "gpt2-small", "--plot", "load.png"])
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not Path("load.png").exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tables_by_rich_on_a_terminal_only(monkeypatch: Any) -> None:
    pytest.importorskip("rich")
    made = Table("Sizes", ("shape", "count"), [("4x8", "12")])
    shown = []
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stdout", stream)
        table.show(made)
        shown.append(stream.getvalue())
    assert "┃" in shown[0]
    assert "4x8" in shown[0]
    assert shown[1] == table.plain(made) + "\n"
    without(monkeypatch, "rich")
    monkeypatch.setattr(sys, "stdout", Terminal())
    table.show(made)
    assert sys.stdout.getvalue() == shown[1]  # type: ignore[attr-defined]


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ortho_func", "plan", "2*4x8", "--ranks", "2"],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    assert "fsdp on 2" in done.stdout


# The doctor.


@pytest.mark.timeout(700)  # starts three processes that import torch
def test_two_processes_agree_with_one(capsys: Any) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "weights agree" in text
    assert text.splitlines()[-1] == "All is well."
    for name in ("torch", "einops", "triton", "rich", "matplotlib"):
        assert f"  {name}" in text


def test_a_fault_is_the_exit_code(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(doctor, "self_test", lambda: Check("self-test", False, "rank 1 failed"))
    monkeypatch.setattr(torch, "__version__", "2.8.1")
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "FAULT  torch: 2.8.1" in text
    assert "FAULT  self-test: rank 1 failed" in text
    assert "2 fault(s)" in text


def broken(script: str, monkeypatch: Any) -> Check:
    """The self-test with another program in place of a rank."""
    start = subprocess.Popen

    def other(command: list[str], **options: Any) -> Any:
        return start([sys.executable, "-c", script, *command[3:]], **options)

    monkeypatch.setattr(subprocess, "Popen", other)
    return doctor.self_test()


def test_a_rank_that_fails_is_named(monkeypatch: Any) -> None:
    found = broken("import sys; sys.exit('no route' if sys.argv[2] == '2' else 0)", monkeypatch)
    assert found.good is False
    assert "of 2 failed: no route" in found.detail


def test_a_rank_that_hangs_is_ended(monkeypatch: Any) -> None:
    monkeypatch.setattr(doctor, "SECONDS", 1.0)
    found = broken("import time; time.sleep(60)", monkeypatch)
    assert found.good is False
    assert "did not end within 1 s" in found.detail


def test_weights_that_differ_are_a_fault(monkeypatch: Any) -> None:
    script = (
        "import sys, torch; w = torch.full((2, 2), float(sys.argv[2]));"
        "torch.save([w], f'{sys.argv[3]}/weights-{sys.argv[2]}.pt')"
    )
    found = broken(script, monkeypatch)
    assert found.good is False
    assert "differ by 1.0e+00" in found.detail
