"""What the training run shows: a progress bar, a plot of the losses and their numbers."""

import json
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tqdm import tqdm

Curve = list[tuple[int, float]]


class Bar:
    """Progress with loss and bytes per second; silent unless ``show``.

    Args:
        steps: length of the whole run.
        step: where it starts.
        tokens: bytes that all ranks together learn from in one step.
        entropy: unigram entropy of the validation text, nats per byte.
    """

    def __init__(self, *, steps: int, step: int, tokens: int, entropy: float, show: bool) -> None:
        self.tokens, self.entropy = tokens, entropy
        self.bar = tqdm(total=steps, initial=step, unit="step", disable=not show)
        self.bar.set_description("first steps")
        self.since: int | None = None
        self.clock = 0.0

    def training(self, step: int, loss: float) -> None:
        description = f"loss {loss:.3f}"
        if self.since is not None:  # the first stretch compiles: its speed says nothing
            tokens = (step - self.since) * self.tokens
            description += f", {tokens / (time.perf_counter() - self.clock):,.0f} tokens/s"
        self.bar.set_description(description, refresh=False)
        self.bar.update(step - self.bar.n)
        self.restart(step)

    def validation(self, step: int, loss: float) -> None:
        line = f"step {step:5d}: validation loss {loss:.3f} nats per byte"
        self.say(f"{line} (unigram entropy {self.entropy:.3f})")
        self.restart(step)

    def say(self, line: str) -> None:
        if not self.bar.disable:
            self.bar.write(line)

    def restart(self, step: int) -> None:
        """Measure the speed from here: validation and checkpoints don't count."""
        self.since, self.clock = step, time.perf_counter()

    def close(self) -> None:
        self.bar.close()


def write(out: Path, *, settings: dict[str, Any], entropy: float, curves: dict[str, Curve]) -> None:
    """Write ``curve.json`` and ``loss.png``."""
    out.mkdir(parents=True, exist_ok=True)
    content = {"settings": settings, "unigram_entropy": entropy, **curves}
    (out / "curve.json").write_text(json.dumps(content, indent=1, default=str) + "\n")
    losses = {name: curves[name] for name in ("training", "validation")}
    figure = plot(losses, entropy, title=f"{settings['optimizer']}, lr {settings['lr']:g}")
    figure.savefig(out / "loss.png", dpi=120)
    plt.close(figure)


def plot(curves: dict[str, Curve], entropy: float, title: str) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    styles = {"training": {"alpha": 0.5}, "validation": {"marker": "o", "markersize": 4}}
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), label=name, **styles[name])
    axes.axhline(entropy, color="gray", linestyle="--", label="unigram entropy")
    axes.set(title=title, xlabel="step", ylabel="loss (nats per byte)")
    axes.set(ylim=(0, entropy + 1))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
