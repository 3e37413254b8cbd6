"""Whole steps on parameters under FSDP2, gloo, one thread a rank.

``python benchmarks/sharded.py [--dion PATH]``. Each round every entry makes one step, all ranks
together behind a barrier; a step's time is its slowest rank's.
"""

import argparse
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import measure
import peers
import torch
import torch.distributed as dist
import torch.multiprocessing
from one_process import Shapes, layers
from peers import Absent, Entry
from ranks import PATIENCE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclass(frozen=True)
class Case:
    """One comparison: `compiled` says whether our compiled step takes part too."""

    name: str
    world: int
    shapes: tuple[tuple[int, int], ...]
    algorithm: str = "Muon"
    compiled: bool = False


def gated(count: int, width: int) -> Shapes:
    """Layers with a gate of 18 heads each, which leaves many ranks few rows or none."""
    return [shape for _ in range(count) for shape in (*layers(1, width), (18, width))]


MIXTURE = [(256, 256), *3 * [(256, 1024)], *5 * [(512, 256)]]


def cases() -> list[Case]:
    found = []
    for world, width, count in ((2, 256, 6), (4, 64, 6), (8, 256, 3)):
        for algorithm in ("Muon", "NorMuon", "Dion2"):
            name = f"W={world}, D={width}, {count} layers, {algorithm}"
            compiled = algorithm == "Muon" and world < 8
            shapes = tuple(gated(count, width))
            found.append(Case(name, world, shapes, algorithm, compiled))
    found.append(Case("W=8, mixture of 1, 3 and 5 matrices, Muon", 8, tuple(MIXTURE)))
    return found


class Layer(nn.Module):
    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(params)


def measured(
    case: Case, entries: Sequence[Entry], mesh: Any, *, repeats: int, seconds: float
) -> dict[str, Any]:
    """Times of every entry on every rank, and who failed."""
    models = {}
    for entry in entries:
        model = Layer(peers.parameters(case.shapes))
        fully_shard(model, mesh=mesh)
        models[entry.name] = list(model.parameters())
    grads = peers.gradients(next(iter(models.values())))
    steps: dict[str, Any] = {}
    failed: list[Absent] = []
    for entry in entries:
        params = models[entry.name]
        if entry.even and any(rows % case.world for rows, _ in case.shapes):
            failed.append(Absent(entry.name, "can't take shards of unequal sizes"))
            continue
        peers.set_gradients(params, grads)
        optimizer = entry.make(params, mesh if not entry.ours else None)
        start = time.perf_counter()
        for _ in range(2):
            peers.set_gradients(params, grads)
            optimizer.step()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"  {entry.name}: warm in {time.perf_counter() - start:.1f} s", flush=True)
        steps[entry.name] = optimizer.step
    return {
        "times": alternated(steps, models, grads, repeats, seconds),
        "failed": {one.name: one.reason for one in failed},
    }


def alternated(
    steps: dict[str, Any], models: Any, grads: Any, repeats: int, seconds: float
) -> measure.Times:
    """Rounds over all entries; every rank does equally many, and the slowest rank counts."""

    def before(name: str) -> None:
        peers.set_gradients(models[name], grads)
        dist.barrier()

    start = time.perf_counter()
    measure.alternate(steps, repeats=1, before=before, warm=0)
    one_round = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(one_round, dist.ReduceOp.MAX)
    rounds = max(5, min(repeats, int(seconds / float(one_round))))
    times = measure.alternate(steps, repeats=rounds, before=before, warm=1, seconds=float("inf"))
    flat = torch.tensor([times[name] for name in steps], dtype=torch.float64)
    dist.all_reduce(flat, dist.ReduceOp.MAX)
    return dict(zip(steps, flat.tolist(), strict=True))


def worker(rank: int, world: int, todo: list[Case], store: str, repeats: int, seconds: float,
           results: Any) -> None:  # fmt: skip
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    peers.use_dion(None)
    dist.init_process_group(
        "gloo", init_method=Path(store).as_uri(), rank=rank, world_size=world, timeout=PATIENCE
    )
    mesh = init_device_mesh("cpu", (world,))
    for case in todo:
        torch._dynamo.reset()  # or peers' functions reach the limit of recompilations
        if rank == 0:
            print(case.name, flush=True)
        found, absent = peers.sharded(case.algorithm)
        mine = peers.ours(case.algorithm, compiled=case.compiled, three=False)
        try:
            one = measured(case, [*mine, *found], mesh, repeats=repeats, seconds=seconds)
        except Exception:
            results.put((case.name, traceback.format_exc()))
            raise
        if rank == 0:
            one["failed"] |= {peer.name: peer.reason for peer in absent}
            results.put((case.name, {**asdict(case), **one}))
    dist.barrier()
    dist.destroy_process_group()


def run(todo: Sequence[Case], *, repeats: int = 25, seconds: float = 10.0) -> dict[str, Any]:
    """All cases, those of one world size in the same processes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    results: dict[str, Any] = {}
    context = torch.multiprocessing.get_context("spawn")
    for world in sorted({case.world for case in todo}):
        some = [case for case in todo if case.world == world]
        queue = context.Queue()
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world, some, f"{folder}/store", repeats, seconds, queue)
            started = torch.multiprocessing.start_processes(
                worker, arguments, nprocs=world, join=False, start_method="spawn"
            )
            assert started is not None
            for _ in some:
                name, found = queue.get(timeout=2 * PATIENCE.total_seconds())
                if isinstance(found, str):
                    raise RuntimeError(f"{name}:\n{found}")
                results[name] = found
                medians = measure.medians(found["times"])
                print(name, {key: f"{1e3 * t:.2f} ms" for key, t in medians.items()}, flush=True)
            while not started.join():
                pass
    return {"cases": results}


def main() -> None:
    every = cases()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dion", help="a checkout of microsoft/dion")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=10.0, help="of measuring, a case")
    args = parser.parse_args()
    peers.use_dion(args.dion)
    some = [case for case in every if args.only in case.name]
    found = run(some, repeats=args.repeats, seconds=args.seconds)
    print(measure.save("sharded" if some == every else "sharded-some", found))


if __name__ == "__main__":
    main()
