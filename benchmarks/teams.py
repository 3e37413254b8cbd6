"""One matrix owned by one rank, by two, and so on: ``python benchmarks/teams.py``.

Each rank has a core of its own only where there are as many cores as ranks; the script takes two.
"""

import argparse
from typing import Any

import measure
import peers
import torch
from ranks import on_ranks
from sharded import Layer, alternated
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ortho_func import Muon

SHAPES = ((512, 512), (512, 2048), (1024, 1024), (768, 3072), (1024, 4096))
DTYPES = (torch.bfloat16, torch.float32)


def worker(rank: int, world: int, repeats: int, seconds: float) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, float] = {}
    for shape in SHAPES:
        for dtype in DTYPES:
            models, steps = {}, {}
            for size in (1, world):
                model = Layer(peers.parameters([shape]))
                fully_shard(model, mesh=mesh)
                name = f"team of {size}"
                models[name] = list(model.parameters())
                one = Muon(models[name], team_size=size, compute_dtype=dtype)
                steps[name] = one.step
            grads = peers.gradients(models[name])
            times = alternated(steps, models, grads, repeats, seconds)
            medians = measure.medians(times)
            ratio = medians["team of 1"] / medians[f"team of {world}"]
            found[f"{shape[0]}×{shape[1]}, {str(dtype)[6:]}"] = ratio
    return found


def run(world: int = 2, *, repeats: int = 25, seconds: float = 2.0) -> dict[str, Any]:
    """By shape and dtype, the time of one owner over that of a team of all ranks."""
    return {"world": world, "ratios": on_ranks(worker, world, repeats, seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2)
    args = parser.parse_args()
    found = run(args.world)
    print(measure.table(("matrix", "one owner / team"), [
        (name, f"{ratio:.2f}") for name, ratio in found["ratios"].items()
    ]))  # fmt: skip
    print(measure.save("teams", found))


if __name__ == "__main__":
    main()
