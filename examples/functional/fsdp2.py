"""The functional update on the shards of FSDP2, as one compiled graph with its exchanges.

    torchrun --standalone --nproc-per-node 2 examples/functional/fsdp2.py [--backend aot_eager]

FSDP2 keeps its parameters, so forward and backward are its own; everything from gradients to new
parameters and state is one pure function, compiled whole.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from student import batch, network
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from ortho_func import adamw, apply_updates, chain, clip_by_global_norm, muon, partition, plan

Params = dict[str, Tensor]


def main(backend: str = "inductor", steps: int = 100) -> list[float]:
    """Train on all ranks of the default group; the losses of this rank's batches."""
    model = network()
    fully_shard(model)
    params: Params = dict(model.named_parameters())
    matrices = {name: p for name, p in params.items() if p.ndim == 2}
    tx = chain(
        clip_by_global_norm(1.0),
        partition(
            {"matrix": muon(lr=0.05, plan=plan(matrices)), "rest": adamw(lr=3e-3)},
            lambda name, p: "matrix" if name in matrices else "rest",
        ),
    )

    @torch.compile(fullgraph=True, backend=backend)
    def step(params: Params, grads: Params, state: Any) -> tuple[Params, Any]:
        updates, state = tx.update(grads, state, params)
        return apply_updates(params, updates), state

    state = tx.init(params)
    losses = []
    for number in range(steps):
        x, y = batch(number * dist.get_world_size() + dist.get_rank())
        loss = (model(x) - y).square().mean()
        loss.backward()
        grads = {name: p.grad for name, p in params.items()}
        with torch.no_grad():
            new, state = step(params, grads, state)
            for name, p in params.items():
                p.copy_(new[name])
        model.zero_grad()
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    found = main(**vars(arguments))
    if dist.get_rank() == 0:
        print(f"loss {found[0]:.3f} -> {found[-1]:.3f}")
    dist.destroy_process_group()
