"""Parameters in bfloat16 that lose nothing to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import WHOLE, Replicate, Shard, by_placements, gather, relative_error, scatter_like
from test_compile import Trace
from torch import Tensor

from ortho_func import Muon, state_bytes
from ortho_func.primitives.rounding import compensated_sum, unrounded

SHAPES = {"wide": (6, 10), "tall": (9, 4)}
ALGORITHMS = [*WHOLE, "adamw", "lion"]


@settings(deadline=None)
@given(
    st.floats(-4, 4), st.lists(st.floats(-1e-2, 1e-2), min_size=1, max_size=30),
    st.sampled_from([torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_nothing_is_lost(start: float, updates: list[float], dtype: torch.dtype) -> None:
    """What is stored is the sum, to the residual's own rounding in each step."""
    x, r = torch.tensor([start]).to(dtype), torch.zeros(1, dtype=dtype)
    total = x.double()
    for update in updates:
        x, r = compensated_sum(x, r, torch.tensor([update]))
        total = total + torch.tensor([update]).double()
    assert x.dtype == r.dtype == dtype
    unit = torch.finfo(dtype).eps  # of the sum of both, relative to the larger
    error = float((unrounded(x, r).double() - total).abs())
    assert error <= len(updates) * (unit**2 * 8 + torch.finfo(dtype).tiny)
    assert float((x.double() - total).abs()) <= unit * 4  # and x is the nearest there is


def test_what_is_not_finite_stays_so() -> None:
    one, nothing = torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)
    x, r = compensated_sum(one, nothing, torch.tensor([torch.inf, torch.nan]))
    assert x[0] == torch.inf
    assert x[1].isnan()
    assert torch.equal(r, nothing)


def trained(
    algorithm: str, dtype: torch.dtype, steps: int, mesh: tuple[int, ...] = (), **options: Any
) -> tuple[dict[str, Tensor], torch.optim.Optimizer]:
    """Small steps on given gradients, from ones."""
    generator = torch.Generator().manual_seed(1)
    start = {name: torch.ones(shape, dtype=dtype) for name, shape in SHAPES.items()}
    params: dict[str, Any] = {name: torch.nn.Parameter(p) for name, p in start.items()}
    if mesh:
        params = by_placements(start, mesh, [Replicate(), Shard(0)][-len(mesh) :])
    kind, extra = (WHOLE[algorithm][0], WHOLE[algorithm][2]) if algorithm in WHOLE else (Muon, {})
    group: dict[str, Any] = {"params": list(params.items())}
    if algorithm not in WHOLE:
        group["algorithm"] = algorithm
    given = {"lr": 1e-4, "weight_decay": 0.5, "compute_dtype": torch.float32, "wire_dtype":
             torch.float32, "momentum_dtype": torch.float32, **extra, **options}  # fmt: skip
    if algorithm in ("dion2", "dion3"):
        given["selection"] = "global"
    optimizer = kind([group], **given)
    for step in range(steps):
        for p in params.values():
            whole = torch.randn(p.shape, generator=generator) + 1.0
            p.grad = scatter_like(whole.to(dtype), p)
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 * (1 + step % 2)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_hundred_small_steps_follow_float32(algorithm: str) -> None:
    wide, _ = trained(algorithm, torch.float32, 100)
    narrow, optimizer = trained(algorithm, torch.bfloat16, 100, compensated=True)
    lost, _ = trained(algorithm, torch.bfloat16, 100)
    for name, right in wide.items():
        right, lossy = right.detach(), lost[name].detach().float()
        moved = float((right - 1).norm())
        p = narrow[name]
        found = unrounded(p.detach(), optimizer.state[p]["residual"])
        assert optimizer.state[p]["residual"].dtype == torch.bfloat16
        # gradients are rounded to bfloat16
        assert float((found - right).norm()) < 0.1 * moved
        assert float((lossy - right).norm()) > 0.3 * moved
        assert float((found - p.detach()).abs().max()) <= 2**-9  # half a unit, just below one


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_compiled_once_and_equal(algorithm: str) -> None:
    backend = Trace()
    eager, one = trained(algorithm, torch.bfloat16, 5, compensated=True)
    compiled, two = trained(
        algorithm, torch.bfloat16, 5, compensated=True, compile={"backend": backend}
    )
    assert len(backend.traced) == 1
    for name in SHAPES:
        mine, theirs = (
            unrounded(params[name].detach(), opt.state[params[name]]["residual"])
            for params, opt in ((eager, one), (compiled, two))
        )
        assert relative_error(theirs - 1, mine - 1) < 1e-2


def on_ranks(rank: int, world: int, algorithm: str) -> list[Tensor]:
    """Parameters and residuals, whole, of a mesh of replicas and shards."""
    params, optimizer = trained(algorithm, torch.bfloat16, 5, (2, 2), compensated=True)
    found = [gather(p) for p in params.values()]
    return found + [gather(optimizer.state[p]["residual"]) for p in params.values()]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_on_shards_and_replicas(pool: Any, algorithm: str) -> None:
    params, optimizer = trained(algorithm, torch.bfloat16, 5, compensated=True)
    alone = [unrounded(p.detach(), optimizer.state[p]["residual"]) for p in params.values()]
    results = pool.run(on_ranks, algorithm, world=4)
    for found in results:
        assert all(map(torch.equal, found, results[0]))
        together = [unrounded(x, r) for x, r in zip(found[:2], found[2:], strict=True)]
        for mine, right in zip(together, alone, strict=True):
            assert relative_error(mine - 1, right - 1) < 1e-2


def test_bytes_are_counted_and_state_is_restored() -> None:
    params, optimizer = trained("muon", torch.bfloat16, 3, compensated=True)
    elements = {name: p.numel() for name, p in params.items()}
    assert state_bytes(optimizer) == {name: (4 + 2) * n for name, n in elements.items()}
    saved = optimizer.state_dict()
    others, again = trained("muon", torch.bfloat16, 0, compensated=True)
    again.load_state_dict(saved)
    for name, p in params.items():
        assert torch.equal(again.state[others[name]]["residual"], optimizer.state[p]["residual"])
        assert optimizer.state[p]["residual"].abs().sum() > 0


@pytest.mark.parametrize("policy", ["propagate", "skip"])
def test_a_gradient_that_is_not_finite(policy: str) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = Muon([weight], lr=1e-4, compensated=True, nonfinite=policy)
    weight.grad = torch.full((4, 4), torch.nan, dtype=torch.bfloat16)
    optimizer.step()
    assert bool(weight.isnan().all()) == (policy == "propagate")
    assert torch.equal(optimizer.state[weight]["residual"], torch.zeros_like(weight))
