"""Schedules: functions of the number of steps done to a factor or a learning rate.

The step is a 0-d integer tensor and the value a 0-d tensor, so that a schedule is part of a
compiled step and never makes it compile again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Schedule", "cosine", "linear", "trapezoid"]

Schedule = Callable[[Tensor], Tensor]


def _progress(step: Tensor, start: int, length: int) -> Tensor:
    """How far a stretch of steps is through, in 0 .. 1."""
    return ((step - start).to(torch.float32) / max(1, length)).clamp(0.0, 1.0)


def linear(first: float, last: float, steps: int) -> Schedule:
    """From `first` to `last` in `steps` steps, and `last` from then on.

    Examples:
        >>> linear(1.0, 0.0, 4)(torch.tensor(1))
        tensor(0.7500)
    """
    return lambda step: first + (last - first) * _progress(step, 0, steps)


def cosine(peak: float, steps: int, *, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """Half a cosine from `peak` to `floor`, after a linear warmup; `steps` counts both.

    floor + (peak − floor)·(1 + cos(π·(t − warmup)/(steps − warmup)))/2

    Raises:
        ValueError: unless 0 ≤ warmup < steps.

    Source: arXiv 1608.03983, equation 5.

    Examples:
        >>> [round(float(cosine(1.0, 10, warmup=2)(torch.tensor(t))), 3) for t in (0, 1, 2, 6, 10)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if not 0 <= warmup < steps:
        raise ValueError(f"warmup must lie in [0, {steps}), got {warmup}.")

    def value(step: Tensor) -> Tensor:
        wave = 0.5 + 0.5 * torch.cos(math.pi * _progress(step, warmup, steps - warmup))
        return (floor + (peak - floor) * wave) * _warm(step, warmup)

    return value


def trapezoid(peak: float, steps: int, *, warmup: int = 0, decay: int = 0) -> Schedule:
    """Linear warmup, `peak`, and a linear decay to zero in the last `decay` steps.

    Raises:
        ValueError: if warmup and decay do not fit into the steps.

    Source: arXiv 2106.04560 (with a linear decay), as used with Muon by Jordan 2024.

    Examples:
        >>> [float(trapezoid(1.0, 8, warmup=2, decay=4)(torch.tensor(t))) for t in (0, 1, 4, 6, 8)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if warmup < 0 or decay < 0 or warmup + decay > steps:
        raise ValueError(f"warmup {warmup} and decay {decay} do not fit into {steps} steps.")

    def value(step: Tensor) -> Tensor:
        return peak * _warm(step, warmup) * (1 - _progress(step, steps - decay, decay))

    return value


def _warm(step: Tensor, warmup: int) -> Tensor:
    """1/warmup at the first step, 1 from the last step of the warmup on."""
    return _progress(step, -1, warmup)
