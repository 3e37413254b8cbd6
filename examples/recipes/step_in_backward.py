"""A step inside backward: a gradient is used and freed as soon as it is complete.

    python examples/recipes/step_in_backward.py
    torchrun --standalone --nproc-per-node 2 examples/recipes/step_in_backward.py

One optimizer a parameter, called by ``register_post_accumulate_grad_hook``. It saves the memory of
the gradients, and costs the balance between matrices: each is exchanged on its own, when it comes.
Under ``fully_shard`` backward must run in the same order on all ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from small import batches, groups, loss_of, small_model, train
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from ortho_func import Muon

EXACT = {"compute_dtype": torch.float32, "wire_dtype": torch.float32}


def main(steps: int = 10) -> None:
    model, plain = small_model(), small_model()
    if dist.is_initialized():
        fully_shard(model)
    optimizers = {}
    for group in groups(model):
        options = {name: value for name, value in group.items() if name != "params"}
        for p in group["params"]:
            optimizers[p] = Muon([{"params": [p], **options}], lr=0.05, **EXACT)

    def step(p: Tensor) -> None:
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    losses = []
    for x, y in batches(steps):
        loss = loss_of(model, x, y)
        loss.backward()
        assert all(p.grad is None for p in model.parameters())
        losses.append(loss.item())

    expected = train(plain, Muon(groups(plain), lr=0.05, **EXACT), steps)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
