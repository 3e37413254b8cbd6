"""An exponential moving average of the weights by ``torch.optim.swa_utils``.

python examples/recipes/averaging.py
"""

from __future__ import annotations

import torch
from small import batches, fell, groups, loss_of, small_model
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ortho_func import Muon

DECAY = 0.9


def main(steps: int = 40) -> None:
    model = small_model()
    optimizer = Muon(groups(model), lr=0.05)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    by_hand: list[torch.Tensor] = []
    losses = []
    for x, y in batches(steps):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        now = [p.detach().clone() for p in model.parameters()]
        by_hand = [old.lerp(p, 1 - DECAY) for old, p in zip(by_hand or now, now, strict=True)]
        losses.append(loss_of(averaged, x, y).item())
    assert fell(losses)
    for mean, expected in zip(averaged.module.parameters(), by_hand, strict=True):
        torch.testing.assert_close(mean.detach(), expected)


if __name__ == "__main__":
    main()
