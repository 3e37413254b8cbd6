"""Teams of ranks that own one matrix together: the results of one owner, in less of its time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import (
    Replicate,
    Shard,
    by_fully_shard,
    by_placements,
    by_tensor_parallel,
    gather,
    relative_error,
    scatter_like,
    train,
    whole_tensors,
)
from test_compile import Trace

import ortho_func
from ortho_func import Muon, NorMuon
from ortho_func.algorithms.legs import plan_for
from ortho_func.algorithms.muon import MuonRule
from ortho_func.algorithms.normuon import NorMuonRule
from ortho_func.cli.figures import figures_of, make_plan
from ortho_func.cli.hardware import Hardware
from ortho_func.cli.meshes import find_mesh
from ortho_func.cli.models import find_model
from ortho_func.geometry import Reading, mesh_layout
from ortho_func.plan import ParamSpec
from ortho_func.primitives.orthogonalize import Orthogonalizer

WIDE_AND_TALL = {"wide": (6, 20), "tall": (21, 5), "square": (7, 7)}

# name -> (world, shapes, how to place them, its arguments, options)
LAYOUTS: dict[str, tuple[int, Any, Any, dict[str, Any], dict[str, Any]]] = {
    "fsdp": (4, {"wide": (18, 40)}, by_fully_shard, {"mesh": (4,)}, {}),
    "fsdp, tall": (4, {"tall": (40, 18)}, by_fully_shard, {"mesh": (4,)}, {}),
    "fsdp, uneven, empty shards": (4, {"wide": (5, 7), "tall": (7, 2)}, by_fully_shard,
                                   {"mesh": (4,)}, {}),
    "fsdp on 3": (3, {"square": (8, 8)}, by_fully_shard, {"mesh": (3,)}, {}),
    "columns": (4, {"wide": (6, 20)}, by_placements, {"mesh": (4,), "placements": [Shard(1)]}, {}),
    "columns, 5 on 4": (4, {"wide": (3, 5), "tall": (12, 5)}, by_placements,
                        {"mesh": (4,), "placements": [Shard(1)]}, {}),
    "hsdp": (4, WIDE_AND_TALL, by_fully_shard, {"mesh": (2, 2)}, {}),
    "hsdp in two hops": (4, WIDE_AND_TALL, by_fully_shard, {"mesh": (2, 2)}, {"hops": "two"}),
    "tp": (2, {"up": (40, 12), "down": (6, 8)}, by_tensor_parallel, {"mesh": (2,)}, {}),
    "fsdp x tp": (8, {"up": (20, 6), "down": (6, 20)}, by_tensor_parallel, {"mesh": (4, 2)}, {}),
    "both dims": (4, {"w": (9, 16)}, by_placements,
                  {"mesh": (2, 2), "placements": [Shard(0), Shard(1)]}, {}),
    "replicated": (3, {"w": (4, 9)}, by_placements,
                   {"mesh": (3,), "placements": [Replicate()]}, {}),
    "heads": (4, {"q": (6, 20)}, by_fully_shard, {"mesh": (4,)}, {"num_heads": 2}),
    "convolution": (4, {"c": (6, 5, 2, 2)}, by_fully_shard, {"mesh": (4,)}, {"flatten": True}),
    "eight ranks": (8, {"w": (6, 30)}, by_fully_shard, {"mesh": (8,)}, {}),
}  # fmt: skip
EXACT = {
    "orthogonalizer": "newton_schulz",
    "compute_dtype": torch.float64,
    "wire_dtype": torch.float64,
}


def double(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in tensors.items()}


def alone_and_together(
    rank: int, world: int, layout: str, algorithm: str, seed: int, given: dict[str, Any]
) -> tuple[float, set[int], list[torch.Tensor]]:
    """Error over one owner a matrix, the sizes of teams, and the whole parameters."""
    _, shapes, place, arguments, options = LAYOUTS[layout]
    options = {**EXACT, "lr": 0.1, **options, **given}
    tensors = double(whole_tensors(shapes, seed))
    gradients = [double(whole_tensors(shapes, seed + step)) for step in (1, 2, 3)]
    found, states, sizes = [], [], set()
    for size in (1, world):
        parameters = place(tensors, **arguments)
        optimizer = train(parameters, gradients, algorithm, team_size=size, **options)
        found.append([gather(p) for p in parameters.values()])
        states.append([gather(t) for p in parameters.values() for t in optimizer.state[p].values()])
        sizes = {bucket.team for bucket in optimizer.plan.buckets}
    pairs = [*zip(*found, strict=True), *zip(*states, strict=True)]
    return max(relative_error(two, one) for one, two in pairs), sizes, found[1]


@pytest.mark.parametrize("algorithm", ["muon", "normuon"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_equal_to_one_owner(pool: Any, layout: str, algorithm: str) -> None:
    seed = torch.seed() % 2**31
    world = LAYOUTS[layout][0]
    found = pool.run(alone_and_together, layout, algorithm, seed, {}, world=world)
    for error, sizes, whole in found:
        assert error < 1e-6, (seed, error)  # V travels in fp32
        assert max(sizes) > 1
        assert all(map(torch.equal, whole, found[0][2])), seed


METHODS: dict[str, tuple[dict[str, Any], float]] = {
    "jordan": ({"orthogonalizer": "jordan"}, 1e-6),
    "polar_express": ({"orthogonalizer": "polar_express"}, 1e-6),
    "turbo_muon": ({"orthogonalizer": "turbo_muon"}, 1e-6),
    "cubic": ({"orthogonalizer": "cubic"}, 1e-6),
    "gram": ({"orthogonalizer": "gram_newton_schulz"}, 1e-6),
    "gram with a restart": ({"orthogonalizer": "gram_newton_schulz", "ns_steps": 5}, 1e-6),
    "auto in fp32": (
        {"orthogonalizer": "auto", "compute_dtype": torch.float32, "wire_dtype": torch.float32},
        1e-5,
    ),
    "bf16": (
        {"orthogonalizer": "auto", "compute_dtype": torch.bfloat16, "wire_dtype": torch.bfloat16},
        0.02,
    ),
    "dense": ({"wire": "dense"}, 1e-6),
    "exact, small buckets": ({"wire": "exact", "bucket_bytes": 64}, 1e-6),
    "original": ({"adjust_lr_fn": "original", "cautious": True}, 1e-6),
}


@pytest.mark.parametrize("method", list(METHODS))
def test_methods(pool: Any, method: str) -> None:
    seed = torch.seed() % 2**31
    given, tolerance = METHODS[method]
    for error, sizes, _ in pool.run(alone_and_together, "hsdp", "normuon", seed, given, world=4):
        assert error < tolerance, (seed, error)
        assert max(sizes) > 1


def many_shapes(rank: int, world: int, seed: int, compiled: bool) -> tuple[float, int, list[int]]:
    """A model whose large matrices are shared and whose small ones are not; gradients missing."""
    shapes = {"big": (16, 48), "large": (48, 16), **{f"small{n}": (4, 6) for n in range(6)}}
    shapes |= {"odd": (3, 50)}
    backend, found = Trace(), []
    tensors = whole_tensors(shapes, seed)
    for size in (1, 2):
        parameters = by_fully_shard(tensors, (world,))
        optimizer = NorMuon(
            list(parameters.items()), lr=0.1, team_size=size, wire_dtype=torch.float32,
            compute_dtype=torch.float32, orthogonalizer="newton_schulz",
            compile={"backend": backend} if compiled and size > 1 else False,
        )  # fmt: skip
        for step in range(4):
            gradients = whole_tensors(shapes, seed + 1 + step)
            missing = {"large"} if step == 1 else {"big", "small1"} if step == 2 else set()
            for name, p in parameters.items():
                absent = name in missing and (rank == 0 or step == 1)
                p.grad = None if absent else scatter_like(gradients[name], p)
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.step()
        found.append([gather(p) for p in parameters.values()])
    error = max(relative_error(two, one) for one, two in zip(*found, strict=True))
    return error, len(backend.traced), [bucket.team for bucket in optimizer.plan.buckets]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_beside_matrices_of_one_owner(pool: Any, compiled: bool) -> None:
    seed = torch.seed() % 2**31
    for error, graphs, teams in pool.run(many_shapes, seed, compiled, world=4):
        assert error < 1e-4, (seed, error)
        assert graphs == compiled
        assert set(teams) == {1, 2}


def reduced(rank: int, world: int, seed: int) -> float:
    """Replicas with gradients of their own: the owner of a share adds up its terms."""
    shapes = {"w": (6, 20), "v": (20, 6)}
    found = []
    for size in (1, world):
        parameters = {n: torch.nn.Parameter(t) for n, t in whole_tensors(shapes, seed).items()}
        optimizer = Muon(
            list(parameters.items()), lr=0.1, team_size=size, reduce_gradients=True,
            wire_dtype=torch.float32, compute_dtype=torch.float32,
            process_group=torch.distributed.group.WORLD,
        )  # fmt: skip
        for step in range(3):
            gradients = whole_tensors(shapes, seed + 10 * rank + step)
            for name, p in parameters.items():
                p.grad = gradients[name]
            optimizer.step()
        found.append([p.detach() for p in parameters.values()])
    assert max(bucket.team for bucket in optimizer.plan.buckets) > 1
    return max(relative_error(two, one) for one, two in zip(*found, strict=True))


def test_reduced_gradients(pool: Any) -> None:
    seed = torch.seed() % 2**31
    assert max(pool.run(reduced, seed, world=3)) < 1e-4, seed


def functional(rank: int, world: int, seed: int) -> float:
    shapes = {"w": (6, 20), "v": (21, 6)}
    tensors, gradients = whole_tensors(shapes, seed), whole_tensors(shapes, seed + 1)
    found = []
    for size in (1, world):
        params = by_placements(tensors, (world,), [Shard(0)])
        plan = ortho_func.plan(params, team_size=size, wire_dtype=torch.float32)
        tx = ortho_func.normuon(
            lr=0.1, plan=plan, orthogonalizer="newton_schulz", compute_dtype=torch.float32
        )
        grads = {name: scatter_like(gradients[name], p) for name, p in params.items()}
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(grads, state, params)
        found.append([gather(t) for t in (*updates.values(), *state.row_variance.values())])
    return max(relative_error(two, one) for one, two in zip(*found, strict=True))


def test_functional(pool: Any) -> None:
    seed = torch.seed() % 2**31
    assert max(pool.run(functional, seed, world=4)) < 1e-5, seed


def extremes(rank: int, world: int, seed: int) -> dict[str, float]:
    """Sizes of gradients at the ends of fp32's range: how the step differs from that at one."""
    shapes = {"w": (6, 20)}
    gradients, steps = whole_tensors(shapes, seed)["w"], {}
    for factor in (1.0, 1e-30, 1e30, 0.0):
        for dtype in (torch.float32, torch.bfloat16):
            params = by_fully_shard({"w": torch.zeros(6, 20)}, (world,))
            optimizer = Muon(
                list(params.items()), lr=1.0, weight_decay=0.0, team_size=world,
                wire_dtype=torch.float32, compute_dtype=dtype, orthogonalizer="newton_schulz",
            )  # fmt: skip
            scale = torch.ones(20)
            scale[10:] = 1e-3  # shares of other sizes
            params["w"].grad = scatter_like(gradients * scale * factor, params["w"])
            optimizer.step()
            steps[dtype, factor] = gather(params["w"])
    found = {f"{d} {f}": relative_error(x, steps[d, 1.0]) for (d, f), x in steps.items() if f}
    return {**found, "zero": max(float(steps[d, 0.0].abs().max()) for d, f in steps if f == 0)}


