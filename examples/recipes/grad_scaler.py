"""``torch.amp.GradScaler``: scale the loss, let it unscale, skip steps with infinities.

    python examples/recipes/grad_scaler.py
    torchrun --standalone --nproc-per-node 2 examples/recipes/grad_scaler.py

Under ``fully_shard`` the scaler asks all ranks of a gradient's mesh whether it is finite, so that
all skip the same steps, as they must: a step is a collective.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from small import batches, groups, loss_of, small_model, train
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from ortho_func import NorMuon


def main(steps: int = 10) -> None:
    model, plain = small_model(), small_model()
    if dist.is_initialized():
        fully_shard(model)
        fully_shard(plain)
    optimizer = NorMuon(groups(model), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses = []
    for x, y in batches(steps):
        loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # clipping sees gradients of their own size
        clip_grad_norm_(model.parameters(), max_norm=100.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())

    # A scale that is a power of two changes nothing but exponents.
    expected = train(plain, NorMuon(groups(plain), lr=0.05), steps)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))

    # An infinite gradient of one rank: all leave the step out and halve the scale.
    before = [p.detach().clone() for p in model.parameters()]
    scale = scaler.get_scale()
    x, y = next(batches(1))
    scaler.scale(loss_of(model, x, y)).backward()
    if not dist.is_initialized() or dist.get_rank() == 1:
        shard = next(model.parameters()).grad
        getattr(shard, "_local_tensor", shard)[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < scale
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
