"""The plan: owners, buckets, bytes; arithmetic on shapes and placements, the same on every rank."""

from __future__ import annotations

import itertools
import math
import pickle
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import by_fully_shard, by_placements, whole_tensors
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ortho_func import Dion2, Muon, NorMuon, plan
from ortho_func.geometry import Layout, Reading, mesh_layout, replicated_layout
from ortho_func.owners import assign_owners
from ortho_func.plan import (
    ParamSpec,
    Plan,
    Travel,
    build_plan,
    place_in_shard,
    wire_bytes,
)
from ortho_func.routing import Route, routes

EXAMPLES = settings(deadline=None, database=None, print_blob=True)


def sharded(shape: tuple[int, ...], world: int, dim: int = 0) -> Layout:
    return mesh_layout(shape, tuple(range(world)), (world,), (Shard(dim),))


def planned(shapes: Sequence[tuple[int, ...]], world: int, **options: Any) -> Plan:
    """A plan of parameters that are sharded on dim 0 of a 1-D mesh."""
    reading = options.pop("reading", Reading())
    travel = options.pop("travel", Travel())
    specs = [ParamSpec(f"p{n}", sharded(shape, world), reading) for n, shape in enumerate(shapes)]
    return build_plan(tuple(specs), (travel,), **options)


def members(made: Plan) -> list[Any]:
    return [m for bucket in made.buckets for slab in bucket.slabs for m in slab.members]


def matrices_by_owner(made: Plan) -> Counter[int]:
    return Counter(matrix.owner for matrix in members(made))


def all_routes(made: Plan) -> list[list[Route]]:
    """By bucket, the routes of the ranks of its domain."""
    found = {rank: routes(made, rank) for rank in made.buckets[0].domain.ranks}
    return [
        [found[rank][number] for rank in bucket.domain.ranks]
        for number, bucket in enumerate(made.buckets)
    ]


# Ownership.

THREE_SHAPES = [(1024, 4096)] * 48 + [(4096, 1024)] * 12 + [(512, 512)] * 12


@pytest.mark.parametrize("world", [8, 32, 64])
@pytest.mark.parametrize("order", [1, -1])
def test_three_shapes_are_balanced_together(world: int, order: int) -> None:
    made = planned(THREE_SHAPES[::order], world)
    loads, largest = made.loads(), Travel().flops(1024, 4096)
    assert math.isclose(sum(loads), sum(Travel().flops(*shape) for shape in THREE_SHAPES))
    ideal = max(sum(loads) / world, largest)
    assert max(loads) <= (4 / 3 - 1 / (3 * world)) * ideal
    # A shape with fewer matrices than ranks leaves nobody idle while others do two.
    counts = matrices_by_owner(made)
    large = Counter(m.owner for m in members(made) if m.geometry.rows * m.geometry.cols > 2**20)
    if max(large.values()) > 1:
        assert len(large) == world
    assert len(counts) == min(world, len(THREE_SHAPES))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_shapes_of_one_layer_do_not_all_start_at_the_first_rank(first: int) -> None:
    """Twelve of each of three shapes on 32 ranks: nobody gets one of each."""
    shapes = [(512, 1024), (1024, 512), (512, 1023)]
    made = planned([s for s in shapes[first:] + shapes[:first] for _ in range(12)], 32)
    assert Counter(matrices_by_owner(made).values()) == {1: 28, 2: 4}


@EXAMPLES
@given(
    costs=st.lists(st.integers(1, 100), min_size=1, max_size=7),
    world=st.integers(1, 3),
)
def test_owners_are_within_the_bound_of_the_best(costs: list[int], world: int) -> None:
    """Graham's bound, against the optimum by exhaustion."""
    owners = assign_owners(costs, [None] * len(costs), world)

    def busiest(chosen: Sequence[int]) -> int:
        return max(
            sum(c for c, o in zip(costs, chosen, strict=True) if o == rank) for rank in range(world)
        )

    best = min(map(busiest, itertools.product(range(world), repeat=len(costs))))
    assert busiest(owners) <= (4 / 3 - 1 / (3 * world)) * best + 1e-9


