"""A step on a slow link, by a clock that only arithmetic and exchanges move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import by_fully_shard, scatter_like, whole_tensors
from torch import Tensor

from ortho_func import Muon, pipeline


class Clock:
    """Exchanges take so long each, one after the other; arithmetic as long as it says."""

    def __init__(self, exchange: float, monkey: pytest.MonkeyPatch) -> None:
        self.now = self.free = 0.0
        self.exchange = exchange
        self.arrival: dict[int, float] = {}
        self.real = pipeline.all_to_all, pipeline.wait
        monkey.setattr(pipeline, "all_to_all", self.all_to_all)
        monkey.setattr(pipeline, "wait", self.wait)

    def all_to_all(self, x: Tensor, send: Any, receive: Any, *, group: str) -> Tensor:
        begun = self.real[0](x, send, receive, group=group)
        self.free = max(self.free, self.now) + self.exchange
        self.arrival[id(begun)] = self.free
        return begun

    def wait(self, x: Tensor) -> Tensor:
        self.now = max(self.now, self.arrival.pop(id(x)))
        return self.real[1](x)

    def work(self, x: Tensor) -> Tensor:
        self.now += 1.0
        return x.clone()


def simulated(rank: int, world: int, exchange: float) -> tuple[int, float]:
    """How many buckets there are, and when the step ends; each bucket's arithmetic takes 1."""
    shapes = {f"w{n}": (8, 8) for n in range(16)}
    params = by_fully_shard(whole_tensors(shapes, 0), (world,))
    with pytest.MonkeyPatch.context() as monkey:
        clock = Clock(exchange, monkey)
        optimizer = Muon(list(params.items()), orthogonalizer=clock.work, bucket_bytes=128)
        for name, p in params.items():
            p.grad = scatter_like(torch.ones(shapes[name]), p)
        optimizer.step()
    assert not clock.arrival
    assert optimizer.plan is not None
    return len(optimizer.plan.buckets), clock.now


@pytest.mark.parametrize("exchange", [0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 3.0])
def test_the_longer_of_both_and_one_buckets_edge(pool: Any, exchange: float) -> None:
    """Neither waits for the other but at the ends: the first way out, the last way home."""
    for buckets, took in pool.run(simulated, exchange, world=2):
        assert buckets == 8
        longer = max(buckets * 1.0, 2 * buckets * exchange)
        assert longer <= took <= longer + 1.0 + 2 * exchange
