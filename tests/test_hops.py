"""Two hops home: the results of one, over fewer connections."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import Replicate, Shard, by_placements, scatter_like, train, whole_tensors
from test_compile import Capture, Seen, Trace, collectives, events_of, fake_world
from test_wire import check_round_trip, plans

import ortho_func
from ortho_func import Muon, NorMuon
from ortho_func.cli.figures import figures_of, make_plan
from ortho_func.cli.hardware import Hardware
from ortho_func.cli.meshes import find_mesh
from ortho_func.cli.models import find_model
from ortho_func.cli.traffic import exchanges
from ortho_func.geometry import mesh_layout
from ortho_func.plan import DIRECT_CONNECTIONS, Hops, ParamSpec, Plan, Travel, build_plan
from ortho_func.routing import Route, routes

COPIES, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
SHAPES = {"a": (8, 12), "b": (16, 8), "c": (5, 7), "d": (3, 9), "e": (8, 12), "f": (1, 6)}

# A mesh's shape, and the placements on it.
MESHES: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "hsdp 2x2": ((2, 2), (COPIES, ROWS)),
    "hsdp 2x4": ((2, 4), (COPIES, ROWS)),
    "hsdp 4x2 by columns": ((4, 2), (COPIES, COLUMNS)),
    "replicas last": ((4, 2), (ROWS, COPIES)),
    "replicas between": ((2, 2, 2), (ROWS, COPIES, COLUMNS)),
    "two axes of replicas": ((2, 2, 2), (COPIES, ROWS, COPIES)),
    "shards on two axes": ((2, 2, 2), (COPIES, ROWS, COLUMNS)),
}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "small exact buckets": ("normuon", {"wire": "exact", "bucket_bytes": 400}),
    "dense": ("normuon", {"wire": "dense"}),
    "uniform": ("dion2", {"wire": "dense", "balance": "uniform", "wire_dtype": torch.float32}),
}


# Bits on real processes.


def bits(
    mesh: str, algorithm: str, seed: int, **options: Any
) -> tuple[list[torch.Tensor], set[int]]:
    """This rank's shards and state after two steps, and the hops of the buckets."""
    shape, placements = MESHES[mesh]
    parameters = by_placements(whole_tensors(SHAPES, seed), shape, placements)
    gradients = [whole_tensors(SHAPES, seed + step) for step in (1, 2)]
    optimizer = train(
        parameters, gradients, algorithm, lr=0.1, orthogonalizer="newton_schulz", **options
    )
    found = list(parameters.values())
    found += [t for p in parameters.values() for t in optimizer.state[p].values()]
    return [t.to_local().detach() for t in found], {b.hops for b in optimizer.plan.buckets}


def one_and_two(rank: int, world: int, mesh: str, seed: int) -> list[str]:
    """By what way the bits differ, or another number of hops was taken than asked for."""
    wrong = []
    for name, (algorithm, options) in WAYS.items():
        one, direct = bits(mesh, algorithm, seed, hops="one", **options)
        two, relayed = bits(mesh, algorithm, seed, hops="two", **options)
        if not all(map(torch.equal, one, two)) or (direct, relayed) != ({1}, {2}):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("mesh", list(MESHES))
def test_bitwise_equal_to_one_hop(pool: Any, mesh: str) -> None:
    seed = torch.seed() % 2**31
    world = torch.Size(MESHES[mesh][0]).numel()
    assert pool.run(one_and_two, mesh, seed, world=world) == [[]] * world, seed


def several_meshes(rank: int, world: int) -> tuple[bool, set[int]]:
    """Replicas on one axis, on the other, on both and on none, in one optimizer."""
    shapes = dict.fromkeys("abcdefgh", (9, 6))
    kinds = [(COPIES, ROWS), (ROWS, COPIES), (COPIES, COPIES), (ROWS, COLUMNS)]
    placed = dict(zip(shapes, 2 * kinds, strict=True))
    found = []
    for hops in ("one", "two"):
        parameters = by_placements(whole_tensors(shapes, 1), (2, 2), placed)
        optimizer = train(parameters, [whole_tensors(shapes, 2)], "muon", lr=0.1, hops=hops)
        found.append([p.to_local().detach() for p in parameters.values()])
    assert optimizer.plan is not None
    return all(map(torch.equal, *found)), {bucket.hops for bucket in optimizer.plan.buckets}


def test_some_buckets_take_two(pool: Any) -> None:
    assert pool.run(several_meshes, world=4) == [(True, {1, 2})] * 4


def functional(rank: int, world: int) -> tuple[bool, set[int]]:
    tensors, gradients = whole_tensors(SHAPES, 1), whole_tensors(SHAPES, 2)
    found = []
    for hops in ("one", "two"):
        params = by_placements(tensors, *MESHES["replicas between"])
        made = ortho_func.plan(params, hops=hops)
        tx = ortho_func.normuon(lr=0.1, plan=made)
        grads = {name: scatter_like(gradients[name], p) for name, p in params.items()}
        updates, _ = tx.update(grads, tx.init(params), params)
        found.append([u.to_local() for u in updates.values()])
    return all(map(torch.equal, *found)), {bucket.hops for bucket in made.buckets}


