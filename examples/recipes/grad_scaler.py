"""``torch.amp.GradScaler``: scale the loss, let it unscale, skip steps with infinities.

python examples/recipes/grad_scaler.py
"""

from __future__ import annotations

import torch
from small import batches, groups, loss_of, small_model, train

from ortho_func import NorMuon


def main(steps: int = 20) -> None:
    model = small_model()
    optimizer = NorMuon(groups(model), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses = []
    for x, y in batches(steps):
        loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss))

    # A scale that is a power of two changes nothing but exponents.
    plain = small_model()
    expected = train(plain, NorMuon(groups(plain), lr=0.05), steps)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))

    # An infinite gradient: the scaler leaves the step out and halves the scale.
    before = [p.detach().clone() for p in model.parameters()]
    scale = scaler.get_scale()
    x, y = next(batches(1))
    scaler.scale(loss_of(model, x * float("inf"), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < scale
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


if __name__ == "__main__":
    main()
