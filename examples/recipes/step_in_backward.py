"""A step inside backward: a gradient is used and freed as soon as it is complete.

    python examples/recipes/step_in_backward.py

One optimizer a parameter, called by ``register_post_accumulate_grad_hook``. The memory of the
gradients is saved and so is nothing else: matrices no longer share buckets. For one process, or for
shards whose backward passes run in the same order on all ranks.
"""

from __future__ import annotations

import torch
from small import batches, groups, loss_of, small_model, train
from torch import Tensor

from ortho_func import Muon


def main(steps: int = 15) -> None:
    model = small_model()
    optimizers = {}
    for group in groups(model):
        options = {name: value for name, value in group.items() if name != "params"}
        for p in group["params"]:
            optimizers[p] = Muon([{"params": [p], **options}], lr=0.05)

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
        losses.append(float(loss))

    plain = small_model()
    expected = train(plain, Muon(groups(plain), lr=0.05), steps)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-2, atol=1e-3)


if __name__ == "__main__":
    main()
