"""Choose learning rates for train_gpt.py and write the table of examples/README.md.

    python examples/sweep.py

First the learning rate of the hidden matrices varies, then, at its best value, that of the rest.
Each number is one run of train_gpt.py with everything else equal. Finished runs are kept.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
MARKS = "<!-- sweep -->\n", "<!-- end of sweep -->"

# Wide enough for the best to lie inside: no optimizer loses for want of a learning rate.
HIDDEN = {
    "normuon": [0.01, 0.02, 0.04, 0.08],
    "adamw": [0.0005, 0.001, 0.002, 0.004],
}
REST = [0.003, 0.01, 0.03]
FIRST_REST = 0.01


class Sweep:
    """Validation losses by optimizer, lr and rest lr, each trained when asked for."""

    def __init__(self, *, steps: int, ranks: int, out: Path) -> None:
        self.steps, self.ranks, self.out = steps, ranks, out

    def loss(self, optimizer: str, lr: float, rest_lr: float) -> float:
        folder = self.out / f"{self.steps}-{optimizer}-{lr:g}-{rest_lr:g}"
        if not (folder / "curve.json").exists():
            self.train(optimizer, lr, rest_lr, folder)
        _, loss = json.loads((folder / "curve.json").read_text())["validation"][-1]
        return loss

    def train(self, optimizer: str, lr: float, rest_lr: float, folder: Path) -> None:
        options = {
            "optimizer": optimizer,
            "lr": lr,
            "rest-lr": rest_lr,
            "steps": self.steps,
            "save-every": self.steps,
            "sample": 0,
            "out": folder,
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = [f"--nproc-per-node={self.ranks}", str(HERE / "train_gpt.py")]
        arguments = [f"--{name}={value}" for name, value in options.items()]
        subprocess.run([*torchrun, *script, *arguments], check=True)

    def section(self, optimizer: str) -> str:
        """Two Markdown tables: over lr, then over rest lr at the best lr."""
        hidden = {lr: self.loss(optimizer, lr, FIRST_REST) for lr in HIDDEN[optimizer]}
        lr = min(hidden, key=hidden.__getitem__)
        rest = {rest_lr: self.loss(optimizer, lr, rest_lr) for rest_lr in REST}
        first = table(f"{optimizer}: lr, at rest lr {FIRST_REST:g}", hidden)
        return first + "\n" + table(f"{optimizer}: rest lr, at lr {lr:g}", rest)


def table(title: str, losses: dict[float, float]) -> str:
    """One row of losses under the values that gave them, the best in bold."""
    best = min(losses.values())
    cells = [f"**{loss:.3f}**" if loss == best else f"{loss:.3f}" for loss in losses.values()]
    rows = [
        [title, *(f"{value:g}" for value in losses)],
        ["---"] * (len(losses) + 1),
        ["validation loss", *cells],
    ]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="length of each run")
    parser.add_argument("--ranks", type=int, default=2, help="processes per run")
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"), help="folder of the runs")
    args = parser.parse_args()

    sweep = Sweep(steps=args.steps, ranks=args.ranks, out=args.out)
    sections = "\n".join(sweep.section(optimizer) for optimizer in HIDDEN)
    readme = HERE / "README.md"
    before, rest = readme.read_text().split(MARKS[0])
    _, after = rest.split(MARKS[1])
    text = f"Nats per byte after {args.steps} steps of {args.ranks} ranks:\n\n{sections}"
    readme.write_text(before + MARKS[0] + text + MARKS[1] + after)


if __name__ == "__main__":
    main()
