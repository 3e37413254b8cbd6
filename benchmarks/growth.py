"""How the cost of a step grows: ``python benchmarks/growth.py``.

With the number of matrices, with their width, and with the number of ranks: measured to eight, and
by the plan's arithmetic to 4096. Ranks share cores, so what is measured of them is the processor
time of the busiest, which the plan predicts from floating-point operations alone.
"""

import argparse
import statistics
import time
from typing import Any

import measure
import peers
import torch
import torch.distributed as dist
from one_process import layers
from ranks import on_ranks
from sharded import Layer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ortho_func import Muon
from ortho_func.cli.figures import figures_of, make_plan
from ortho_func.cli.hardware import Hardware
from ortho_func.cli.meshes import find_mesh
from ortho_func.cli.models import find_model

COUNTS = (10, 30, 100, 300, 1000)
WIDTHS = (64, 128, 256, 512, 1024)
WORLDS = (1, 2, 4, 8)
MANY = (8, 64, 512, 4096)
MODEL = "llama3-70b"


def one_process(shapes: list[tuple[int, int]], seconds: float) -> dict[str, float]:
    """Median seconds of a step, ours and torch.optim.Muon's, in alternation."""
    found = {}
    for name, make in {
        "ortho_func": lambda params: Muon(params),
        "torch.optim.Muon": lambda params: torch.optim.Muon(params),
    }.items():
        params = peers.parameters(shapes)
        grads = peers.gradients(params)
        peers.set_gradients(params, grads)
        found[name] = make(params).step
    return measure.medians(measure.alternate(found, repeats=15, seconds=seconds))


def worker(rank: int, world: int, width: int, count: int, repeats: int) -> dict[str, float]:
    """The busiest rank's processor time of a step, and its operations by the plan."""
    model = Layer(peers.parameters(layers(count, width)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    params = list(model.parameters())
    grads = peers.gradients(params)
    one = Muon(params)
    assert one.plan is not None
    times = []
    for _ in range(repeats + 2):
        peers.set_gradients(params, grads)
        dist.barrier()
        start = time.thread_time()
        one.step()
        times.append(time.thread_time() - start)
    busiest = torch.tensor(statistics.median(times[2:]), dtype=torch.float64)
    dist.all_reduce(busiest, dist.ReduceOp.MAX)
    return {"seconds": float(busiest), "operations": max(one.plan.loads())}


def by_arithmetic() -> dict[str, dict[str, float]]:
    """A large model's busiest rank, by the number of ranks."""
    found = {}
    for ranks in MANY:
        made = make_plan(find_model(MODEL), find_mesh("fsdp", ranks), bucket_bytes=2**26)
        figures = figures_of(made, Hardware(), tables=False)
        found[str(ranks)] = {
            "operations": float(figures.work.max()),
            "bytes": float(figures.sent.max()),
        }
    return found


def run(*, seconds: float = 4.0, width: int = 256, count: int = 3) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        "matrices": {str(n): one_process(n * [(64, 64)], seconds) for n in COUNTS},
        "width": {str(d): one_process(layers(1, d), seconds) for d in WIDTHS},
        "world": {str(w): on_ranks(worker, w, width, count, 15) for w in WORLDS},
        "layers": {"count": count, "width": width},
        "arithmetic": by_arithmetic(),
    }


def tables(found: dict[str, Any]) -> str:
    """All of it in words and tables."""
    text = GROWTH + _compared("matrices of 64×64", found["matrices"])
    text += "\n" + _compared("width of a layer", found["width"])
    first = found["world"]["1"]
    rows = [
        [
            world,
            f"{one['operations'] / first['operations']:.3f}",
            f"{one['seconds'] / first['seconds']:.3f}",
        ]
        for world, one in found["world"].items()
    ]
    size = found["layers"]
    text += f"\n{size['count']} layers of width {size['width']} under FSDP2, of one rank's:\n\n"
    head = ("ranks", "busiest rank's operations", "busiest rank's processor time")
    text += measure.table(head, rows)
    rows = [
        [ranks, f"{one['operations'] / 1e12:.1f}", f"{one['bytes'] / 2**30:.2f}"]
        for ranks, one in found["arithmetic"].items()
    ]
    text += f"\n{MODEL} by the plan alone:\n\n"
    head = ("ranks", "busiest rank's TFLOP", "GiB that a rank sends at most")
    return text + measure.table(head, rows)


GROWTH = """
## As work grows

![step time as work grows](growth.svg)

One process, one thread, eager; the time of a step over that of the first row, and that of
torch.optim.Muon over ours.

"""


def _compared(what: str, found: dict[str, dict[str, float]]) -> str:
    first = next(iter(found.values()))["ortho_func"]
    rows = [
        [
            size,
            f"{one['ortho_func'] / first:.1f}",
            f"{one['torch.optim.Muon'] / one['ortho_func']:.2f}",
        ]
        for size, one in found.items()
    ]
    return measure.table((what, "time", "torch.optim.Muon's over ours"), rows)


def draw(found: dict[str, Any], buckets: dict[str, Any] | None, path: Any) -> None:
    """Four panels: by matrices, by width, by ranks, and memory by bucket size."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "growth"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 7), layout="constrained")
    for axis, what in zip(axes[0], ("matrices", "width"), strict=True):
        sizes = [int(size) for size in found[what]]
        for name in ("ortho_func", "torch.optim.Muon"):
            times = [1e3 * one[name] for one in found[what].values()]
            axis.loglog(sizes, times, marker="o", markersize=3, label=name)
        axis.set(xlabel=what, ylabel="ms a step")
        axis.legend()
    first = found["world"]["1"]
    ranks = [int(world) for world in found["world"]]
    axes[1, 0].loglog(
        ranks, [one["seconds"] / first["seconds"] for one in found["world"].values()],
        "o", label="processor time, measured",
    )  # fmt: skip
    axes[1, 0].loglog(
        ranks, [one["operations"] / first["operations"] for one in found["world"].values()],
        label="operations, by the plan",
    )  # fmt: skip
    many = found["arithmetic"]
    most = many[str(MANY[0])]["operations"] * MANY[0]
    axes[1, 0].loglog(
        [int(n) for n in many], [one["operations"] / most for one in many.values()],
        "--", label=f"operations, {MODEL}",
    )  # fmt: skip
    axes[1, 0].set(xlabel="ranks", ylabel="busiest rank over one rank")
    axes[1, 0].legend()
    if buckets is not None:
        sizes = [int(size) / 2**20 for size in buckets["extra"]]
        extra = [bytes_ / 2**20 for bytes_ in buckets["extra"].values()]
        axes[1, 1].semilogx(sizes, extra, marker="o", markersize=3)
        axes[1, 1].set(xlabel="bucket_bytes (MiB)", ylabel="extra memory (MiB)")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    found = run(seconds=args.seconds)
    print(tables(found))
    print(measure.save("growth", found))


if __name__ == "__main__":
    main()
