"""The bucket size: step time and extra memory against ``bucket_bytes``.

``python benchmarks/buckets.py``. Ranks share FSDP2 parameters over gloo, one thread a rank.
"""

import argparse
import os
import threading
import time
from pathlib import Path
from typing import Any

import measure
import peers
import torch.distributed as dist
from one_process import layers
from ranks import on_ranks
from sharded import Layer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ortho_func import Muon

MIB = 2**20


class Peak:
    """The largest resident memory in a block over that at its start, in bytes."""

    def __enter__(self) -> "Peak":
        self.start = self.most = resident()
        self.running = True
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while self.running:
            self.most = max(self.most, resident())
            time.sleep(0.0005)

    def __exit__(self, *exception: object) -> None:
        self.running = False
        self.thread.join()
        self.extra = self.most - self.start


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def give_memory_back() -> None:
    """Return freed memory to the system, so that the next peak starts from what is in use."""
    import ctypes

    ctypes.CDLL("libc.so.6").malloc_trim(0)


def worker(rank: int, world: int, width: int, count: int, sizes: list[int]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    model = Layer(peers.parameters(layers(count, width)))
    fully_shard(model, mesh=mesh)
    params = list(model.parameters())
    grads = peers.gradients(params)
    made = {size: Muon(params, bucket_bytes=size) for size in sizes}

    def before(name: str) -> None:
        peers.set_gradients(params, grads)
        dist.barrier()

    times = measure.alternate(
        {str(size): one.step for size, one in made.items()}, repeats=9, before=before,
        seconds=float("inf"),
    )  # fmt: skip
    extra = {}
    for size, one in made.items():
        give_memory_back()
        dist.barrier()
        with Peak() as peak:
            one.step()
        extra[str(size)] = peak.extra
    whole = sum(p.numel() for p in params) * 2
    return {
        "world": world, "width": width, "layers": count, "wire_bytes": whole,
        "times": times, "extra": extra,
        "buckets": {str(size): len(one.plan.buckets) for size, one in made.items()},
    }  # fmt: skip


def run(world: int = 2, width: int = 512, count: int = 4) -> dict[str, Any]:
    found: dict[str, Any] = on_ranks(
        worker, world, width, count, [n * MIB for n in (1, 2, 4, 8, 16, 32, 64)]
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    found = run(args.world, args.width, args.layers)
    print(measure.save("buckets", found))
    for size, seconds in measure.medians(found["times"]).items():
        print(
            f"{int(size) // MIB:4d} MiB: {found['buckets'][size]:3d} buckets, "
            f"{1e3 * seconds:8.2f} ms, {found['extra'][size] / MIB:7.1f} MiB more"
        )


if __name__ == "__main__":
    main()
