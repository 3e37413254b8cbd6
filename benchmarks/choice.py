"""Hold the model by which `orthogonalize` chooses against measurement.

For each shape: the Gram iteration's cost over plain Newton-Schulz's as the model predicts it, as
operations alone would, and as measured on one thread; and what the choice costs where it is wrong.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ortho_func.primitives.orthogonalize import cost, flops, gram_newton_schulz, newton_schulz

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SHORT_SIDES = (32, 128, 384, 768)
RATIOS = (1.0, 1.25, 1.5, 2.0, 3.0, 6.0)
PLAIN, GRAM = "newton_schulz", "gram_newton_schulz"


@dataclass(frozen=True)
class Row:
    """One shape: the Gram iteration's work over plain Newton-Schulz's."""

    dtype: torch.dtype
    shape: tuple[int, int, int]
    operations: float
    model: float
    measured: float
    chosen: str

    @property
    def best(self) -> str:
        return GRAM if self.measured < 1 else PLAIN

    @property
    def loss(self) -> float:
        """What the choice takes more than the best method, as a fraction."""
        taken = self.measured if self.chosen == GRAM else 1.0
        return taken / min(1.0, self.measured) - 1


def alternated_medians(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if turn:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def measure(dtype: torch.dtype, short: int, ratio: float) -> Row:
    long = int(short * ratio)
    count = max(1, min(64, (256 // short) ** 2))
    x = torch.randn(count, short, long).to(dtype)
    operations = {
        name: flops(short, long, method=name, compute_dtype=dtype) for name in (PLAIN, GRAM)
    }
    took = alternated_medians(
        {
            PLAIN: lambda: newton_schulz(x, compute_dtype=dtype),
            GRAM: lambda: gram_newton_schulz(x, compute_dtype=dtype),
        },
        repeats=max(5, min(21, int(4e9 / (count * operations[PLAIN])))),
    )
    price = {name: cost(short, long, method=name, compute_dtype=dtype) for name in (PLAIN, GRAM)}
    chosen = cost(short, long, compute_dtype=dtype)
    return Row(
        dtype,
        (count, short, long),
        operations[GRAM] / operations[PLAIN],
        price[GRAM] / price[PLAIN],
        took[GRAM] / took[PLAIN],
        GRAM if chosen == price[GRAM] else PLAIN,
    )


def measured_rows() -> Iterator[Row]:
    for dtype in DTYPES:
        for short in SHORT_SIDES:
            if short > 384 and dtype != torch.float32:
                continue  # slow, and nothing new
            for ratio in RATIOS:
                yield measure(dtype, short, ratio)


HEAD = ("dtype", "shape", "operations", "model", "measured", "chosen", "fastest")


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table, by `HEAD`: the work of the Gram iteration over that of the plain one."""
    ratios = (f"{value:.2f}" for value in (row.operations, row.model, row.measured))
    # Within five hundredths neither is the faster one.
    best = row.best if abs(row.measured - 1) > 0.05 else "either"
    return (str(row.dtype)[6:], "×".join(map(str, row.shape)), *ratios, row.chosen, best)


def summary(rows: list[Row]) -> str:
    wrong = [row for row in rows if row.loss > 0.05]
    worst = max(row.loss for row in rows)
    return (
        f"Of {len(rows)} choices {len(wrong)} cost more than 5% over the best; "
        f"the worst costs {worst:.0%}."
    )


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    print("  ".join(HEAD))
    for row in measured_rows():
        rows.append(row)
        print("  ".join(cells(row)), flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
