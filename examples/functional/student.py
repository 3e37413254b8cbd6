"""A small regression task that the examples share: a teacher network to imitate."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

Params = dict[str, Tensor]


def network(width: int = 32, *, seed: int = 0) -> nn.Sequential:
    """Two hidden layers, initialized from a seed."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
    )


def parameters(model: nn.Module) -> Params:
    """The model's parameters by name, as plain tensors."""
    return {name: p.detach() for name, p in model.named_parameters()}


def batch(number: int, size: int = 64) -> tuple[Tensor, Tensor]:
    """Inputs and the teacher's outputs; the same for the same number."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(size, 8, generator=generator)
    mixed = x @ torch.randn(8, 8, generator=torch.Generator().manual_seed(1234))
    return x, torch.sin(mixed)[:, :4]


STUDENT = network()


def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of the student."""
    return (functional_call(STUDENT, params, (x,)) - y).square().mean()


def is_matrix(name: str, p: Tensor) -> str:
    """Labels for `partition`: hidden and output matrices, and the rest."""
    return "matrix" if p.ndim == 2 else "rest"
