"""Hugging Face Accelerate: ``prepare`` wraps the optimizer as any other.

python examples/recipes/with_accelerate.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from small import batches, groups, loss_of, small_model, train

from ortho_func import NorMuon


def main(steps: int = 15) -> None:
    accelerator = Accelerator(cpu=True)
    model = small_model()
    optimizer = NorMuon(groups(model), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    losses = []
    for x, y in batches(steps):
        loss = loss_of(model, x, y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss))

    plain = small_model()
    expected = train(plain, NorMuon(groups(plain), lr=0.05), steps)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))


if __name__ == "__main__":
    main()
