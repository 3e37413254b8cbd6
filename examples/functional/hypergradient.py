"""A hypergradient: how the validation loss after training depends on the learning rate.

The derivative goes through every update, orthogonalization included; then gradient descent on the
learning rate itself.

    python examples/functional/hypergradient.py
"""

from __future__ import annotations

import torch
from student import STUDENT, Params, batch, is_matrix, loss, parameters
from torch import Tensor
from torch.func import grad, grad_and_value

from ortho_func import adamw, apply_updates, muon, partition


def validation(lr: Tensor, params: Params, steps: int) -> Tensor:
    """The loss on a held-out batch after some steps of Muon at a learning rate."""
    tx = partition({"matrix": muon(lr=lr, weight_decay=0.1), "rest": adamw(lr=1e-3)}, is_matrix)
    state = tx.init(params)
    for number in range(steps):
        x, y = (t.to(lr.dtype) for t in batch(number))
        updates, state = tx.update(grad(loss)(params, x, y), state, params)
        params = apply_updates(params, updates)
    x, y = (t.to(lr.dtype) for t in batch(10**6))
    return loss(params, x, y)


def main(steps: int = 5, rounds: int = 20) -> list[tuple[float, float]]:
    """Tune the learning rate by its own gradient; rates and losses on the way."""
    params = {name: p.double() for name, p in parameters(STUDENT).items()}
    log_lr = torch.tensor(0.003, dtype=torch.float64).log()
    found = []
    for _ in range(rounds):
        slope, value = grad_and_value(lambda s: validation(s.exp(), params, steps))(log_lr)
        found.append((float(log_lr.exp()), float(value)))
        log_lr = log_lr - 20.0 * slope
    return found


if __name__ == "__main__":
    for rate, value in main():
        print(f"lr {rate:.4f}  validation loss {value:.4f}")
