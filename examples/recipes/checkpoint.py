"""Save and resume with ``torch.distributed.checkpoint``.

torchrun --standalone --nproc-per-node 2 examples/recipes/checkpoint.py
"""

from __future__ import annotations

import tempfile

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small import groups, small_model, train
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from ortho_func import NorMuon


def build(seed: int) -> tuple[nn.Module, NorMuon]:
    model = small_model(seed)
    fully_shard(model)
    return model, NorMuon(groups(model), lr=0.05)


def main(steps: int = 5) -> None:
    with tempfile.TemporaryDirectory() as mine:
        folder = [mine]
        dist.broadcast_object_list(folder)  # rank 0's
        save_and_resume(folder[0], steps)
        dist.barrier()


def save_and_resume(folder: str, steps: int) -> None:
    model, optimizer = build(seed=0)
    train(model, optimizer, steps)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    expected = train(model, optimizer, steps)

    model, optimizer = build(seed=1)  # other weights, empty state
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
    )
    assert train(model, optimizer, steps) == expected


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