def test_any_size_of_gradient(pool: Any) -> None:
    seed = torch.seed() % 2**31
    for found in pool.run(extremes, seed, world=4):
        assert all(error < (0.03 if "bf" in name else 1e-5) for name, error in found.items()), (
            seed,
            found,
        )


def not_finite(rank: int, world: int, value: float, policy: str) -> list[list[bool]]:
    """After a step with one bad element, by matrix: finite? moved?"""
    shapes = {"bad": (6, 20), "good": (6, 20), "other": (4, 4)}
    tensors = whole_tensors(shapes, 1)
    params = by_fully_shard(tensors, (world,))
    optimizer = NorMuon(list(params.items()), lr=0.1, team_size=4, nonfinite=policy)
    gradients = whole_tensors(shapes, 2)
    gradients["bad"][3, 17] = value
    for name, p in params.items():
        p.grad = scatter_like(gradients[name], p)
    optimizer.step()
    assert optimizer.plan is not None
    assert max(bucket.team for bucket in optimizer.plan.buckets) > 1
    found = []
    for name, p in params.items():
        whole = gather(p)
        state = [gather(t) for t in optimizer.state[p].values()]
        found.append([
            all(bool(t.isfinite().all()) for t in (whole, *state)),
            not torch.equal(whole, tensors[name]),
        ])  # fmt: skip
    return found


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_not_finite(pool: Any, value: float) -> None:
    for found in pool.run(not_finite, value, "propagate", world=4):
        assert found == [[False, True], [True, True], [True, True]]
    for found in pool.run(not_finite, value, "skip", world=4):
        assert found == [[True, False], [True, True], [True, True]]


