"""Schedulers of ``torch.optim.lr_scheduler``: they set ``group["lr"]``, and the step reads it.

    python examples/recipes/lr_schedulers.py

Numbers and 0-d tensors may take each other's place: a step with ``compile=True`` is compiled once.
"""

from __future__ import annotations

from typing import Any

import torch
from small import batches, fell, groups, loss_of, small_model
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from ortho_func import Muon

STEPS = 40


class ByHand:
    """Puts a float in the place of whatever was there."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.first = [float(group["lr"]) for group in optimizer.param_groups]
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        for group, first in zip(self.optimizer.param_groups, self.first, strict=True):
            group["lr"] = first * (1.0 - self.steps / STEPS)


SCHEDULERS: dict[str, Any] = {
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=STEPS),
    "warmup": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [
            lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=10),
            lr_scheduler.ExponentialLR(opt, gamma=0.95),
        ],
        milestones=[10],
    ),
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1.0 - step / STEPS),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=[0.05, 3e-3], total_steps=STEPS),
    "swa": lambda opt: SWALR(opt, swa_lr=[0.01, 1e-3], anneal_epochs=30),
    "by hand": ByHand,
}


def run(name: str, lr: Any = 0.05, **options: Any) -> tuple[list[float], list[float]]:
    """Losses, and the learning rate of the matrices at each step."""
    model = small_model()
    optimizer = Muon(groups(model), lr=lr, **options)
    scheduler = SCHEDULERS[name](optimizer)
    losses, rates = [], []
    for x, y in batches(STEPS):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses, rates


def main(backend: Any = "inductor") -> None:
    for name in SCHEDULERS:
        losses, rates = run(name)
        assert fell(losses), name
        assert len(set(rates)) > STEPS / 2, name
    eager, _ = run("lambda", compute_dtype=torch.float32)
    compiled, _ = run(
        "by hand", torch.tensor(0.05), compute_dtype=torch.float32, compile={"backend": backend}
    )
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(eager), rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    main()
