"""Schedulers of ``torch.optim.lr_scheduler``: they set ``group["lr"]``, and the step reads it.

    python examples/recipes/lr_schedulers.py

A scheduler may replace a tensor by a float. A step with ``compile=True`` is not compiled again.
"""

from __future__ import annotations

from typing import Any

import torch
from small import batches, fell, groups, loss_of, small_model
from torch.optim import lr_scheduler

from ortho_func import Muon

STEPS = 40
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
}


def run(name: str, **options: Any) -> tuple[list[float], list[float]]:
    """Losses, and the learning rate of the matrices at each step."""
    model = small_model()
    optimizer = Muon(groups(model), lr=0.05, **options)
    scheduler = SCHEDULERS[name](optimizer)
    losses, rates = [], []
    for x, y in batches(STEPS):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss))
    return losses, rates


def main(backend: str = "inductor") -> None:
    for name in SCHEDULERS:
        losses, rates = run(name)
        assert fell(losses), name
        assert len(set(rates)) > STEPS / 2, name
    eager, _ = run("lambda", compute_dtype=torch.float32)
    compiled, _ = run("lambda", compute_dtype=torch.float32, compile={"backend": backend})
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(eager), rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    main()
