"""One matrix owned by one rank, by two, and so on: ``python benchmarks/teams.py``.

Each rank has a core of its own only where there are as many cores as ranks; the script takes two.
"""

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import measure
import peers
import torch
import torch.distributed as dist
import torch.multiprocessing
from sharded import PATIENCE, Layer, _alternate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ortho_func import Muon

SHAPES = ((512, 512), (512, 2048), (1024, 1024), (768, 3072), (1024, 4096))
DTYPES = (torch.bfloat16, torch.float32)


def worker(rank: int, world: int, store: str, repeats: int, seconds: float, results: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=Path(store).as_uri(), rank=rank, world_size=world, timeout=PATIENCE
    )
    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, Any] = {}
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
            times = _alternate(steps, models, grads, repeats, seconds)
            medians = measure.medians(times)
            ratio = medians["team of 1"] / medians[f"team of {world}"]
            found[f"{shape[0]}×{shape[1]}, {str(dtype)[6:]}"] = ratio
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def run(world: int = 2, *, repeats: int = 25, seconds: float = 4.0) -> dict[str, Any]:
    """By shape and dtype, the time of one owner over that of a team of all ranks."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, f"{folder}/store", repeats, seconds, queue)
        started = torch.multiprocessing.start_processes(
            worker, arguments, nprocs=world, join=False, start_method="spawn"
        )
        assert started is not None
        found = queue.get(timeout=PATIENCE.total_seconds())
        while not started.join():
            pass
    return {"world": world, "ratios": found}


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