# The plan, without processes.


def planned(
    shapes: list[tuple[int, int]], world: int, size: Any, rule: Any = None, **options: Any
) -> Any:
    specs = [
        ParamSpec(f"w{n}", mesh_layout(shape, tuple(range(world)), (world,), (Shard(0),)))
        for n, shape in enumerate(shapes)
    ]
    rule = rule or MuonRule(orthogonalizer=Orthogonalizer("auto"))
    return plan_for(specs, [rule], [torch.bfloat16], bucket_bytes=2**23, team_size=size, **options)[
        0
    ].plan


def test_the_busiest_rank_falls_below_the_largest_matrix() -> None:
    shapes = [(64, 256), (256, 64), (64, 64), (8, 16)]
    alone, together = planned(shapes, 8, 1), planned(shapes, 8, 8)
    largest = MuonRule().travel().flops(64, 256)
    assert max(alone.loads()) == largest
    assert max(together.loads()) < 0.6 * largest
    assert "teams of" in together.describe()
    assert together.digest() != alone.digest()


def test_no_teams_where_there_are_matrices_enough() -> None:
    for size in (8, "auto"):
        made = planned([(64, 64)] * 64, 8, size)
        assert {bucket.team for bucket in made.buckets} == {1}


def test_auto_counts_what_the_sums_move() -> None:
    small, large = planned([(512, 2048)], 8, "auto"), planned([(16384, 65536)], 8, "auto")
    assert {bucket.team for bucket in small.buckets} == {1}
    assert max(bucket.team for bucket in large.buckets) > 1


