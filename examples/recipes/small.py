"""What the recipes share: a small model, its data, and its parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def small_model(seed: int = 0) -> nn.Sequential:
    """The same weights on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Hidden weights are orthogonalized; biases and the output go to AdamW."""
    named = dict(model.named_parameters())
    hidden = [p for p in named.values() if p.ndim == 2 and p.shape[0] > 1]
    rest = [p for p in named.values() if p.ndim < 2 or p.shape[0] == 1]
    return [{"params": hidden}, {"params": rest, "algorithm": "adamw", "lr": 3e-3}]


def batches(steps: int, size: int = 64) -> Iterator[tuple[Tensor, Tensor]]:
    """The same batches in every process."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(size, 16, generator=generator)
        yield x, x[:, :4].sin().sum(dim=1, keepdim=True)


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Mean squared error."""
    return (model(x) - y).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """The plain loop, which recipes compare themselves with."""
    losses = []
    for x, y in batches(steps):
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fell(losses: list[float]) -> bool:
    """Whether the last losses are below the first ones."""
    return sum(losses[-5:]) < 0.8 * sum(losses[:5])
