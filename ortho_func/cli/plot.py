"""Load and bytes of every rank, as a picture."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from ortho_func.cli.figures import Figures

__all__ = ["check_plot", "draw"]


def check_plot(path: str) -> None:
    """Raise `ValueError` if no plot can be drawn, saying what to install."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"--plot {path} needs matplotlib: pip install matplotlib")


def draw(path: str, found: Mapping[str, Figures]) -> None:
    """Draw work and bytes by rank, a row for each plan, and save the picture to a file.

    Args:
        path: where to; the ending says in which format.
        found: the figures by the plan's title.
    """
    agg = importlib.import_module("matplotlib.backends.backend_agg")
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(10, 3.2 * len(found)), layout="constrained"
    )
    agg.FigureCanvasAgg(figure)
    axes = figure.subplots(len(found), 2, squeeze=False)
    for row, (title, figures) in zip(axes, found.items(), strict=True):
        _draw_load(row[0], title, figures)
        _draw_bytes(row[1], title, figures)
    figure.savefig(path, dpi=130)


def _draw_load(axis: Any, title: str, figures: Figures) -> None:
    work = (figures.work / 1e12).tolist()
    mean = sum(work) / len(work)
    axis.fill_between(range(len(work)), work, step="mid", alpha=0.6)
    axis.axhline(mean, color="black", linewidth=1, label=f"mean {mean:.3g}")
    largest = max(figures.costs) / 1e12
    axis.axhline(largest, color="tab:red", linewidth=1, label=f"largest matrix {largest:.3g}")
    axis.set(title=f"{title}: work", xlabel="rank", ylabel="TFLOP a step")
    axis.set_ylim(0, 1.1 * max(largest, *work))
    axis.legend(loc="lower right")


def _draw_bytes(axis: Any, title: str, figures: Figures) -> None:
    ways = (("sent", "solid", figures.sent), ("received", "dashed", figures.received))
    for name, style, values in ways:
        found = (values / 2**20).tolist()
        axis.step(range(len(found)), found, where="mid", label=name, linestyle=style)
    axis.set(title=f"{title}: wire", xlabel="rank", ylabel="MiB a step")
    axis.set_ylim(
        0, 1.1 * max(1.0, float(torch.maximum(figures.sent, figures.received).max()) / 2**20)
    )
    axis.legend(loc="lower right")
