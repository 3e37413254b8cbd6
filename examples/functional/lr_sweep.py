"""Learning rates swept by `vmap` over the whole training run: one program, all rates at once.

python examples/functional/lr_sweep.py
"""

from __future__ import annotations

import torch
from student import STUDENT, batch, is_matrix, loss, parameters
from torch import Tensor
from torch.func import grad, vmap

from ortho_func import adamw, apply_updates, inject, muon, partition


def train(lr: Tensor, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The loss on the last batch after a step on each other at a learning rate, a 0-d tensor."""
    matrices = inject(muon(weight_decay=0.01, compute_dtype=torch.float32), lr=lr)
    tx = partition({"matrix": matrices, "rest": adamw(lr=3e-3)}, is_matrix)
    params = parameters(STUDENT)
    state = tx.init(params)
    for x, y in batches[:-1]:
        grads = grad(loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        params = apply_updates(params, updates)
    return loss(params, *batches[-1])


def main(steps: int = 60, count: int = 8) -> tuple[Tensor, Tensor]:
    """Learning rates and the losses that they lead to."""
    rates = torch.logspace(-3, 0, count)
    batches = [*map(batch, range(steps)), batch(10**6, 512)]
    return rates, vmap(lambda lr: train(lr, batches))(rates)


if __name__ == "__main__":
    for rate, value in zip(*main(), strict=True):
        print(f"lr {float(rate):.4f}  loss {float(value):.4f}")
