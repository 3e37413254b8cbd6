"""The step as one graph: equal to eager, compiled once, and its collectives as written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import (
    WHOLE,
    Shard,
    by_fully_shard,
    by_placements,
    exact,
    expected,
    gather,
    relative_error,
    scatter_like,
    whole_tensors,
)
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

from ortho_func import Muon, NorMuon
from ortho_func.geometry import local
from ortho_func.optim.kept import Kept
from ortho_func.primitives import packing

COMMUNICATION = ("_c10d_functional", "c10d", "c10d_functional", "_dtensor", "symm_mem")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
Parameters = Mapping[str, Tensor]


def fresh_seed() -> int:
    return int(torch.seed() % 2**31)


# Looking at a step, eager or traced.


class Seen(TorchDispatchMode):
    """The operators of an eager step, in order: collectives, matrix products by rows, AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert "_local_scalar_dense" not in str(func), "a step may not wait for a number"
        result = func(*args, **(kwargs or {}))
        self.events += event(func, result)
        return result


def event(func: Any, result: Any) -> list[str]:
    namespace, _, name = str(func).partition(".")
    name = name.partition(".")[0]
    if namespace in COMMUNICATION:
        return [name]
    if name in PRODUCTS:
        return [f"product {result.shape[-2]}"]
    if "adamw" in name or name == "expm1":  # fused, or traced: a bias correction
        return ["adamw"]
    return []


def events_of(graph: torch.fx.Graph) -> list[str]:
    """The same of a traced graph of ATen operators."""
    found = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        assert "_local_scalar_dense" not in str(node.target), "a step may not wait for a number"
        if node.args and "elementwise_where_" in str(node.args[0]):  # an operator that writes
            found.append(node.kwargs["name"])
        else:
            found += event(node.target, node.meta.get("val"))
    return found


def merged(events: Sequence[str]) -> list[str]:
    """Runs of the same event as one."""
    return [one for n, one in enumerate(events) if n == 0 or events[n - 1] != one]


def collectives(events: Sequence[str]) -> list[str]:
    return [one for one in events if not one.startswith(("product", "adamw"))]


class Capture:
    """A backend that runs graphs eagerly and keeps them, before and after AOTAutograd."""

    def __init__(self) -> None:
        self.traced: list[torch.fx.GraphModule] = []
        self.lowered: list[torch.fx.GraphModule] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        self.traced.append(module)

        def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
            self.lowered.append(graph)
            forward = graph.forward

            def boxed(args: list[Any]) -> Any:
                return forward(*args)

            boxed._boxed_call = True  # type: ignore[attr-defined]
            return boxed

        return aot_autograd(fw_compiler=keep)(module, inputs)


