"""How much memory an optimizer's state takes."""

from __future__ import annotations

import torch
from torch import Tensor

from ortho_func.geometry import local

__all__ = ["state_bytes"]


def state_bytes(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of state that this process holds, by parameter; of DTensors, those of its shards.

    Parameters are named as they were given, else by number and group. The optimizers here hold
    all of their state from construction on; torch's own hold it after a first step.

    Examples:
        >>> from ortho_func import Muon
        >>> layer = torch.nn.Linear(8, 4, bias=False)
        >>> state_bytes(Muon(layer.named_parameters()))
        {'weight': 128}
        >>> state_bytes(Muon(layer.parameters(), momentum_dtype=torch.bfloat16))
        {'parameter 0 of group 0': 64}
    """
    found = {}
    for number, group in enumerate(optimizer.param_groups):
        count = len(group["params"])
        names = group.get("param_names") or [
            f"parameter {n} of group {number}" for n in range(count)
        ]
        for name, parameter in zip(names, group["params"], strict=True):
            tensors = [t for t in optimizer.state[parameter].values() if isinstance(t, Tensor)]
            found[name] = sum(local(t).nbytes for t in tensors)
    return found
