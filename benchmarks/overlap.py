"""What a slow link costs a step whose exchanges overlap its arithmetic.

``python benchmarks/overlap.py``. Two ranks under FSDP2; a link is simulated that carries one
exchange after the other and takes as long for each as is said, by holding back what arrived.
"""

import argparse
import statistics
import time
from typing import Any

import measure
import peers
import torch
import torch.distributed as dist
from ranks import on_ranks
from sharded import Layer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ortho_func import Muon, pipeline

# Seconds on the link over seconds of the step without one.
LINKS = (0.25, 0.5, 1.0, 2.0)


class Link:
    """In the place of the pipeline's collectives: each exchange takes `seconds` of the link."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.free = seconds, 0.0
        self.arrival: dict[int, float] = {}

    def __enter__(self) -> "Link":
        self.real = pipeline.all_to_all, pipeline.wait
        pipeline.all_to_all, pipeline.wait = self.all_to_all, self.wait
        return self

    def __exit__(self, *exception: object) -> None:
        pipeline.all_to_all, pipeline.wait = self.real

    def all_to_all(self, x: Tensor, send: Any, receive: Any, *, group: str) -> Tensor:
        begun: Tensor = self.real[0](x, send, receive, group=group)
        self.free = max(self.free, time.perf_counter()) + self.seconds
        self.arrival[id(begun)] = self.free
        return begun

    def wait(self, x: Tensor) -> Tensor:
        arrived: Tensor = self.real[1](x)
        time.sleep(max(0.0, self.arrival.pop(id(x)) - time.perf_counter()))
        return arrived


def worker(rank: int, world: int, width: int, count: int, repeats: int) -> dict[str, Any]:
    model = Layer(peers.parameters(2 * count * [(width, width)]))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    params = list(model.parameters())
    grads = peers.gradients(params)
    one = Muon(params, bucket_bytes=2 * width * width)
    assert one.plan is not None
    buckets = len(one.plan.buckets)

    def step() -> float:
        peers.set_gradients(params, grads)
        dist.barrier()
        start = time.perf_counter()
        one.step()
        taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    for _ in range(3):
        step()
    bare = statistics.median(step() for _ in range(repeats))
    found: dict[str, Any] = {"buckets": buckets, "width": width, "links": {}}
    for share in LINKS:
        each = share * bare / (2 * buckets)
        times, bares = [], []
        for _ in range(repeats):
            bares.append(step())
            with Link(each):
                times.append(step())
        arithmetic = statistics.median(bares)
        edge = arithmetic / buckets + 2 * each
        bound = 1.1 * max(arithmetic, 2 * buckets * each) + edge
        apart = arithmetic + 2 * buckets * each
        took = statistics.median(times)
        found["links"][str(share)] = {
            "over the longer": took / max(arithmetic, 2 * buckets * each),
            "over the bound": took / bound,
            "over one after the other": took / apart,
        }
    return found


def run(world: int = 2, *, width: int = 384, count: int = 8, repeats: int = 7) -> dict[str, Any]:
    found: dict[str, Any] = on_ranks(worker, world, width, count, repeats)
    return found


def table(found: dict[str, Any]) -> str:
    head = ("link / step without it", "step / the longer of both", "step / bound",
            "step / both in turn")  # fmt: skip
    rows = [[share, *(f"{x:.2f}" for x in one.values())] for share, one in found["links"].items()]
    return measure.table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    found = run(repeats=args.repeats)
    print(table(found))
    print(measure.save("overlap", found))


if __name__ == "__main__":
    main()
