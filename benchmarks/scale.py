"""Plan published models on thousands of ranks and write docs/scale.md."""

from pathlib import Path

from ortho_func.cli.figures import Figures, Planned, figures_of, make_plan
from ortho_func.cli.hardware import Hardware
from ortho_func.cli.meshes import find_mesh
from ortho_func.cli.models import find_model
from ortho_func.cli.report import hops_home, seconds, size
from ortho_func.cli.table import Table, markdown
from ortho_func.plan import DEFAULT_BUCKET_BYTES, DIRECT_CONNECTIONS

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
RANKS = (8, 64, 512, 1024, 4096)
MESHES = {
    "gpt2-small": ("ddp", "fsdp"),
    "llama3-8b": ("fsdp", "hsdp:8", "fsdp-tp:8"),
    "llama3-70b": ("fsdp", "hsdp:8", "fsdp-tp:8"),
    "qwen3-30b-a3b": ("fsdp", "hsdp:8", "fsdp-tp:8", "ep:8"),
    "deepseek-v3": ("fsdp", "hsdp:8", "fsdp-tp:8", "ep:8"),
}
HEAD = (
    "mesh", "ranks", "balance", "over bound", "bytes", "a rank's wire", "arithmetic", "exchanges",
    "step", "in flight", "tables", "connections", "home in", "buckets",
    "planned in",
)  # fmt: skip

PROSE = """\
# Scale

Made by `python benchmarks/scale.py`; don't edit. One line of it, with more figures:

```
python -m ortho_func plan llama3-70b --ranks 1024 --mesh fsdp-tp:8 --plot load.png
```

A plan is arithmetic on shapes, so no process and no device is needed to know what every one of
4096 ranks will do. Muon with the default orthogonalizer, bfloat16 on the wire, buckets of
{bucket} MiB. Times are estimates for `{hardware}`: 10^12 FLOP/s,
10^9 bytes/s each way, microseconds that each peer adds to an exchange.

- **balance**: the busiest rank's floating-point operations over the larger of the mean and the
  largest matrix.
- **over bound**: the same over a bound that no assignment of whole matrices to ranks beats
  (bin packing, Martello and Toth's L2). Where `balance` is large and this is 1, there is no better
  assignment. (Not below: the 70B on 256 ranks has 240 matrices of the largest size, and the other
  16 ranks cannot hold the rest below 1.175 of the mean.)
- **bytes**: what crosses between ranks over the least possible, which is (1 - 1/S) of every matrix
  on the way out and (R - 1/S) on the way home, for R replicas of S even shards.
- **a rank's wire**: the most that any rank sends or receives in a step.
- **arithmetic**, **exchanges**: the busiest rank's time for either. **step**: both overlapped as
  the pipeline runs them, with every exchange as slow as its slowest rank.
- **in flight**: the most that any rank's buffers and whole matrices take; the orthogonalizer's own
  work space comes on top. A bucket bounds what an owner collects, and an owner's first matrix
  always fits, so with more ranks than matrices one bucket holds the model.
- **tables**: index tables of the busiest rank (none where all buckets are dense).
- **connections**: other ranks that a rank exchanges anything with, at most. **home in**: whether
  results go to replicas from their owner (one hop) or by way of its replica (two).
- **planned in**: processor time on one core, layouts included.

Meshes: `hsdp:8` has eight replicas; `fsdp-tp:8` splits q, k, v, gate and up by rows and o and down
by columns over eight ranks, and rows over the rest; `ep:8` puts experts on an axis of eight and
their rows on the rest, with dense layers over all ranks. Stacks of experts are sharded by expert,
or by their rows where there are more shards than experts.
"""

