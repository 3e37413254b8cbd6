"""Hugging Face Accelerate: ``prepare`` wraps the optimizer as any other.

    python examples/recipes/with_accelerate.py
    torchrun --standalone --nproc-per-node 2 examples/recipes/with_accelerate.py

In several processes the model is sharded by the FSDP2 plugin (on CPUs Accelerate leaves it aside
and wraps the model in DDP). ``prepare`` then puts the shards in the place of the parameters that
the optimizer was built of, and the next step is planned of those.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from small import batches, groups, loss_of, small_model, train

from ortho_func import NorMuon

EXACT = {"compute_dtype": torch.float32, "wire_dtype": torch.float32}


def main(steps: int = 15) -> None:
    sharded = int(os.environ.get("WORLD_SIZE", "1")) > 1
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), fsdp_plugin=plugin, gradient_accumulation_steps=2
    )
    model = small_model()
    optimizer = NorMuon(groups(model), lr=0.05, **EXACT)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    losses = []
    for x, y in batches(steps):
        for half in (slice(0, 32), slice(32, 64)):
            with accelerator.accumulate(model):
                loss = loss_of(model, x[half], y[half])
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1e6)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())

    plain = small_model()
    expected = train(plain, NorMuon(groups(plain), lr=0.05, **EXACT), steps)
    means = torch.tensor(losses).reshape(-1, 2).mean(dim=1)
    torch.testing.assert_close(means, torch.tensor(expected), rtol=1e-3, atol=1e-4)

    folder = [tempfile.mkdtemp()]
    if sharded:
        dist.broadcast_object_list(folder)
    x, y = next(batches(1))
    accelerator.save_state(folder[0])
    accelerator.wait_for_everyone()
    after = []
    for _ in range(2):
        accelerator.load_state(folder[0])
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        after.append(loss_of(model, x, y).item())
    assert after[0] == after[1]
    accelerator.end_training()


if __name__ == "__main__":
    main()