@EXAMPLES
@given(
    costs=st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=200),
    world=st.integers(1, 70),
)
def test_owners_of_many_matrices(costs: list[float], world: int) -> None:
    owners = assign_owners(costs, [None] * len(costs), world)
    assert len(owners) == len(costs)
    assert set(owners) <= set(range(world))
    loads = [0.0] * world
    last = [0.0] * world
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
        last[owner] = min(cost, last[owner] or cost)
    # When the busiest rank took its smallest matrix, no other had less to do.
    busiest = max(range(world), key=loads.__getitem__)
    assert loads[busiest] - last[busiest] <= min(loads) * (1 + 1e-9)
    if max(Counter(owners).values()) > 1:
        assert min(loads) > 0  # nobody idle while another owns two


@EXAMPLES
@given(data=st.data())
def test_homes_are_kept_unless_that_unbalances(data: st.DataObject) -> None:
    world = data.draw(st.integers(2, 8))
    costs = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=40))
    home = st.one_of(st.none(), st.integers(0, world - 1))
    homes = data.draw(st.lists(home, min_size=len(costs), max_size=len(costs)))

    def busiest(owners: Sequence[int]) -> int:
        loads = Counter[int]()
        for cost, owner in zip(costs, owners, strict=True):
            loads[owner] += cost
        return max(loads.values())

    owners = assign_owners(costs, homes, world)
    free = busiest(assign_owners(costs, [None] * len(costs), world))
    assert busiest(owners) <= 1.05 * free
    kept = all(home in (None, owner) for owner, home in zip(owners, homes, strict=True))
    pinned = Counter[int]()
    for cost, where in zip(costs, homes, strict=True):
        if where is not None:
            pinned[where] += cost
    if not kept:
        # Then what is pinned alone is too much somewhere, or leaves too uneven a rest.
        assert max(pinned.values()) + max(costs) > 1.05 * free


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_replicas_share_the_work(replicas: int) -> None:
    """HSDP: each matrix once in the whole mesh, gathered within its owner's replica."""
    world, shards = 4 * replicas, 4
    layout = mesh_layout(
        (64, 256), tuple(range(world)), (replicas, shards), (Replicate(), Shard(0))
    )
    made = build_plan(tuple(ParamSpec(f"p{n}", layout) for n in range(16)), (Travel(),))
    assert len(members(made)) == 16
    assert len({(m.param, m.index) for m in members(made)}) == 16
    assert max(made.loads()) == 16 / world * Travel().flops(64, 256)
    for found in all_routes(made):
        for rank, route in enumerate(found):
            asked = {other for other, size in enumerate(route.send) if size}
            assert asked <= {o for o in range(world) if o // shards == rank // shards}


def test_meshes_over_the_same_ranks_are_balanced_together() -> None:
    """Experts on one mesh and dense layers on another: the load of a rank is that of both."""
    ranks = tuple(range(8))
    flat = mesh_layout((64, 256), ranks, (8,), (Shard(0),))
    square = mesh_layout((64, 512), ranks, (2, 4), (Shard(0), Shard(1)))
    specs = [ParamSpec(f"a{n}", flat) for n in range(4)]
    specs += [ParamSpec(f"b{n}", square) for n in range(4)]
    made = build_plan(tuple(specs), (Travel(),))
    domains = {spec.layout.domain for spec in specs}
    assert len(domains) == 2
    assert matrices_by_owner(made) == dict.fromkeys(ranks, 1)


def test_ddp_sends_results_only() -> None:
    layout = replicated_layout((8, 16), (0, 1, 2, 3))
    made = build_plan(tuple(ParamSpec(f"p{n}", layout) for n in range(8)), (Travel(),))
    assert set(matrices_by_owner(made).values()) == {2}
    (bucket,) = made.buckets
    assert (bucket.gathers, bucket.returns) == (False, True)
    (found,) = all_routes(made)
    for rank, route in enumerate(found):
        assert route.send == tuple(2 * 8 * 16 * (other == rank) for other in range(4))
        assert route.home == (2 * 8 * 16,) * 4


# What is whole already stays.


@pytest.mark.parametrize(("experts", "world"), [(8, 4), (6, 4), (3, 4), (16, 8)])
@pytest.mark.parametrize("wire", ["auto", "dense", "exact"])
def test_whole_experts_stay_home(experts: int, world: int, wire: Any) -> None:
    layout = sharded((experts, 8, 4), world)
    spec = ParamSpec("experts", layout, Reading(flatten=False))
    for travel in (Travel(), Travel(sides=("row",)), Travel(sides=("slice",))):
        made = build_plan((spec,), (travel,), wire=wire)
        for matrix in members(made):
            assert [piece.rank for piece in matrix.geometry.pieces] == [matrix.owner]
        assert all(bucket.local for bucket in made.buckets)
        assert [wire_bytes(made, bucket) for bucket in made.buckets] == [(0, 0)]
        for found in all_routes(made):
            for rank, route in enumerate(found):
                for sizes in (route.send, route.arrive, route.back, route.home):
                    assert all(size == 0 for other, size in enumerate(sizes) if other != rank)
        assert "stays local" in made.describe()


def test_what_stays_is_not_rounded() -> None:
    """A bucket in which nothing travels is in the parameter's dtype."""
    spec = ParamSpec("experts", sharded((4, 8, 4), 4), Reading(flatten=False), 0, torch.float32)
    made = build_plan((spec,), (Travel(wire_dtype=torch.bfloat16),))
    assert [bucket.wire_dtype for bucket in made.buckets] == [torch.float32]


# One value, the same on every rank.

TWO = {"w": (18, 32), "v": (7, 5), "e": (6, 4, 8)}


def view_of_a_rank(rank: int, world: int, mesh: tuple[int, ...]) -> tuple[Plan, str, int]:
    parameters = by_fully_shard(whole_tensors(TWO, seed=rank), mesh)  # values differ: no matter
    made = plan(parameters, readings={"e": Reading(flatten=False)}, bucket_bytes=2**20)
    return made, made.digest(), hash(replace(made, places=()))


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_every_rank_computes_the_same_plan(pool: Any, mesh: tuple[int, ...]) -> None:
    found = pool.run(view_of_a_rank, mesh, world=4)
    plans = [made for made, _, _ in found]
    assert all(made == plans[0] for made in plans)
    assert all(made.buckets == plans[0].buckets for made in plans)
    assert len({digest for _, digest, _ in found}) == 1
    # And what four processes computed is what arithmetic on the mesh's shape says here.
    placements = (Replicate(),) * (len(mesh) - 1) + (Shard(0),)
    specs = tuple(
        ParamSpec(
            name,
            mesh_layout(shape, (0, 1, 2, 3), mesh, placements),
            Reading(flatten=False) if len(shape) > 2 else Reading(),
        )
        for name, shape in TWO.items()
    )
    here = build_plan(specs, (Travel(),), bucket_bytes=2**20)
    assert here == plans[0]
    assert hash(here) == hash(plans[0])
    assert here.digest() == plans[0].digest()


def test_plans_are_values() -> None:
    made = planned([(18, 32), (7, 5)], 4)
    again = planned([(18, 32), (7, 5)], 4)
    assert made == again
    assert hash(made) == hash(again)
    assert made.digest() == again.digest()
    copy = pickle.loads(pickle.dumps(made))
    assert copy == made
    assert copy.buckets == made.buckets
    assert copy.digest() == made.digest()
    assert [r.send for r in routes(copy, 1)] == [r.send for r in routes(made, 1)]
    others = [
        planned([(18, 32), (7, 6)], 4),
        planned([(7, 5), (18, 32)], 4),
        planned([(18, 32), (7, 5)], 2),
        planned([(18, 32), (7, 5)], 4, bucket_bytes=64),
        planned([(18, 32), (7, 5)], 4, wire="exact"),
        planned([(18, 32), (7, 5)], 4, balance="uniform"),
        planned([(18, 32), (7, 5)], 4, travel=Travel(sides=("row",))),
        planned([(18, 32), (7, 5)], 4, travel=Travel(wire_dtype=torch.float32)),
        planned([(18, 32), (7, 5)], 4, travel=Travel(fraction=0.5)),
    ]
    assert all(other != made for other in others)
    assert len({made.digest(), *(other.digest() for other in others)}) == len(others) + 1


@pytest.mark.parametrize("cls", [Muon, NorMuon, Dion2])
def test_plans_of_optimizers_are_values(cls: Any) -> None:
    made, again = (cls([nn.Parameter(torch.randn(4, 8))]).plan for _ in range(2))
    assert made == again
    assert hash(made) == hash(again)
    copy = pickle.loads(pickle.dumps(made))
    assert copy == made
    assert copy.loads() == made.loads()


# Buckets.


def received(made: Plan) -> Iterator[tuple[Any, int, int]]:
    """Bucket, rank, and the bytes of matrices that it receives in the first exchange."""
    for bucket in made.buckets:
        for owner in range(bucket.domain.size):
            found = [m.geometry for slab in bucket.slabs for m in slab.owned(owner)]
            yield bucket, owner, sum(g.rows * g.cols for g in found) * bucket.wire_dtype.itemsize


@EXAMPLES
@given(data=st.data())
def test_bucket_bytes_bound_what_a_rank_receives(data: st.DataObject) -> None:
    world = data.draw(st.integers(2, 8))
    extent = st.integers(1, 24)
    shapes = data.draw(st.lists(st.tuples(extent, extent), min_size=1, max_size=24))
    cap = data.draw(st.integers(2, 4000))
    made = planned(shapes, world, bucket_bytes=cap)
    for bucket, owner, size in received(made):
        alone = sum(len(slab.owned(owner)) for slab in bucket.slabs) == 1
        assert size <= cap or alone, (bucket, owner)
    # And as the routes say: padding adds little, and only where it was chosen.
    for bucket, found in zip(made.buckets, all_routes(made), strict=True):
        for owner, route in enumerate(found):
            arrives = sum(route.arrive) * bucket.wire_dtype.itemsize
            own = [m for slab in bucket.slabs for m in slab.owned(owner)]
            exact = sum(m.geometry.rows * m.geometry.cols for m in own) * 2
            assert arrives == exact or bucket.dense
    # Not needlessly many: the busiest owner's bytes, in halves at least.
    totals = Counter[int]()
    for _, owner, size in received(made):
        totals[owner] += size
    travelling = [bucket for bucket in made.buckets if not bucket.local]
    assert len(travelling) <= 2 + 2 * sum(math.ceil(totals[owner] / cap) for owner in range(world))


def test_even_shards_bound_the_second_exchange_as_well() -> None:
    made = planned([(64, 32)] * 64, 8, bucket_bytes=3 * 64 * 32 * 2)
    assert len(made.buckets) == 3
    for found in all_routes(made):
        for route in found:
            assert sum(route.home) * 2 <= 3 * 64 * 32 * 2
            assert sum(route.arrive) * 2 <= 3 * 64 * 32 * 2


@pytest.mark.parametrize("world", [4, 64])
def test_matrices_larger_than_a_bucket_share_it_with_those_of_other_owners(world: int) -> None:
    """Else they would be orthogonalized one after the other, each rank waiting for the others."""
    made = planned([(64, 64)] * (2 * world), world, bucket_bytes=100)
    assert len(made.buckets) == 2
    for bucket in made.buckets:
        assert {m.owner for slab in bucket.slabs for m in slab.members} == set(range(world))


@pytest.mark.parametrize(
    ("mesh", "placements", "places"),
    [
        ((4,), (Shard(1),), 12),  # by rows: every rank has a part of each matrix
        ((2, 2), (Shard(0), Shard(1)), 6),
        ((4,), (Shard(2),), 12),
    ],
    ids=str,
)
def test_stacks_are_cut_by_place_in_the_shard(mesh: Any, placements: Any, places: int) -> None:
    """So that every rank sends a slice of its own shard in every bucket."""
    layout = mesh_layout((12, 8, 8), (0, 1, 2, 3), mesh, placements)
    spec = ParamSpec("experts", layout, Reading(flatten=False))
    made = build_plan((spec,), (Travel(),), bucket_bytes=8 * 8 * 2)
    assert len(made.buckets) > 1
    items = sorted(item for bucket in made.buckets for item in bucket.items)
    assert [item.first for item in items] == [0, *(item.last for item in items[:-1])]
    assert items[-1].last == places
    assert not any(item.whole for item in items)
    for bucket, found in zip(made.buckets, all_routes(made), strict=True):
        for slab in bucket.slabs:
            for matrix in slab.members:
                place = place_in_shard(spec, matrix)
                assert any(item.first <= place < item.last for item in bucket.items)
        for route in found:
            for entry in route.entries:
                assert (entry.first, entry.last) == (entry.item.first, entry.item.last)
                assert entry.shape[0] == entry.last - entry.first


def test_a_stack_that_fits_is_not_cut() -> None:
    spec = ParamSpec("experts", sharded((12, 8, 8), 4, dim=1), Reading(flatten=False))
    (bucket,) = build_plan((spec,), (Travel(),)).buckets
    assert [item.whole for item in bucket.items] == [True]


# In words.

LINE = re.compile(
    r"bucket of (\d+) matrices, (stays local|dense|exact splits): "
    r"([\d.]+) MiB out, ([\d.]+) MiB back"
)


def counted(made: Plan) -> list[tuple[int, int]]:
    """By bucket, the bytes that leave any rank for another, from the routes' send sizes."""
    totals = []
    for bucket, found in zip(made.buckets, all_routes(made), strict=True):
        size = bucket.wire_dtype.itemsize
        out = sum(n for r, route in enumerate(found) for o, n in enumerate(route.send) if o != r)
        back = sum(n for r, route in enumerate(found) for o, n in enumerate(route.back) if o != r)
        totals.append((out * size, back * size))
    return totals


@pytest.mark.parametrize("wire", ["auto", "dense", "exact"])
@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((8,), (Shard(0),)),
        ((8,), (Shard(1),)),
        ((8,), (Replicate(),)),
        ((2, 4), (Replicate(), Shard(0))),
        ((2, 4), (Shard(0), Shard(1))),
    ],
    ids=str,
)
def test_described_bytes_are_those_of_the_routes(mesh: Any, placements: Any, wire: Any) -> None:
    shapes = [(18, 256)] * 5 + [(256, 512)] * 9 + [(300, 100)] * 3
    specs = tuple(
        ParamSpec(f"p{n}", mesh_layout(shape, tuple(range(8)), mesh, placements))
        for n, shape in enumerate(shapes)
    )
    made = build_plan(specs, (Travel(),), wire=wire, bucket_bytes=2**18)
    found = counted(made)
    assert [wire_bytes(made, bucket) for bucket in made.buckets] == found
    described = [
        (int(n), float(out), float(back)) for n, _, out, back in LINE.findall(made.describe())
    ]
    assert described == [
        (
            sum(len(slab.members) for slab in bucket.slabs),
            pytest.approx(out / 2**20, abs=6e-4),
            pytest.approx(back / 2**20, abs=6e-4),
        )
        for bucket, (out, back) in zip(made.buckets, found, strict=True)
    ]


