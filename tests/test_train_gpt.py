"""The main example: it learns, and a resumed run continues with the very same numbers."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "examples" / "train_gpt.py"
SMALL = ["--width=72", "--layers=1", "--time=64", "--log-every=1", "--steps=20", "--sample=5"]
SECONDS = 200


def train(out: Path, *options: str) -> dict:
    """Run the script on two ranks and return its curve; a hang ends all ranks and fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(SCRIPT), f"--out={out}", *SMALL, "--validate-every=10", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        try:
            assert process.wait(SECONDS) == 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return json.loads((out / "curve.json").read_text())


@pytest.mark.parametrize("optimizer", ["normuon", "muon", "dion2", "adamw"])
def test_learns_and_resumes(tmp_path: Path, optimizer: str) -> None:
    options = (f"--optimizer={optimizer}", "--no-compile", "--save-every=10")
    whole = train(tmp_path / "whole", *options)
    assert whole["validation"][-1][1] < whole["unigram_entropy"]
    assert (tmp_path / "whole" / "loss.png").stat().st_size > 10_000

    shutil.copytree(tmp_path / "whole" / "checkpoint-000010", tmp_path / "half/checkpoint-000010")
    resumed = train(tmp_path / "half", *options, "--resume")
    assert resumed["training"] == whole["training"]
    assert resumed["validation"] == whole["validation"]
