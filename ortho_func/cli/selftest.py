"""One rank of doctor's self-test: ``python -m ortho_func.cli.selftest RANK WORLD FOLDER``.

Trains three weights for a few steps and saves them whole. On two ranks one is even, one uneven,
and one leaves a rank without rows.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ortho_func.optim.optimizers import Muon

__all__ = ["SHAPES", "train"]

SHAPES = ((18, 64), (5, 64), (1, 64))
STEPS = 3
SECONDS = 240  # until a rank that waits in vain gives up: busy machines start slowly


def train(world: int) -> list[Tensor]:
    """The weights after some steps of Muon, whole, on every rank."""
    generator = torch.Generator().manual_seed(0)
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None

    def draw(shape: tuple[int, int]) -> Tensor:
        whole = torch.randn(shape, generator=generator)
        return whole if mesh is None else distribute_tensor(whole, mesh, [Shard(0)])

    weights = [torch.nn.Parameter(draw(shape)) for shape in SHAPES]
    optimizer = Muon(weights, lr=0.1, wire_dtype=torch.float32, compute_dtype=torch.float32)
    for _ in range(STEPS):
        for weight, shape in zip(weights, SHAPES, strict=True):
            weight.grad = draw(shape)
        optimizer.step()
    return [
        (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().clone()
        for weight in weights
    ]


def main(rank: int, world: int, folder: Path) -> None:
    """Train as one rank of `world`; rank 0 saves the result."""
    if world > 1:
        dist.init_process_group(
            "gloo",
            init_method=(folder / "store").as_uri(),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=SECONDS),
        )
    weights = train(world)
    if rank == 0:
        torch.save(weights, folder / f"weights-{world}.pt")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