def test_functional_update(pool: Any) -> None:
    assert pool.run(functional, world=8) == [(True, {2})] * 8


def average(rank: int, world: int) -> set[int]:
    """Replicas whose gradients differ hold terms of a sum: one hop."""
    params = by_placements(whole_tensors(SHAPES, 1), *MESHES["hsdp 2x2"])
    optimizer = Muon(list(params.items()), hops="two", reduce_gradients=True)
    assert optimizer.plan is not None
    return {bucket.hops for bucket in optimizer.plan.buckets}


def test_sums_over_replicas_take_one(pool: Any) -> None:
    assert pool.run(average, world=4) == [{1}] * 4


# One graph, and the order of collectives.


def traced(rank: int, world: int, seed: int) -> tuple[bool, int, list[str], list[str]]:
    """Whether compiled is close to eager; the number of graphs; collectives of eager and graph."""
    results, backend = [], Capture()
    shapes = {f"w{n}": (8, 12) for n in range(12)}
    for compiled in (False, {"backend": backend}):
        params = by_placements(whole_tensors(shapes, seed), (2, 2), [COPIES, ROWS])
        optimizer = NorMuon(
            list(params.items()), lr=0.1, hops="two", bucket_bytes=200, compile=compiled,
            wire_dtype=torch.float32, compute_dtype=torch.float32,
        )  # fmt: skip
        for name, p in params.items():
            p.grad = scatter_like(whole_tensors(shapes, seed + 1)[name], p)
        with nullcontext() if compiled else Seen() as seen:
            optimizer.step()
        if seen is not None:
            events = collectives(seen.events)
        results.append([p.to_local().detach() for p in params.values()])
    equal = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*results, strict=True))
    (graph,) = backend.lowered
    return equal, len(backend.traced), events, collectives(events_of(graph.graph))


def test_one_graph_and_one_order(pool: Any) -> None:
    """Three buckets: hop 2 of one begins after hop 1 of the next, and is waited for after that."""
    send, wait = "all_to_all_single", "wait_tensor"
    expected = [send]  # out 0
    expected += [send, wait, send]  # out 1, turn 0
    expected += [send, wait, send, wait, send]  # out 2, turn 1, pass 0 on
    expected += [wait, send, wait, send, wait]  # turn 2, pass 1 on, 0 is home
    expected += [wait, send, wait, wait]  # pass 2 on, 1 is home, 2 is home
    for equal, graphs, eager, graph in pool.run(traced, torch.seed() % 2**31, world=4):
        assert equal
        assert graphs == 1
        assert eager == graph == expected


