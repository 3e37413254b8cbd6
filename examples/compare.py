"""Train every algorithm on the same text, and write the tables and the plot of docs/choosing.md.

    python examples/compare.py

For each algorithm first one run a learning rate, then, at the best, one more run a seed. A small
model, two ranks, eager steps. Finished runs are kept.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RATES = {
    "muon": [0.01, 0.02, 0.04, 0.08],
    "normuon": [0.01, 0.02, 0.04, 0.08],
    "dion2": [0.005, 0.01, 0.02, 0.04],
    "dion3": [0.005, 0.01, 0.02, 0.04],
    "dion": [0.01, 0.02, 0.04, 0.08],
    "adamw": [0.001, 0.002, 0.004, 0.008],
}
MODEL = {"width": 144, "heads": 18, "layers": 3, "batch": 8, "time": 128}


@dataclass(frozen=True)
class Run:
    """Validation losses by step, and processor seconds of one rank by step."""

    losses: list[tuple[int, float]]
    seconds: dict[int, float]

    @property
    def last(self) -> float:
        return self.losses[-1][1]

    @property
    def per_step(self) -> float:
        step = self.losses[-1][0]
        return self.seconds[step] / step


@dataclass(frozen=True)
class Entry:
    """What is compared: a name, options of train_gpt.py, and the learning rates to try."""

    name: str
    options: dict[str, str]
    rates: list[float]


ByRate = dict[str, dict[float, Run]]
BySeed = dict[str, tuple[float, list[Run]]]

ALGORITHMS = [Entry(name, {"optimizer": name}, rates) for name, rates in RATES.items()]
VARIANTS = [
    Entry("normuon as it is", {"optimizer": "normuon"}, [0.02]),
    *(
        Entry(f"adjust_lr_fn={name}", {"optimizer": "normuon", "adjust-lr-fn": name}, rates)
        for name, rates in {
            "match_rms_adamw": [0.003, 0.006, 0.012],
            "spectral_norm": [0.01, 0.02, 0.04],
            "none": [0.02, 0.04, 0.08],
        }.items()
    ),
    *(
        Entry(f"orthogonalizer={name}", {"optimizer": "normuon", "orthogonalizer": name}, [0.02])
        for name in ("jordan", "polar_express", "cubic", "turbo_muon", "svd")
    ),
    Entry("lion", {"optimizer": "lion"}, [0.0003, 0.001, 0.003]),
]


WHAT = {"algorithms": ALGORITHMS, "variants": VARIANTS}


class Runs:
    """Runs by entry, learning rate and seed, each trained when asked for."""

    def __init__(self, *, steps: int, out: Path) -> None:
        self.steps, self.out = steps, out

    def one(self, entry: Entry, lr: float, seed: int) -> Run:
        name = "-".join(entry.options.values())
        folder = self.out / f"{self.steps}-{name}-{lr:g}-{seed}"
        if not (folder / "curve.json").exists():
            self.train(entry, lr, seed, folder)
        found = json.loads((folder / "curve.json").read_text())
        return Run([tuple(pair) for pair in found["validation"]], dict(found["seconds"]))

    def train(self, entry: Entry, lr: float, seed: int, folder: Path) -> None:
        options = {
            **MODEL,
            **entry.options,
            "lr": lr,
            "seed": seed,
            "steps": self.steps,
            "validate-every": 25,
            "save-every": self.steps,
            "sample": 0,
            "out": folder,
        }
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = ["--nproc-per-node=2", str(HERE / "train_gpt.py"), "--no-compile"]
        arguments = [f"--{name}={value}" for name, value in options.items()]
        subprocess.run([*torchrun, *script, *arguments], check=True)

    def best(self, entries: list[Entry], seeds: int) -> tuple[ByRate, BySeed]:
        """All learning rates with one seed, and the best of them with all."""
        by_rate = {e.name: {lr: self.one(e, lr, 0) for lr in e.rates} for e in entries}
        by_seed = {}
        for entry in entries:
            tried = by_rate[entry.name]
            lr = min(tried, key=lambda lr: tried[lr].last)
            by_seed[entry.name] = lr, [self.one(entry, lr, seed) for seed in range(seeds)]
        return by_rate, by_seed


def rates_table(found: ByRate) -> str:
    """The loss after all steps by learning rate, the best in bold."""
    lines = ["| what | lr: loss |", "| --- | --- |"]
    for algorithm, runs in found.items():
        best = min(run.last for run in runs.values())
        cells = [
            f"{lr:g}: **{run.last:.3f}**" if run.last == best else f"{lr:g}: {run.last:.3f}"
            for lr, run in runs.items()
        ]
        lines.append(f"| {algorithm} | {', '.join(cells)} |")
    return "\n".join(lines) + "\n"


def seeds_table(found: BySeed) -> str:
    """Mean and spread over seeds, and processor time a step as a ratio to the first's."""
    lines = [
        "| what | lr | loss, mean of seeds | lowest to highest | processor time a step |",
        "| --- | --- | --- | --- | --- |",
    ]
    _, first = next(iter(found.values()))
    unit = statistics.median(run.per_step for run in first)
    for algorithm, (lr, runs) in found.items():
        losses = [run.last for run in runs]
        time = statistics.median(run.per_step for run in runs) / unit
        lines.append(
            f"| {algorithm} | {lr:g} | {statistics.mean(losses):.3f} | "
            f"{min(losses):.3f} to {max(losses):.3f} | {time:.2f} |"
        )
    return "\n".join(lines) + "\n"


def plot(found: BySeed, path: Path) -> None:
    """Mean loss over seeds, against steps and against processor time."""
    figure, (by_step, by_time) = plt.subplots(
        1, 2, figsize=(10, 4.2), sharey=True, layout="constrained"
    )
    for algorithm, (lr, runs) in found.items():
        steps = [step for step, _ in runs[0].losses]
        losses = [statistics.mean(run.losses[n][1] for run in runs) for n in range(len(steps))]
        seconds = [statistics.mean(run.seconds[step] for run in runs) for step in steps]
        by_step.plot(steps, losses, label=f"{algorithm}, lr {lr:g}", marker="o", markersize=3)
        by_time.plot(seconds, losses, label=algorithm, marker="o", markersize=3)
    by_step.set(xlabel="step", ylabel="validation loss (nats per byte)")
    by_time.set(xlabel="processor seconds of one rank")
    by_step.legend()
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="length of each run")
    parser.add_argument("--seeds", type=int, default=3, help="runs at the best learning rate")
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT), help="sections")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="folder of the runs")
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs", help="what to write to")
    args = parser.parse_args()

    runs = Runs(steps=args.steps, out=args.out)
    for what in args.what:
        by_rate, by_seed = runs.best(WHAT[what], args.seeds)
        plot(by_seed, args.docs / f"choosing{'' if what == 'algorithms' else '-' + what}.svg")
        text = f"After {args.steps} steps, {args.seeds} seeds:\n\n{seeds_table(by_seed)}\n"
        tried = {name: found for name, found in by_rate.items() if len(found) > 1}
        text += f"The learning rates that were tried, one seed:\n\n{rates_table(tried)}"
        write(args.docs / "choosing.md", what, text)


def write(page: Path, what: str, text: str) -> None:
    """Put a section between its marks."""
    begin, end = f"<!-- {what} -->\n", f"<!-- end of {what} -->"
    before, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    page.write_text(before + begin + text + end + after)


if __name__ == "__main__":
    main()
