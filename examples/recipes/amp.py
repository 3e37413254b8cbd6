"""``torch.autocast``: forward and backward in bfloat16, parameters and state in float32.

python examples/recipes/amp.py
"""

from __future__ import annotations

import torch
from small import batches, fell, groups, loss_of, small_model

from ortho_func import Muon


def main(steps: int = 40) -> None:
    model = small_model()
    optimizer = Muon(groups(model), lr=0.05)
    losses = []
    for x, y in batches(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            prediction = model(x)
        assert prediction.dtype == torch.bfloat16
        loss = loss_of(lambda _, found=prediction: found.float(), x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert fell(losses)
    for p in model.parameters():
        assert p.dtype == torch.float32
        for name, value in optimizer.state[p].items():
            assert not value.is_floating_point() or value.dtype == torch.float32, name


if __name__ == "__main__":
    main()
