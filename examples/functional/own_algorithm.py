"""An algorithm of one's own, distributed by nothing more than ``plan=``.

    python examples/functional/own_algorithm.py
    torchrun --standalone --nproc-per-node 2 examples/functional/own_algorithm.py

Both print the same numbers: whole matrices see the same function, however they are sharded.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ortho_func
from ortho_func import Transform, apply_updates, elementwise, on_whole_matrices, orthogonalize


# --8<-- [start:algorithm]
def soft_muon(lr: float, beta: float = 0.9, plan: Any = None) -> Transform:
    """The momentum of signs, half orthogonalized: U = −lr·(orth(M) + M/‖M‖₂)/2."""

    def blend(m: Tensor) -> Tensor:  # [n, R, C] whole matrices, each on its own
        norm = torch.linalg.matrix_norm(m, ord=2, keepdim=True)
        return (orthogonalize(m, compute_dtype=torch.float32) + m / norm.clamp_min(1e-12)) / 2

    blended = on_whole_matrices(blend, plan=plan)

    def init(params: Any) -> Any:
        return elementwise(torch.zeros_like, params)

    def update(grads: Any, momenta: Any, params: Any = None) -> tuple[Any, Any]:
        momenta = elementwise(lambda m, g: beta * m + (1 - beta) * g.sign(), momenta, grads)
        return elementwise(lambda u: -lr * u, blended(momenta)), momenta

    return Transform(init, update)


# --8<-- [end:algorithm]


def whole(seed: int) -> dict[str, Tensor]:
    """The same parameters or gradients in every process."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "up": torch.randn(18, 8, generator=generator),
        "down": torch.randn(5, 18, generator=generator),
    }


def main(steps: int = 3) -> dict[str, float]:
    """A few steps on given gradients; the norms of the parameters after them."""
    params, plan = whole(0), None
    sharded = dist.is_initialized() and dist.get_world_size() > 1

    def place(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if not sharded:
            return tensors
        return {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in tensors.items()}

    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        params = place(params)
        plan = ortho_func.plan(params, wire_dtype=torch.float32)
    tx = soft_muon(lr=0.1, plan=plan)
    state = tx.init(params)
    for step in range(steps):
        updates, state = tx.update(place(whole(1 + step)), state, params)
        params = apply_updates(params, updates)
    gathered = {n: p.full_tensor() if sharded else p for n, p in params.items()}
    return {name: float(p.norm()) for name, p in gathered.items()}


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    print(main())
    if dist.is_initialized():
        dist.destroy_process_group()
