"""The figures of plans as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ortho_func.cli.figures import Figures, Planned
from ortho_func.cli.table import Table
from ortho_func.plan import Plan

__all__ = ["figure_table", "hops_home", "seconds", "shape_table", "size"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: float) -> str:
    """A number of bytes.

    Examples:
        >>> size(3 * 2**20), size(100)
        ('3.00 MiB', '100 B')
    """
    power = 0
    while count >= 1024 and power < len(_UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.3g} {_UNITS[power]}" if power == 0 else f"{count:.2f} {_UNITS[power]}"


def seconds(value: float) -> str:
    """A time.

    Examples:
        >>> seconds(0.01234), seconds(2.5)
        ('12.3 ms', '2.50 s')
    """
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _span(values: Tensor, text: Callable[[float], str] = lambda value: f"{value:.0f}") -> str:
    """The smallest and the largest of some values."""
    low, high = text(float(values.min())), text(float(values.max()))
    return low if low == high else f"{low} to {high}"


def shape_table(planned: Planned, figures: Figures) -> Table:
    """How many matrices of which shape there are, and what one costs."""
    cost: dict[tuple[int, int], float] = {}
    owners: dict[tuple[int, int], set[int]] = {}
    each = iter(figures.costs)
    for bucket in planned.plan.buckets:
        for slab in bucket.slabs:
            for matrix in slab.members:
                cost[slab.rows, slab.cols] = next(each)
                owners.setdefault((slab.rows, slab.cols), set()).add(matrix.owner)
    total = sum(figures.costs)
    rows = [
        (
            f"{shape[0]}x{shape[1]}",
            str(count),
            f"{cost[shape] / 1e9:.1f}",
            f"{100 * count * cost[shape] / total:.1f}",
            str(len(owners[shape])),
        )
        for shape, count in sorted(figures.shapes.items(), key=lambda pair: -cost[pair[0]])
    ]
    head = ("shape", "matrices", "GFLOP each", "% of work", "owners")
    return Table(f"{planned.model.name}: what is orthogonalized", head, rows)


def hops_home(made: Plan) -> str:
    """In how many hops the results of buckets that travel do."""
    found = sorted({bucket.hops for bucket in made.buckets if bucket.returns})
    return " and ".join({1: "one hop", 2: "two hops"}[hops] for hops in found) or "no hop"


def _teams(made: Plan) -> str:
    """How many ranks own a matrix together."""
    return ", ".join(map(str, sorted({bucket.team for bucket in made.buckets})))


_ROWS: tuple[tuple[str, Callable[[Planned, Figures], str]], ...] = (
    ("matrices", lambda p, f: str(f.matrices)),
    ("ranks that own any", lambda p, f: str(int((f.owned > 0).sum()))),
    ("matrices a rank owns", lambda p, f: _span(f.owned)),
    ("ranks that own a matrix together", lambda p, f: _teams(p.plan)),
    ("busiest rank / max(mean, largest matrix)", lambda p, f: f"{f.balance:.3f}"),
    ("busiest rank / no assignment beats", lambda p, f: f"{f.over_least_busiest:.3f}"),
    ("bytes on the wire, all ranks", lambda p, f: size(f.wire_bytes)),
    ("bytes / least possible", lambda p, f: f"{f.bytes_ratio:.4f}"),
    ("a rank sends", lambda p, f: _span(f.sent, size)),
    ("a rank receives", lambda p, f: _span(f.received, size)),
    ("arithmetic a rank", lambda p, f: _span(f.arithmetic_time, seconds)),
    ("wire a rank", lambda p, f: _span(f.wire_time, seconds)),
    ("step, overlapped", lambda p, f: seconds(f.step_time)),
    ("memory in flight a rank", lambda p, f: _span(f.memory, size)),
    ("index tables, busiest rank", lambda p, f: size(f.table_bytes)),
    ("connections a rank", lambda p, f: _span(f.connections)),
    ("results go home in", lambda p, f: hops_home(p.plan)),
    ("buckets", lambda p, f: ", ".join(f"{n} {how}" for how, n in f.buckets.items())),
    ("time to plan", lambda p, f: seconds(p.seconds)),
)


def figure_table(found: Sequence[tuple[Planned, Figures]]) -> Table:
    """One column of figures for each plan."""
    head = ("", *(title(planned) for planned, _ in found))
    rows = [(name, *(text(planned, figures) for planned, figures in found)) for name, text in _ROWS]
    return Table("The plan", head, rows)


def title(planned: Planned) -> str:
    """The mesh of a plan in a few words."""
    mesh = planned.mesh
    extent = f":{mesh.extent}" if mesh.extent > 1 else ""
    return f"{mesh.kind}{extent} on {mesh.ranks}"