def test_members_of_a_team_are_different_ranks_in_one_bucket() -> None:
    made = planned([(16, 64)] * 3 + [(64, 16)] * 2 + [(30, 31)], 8, 4)
    teams: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, bucket in enumerate(made.buckets):
        for slab in bucket.slabs:
            for matrix in slab.members:
                share = made.params[matrix.param].share
                assert (share is not None) == (bucket.team > 1)
                if share is not None:
                    found = teams.setdefault((share.team, matrix.index), [])
                    found.append((number, matrix.owner))
                    assert share.count == bucket.team
    assert teams
    for found in teams.values():
        assert len({bucket for bucket, _ in found}) == 1
        assert len({owner for _, owner in found}) == len(found)


def test_what_has_one_owner() -> None:
    """Stacks, blocks of several sizes, vectors, callables, and rules that send a selection."""
    layout = mesh_layout((4, 16, 64), tuple(range(8)), (8,), (Shard(0),))
    specs = [ParamSpec("experts", layout, Reading(flatten=False))]
    rule = MuonRule()
    made = plan_for(specs, [rule], [torch.bfloat16], bucket_bytes=2**23, team_size=8)
    assert {b.team for b in made[0].plan.buckets} == {1}
    for other in (
        MuonRule(orthogonalizer=torch.clone),
        MuonRule(orthogonalizer=Orthogonalizer("svd")),
    ):
        assert {b.team for b in planned([(64, 256)], 8, 8, other).buckets} == {1}
    assert {b.team for b in planned([(1, 256)], 8, 8).buckets} == {1}
    assert max(b.team for b in planned([(64, 256)], 8, 8, NorMuonRule()).buckets) > 1


def test_the_plan_command_counts_teams() -> None:
    model, mesh = find_model("1*16384x65536"), find_mesh("fsdp", 8)
    alone, together = (
        figures_of(make_plan(model, mesh, bucket_bytes=2**26, team_size=size), Hardware())
        for size in (1, 8)
    )
    assert max(together.work) < 0.5 * max(alone.work)
    assert together.matrices == 8
    # Each of eight owners: four Gram matrices in bf16, all but an eighth out and home.
    sums = 8 * 2 * 4 * 2 * 16384**2 * 7 // 8
    assert together.wire_bytes == together.least_bytes + sums
    assert together.step_time < alone.step_time


@pytest.mark.parametrize(
    ("size", "error", "says"),
    [
        (0, ValueError, "team_size must be at least 1, got 0"),
        (True, TypeError, "team_size must be a whole number or 'auto', got True"),
        ("many", TypeError, "team_size must be a whole number or 'auto', got 'many'"),
    ],
)
def test_wrong_sizes(size: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Muon([torch.nn.Parameter(torch.ones(2, 2))], team_size=size)


def test_uniform_batches_and_teams_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="team_size other than 1 needs balance='cost'"):
        Muon([torch.nn.Parameter(torch.ones(2, 2))], team_size=2, balance="uniform")
