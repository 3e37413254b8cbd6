"""What a type checker must accept, as users write it. Checked by tests/test_packaging.py."""

from typing import Any

import torch

from ortho_func import (
    Muon,
    NorMuon,
    Transform,
    apply_updates,
    muon,
    newton_schulz,
    param_groups,
    plan,
    state_bytes,
)

layer = torch.nn.Linear(8, 4)
optimizer: torch.optim.Optimizer = Muon(layer.parameters(), lr=0.02, weight_decay=0.1)
grouped = NorMuon(
    [{"params": [layer.weight]}, {"params": [layer.bias], "algorithm": "adamw"}],
    lr=torch.tensor(0.02),
    orthogonalizer=lambda x: newton_schulz(x, steps=3),
    wire_dtype=torch.float32,
    hops="one",
    team_size="auto",
)
chosen = NorMuon(param_groups(layer, lr=0.02), compile={"mode": "default"})
scheduler = torch.optim.lr_scheduler.LambdaLR(grouped, lambda step: 0.9**step)
sizes: dict[str, int] = state_bytes(optimizer)

params: dict[str, torch.Tensor] = {"w": torch.zeros(4, 8)}
transform: Transform = muon(lr=0.02, plan=plan(params))
state: Any = transform.init(params)
updates, state = transform.update(params, state, params)
params = apply_updates(params, updates)
