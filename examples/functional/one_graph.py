"""A whole training step as one compiled graph: forward, backward, update.

python examples/functional/one_graph.py [--backend aot_eager]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from student import STUDENT, Params, batch, is_matrix, loss, parameters
from torch import Tensor
from torch.func import grad_and_value

from ortho_func import (
    Transform,
    adamw,
    apply_updates,
    chain,
    clip_by_global_norm,
    muon,
    partition,
    schedules,
)


def optimizer(steps: int) -> Transform:
    decay = schedules.trapezoid(0.05, steps, warmup=steps // 10, decay=steps // 2)
    return chain(
        clip_by_global_norm(1.0),
        partition({"matrix": muon(lr=decay), "rest": adamw(lr=3e-3)}, is_matrix),
    )


def make_step(tx: Transform) -> Callable[..., tuple[Params, Any, Tensor]]:
    def step(params: Params, state: Any, x: Tensor, y: Tensor) -> tuple[Params, Any, Tensor]:
        grads, value = grad_and_value(loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return apply_updates(params, updates), state, value

    return step


def main(backend: str = "inductor", steps: int = 200) -> list[float]:
    """Train; the losses."""
    tx = optimizer(steps)
    params = parameters(STUDENT)
    state = tx.init(params)
    step = torch.compile(make_step(tx), fullgraph=True, backend=backend)
    losses = []
    for number in range(steps):
        params, state, value = step(params, state, *batch(number))
        losses.append(value)
    return [float(value) for value in losses]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--steps", type=int, default=200)
    found = main(**vars(parser.parse_args()))
    print(f"loss {found[0]:.3f} -> {found[-1]:.3f}")
