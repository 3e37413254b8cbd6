"""Gradient accumulation: several backward passes, then one step.

python examples/recipes/accumulation.py
"""

from __future__ import annotations

import torch
from small import batches, groups, loss_of, small_model, train

from ortho_func import NorMuon


def main(steps: int = 15, parts: int = 4) -> None:
    model = small_model()
    optimizer = NorMuon(groups(model), lr=0.05, compute_dtype=torch.float32)
    for x, y in batches(steps):
        for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (loss_of(model, x_part, y_part) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()

    whole = small_model()
    train(whole, NorMuon(groups(whole), lr=0.05, compute_dtype=torch.float32), steps)
    for accumulated, at_once in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(accumulated, at_once, rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    main()