class Trace:
    """A backend that only keeps the graph: the fastest way to know that there is one."""

    def __init__(self) -> None:
        self.traced: list[torch.fx.GraphModule] = []

    def __call__(self, module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.traced.append(module)
        return module.forward


# What is trained.


def grouped(algorithm: str, matrices: Parameters, others: Parameters, **options: Any) -> Any:
    """An optimizer with a matrix group and an AdamW group."""
    cls, _, extra = WHOLE[algorithm]
    if algorithm in ("dion2", "dion3"):
        extra = {**extra, "selection": "global"}
    groups: list[dict[str, Any]] = [
        {"params": list(matrices.items())},
        {"params": list(others.items()), "algorithm": "adamw", "lr": 0.01},
    ]
    return cls(
        groups, **{"lr": 0.1, "wire_dtype": torch.float32, "compute_dtype": torch.float32,
                   **extra, **options},
    )  # fmt: skip


def twenty_steps(
    parameters: Sequence[Parameters],
    optimizers: Sequence[torch.optim.Optimizer],
    seed: int,
    rank: int = 0,
) -> float:
    """Everything that may change from step to step, on two equal models; how they differ.

    Each step has another learning rate (by a scheduler), weight decay and momentum, and other
    gradients are missing, some on this rank only.
    """
    schedulers = [LambdaLR(opt, lambda step: 0.9**step) for opt in optimizers]
    shapes = {name: tuple(p.shape) for name, p in parameters[0].items()}
    worst = 0.0
    for step in range(20):
        whole = whole_tensors(shapes, seed + step)
        chance = torch.Generator().manual_seed(seed + 100 * step + rank)
        absent = {name for name in shapes if torch.rand((), generator=chance) < 0.3 and step > 0}
        for params, opt, scheduler in zip(parameters, optimizers, schedulers, strict=True):
            for name, p in params.items():
                p.grad = None if name in absent else scatter_like(whole[name], p)
            for group in opt.param_groups:
                group["weight_decay"] = 0.01 * step
                group["momentum"] = 0.9 - 0.02 * step
            opt.step()
            scheduler.step()
        one, two = ([local(p.detach()) for p in params.values()] for params in parameters)
        for mine, right in zip(one, two, strict=True):
            if mine.numel():
                worst = max(worst, relative_error(mine, right))
    return worst


MATRICES = {"a": (6, 10), "b": (6, 10), "c": (10, 6)}
OTHERS = {"bias": (10,), "scale": (6,)}


def plain(seed: int) -> tuple[Parameters, Parameters]:
    return tuple(  # type: ignore[return-value]
        {name: nn.Parameter(t) for name, t in whole_tensors(shapes, seed).items()}
        for shapes in (MATRICES, OTHERS)
    )


@contextmanager
def no_graph_breaks() -> Iterator[None]:
    """Dynamo starts afresh, breaks no graph and compiles no frame twice."""
    torch._dynamo.reset()
    counters.clear()
    yield
    assert not counters["graph_break"], counters["graph_break"]
    assert not counters["recompiles"], counters["recompiles"]


# On one process.


@pytest.mark.parametrize(
    ("algorithm", "orthogonalizer"),
    [("muon", "jordan"), ("normuon", "auto"), ("dion2", "svd"), ("dion3", "svd")],
)
def test_one_process_compiles_once(algorithm: str, orthogonalizer: str) -> None:
    seed, backend = fresh_seed(), Capture()
    models = [plain(seed), plain(seed)]
    with no_graph_breaks():
        opts = [
            grouped(algorithm, *model, orthogonalizer=orthogonalizer, compile=how)
            for model, how in zip(models, (False, {"backend": backend}), strict=True)
        ]
        error = twenty_steps([{**m, **o} for m, o in models], opts, seed)
    assert error < 1e-5, (seed, error)
    assert len(backend.traced) == len(backend.lowered) == 1, seed
    assert collectives(events_of(backend.lowered[0].graph)) == []
    assert "adamw" in events_of(backend.lowered[0].graph)


@pytest.mark.parametrize("algorithm", ["muon", "normuon", "dion2"])
def test_the_step_written_out_as_on_an_accelerator(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the CPU's operators: every mask is a tensor of its own, and nothing is opaque."""
    monkeypatch.setattr(packing, "opaque", lambda *_: False)
    monkeypatch.setattr(Kept, "present", lambda _, there, device: list(torch.tensor(there)))
    seed, backend = fresh_seed(), Capture()
    models = [plain(seed), plain(seed)]
    with no_graph_breaks():
        opts = [
            grouped(algorithm, *model, orthogonalizer="svd", compile=how)
            for model, how in zip(models, (False, {"backend": backend}), strict=True)
        ]
        error = twenty_steps([{**m, **o} for m, o in models], opts, seed)
    assert error < 1e-5, (seed, error)
    (lowered,) = backend.lowered
    assert not [node for node in lowered.graph.nodes if "ortho_func" in str(node.target)]


def test_state_and_shards_that_are_replaced_are_seen() -> None:
    """What is kept from step to step is kept by identity, not for good."""
    p = plain(0)[0]["a"]
    opt = Muon([p], lr=0.1, momentum=0.5, compile={"backend": "eager"})
    p.grad = torch.ones_like(p)
    opt.step()
    opt.state[p]["momentum_buffer"] = torch.zeros_like(p)
    opt.step()
    assert torch.equal(opt.state[p]["momentum_buffer"], torch.full_like(p, 0.5))
    opt.state[p] = {"momentum_buffer": torch.full_like(p, 3.0)}
    opt.step()
    assert torch.equal(opt.state[p]["momentum_buffer"], torch.full_like(p, 2.0))


def moved_shards(rank: int, world: int) -> tuple[bool, bool]:
    """A shard that is made anew between steps, as a wrapper does that frees its storage."""
    params = by_fully_shard(whole_tensors({"a": (6, 8)}, 0), (world,))
    (p,) = params.values()
    opt = Muon([p], lr=0.1, ns_steps=1, compile={"backend": "eager"})
    p.grad = scatter_like(torch.ones(6, 8), p)
    opt.step()
    left = local(p.detach())
    p._local_tensor = left.clone()
    before = local(p.detach()).clone()
    opt.step()
    return torch.equal(left, before), torch.equal(local(p.detach()), before)


def test_shards_that_move_are_seen(pool: Any) -> None:
    for left, same in pool.run(moved_shards, world=2):
        assert left  # nothing was written to what is no longer the shard
        assert not same


def test_inductor_on_one_process() -> None:
    seed = fresh_seed()
    models = [plain(seed), plain(seed)]
    with no_graph_breaks():
        opts = [
            grouped("normuon", *model, orthogonalizer="jordan", ns_steps=1, compile=how)
            for model, how in zip(models, (False, True), strict=True)
        ]
        error = twenty_steps([{**m, **o} for m, o in models], opts, seed)
    assert error < 1e-4, (seed, error)  # other rounding, through five Newton-Schulz steps
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("tensor", [True, False])
def test_the_caller_may_compile_the_step(tensor: bool) -> None:
    """With rates as tensors it compiles once; numbers are guarded twice at most."""
    seed, backend = fresh_seed(), Trace()
    models = [plain(seed), plain(seed)]
    rate = torch.tensor(0.1) if tensor else 0.1
    with no_graph_breaks():
        opts = [grouped("normuon", *m, orthogonalizer="auto", lr=rate) for m in models]
        compiled = torch.compile(opts[1].step, fullgraph=True, backend=backend)
        for step in range(6):
            for (name, p), q in zip(
                [*models[0][0].items(), *models[0][1].items()],
                [*models[1][0].values(), *models[1][1].values()],
                strict=True,
            ):
                p.grad = torch.randn_like(p)
                q.grad = p.grad.clone()
                assert name
            for opt in opts:
                if not tensor:
                    opt.param_groups[0]["lr"] = 0.1 / (1 + step)
            if tensor:
                rate.fill_(0.1 / (1 + step))
            opts[0].step()
            compiled()
            for p, q in zip(models[0][0].values(), models[1][0].values(), strict=True):
                assert relative_error(q.detach(), p.detach()) < 1e-5, seed
            if tensor:
                assert len(backend.traced) == 1
        counters["recompiles"].clear()
    assert len(backend.traced) <= 2


# On several.

SHARDED = {"a": (10, 14), "b": (10, 14), "c": (8, 12), "d": (8, 12), "e": (6, 10), "f": (6, 10)}
UNEVEN = {"a": (5, 12), "b": (9, 12), "c": (12, 5), "d": (2, 7), "e": (9, 12)}


def models_on_mesh(
    world: int, shapes: Mapping[str, tuple[int, ...]], seed: int
) -> tuple[Parameters, Parameters]:
    """Matrices and vectors by fully_shard; the vectors have empty shards on some worlds."""
    matrices, others = whole_tensors(shapes, seed), whole_tensors({"bias": (3,)}, seed)
    return by_fully_shard(matrices, (world,)), by_fully_shard(others, (world,))


def compiled_on_ranks(
    rank: int, world: int, algorithm: str, shapes: Any, seed: int, cap: int, backend: str
) -> dict[str, Any]:
    """Twenty steps eager and compiled; what the graph holds, and how the two differ."""
    capture = Capture()
    models = [models_on_mesh(world, shapes, seed) for _ in range(2)]
    how = {"backend": capture} if backend == "aot" else {"backend": backend}
    with no_graph_breaks():
        opts = [
            grouped(
                algorithm, *model, orthogonalizer="jordan", ns_steps=1, bucket_bytes=cap,
                compile=option,
            )
            for model, option in zip(models, (False, how), strict=True)
        ]  # fmt: skip
        error = twenty_steps([{**m, **o} for m, o in models], opts, seed, rank)
    for name, p in {**models[0][0], **models[0][1]}.items():
        p.grad = scatter_like(torch.ones(p.shape), p)
        assert name
    with Seen() as seen:
        opts[0].step()
    return {
        "error": error,
        "graphs": counters["stats"]["unique_graphs"],
        "eager": seen.events,
        "lowered": [events_of(graph.graph) for graph in capture.lowered],
        "traced": [
            sum("all_to_all" in str(node.target) for node in graph.graph.nodes)
            for graph in capture.traced
        ],
        "buckets": [(bucket.gathers, bucket.returns) for bucket in opts[0].plan.buckets],
        "state": [list(opts[1].state[p]) for group in models[1] for p in group.values()],
    }


def pipelined(buckets: Sequence[int]) -> list[str]:
    """The order of a step over buckets, each of matrices with so many rows.

    Out k + 1 begins before the arithmetic of bucket k; back k - 1 is awaited after it.
    """
    start, wait = "all_to_all_single", "wait_tensor"
    order = [start, "adamw"]
    for k, rows in enumerate(buckets):
        order += [start] * (k + 1 < len(buckets))
        order += [wait, f"product {rows}", start]
        order += [wait] * (k > 0)
    return merged([*order, wait])


@pytest.mark.parametrize(
    ("world", "algorithm", "shapes"),
    [
        (2, "muon", SHARDED),
        (2, "normuon", UNEVEN),
        (2, "dion2", UNEVEN),
        (4, "normuon", UNEVEN),
    ],
    ids=lambda x: str(len(x)) if isinstance(x, dict) else str(x),
)
def test_ranks_compile_once_and_agree_with_eager(
    pool: Any, world: int, algorithm: str, shapes: Any
) -> None:
    seed, cap = fresh_seed(), 1  # one matrix an owner
    found = pool.run(
        compiled_on_ranks, algorithm, shapes, seed, cap, "aot", world=world, timeout=240
    )
    for one in found:
        assert one["error"] < 1e-5, (seed, one["error"])
        assert one["graphs"] == 1, seed
        # Exactly two exchanges a bucket and nothing else, eager and compiled.
        assert len(one["buckets"]) > 1
        exchanges = sum(gathers + returns for gathers, returns in one["buckets"])
        assert exchanges == 2 * len(one["buckets"])
        (lowered,) = one["lowered"]
        for events in (one["eager"], lowered):
            names = collectives(events)
            assert set(names) == {"all_to_all_single", "wait_tensor"}
            assert names.count("all_to_all_single") == exchanges
            assert names.count("wait_tensor") == exchanges
        assert one["traced"] == [exchanges]
        assert one["state"] == found[0]["state"]
        if shapes is SHARDED:  # three buckets, told apart by their matrices' rows
            assert merged(one["eager"]) == pipelined([10, 8, 6])
            assert merged(lowered) == pipelined([10, 8, 6])
    # All ranks begin and await their exchanges in the same order.
    assert all(collectives(one["eager"]) == collectives(found[0]["eager"]) for one in found)
    assert all(
        collectives(one["lowered"][0]) == collectives(found[0]["lowered"][0]) for one in found
    )


def inductor_on_ranks(rank: int, world: int, seed: int) -> tuple[float, int, list[str]]:
    """As users compile: the error, the number of graphs, and the order of the generated code."""
    from torch._inductor.utils import run_and_get_code

    models = [models_on_mesh(world, SHARDED, seed) for _ in range(2)]
    torch._dynamo.reset()
    counters.clear()
    opts = [
        grouped("muon", *model, orthogonalizer="jordan", ns_steps=1, bucket_bytes=1, compile=option)
        for model, option in zip(models, (False, True), strict=True)
    ]
    every = [{**m, **o} for m, o in models]
    _, code = run_and_get_code(twenty_steps, every, opts, seed, rank)
    error = max(
        relative_error(local(p.detach()), local(q.detach()))
        for p, q in zip(every[1].values(), every[0].values(), strict=True)
        if local(p).numel()
    )
    steps = [text for text in code if "all_to_all_single" in text]
    calls = re.findall(r"(all_to_all_single|wait_tensor|extern_kernels\.\w+)[.\w]*\(", steps[0])
    return error, counters["stats"]["unique_graphs"], calls


def test_inductor_on_two_ranks(pool: Any) -> None:
    """The generated code keeps the order that was written."""
    seed = fresh_seed()
    found = pool.run(inductor_on_ranks, seed, world=2, timeout=240)
    for error, graphs, calls in found:
        assert error < 1e-4, seed
        assert graphs == 1
        order = merged(["product" if "extern" in call else call for call in calls])
        assert order == merged(
            ["product" if "product" in e else e for e in pipelined([10, 8, 6]) if e != "adamw"]
        )


def caller_compiles(rank: int, world: int, seed: int) -> tuple[float, int]:
    models = [models_on_mesh(world, UNEVEN, seed) for _ in range(2)]
    backend, rate = Trace(), torch.tensor(0.1)
    with no_graph_breaks():
        opts = [grouped("normuon", *model, lr=rate, ns_steps=1) for model in models]
        compiled = torch.compile(opts[1].step, fullgraph=True, backend=backend)
        for step in range(4):
            whole = whole_tensors({**UNEVEN, "bias": (3,)}, seed + step)
            for model in models:
                for group in model:
                    for name, p in group.items():
                        p.grad = scatter_like(whole[name], p)
            rate.fill_(0.1 / (1 + step))
            opts[0].step()
            compiled()
    errors = [
        relative_error(local(q.detach()), local(p.detach()))
        for mine, right in zip(models[1], models[0], strict=True)
        for q, p in zip(mine.values(), right.values(), strict=True)
        if local(p).numel()
    ]
    return max(errors), len(backend.traced)


def test_the_caller_may_compile_a_step_on_dtensors(pool: Any) -> None:
    seed = fresh_seed()
    for error, graphs in pool.run(caller_compiles, seed, world=2, timeout=240):
        assert error < 1e-5, seed
        assert graphs == 1, seed


# What does not travel needs no exchange.


def eager_events(
    rank: int, world: int, shapes: Any, placements: Any, mesh: tuple[int, ...], options: Any
) -> list[str]:
    parameters = by_placements(whole_tensors(shapes, 0), mesh, placements)
    opt = Muon(list(parameters.items()), lr=0.1, ns_steps=1, **options)
    for name, p in parameters.items():
        p.grad = scatter_like(whole_tensors(shapes, 1)[name], p)
    with Seen() as seen:
        opt.step()
    return seen.events


@pytest.mark.parametrize(
    ("world", "shapes", "options"),
    [
        (1, {"w": (6, 10), "v": (10, 6)}, {}),
        (4, {"experts": (6, 8, 4)}, {"flatten": False}),  # two, two, two and none
        (2, {"experts": (4, 8, 4)}, {"flatten": False, "balance": "uniform"}),
    ],
)
def test_no_exchange_where_nothing_travels(
    pool: Any, world: int, shapes: Any, options: Any
) -> None:
    found = pool.run(eager_events, shapes, [Shard(0)], (world,), options, world=world)
    assert all(collectives(events) == [] for events in found)
    assert any("product" in name for name in found[0])


def ddp_events(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(6, 10)) for _ in range(4)]
    opt = NorMuon(params, lr=0.1, ns_steps=1, process_group=dist.group.WORLD)
    for p in params:
        p.grad = torch.randn_like(p)
    with Seen() as seen:
        opt.step()
    return seen.events


def test_replicas_exchange_results_only(pool: Any) -> None:
    for events in pool.run(ddp_events, world=2):
        assert collectives(events) == ["all_to_all_single", "wait_tensor"]


# The graph's size.


@contextmanager
def fake_world(world: int) -> Iterator[None]:
    """Rank 0 of a world whose other members do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def nodes_of_a_step(world: int, copies: int, rows: int, wire: str) -> int:
    """Nodes of the graph of rank 0 with so many matrices of each of two shapes."""
    shapes = {f"w{n}": (rows, 192) for n in range(copies)}
    shapes |= {f"v{n}": (2 * rows, 64) for n in range(copies)}
    backend = Trace()
    with fake_world(world):
        parameters = by_placements(whole_tensors(shapes, 0), (world,), [Shard(0)])
        opt = NorMuon(
            list(parameters.items()), lr=0.1, ns_steps=1, wire=wire, compile={"backend": backend}
        )
        for name, p in parameters.items():
            p.grad = scatter_like(torch.zeros(shapes[name]), p)
        opt.step()
    (graph,) = backend.traced
    return len(graph.graph.nodes)


@pytest.mark.parametrize(("rows", "wire"), [(64, "auto"), (72, "exact")])
def test_the_graph_does_not_grow_with_the_world(rows: int, wire: str) -> None:
    few, many = (nodes_of_a_step(world, 3, rows, wire) for world in (8, 64))
    assert many <= few  # of pairs of a rank and a matrix there are 336 more


def test_the_graph_grows_with_parameters_by_a_few_nodes_each() -> None:
    few, many = (nodes_of_a_step(64, copies, 64, "auto") for copies in (1, 3))
    assert (many - few) / 4 < 40


# Gradients that are not there.

MISSING = {"b": (9, 12), "c": (12, 5), "d": (9, 12)}


def without_gradients(
    rank: int, world: int, algorithm: str, seed: int, absent_on: int, compiled: bool
) -> dict[str, Any]:
    """One rank has no gradient of b at first, nobody one of d for two steps."""
    backend = Trace()
    tensors = whole_tensors(MISSING, seed)
    gradients: list[dict[str, Any]] = [whole_tensors(MISSING, seed + 1 + n) for n in range(4)]
    matrices = by_fully_shard(tensors, (world,))
    others = by_fully_shard(whole_tensors({"bias": (3,)}, seed), (world,))
    opt = grouped(
        algorithm, matrices, others, weight_decay=0.0, **exact(algorithm),
        compile={"backend": backend} if compiled else False,
    )  # fmt: skip
    gradients[0]["d"] = gradients[1]["d"] = None

    def step(whole: dict[str, Any], *, skip: bool) -> None:
        for name, p in matrices.items():
            here = whole[name] is not None and not (skip and name == "b" and rank == absent_on)
            p.grad = scatter_like(whole[name], p) if here else None
        for p in others.values():
            p.grad = None if rank == absent_on else torch.zeros_like(p)
        opt.step()

    for number, whole in enumerate(gradients):
        step(whole, skip=number == 0)

    # The reference: that shard's gradient is zero.
    rows = [len(part) for part in torch.arange(9).chunk(world)] + [0] * world
    first = sum(rows[:absent_on])
    zeroed = gradients[0]["b"].clone()
    zeroed[first : first + rows[absent_on]] = 0
    gradients[0] = {**gradients[0], "b": zeroed}
    right = expected(tensors, gradients, algorithm, lr=0.1, weight_decay=0.0)
    error = max(relative_error(gather(matrices[name]), right[name]) for name in MISSING)

    # Once more with decay and momentum in place: what is absent keeps its bits.
    opt.param_groups[0]["weight_decay"] = 0.5
    held = {name: bits(opt, p) for name, p in {**matrices, **others}.items()}
    step({**whole_tensors(MISSING, seed + 9), "d": None}, skip=True)
    after = {name: bits(opt, p) for name, p in {**matrices, **others}.items()}
    unchanged = {
        name
        for name in held
        if all(torch.equal(x, y) for x, y in zip(held[name], after[name], strict=True))
    }
    return {
        "error": error,
        "unchanged": unchanged,
        "finite": all(bool(torch.isfinite(t).all()) for one in after.values() for t in one),
        "keys": [sorted(opt.state[p]) for p in {**matrices, **others}.values()],
        "graphs": len(backend.traced),
        "empty": {name for name, p in {**matrices, **others}.items() if not local(p).numel()},
    }


def bits(opt: torch.optim.Optimizer, p: Tensor) -> list[Tensor]:
    """A parameter's shard and everything the optimizer knows about it, copied.

    But for Dion's right factor, which belongs to all ranks: it moves where others have gradients.
    """
    state = [t for name, t in opt.state[p].items() if name != "right_factor"]
    return [local(t.detach()).clone() for t in (p, *state)]


def check_missing(found: list[dict[str, Any]], absent_on: int, note: Any) -> None:
    for rank, one in enumerate(found):
        assert one["error"] < 1e-5, (note, one["error"])
        assert one["finite"], note
        absent = {"b", "d", "bias"} if rank == absent_on else {"d"}
        assert one["unchanged"] - one["empty"] == absent - one["empty"], (note, rank)
        assert one["keys"] == found[0]["keys"], note


@pytest.mark.parametrize("algorithm", list(WHOLE))
@pytest.mark.parametrize("world", [2, 4])
def test_missing_gradients(pool: Any, world: int, algorithm: str) -> None:
    seed = fresh_seed()
    for absent_on in sorted({0, 1, world - 1}):  # among them the owner
        found = pool.run(without_gradients, algorithm, seed, absent_on, False, world=world)
        check_missing(found, absent_on, (seed, absent_on))


@pytest.mark.parametrize(
    ("world", "algorithm", "absent_on"), [(2, "normuon", 1), (2, "dion2", 0), (4, "muon", 2)]
)
def test_missing_gradients_compiled(pool: Any, world: int, algorithm: str, absent_on: int) -> None:
    seed = fresh_seed()
    found = pool.run(without_gradients, algorithm, seed, absent_on, True, world=world, timeout=240)
    check_missing(found, absent_on, seed)
    assert [one["graphs"] for one in found] == [1] * world, seed
