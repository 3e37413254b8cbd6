"""Gradient clipping under ``fully_shard``: ``clip_grad_norm_`` knows DTensors.

    torchrun --standalone --nproc-per-node 2 examples/recipes/clipping.py

Muon's update does not depend on the gradient's length but through its momentum; AdamW's neither.
Clipping therefore bounds what a single batch adds to the momentum, not the step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from small import batches, groups, loss_of, small_model
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from ortho_func import NorMuon


def run(shard: bool, steps: int) -> tuple[list[float], list[float]]:
    """Losses, and the gradients' norms before clipping."""
    model = small_model()
    if shard:
        fully_shard(model)
    optimizer = NorMuon(
        groups(model), lr=0.05, compute_dtype=torch.float32, wire_dtype=torch.float32
    )
    losses, norms = [], []
    for x, y in batches(steps):
        loss = loss_of(model, x, y)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), max_norm=0.5)
        norms.append(float(norm.full_tensor() if shard else norm))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def main(steps: int = 10) -> None:
    losses, norms = run(True, steps)
    expected_losses, expected_norms = run(False, steps)
    assert max(norms) > 0.5
    for found, expected in ((losses, expected_losses), (norms, expected_norms)):
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=1e-4
        )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