def nodes_of_a_step(world: int, wire: Any, hops: Hops) -> int:
    """Nodes of rank 0's graph on 16 replicas; it owns one matrix of four."""
    backend = Trace()
    shapes = {f"w{n}": (128, 24) for n in range(4)}
    with fake_world(world):
        params = by_placements(whole_tensors(shapes, 0), (16, world // 16), [COPIES, ROWS])
        optimizer = NorMuon(
            list(params.items()), lr=0.1, ns_steps=1, wire=wire, hops=hops,
            compile={"backend": backend},
        )  # fmt: skip
        for name, p in params.items():
            p.grad = scatter_like(torch.zeros(shapes[name]), p)
        optimizer.step()
    (graph,) = backend.traced
    return len(graph.graph.nodes)


@pytest.mark.parametrize("wire", ["dense", "exact"])
def test_the_graph_does_not_grow_with_the_world(wire: str) -> None:
    """(Directly it does where buckets are dense: an owner's parts are picked for every rank.)"""
    few, many = (nodes_of_a_step(world, wire, "two") for world in (64, 1024))
    assert few == many, (few, many)
    direct = nodes_of_a_step(64, wire, "one")
    # besides a wait, a repeat and an exchange
    assert 0 < few - direct <= 4 if wire == "exact" else few < direct, (few, direct)


# The plan, without processes.


@settings(deadline=None, max_examples=150)
@given(plan=plans(), seed=st.integers(0, 2**31))
def test_round_trip_is_the_identity(plan: Plan, seed: int) -> None:
    """On meshes of any axes, over ranks in any order; where two hops are impossible, in one."""
    torch.manual_seed(seed)
    check_round_trip(replace(plan, hops="two").with_travel())


@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("sides", [(), ("row",), ("slice", "col")], ids=str)
def test_named_meshes(mesh: str, sides: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    for wire, balance, cap in itertools.product(
        ("auto", "dense", "exact"), ("cost", "uniform"), (10**6, 256)
    ):
        made = two_hop_plan(mesh, Travel(sides=sides), wire=wire, balance=balance, bucket_bytes=cap)
        assert {bucket.hops for bucket in made.buckets} == {2}
        check_round_trip(made)


def two_hop_plan(mesh: str, travel: Travel, **options: Any) -> Plan:
    shape, placements = MESHES[mesh]
    ranks = tuple(range(torch.Size(shape).numel()))
    specs = tuple(
        ParamSpec(name, mesh_layout(size, ranks, shape, placements))
        for name, size in SHAPES.items()
    )
    return build_plan(specs, (travel,), **{"hops": "two", **options})


def connections(found: list[tuple[Route, ...]]) -> list[int]:
    """By rank, the ranks that it exchanges anything with, counted from split sizes."""
    pairs = set()
    for rank, mine in enumerate(found):
        for route in mine:
            ways = [(route.near, sizes) for sizes in (route.send, route.arrive, route.back)]
            ways += [(route.near, route.home), (route.far, route.passed)]
            for group, sizes in ways:
                pairs |= {(rank, r) for r, n in zip(group, sizes, strict=True) if n and r != rank}
    count = Counter(a for a, _ in pairs | {(b, a) for a, b in pairs})
    return [count[rank] for rank in range(len(found))]


def sent(found: list[tuple[Route, ...]]) -> int:
    """Elements that leave their rank, from split sizes."""
    total = 0
    for rank, mine in enumerate(found):
        for route in mine:
            for sizes in (route.send, route.back):
                total += sum(n for r, n in zip(route.near, sizes, strict=True) if r != rank)
            total += sum(route.home) * sum(peer != rank for peer in route.far)
    return total


@pytest.mark.parametrize("wire", ["dense", "exact"])
@pytest.mark.parametrize("mesh", ["hsdp:2", "hsdp:4"])
def test_fewer_connections_and_equal_bytes(mesh: str, wire: str) -> None:
    model, place = find_model("32*16x24,24*24x16"), find_mesh(mesh, 16)
    counts, sizes = {}, {}
    for hops in ("one", "two"):
        made = make_plan(model, place, bucket_bytes=4096, wire=wire, hops=hops)
        found = [routes(made.plan, rank) for rank in range(16)]
        counts[hops], sizes[hops] = connections(found), sent(found)
        figures = figures_of(made, Hardware())
        assert figures.connections.tolist() == counts[hops]
        assert figures.wire_bytes == 2 * sizes[hops]
        for number, bucket in enumerate(made.plan.buckets):
            mine = [routes_of[number] for routes_of in found]
            ways = exchanges(made.plan, bucket)
            assert ways[0].sent.tolist() == [2 * sum(route.send) for route in mine]
            assert ways[1].received.tolist() == [2 * sum(route.home) for route in mine]
            if hops == "two":
                each = [2 * sum(route.home) * len(route.far) for route in mine]
                assert ways[2].sent.tolist() == each
                assert ways[2].received.tolist() == [2 * sum(route.passed) for route in mine]
    replicas = place.extent
    assert counts == {"one": [15] * 16, "two": [16 // replicas + replicas - 2] * 16}
    assert sizes["one"] == sizes["two"]


def test_auto_takes_two_where_connections_are_many() -> None:
    model = find_model("64*64x64")
    for ranks, hops in ((DIRECT_CONNECTIONS, {1}), (2 * DIRECT_CONNECTIONS, {2})):
        made = make_plan(model, find_mesh("hsdp:8", ranks), bucket_bytes=2**20).plan
        assert {bucket.hops for bucket in made.buckets} == hops
    for mesh in ("fsdp", "ddp"):
        made = make_plan(model, find_mesh(mesh, 128), bucket_bytes=2**20).plan
        assert {bucket.hops for bucket in made.buckets} == {1}


def test_hops_are_part_of_a_plan() -> None:
    one, two = (two_hop_plan("hsdp 2x2", Travel(), hops=hops) for hops in ("one", "two"))
    assert one != two
    assert one.digest() != two.digest()
    assert "hops=two" in two.lines()[0]
    assert "two hops home" in two.describe()
    assert two.with_travel() == two
    with pytest.raises(ValueError, match="hops must be 'auto', 'one' or 'two', got 3"):
        two_hop_plan("hsdp 2x2", Travel(), hops=3)


def groups_of_a_step(rank: int, world: int) -> list[tuple[int, ...]]:
    """The ranks of the process group of every exchange of a step."""
    params = by_placements(whole_tensors({"w": (8, 4), "v": (8, 4)}, 0), (2, 4), [COPIES, ROWS])
    optimizer = Muon(list(params.items()), hops="two")
    program = optimizer._built.program
    found = []
    for trip in program.trips:
        for ways in trip.ways:
            for name in ways:
                group = dist.distributed_c10d._resolve_process_group(name)
                found.append(tuple(dist.get_process_group_ranks(group)))
    return found


def test_exchanges_go_over_the_axes_groups(pool: Any) -> None:
    """Not over all ranks with sizes of zero: NCCL connects these too."""
    for rank, found in enumerate(pool.run(groups_of_a_step, world=8)):
        first = rank // 4 * 4
        assert set(found) == {tuple(range(first, first + 4)), (rank % 4, rank % 4 + 4)}
