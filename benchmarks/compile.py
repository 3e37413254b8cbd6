"""What compiling the step costs, cold and warm; the graph's size; overhead outside the graph.

``python benchmarks/compile.py [--layers 1 2 4]``. A layer has one matrix of each of seven shapes
and two vectors; 32 of them and two more matrices are the 226 matrices of a model. Dims are tiny:
what is measured depends on how many there are. Each number of layers compiles in a process of its
own, with an empty cache and then with that cache.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any

import measure
import peers
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ortho_func import Muon

SEVEN = ((32, 32), (16, 32), (8, 32), (32, 16), (64, 32), (48, 32), (32, 64))
FULL = 32  # layers
COLD_SECONDS = 600  # of one compilation, at most


def model(count: int) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = peers.parameters([*count * SEVEN, *2 * SEVEN[:1]])
    return matrices, peers.parameters((2 * count + 1) * [(32,)])


def optimizer_for(count: int, how: Any) -> Muon:
    matrices, vectors = model(count)
    made = Muon(
        [{"params": matrices}, {"params": vectors, "algorithm": "adamw"}], lr=0.02, compile=how
    )
    for p in (*matrices, *vectors):
        p.grad = torch.ones_like(p)
    return made


def first_step(count: int) -> None:
    """Compile one step and say how long it took; run in a process of its own."""
    torch.set_num_threads(1)
    made = optimizer_for(count, True)
    start = time.perf_counter()
    made.step()
    print(json.dumps({"seconds": time.perf_counter() - start}))


def compile_times(count: int) -> dict[str, float]:
    """Seconds of the first step with an empty cache, and with the one it leaves."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            done = subprocess.run(
                [sys.executable, __file__, "--first-step", str(count)],
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
                capture_output=True, text=True, timeout=COLD_SECONDS, check=True,
            )  # fmt: skip
            found[name] = json.loads(done.stdout.splitlines()[-1])["seconds"]
    return found


def nodes(count: int, world: int) -> int:
    """Operations in the traced graph of rank 0, the other ranks only pretended."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    graphs: list[int] = []

    def capture(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(sum(node.op == "call_function" for node in module.graph.nodes))
        return module.forward

    torch._dynamo.reset()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        mesh = init_device_mesh("cpu", (world,))
        weights = [nn.Parameter(_shard(shape, mesh, world)) for shape in count * SEVEN]
        made = Muon(weights, compile={"backend": capture})
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        made.step()
    finally:
        dist.destroy_process_group()
    return graphs[0]


def _shard(shape: tuple[int, int], mesh: Any, world: int) -> DTensor:
    rows = min(-(-shape[0] // world), shape[0])
    return DTensor.from_local(
        torch.ones(rows, shape[1]), mesh, [Shard(0)],
        run_check=False, shape=torch.Size(shape), stride=(shape[1], 1),
    )  # fmt: skip


def outside_the_graph(count: int = 500, repeats: int = 30) -> float:
    """Median seconds of a compiled step whose graph does nothing: guards and Python around it."""

    def nothing(module: torch.fx.GraphModule, _: Any) -> Any:
        return lambda *inputs: ()

    torch._dynamo.reset()
    weights = peers.parameters(count * [(8, 16)])
    peers.set_gradients(weights, peers.gradients(weights))
    made = Muon(weights, compile={"backend": nothing})
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        made.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def import_seconds(repeats: int = 5) -> dict[str, float]:
    """Median seconds of ``import torch``, and of ``import ortho_func`` after it."""
    code = (
        "import time; a = time.perf_counter(); import torch; b = time.perf_counter();"
        "import ortho_func; print(b - a, time.perf_counter() - b)"
    )
    pairs = []
    for _ in range(repeats):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        pairs.append([float(value) for value in done.stdout.split()])
    first, second = zip(*pairs, strict=True)
    return {"torch": statistics.median(first), "ortho_func": statistics.median(second)}


def import_table(lines: int = 12) -> str:
    """What takes longest below ``import ortho_func``, by ``python -X importtime``."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import torch, sys; sys.stderr.write('=\\n');"
         "import ortho_func"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    after = done.stderr.rpartition("=\n")[2].splitlines()
    rows = [line.removeprefix("import time:").split("|") for line in after if "|" in line]
    by_cost = sorted(rows, key=lambda row: -int(row[1]) if row[1].strip().isdigit() else 0)
    return "\n".join(f"{row[1].strip():>8} us {row[2].rstrip()}" for row in by_cost[:lines])


def run(counts: Sequence[int] = (1, 2, 4)) -> dict[str, Any]:
    torch.set_num_threads(1)
    times = {str(count): compile_times(count) for count in counts}
    for count, found in times.items():
        print(f"{count} layers: " + ", ".join(f"{k} {v:.1f} s" for k, v in found.items()))
    return {
        "matrices": {str(count): len(model(count)[0]) for count in (*counts, FULL)},
        "seconds": times,
        "nodes by world": {str(world): nodes(4, world) for world in (2, 8, 64)},
        "nodes by layers": {str(count): nodes(count, 8) for count in (2, 4, 8)},
        "outside the graph": outside_the_graph(),
        "import": import_seconds(),
    }


def extrapolated(found: dict[str, Any], which: str) -> float:
    """Seconds at the full number of layers, on the line through the two largest measured."""
    small, large = sorted(map(int, found["seconds"]))[-2:]
    low, high = (found["seconds"][str(count)][which] for count in (small, large))
    slope: float = max(0.0, high - low) / (large - small)
    return high + slope * (FULL - large)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--first-step", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.first_step is not None:
        first_step(args.first_step)
        return
    found = run(args.layers)
    print(measure.save("compile", found))
    if len(args.layers) > 1 and max(args.layers) < FULL:
        for which in ("cold", "warm"):
            print(f"{which}, {FULL} layers by extrapolation: {extrapolated(found, which):.0f} s")
    print(found["nodes by world"], found["nodes by layers"])
    print(f"outside the graph, 500 parameters: {1e3 * found['outside the graph']:.2f} ms")
    print(f"imports: {found['import']}\n{import_table()}")


if __name__ == "__main__":
    main()