READING = """
## What the tables say

- Work is balanced to within a few per cent until there are more ranks than matrices. From there on
  the largest matrix alone sets the step: the 70B's takes {floor} on any number of ranks.
- Experts and dense layers on different meshes over the same ranks are balanced together.
- Owners are chosen among ranks that hold a piece wherever that leaves the balance alone, so the
  wire stays within {worst} of the least possible on all {count} plans here.
- A full all-to-all connects a rank with every other that owns or holds anything. On 4096 ranks and
  with many buckets (DeepSeek-V3, `ep:8`) these messages, not the bytes, are most of the time.
- With replicas, results reach them in two hops from {least} ranks on: from the owner to the ranks
  of its own replica, over a process group of these alone, and from each of them to its peers in
  the others, over another. (Over one group of all, with sizes of zero, NCCL would connect every
  pair all the same.) The 70B in `hsdp:8` on 4096 ranks then has at most {two} connections a rank
  instead of {one}, and {bytes}; an owner no longer sends every replica its copy by itself,
  and the step is estimated at {fast} instead of {slow}.
  (`python -m ortho_func plan llama3-70b --ranks 4096 --mesh hsdp:8 --hops one`.)
- The slowest plan here took {slowest}.
"""


def row(planned: Planned, figures: Figures) -> list[str]:
    mesh = planned.mesh
    extent = f":{mesh.extent}" if mesh.kind not in ("ddp", "fsdp") else ""
    wire = max(int(figures.sent.max()), int(figures.received.max()))
    return [
        mesh.kind + extent,
        str(mesh.ranks),
        f"{figures.balance:.3f}",
        f"{figures.over_least_busiest:.3f}",
        f"{figures.bytes_ratio:.4f}",
        size(wire),
        seconds(float(figures.arithmetic_time.max())),
        seconds(float(figures.wire_time.max())),
        seconds(figures.step_time),
        size(float(figures.memory.max())),
        size(figures.table_bytes),
        str(int(figures.connections.max())),
        hops_home(planned.plan),
        ", ".join(f"{n} {how}" for how, n in figures.buckets.items()),
        f"{planned.seconds:.2f} s",
    ]


def main() -> None:
    hardware = Hardware()
    parts, found = [], []
    for name, meshes in MESHES.items():
        model = find_model(name)
        lines = []
        for mesh in meshes:
            for ranks in RANKS:
                planned = make_plan(
                    model, find_mesh(mesh, ranks), bucket_bytes=DEFAULT_BUCKET_BYTES
                )
                figures = figures_of(planned, hardware)
                lines.append(row(planned, figures))
                found.append((planned, figures))
                print(name, *lines[-1], flush=True)
        counts = ", ".join(f"{n} of {r}×{c}" for (r, c), n in figures.shapes.items())
        parts += [f"\n## {name}\n", f"{figures.matrices} matrices: {counts}."]
        parts += [f"Shapes: <{model.source}>.\n", markdown(Table(name, HEAD, lines))]
    PAGE.write_text(prose(hardware) + "\n".join(parts) + "\n" + reading(found))


def prose(hardware: Hardware) -> str:
    line = f"tflops={hardware.tflops:g},gbps={hardware.gbps:g},latency_us={hardware.latency_us:g}"
    return PROSE.format(bucket=DEFAULT_BUCKET_BYTES // 2**20, hardware=line)


def reading(found: list[tuple[Planned, Figures]]) -> str:
    big = [f for p, f in found if p.model.name == "llama3-70b" and p.mesh.ranks == 1024]
    one, two = (_hops(hops) for hops in ("one", "two"))
    same = one.wire_bytes == two.wire_bytes
    return READING.format(
        least=DIRECT_CONNECTIONS + 2,
        one=int(one.connections.max()),
        two=int(two.connections.max()),
        bytes="equally many bytes" if same else f"{size(two.wire_bytes)} in all",
        fast=seconds(two.step_time),
        slow=seconds(one.step_time),
        floor=seconds(float(big[0].arithmetic_time.max())),
        worst=f"{100 * (max(f.bytes_ratio for _, f in found) - 1):.1f}%",
        count=len(found),
        slowest=f"{max(p.seconds for p, _ in found):.1f} s of processor time",
    )


def _hops(hops: str) -> Figures:
    planned = make_plan(
        find_model("llama3-70b"),
        find_mesh("hsdp:8", 4096),
        bucket_bytes=DEFAULT_BUCKET_BYTES,
        hops=hops,
    )
    return figures_of(planned, Hardware())


if __name__ == "__main__":
    main()
