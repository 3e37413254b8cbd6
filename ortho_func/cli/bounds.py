"""What no assignment of whole matrices to ranks can beat."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

__all__ = ["least_busiest", "longest_first_bound"]

HALVINGS = 40  # of the interval that holds the bound: to 1e-12 of it


def least_busiest(costs: Sequence[float], ranks: int) -> float:
    """A lower bound of the busiest rank's load over all assignments of costs to ranks.

    The mean, the largest cost, and the largest load that is shown to be too small because
    matrices in ranks of that size would need more ranks than there are: Martello and Toth's
    bound L2 for bin packing (Knapsack Problems, 1990, section 8.3).

    Examples:
        >>> round(least_busiest([3.0, 3.0, 3.0, 1.0], 2), 6)
        6.0
    """
    counts = Counter(costs)
    low = max(sum(costs) / ranks, max(costs))
    high = 2 * low  # an assignment of no more than this always exists
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _ranks_needed(counts, middle) > ranks else (low, middle)
    return low


def _ranks_needed(counts: Mapping[float, int], load: float) -> int:
    """At least so many ranks hold these costs if none may exceed `load`."""
    needed = 0
    for small in {0.0, *(cost for cost in counts if cost <= load / 2)}:
        alone = paired = rest = 0.0
        spare = 0.0  # beside those that leave room for a small one
        for cost, count in counts.items():
            if cost > load - small:
                alone += count
            elif cost > load / 2:
                paired += count
                spare += count * (load - cost)
            elif cost >= small:
                rest += count * cost
        more = max(0, math.ceil((rest - spare) / load - 1e-9))
        needed = max(needed, int(alone + paired) + more)
    return needed


def longest_first_bound(ranks: int) -> float:
    """How far longest-processing-time-first can be from the best assignment, as a ratio.

    4/3 - 1/(3W) on W ranks (Graham, Bounds on Multiprocessing Timing Anomalies, 1969).
    """
    return 4 / 3 - 1 / (3 * ranks)