def test_description_says_what_the_plan_is() -> None:
    made = planned([(18, 256)] * 5 + [(64, 32)] * 9, 8)
    text = made.describe()
    assert text.startswith("14 parameters, 14 matrices, ")
    assert "8 rank(s), mesh 8:" in text
    assert re.search(r"\b5 x 18 x 256 \(muon\)", text)
    assert re.search(r"\b9 x 64 x 32 \(muon\)", text)
    loads = made.loads()
    counts = matrices_by_owner(made)
    said = re.search(r"matrices a rank (\d+) to (\d+); busiest rank ([\d.]+) of the mean", text)
    assert said is not None
    owned = [counts[rank] for rank in range(8)]
    assert (int(said[1]), int(said[2])) == (min(owned), max(owned))
    assert float(said[3]) == pytest.approx(max(loads) / (sum(loads) / 8), abs=6e-4)


def test_plan_of_an_optimizer_counts_dion2s_slices() -> None:
    """Only the selected rows travel, and so few bytes are described."""
    shapes = [(64, 32)] * 8
    whole = planned(shapes, 4)
    some = planned(shapes, 4, travel=Travel(algorithm="dion2", fraction=0.25))
    assert {(m.geometry.rows, m.geometry.cols) for m in members(some)} == {(16, 32)}
    assert [4 * out for out, _ in counted(some)] == [out for out, _ in counted(whole)]


