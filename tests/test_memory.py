"""What is in flight in a step is bounded by the bucket size, not by the model."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from layouts import WHOLE, by_fully_shard, whole_tensors
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ortho_func.algorithms.dion2 import Dion2Rule
from ortho_func.algorithms.dion3 import Dion3Rule
from ortho_func.algorithms.muon import MuonRule
from ortho_func.geometry import mesh_layout
from ortho_func.plan import ParamSpec, Travel, build_plan
from ortho_func.routing import routes


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made under the mode and still live, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._note(x.untyped_storage(), given)
        return out

    def _note(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in given or key in self.known:
            return
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def peak_of_a_step(optimizer: torch.optim.Optimizer) -> int:
    optimizer.step()
    with LiveBytes() as mode:
        optimizer.step()
    return mode.peak


def test_the_meter_measures() -> None:
    with LiveBytes() as mode:
        x = torch.ones(1000)
        y = x + 1
        del x
        z = y * 2
        del y, z
    assert 8000 <= mode.peak <= 12000
    assert mode.live == 0


@pytest.mark.parametrize("algorithm", list(WHOLE))
def test_one_process(algorithm: str) -> None:
    """128 matrices of 32 × 64: 1 MiB of parameters, of which 32 KiB travel at a time."""
    parameters = [nn.Parameter(torch.randn(32, 64)) for _ in range(128)]
    for p in parameters:
        p.grad = torch.randn_like(p)
    total = sum(p.numel() * 4 for p in parameters)
    bucket = 2**15
    small = WHOLE[algorithm][0](parameters, lr=0.1, bucket_bytes=bucket)
    large = WHOLE[algorithm][0](parameters, lr=0.1, bucket_bytes=2 * total)
    bounded, whole = peak_of_a_step(small), peak_of_a_step(large)
    assert bounded < 16 * bucket, (bounded, bucket)
    assert bounded < total / 2, (bounded, total)
    assert whole > 4 * bounded, "the bound does nothing"


def sharded_peak(rank: int, world: int, algorithm: str, bucket: int) -> tuple[int, int]:
    """Peak of a step over 64 sharded matrices, and the bytes of this rank's shards."""
    tensors = whole_tensors({f"w{n}": (32, 64) for n in range(64)}, 5)
    parameters = by_fully_shard(tensors, (world,))
    for p in parameters.values():
        p.grad = torch.distributed.tensor.DTensor.from_local(
            torch.randn_like(p.to_local()), p.device_mesh, p.placements
        )
    optimizer = WHOLE[algorithm][0](list(parameters.values()), lr=0.1, bucket_bytes=bucket)
    return peak_of_a_step(optimizer), sum(p.to_local().numel() * 4 for p in parameters.values())


@pytest.mark.parametrize("algorithm", list(WHOLE))
def test_sharded(pool: Any, algorithm: str) -> None:
    bucket = 2**13  # two matrices an owner
    bounded = pool.run(sharded_peak, algorithm, bucket, world=2)
    whole = pool.run(sharded_peak, algorithm, 2**24, world=2)
    for (small, shards), (large, _) in zip(bounded, whole, strict=True):
        assert small < shards, (small, shards)
        assert large > 2 * small, "the bound does nothing"


@pytest.mark.parametrize(("replicas", "shards"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_what_comes_home_is_bounded_by_the_replicas(replicas: int, shards: int) -> None:
    """An owner works on `bucket_bytes`; a rank gets back that much once for each replica."""
    layout = mesh_layout((64, 64), tuple(range(8)), (replicas, shards), (Replicate(), Shard(0)))
    bucket_bytes = 2 * 64 * 64 * 2  # two matrices in bf16
    made = build_plan(
        tuple(ParamSpec(f"w{n}", layout) for n in range(64)), (Travel(),), bucket_bytes=bucket_bytes
    )
    for rank in range(8):
        for route in routes(made, rank):
            assert sum(route.arrive) * 2 <= bucket_bytes
            assert sum(route.home) * 2 <= replicas * bucket_bytes
    assert len(made.buckets) == 64 // (2 * 8), "buckets are not filled"


def test_cost_counts_the_fraction_once() -> None:
    """What shards select is costed at the shape that travels, what owners select by its share."""
    for kind in (Dion2Rule, Dion3Rule):
        rule = kind(fraction=0.25)
        by_owner = rule.travel().flops(64, 256)
        by_shards = rule.for_cut("row").travel().flops(16, 256)
        assert by_owner == 0.25 * MuonRule().travel().flops(64, 256)
        assert by_shards == MuonRule().travel().flops(16, 256)
