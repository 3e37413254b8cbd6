"""A small part of the soak; the rest is `make soak`."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import soak


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_neither_memory_nor_handles_grow(pool: Any) -> None:
    for found in pool.run(soak.soak, 150, 120, world=2):
        assert found.finite
        more = soak.growth(found.samples)
        assert more.resident < 4 * 2**20
        assert more.handles <= 0
        assert more.threads <= 0
        assert more.objects < 10  # an object a step would be some sixty


def test_growth_is_noticed() -> None:
    samples = [soak.Sample(n, 2**20 * n, 12, 5, 1000 + n) for n in range(40)]
    assert soak.growth(samples) == soak.Growth(2**20 * 20.0, 0.0, 0.0, 0.0)
    assert not soak.steady(soak.growth(samples))
    leaking = [soak.Sample(n, 2**30, 12 + n, 5, 1000 + 3 * n) for n in range(40)]
    assert soak.growth(leaking) == soak.Growth(0.0, 20.0, 0.0, 40.0)
    assert not soak.steady(soak.growth(leaking))
    assert soak.steady(soak.Growth(100.0, 0.0, 0.0, 0.0))