# At scale.


def large_model(world: int) -> tuple[ParamSpec, ...]:
    """720 parameters, as a 70B model has them."""
    shapes = [(8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672), (1024, 8192), (8192, 8192)]
    layouts = [sharded(shape, world) for shape in shapes]
    return tuple(ParamSpec(f"p{n}", layouts[n % 6]) for n in range(720))


def test_720_parameters_on_1024_ranks() -> None:
    made = build_plan(large_model(1024), (Travel(),))
    assert len(members(made)) == 720
    assert max(matrices_by_owner(made).values()) == 1
    # The sizes of any two ranks fit together; all pairs would be a million.
    some = (0, 1, 511, 1000, 1023)
    found = {rank: routes(made, rank) for rank in some}
    for one, two in itertools.product(some, some):
        for mine, theirs in zip(found[one], found[two], strict=True):
            assert mine.send[two] == theirs.arrive[one]
            assert mine.back[two] == theirs.home[one]
    # No table has an entry per element: they would be the size of the model.
    shard = sum(spec.layout.boxes[0].numel for spec in made.params)
    for rank in some:
        assert sum(route.table_bytes for route in found[rank]) < shard * 2 / 100
    assert len(made.describe().splitlines()) < 50


# What cannot be planned is said at once.


@pytest.fixture
def four_fake_ranks() -> Iterator[None]:
    """A process group whose other members do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def spec_error(shape: tuple[int, ...], reading: Reading = Reading()) -> str:  # noqa: B008
    spec = ParamSpec("blocks.3.weight", sharded(shape, 2), reading)
    with pytest.raises(ValueError, match=r"blocks\.3\.weight") as caught:
        build_plan((spec,), (Travel(),))
    return str(caught.value)


def test_one_dim_is_refused() -> None:
    text = spec_error((8,))
    assert "(8,)" in text
    assert "algorithm='adamw'" in text
    assert "FSDP1" in text


def test_no_dim_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scale has shape \(\)"):
        plan({"scale": torch.tensor(1.0)})


def test_three_dims_must_be_explained() -> None:
    text = spec_error((8, 4, 3))
    assert "flatten=False" in text
    assert "flatten=True" in text


@pytest.mark.parametrize("splits", [(8, 2), (8, 2, 4), (12, 0), (13, -1), ()])
def test_split_sizes_must_add_up(splits: tuple[int, ...]) -> None:
    text = spec_error((12, 16), Reading(split_sizes=splits))
    assert "split_sizes" in text
    assert str(splits) in text
    assert "12 rows" in text


@pytest.mark.parametrize("heads", [5, 0, -2, 24])
def test_heads_must_divide_the_rows(heads: int) -> None:
    text = spec_error((12, 16), Reading(num_heads=heads))
    assert f"num_heads={heads}" in text


def test_splits_and_heads_exclude_each_other() -> None:
    assert "not both" in spec_error((12, 16), Reading(split_sizes=(6, 6), num_heads=2))


@pytest.mark.parametrize("dim", [2, 3])
def test_kernels_cannot_be_sharded(dim: int) -> None:
    layout = sharded((8, 4, 6, 6), 2, dim=dim)
    spec = ParamSpec("conv.weight", layout, Reading(flatten=True))
    with pytest.raises(ValueError, match=r"\(8, 4, 6, 6\).*kernel dim.*dim 0 or dim 1"):
        build_plan((spec,), (Travel(),))
    # One input channel leaves a rectangle after all.
    thin = ParamSpec("conv.weight", sharded((8, 1, 6, 6), 2, dim=2), Reading(flatten=True))
    assert len(members(build_plan((thin,), (Travel(),)))) == 1


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"bucket_bytes": 0}, "bucket_bytes must be at least 1, got 0"),
        ({"wire": "sparse"}, "wire must be .*'dense'.*got 'sparse'"),
        ({"balance": "fair"}, "balance must be .*got 'fair'"),
    ],
)
def test_options_are_checked(option: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        planned([(4, 4)], 2, **option)


@pytest.mark.usefixtures("four_fake_ranks")
def test_partial_placements_are_refused() -> None:
    mesh = init_device_mesh("cpu", (4,))
    partial = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()], run_check=False)
    with pytest.raises(ValueError, match=r"head has placement P.*Redistribute"):
        plan({"head": partial})
    with pytest.raises(ValueError, match=r"head has placement P"):
        Muon([("head", nn.Parameter(partial))])


@pytest.mark.usefixtures("four_fake_ranks")
def test_plans_of_dtensors_need_no_communication() -> None:
    """On ranks that do not exist: any exchange would have nobody to talk to."""
    made = plan(by_placements(whole_tensors({"w": (18, 32)}, 0), (2, 2), [Replicate(), Shard(0)]))
    layout = mesh_layout((18, 32), (0, 1, 2, 3), (2, 2), (Replicate(), Shard(0)))
    assert made.params[0].layout == layout
