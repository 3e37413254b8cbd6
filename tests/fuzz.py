"""Random models on random meshes, three steps, against one process; and random plans.

    python tests/fuzz.py 500                # models on gloo processes, seeds 0 to 499
    python tests/fuzz.py --seed 17          # one of them again
    python tests/fuzz.py --plans 20000      # geometry, plans and wires, by arithmetic alone

A case follows from its seed alone, so every process draws it by itself. What is right is computed
from whole tensors: each rank says which of a parameter's elements it holds (their numbers are
placed in the same way as the parameter), and these must be the elements of the one-process result.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import reference
import torch
import torch.distributed as dist
from layouts import Weights, relative_error
from test_reduce import replica_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import ortho_func

STEPS = 3
EXTENTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 18)
# Of the change of a parameter. What bfloat16 rounds is compared with the library in one process.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 5e-2}
COMPILED_EVERY = 25  # one case in so many is compiled, at the price of ten others
# From this seed on, more is drawn: the cases before it stay what they were when they found faults.
MORE_FROM = 240
PRECISION = {torch.float64: 2, torch.float32: 1, torch.bfloat16: 0}

NAIVE = {
    "muon": reference.muon,
    "normuon": reference.normuon,
    "dion2": reference.dion2,
    "dion3": reference.dion3,
    "dion": reference.dion,
    "adamw": reference.adamw,
    "lion": reference.lion,
}
ELEMENTWISE = ("adamw", "lion")


# What a case is.


@dataclass(frozen=True)
class Realm:
    """How some of the parameters are wrapped, and on which ranks."""

    kind: str  # fsdp, hsdp, tp, ddp, placed, part or axis
    mesh: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """One parameter. `missing` says, by step, on which shards it has no gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    realm: int
    placements: tuple[Placement, ...]
    frozen: bool
    missing: tuple[str, ...]  # none, all or some


@dataclass(frozen=True)
class Group:
    """Parameters under one algorithm; `hyper` is the reference's, `own` how they are read.

    `extra` are options that the reference does not know.
    """

    algorithm: str
    weights: tuple[Weight, ...]
    hyper: Mapping[str, Any]
    own: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def dtype(self, weight: Weight) -> torch.dtype:
        """The narrowest of what a parameter and its momentum are rounded to."""
        kept = self.extra.get("momentum_dtype") or weight.dtype
        return min(weight.dtype, kept, key=PRECISION.__getitem__)

    def by_reference(self, weight: Weight) -> bool:
        """Whether the naive reference says what is right, or the library in one process."""
        return self.dtype(weight) != torch.bfloat16 and "nonfinite" not in self.extra


@dataclass(frozen=True)
class Case:
    """A model, how it is wrapped, and an optimizer's options."""

    seed: int
    world: int
    realms: tuple[Realm, ...]
    groups: tuple[Group, ...]
    options: Mapping[str, Any]

    @property
    def weights(self) -> list[Weight]:
        """All parameters, by group."""
        return [weight for group in self.groups for weight in group.weights]

    def values(self, step: int | None = None) -> dict[str, Tensor]:
        """The parameters, or the gradients of a step: whole, rounded once."""
        generator = torch.Generator().manual_seed(1000 * self.seed + (0 if step is None else step))
        found = {
            w.name: torch.randn(w.shape, generator=generator, dtype=torch.float64).to(w.dtype)
            for w in self.weights
        }
        for group in self.groups if step == 2 else ():
            for number, w in enumerate(group.weights if "nonfinite" in group.extra else ()):
                if number % 3 != 2:  # something of it is not finite
                    where = zlib.crc32(w.name.encode()) % math.prod(w.shape)
                    found[w.name].view(-1)[where] = math.inf if number % 3 else math.nan
        return found


# Drawing one.


def draw(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    world = rng.choice([1, 2, 2, 3, 4, 4, 5, 6, 8])
    realms = tuple(_realm(rng, world) for _ in range(rng.choice([1, 1, 2, 3])))
    total = rng.choice([1, 2, 3, 5, 8, 12, 30])
    groups: list[Group] = []
    while total > 0:
        count = rng.randint(1, total)
        groups.append(_group(rng, realms, len(groups), count))
        total -= count
    double = any(w.dtype == torch.float64 for group in groups for w in group.weights)
    options = {
        "wire": rng.choice(["auto", "auto", "dense", "exact"]),
        "balance": rng.choice(["cost", "cost", "uniform"]),
        "bucket_bytes": rng.choice([64, 512, 4096, 10**7]),
        "wire_dtype": torch.float64 if double or rng.random() < 0.3 else torch.float32,
        "compile": {"backend": "eager"} if seed % COMPILED_EVERY == COMPILED_EVERY - 1 else False,
        "hops": rng.choice(["one", "two"]),
    }
    case = Case(seed, world, realms, tuple(groups), options)
    return case if seed < MORE_FROM else _more(random.Random(-seed), case)


def _more(rng: random.Random, case: Case) -> Case:
    """A case with the options drawn that came later."""
    if rng.random() < 0.3:
        return _reducing(case)
    return replace(case, groups=tuple(_with_extra(rng, group) for group in case.groups))


def _reducing(case: Case) -> Case:
    """Gradients that differ by replica and that the optimizer averages; there all are there."""
    groups = []
    for group in case.groups:
        weights = tuple(
            replace(
                w,
                missing=("none",) * STEPS,
                dtype=torch.float32 if w.dtype == torch.bfloat16 else w.dtype,
            )
            for w in group.weights
        )
        groups.append(replace(group, weights=weights))
    options = {**case.options, "reduce_gradients": True}
    return replace(case, groups=tuple(groups), options=options)


def _with_extra(rng: random.Random, group: Group) -> Group:
    """What the library in one process is asked about; it knows no gradients missing in part."""
    extra: dict[str, Any] = {}
    partly = any("some" in w.missing for w in group.weights)
    dtypes = [None, None, torch.float32] + ([] if partly else [torch.bfloat16])
    if (chosen := rng.choice(dtypes)) is not None:
        extra["momentum_dtype"] = chosen
    if not partly and rng.random() < 0.4:
        extra["nonfinite"] = "skip"
    return replace(group, extra=extra)


def _realm(rng: random.Random, world: int) -> Realm:
    ranks = tuple(range(world))
    kinds = ["fsdp", "fsdp", "ddp", "placed", "placed"]
    kinds += ["part"] if world > 1 else []
    pairs = [(a, world // a) for a in range(2, world) if world % a == 0]
    kind = rng.choice(kinds + ["hsdp", "tp", "axis", "placed"] * bool(pairs))
    if kind == "placed":
        mesh = rng.choice([(world,), *pairs, *pairs])
        return Realm(kind, mesh, tuple(rng.sample(ranks, world)))
    if kind == "part":
        some = sorted(rng.sample(ranks, rng.randint(1, world - 1)))
        return Realm(kind, (len(some),), tuple(some))
    mesh = (world,) if kind in ("fsdp", "ddp") else rng.choice(pairs)
    return Realm(kind, mesh, ranks)


def _group(rng: random.Random, realms: Sequence[Realm], number: int, count: int) -> Group:
    algorithm = rng.choice([*NAIVE, "muon", "normuon"])
    own, make = _reading(rng, algorithm)
    hyper: dict[str, Any] = {
        "lr": 0.1,
        "weight_decay": rng.choice([0.0, 0.2]),
        "cautious": rng.random() < 0.2,
    }
    if algorithm in ELEMENTWISE:
        hyper["betas"] = (0.9, 0.95)
    else:
        hyper["momentum"] = rng.choice([0.9, 0.95])
        if rng.random() < 0.7:
            hyper["adjust_lr_fn"] = rng.choice(
                ["original", "match_rms_adamw", "spectral_norm", "none"]
            )
    if algorithm in ("muon", "normuon"):
        hyper["nesterov"] = rng.random() < 0.5
    if algorithm in ("normuon", "dion3"):
        hyper["beta2"] = rng.choice([0.5, 0.9])
    if algorithm in ("dion2", "dion3"):
        hyper["fraction"] = rng.choice([0.25, 0.3, 1.0])
    if algorithm == "dion":
        hyper["rank_fraction"] = rng.choice([0.25, 0.5, 1.0])
    shapes = [make() for _ in range(min(count, 4))]
    weights = tuple(
        _weight(rng, realms, f"g{number}.w{n}", rng.choice(shapes), algorithm, hyper, own)
        for n in range(count)
    )
    return Group(algorithm, weights, hyper, own)


def _reading(rng: random.Random, algorithm: str) -> tuple[dict[str, Any], Any]:
    """How a group's parameters are read, and what draws their shapes."""

    def extent() -> int:
        return rng.choice(EXTENTS)

    if algorithm in ELEMENTWISE:
        return {}, lambda: tuple(rng.choice(EXTENTS[:8]) for _ in range(rng.randint(1, 4)))
    dims = rng.choice([2, 2, 2, 3, 4])
    flatten = None if dims == 2 else rng.random() < 0.5
    own: dict[str, Any] = {} if flatten is None else {"flatten": flatten}
    rows = None
    how = rng.choice(["whole", "whole", "splits", "heads"])
    if how == "splits":
        own["split_sizes"] = tuple(rng.choice([1, 2, 3, 4, 8]) for _ in range(rng.choice([2, 3])))
        rows = sum(own["split_sizes"])
    elif how == "heads":
        own["num_heads"] = rng.choice([2, 3, 6])
        rows = own["num_heads"] * rng.randint(1, 4)

    def shape() -> tuple[int, ...]:
        tall = extent() if rows is None else rows
        if flatten:
            return (tall, extent(), *(rng.randint(1, 3) for _ in range(dims - 2)))
        return (*(rng.randint(1, 5) for _ in range(dims - 2)), tall, extent())

    return own, shape


def _weight(
    rng: random.Random,
    realms: Sequence[Realm],
    name: str,
    shape: tuple[int, ...],
    algorithm: str,
    hyper: Mapping[str, Any],
    own: Mapping[str, Any],
) -> Weight:
    realm = rng.randrange(len(realms))
    axes = {"placed": len(realms[realm].mesh), "part": 1, "axis": 1, "tp": 1}
    dims = min(2, len(shape)) if own.get("flatten") else len(shape)
    kind, mesh = realms[realm].kind, realms[realm].mesh
    placements = tuple(
        _placement(rng, shape[:dims], mesh[1] if kind == "tp" else 1)
        for _ in range(axes.get(kind, 0))
    )
    dtype = rng.choice([torch.float64, torch.float32, torch.float32, torch.bfloat16])
    partly = dtype != torch.bfloat16 and _may_miss_in_part(algorithm, hyper)
    ways = ["none"] * 8 + ["all"] + (["some"] * 2 if partly else [])
    missing = tuple(rng.choice(ways) for _ in range(STEPS))
    frozen = rng.random() < 0.1
    return Weight(name, shape, dtype, realm, placements, frozen, missing)


def _placement(rng: random.Random, shape: Sequence[int], ways: int) -> Placement:
    """Any, but that fully_shard is not given a shard that `ways` parts leave empty.

    (It makes all dims of it empty, not only its own, and construction refuses what results.)
    """
    full = [dim for dim, n in enumerate(shape) if -(-n // ways) * (ways - 1) < n]
    chosen = rng.choice([rng.randrange(len(shape)), 0, None])
    return Shard(chosen) if chosen in full else Replicate()


def _may_miss_in_part(algorithm: str, hyper: Mapping[str, Any]) -> bool:
    """Whether the reference says what happens when shards of one parameter lack gradients."""
    return algorithm in ("muon", "dion2", "lion") and not hyper["cautious"]


# On each rank.


class Held(NamedTuple):
    """What a rank has of a parameter after the steps."""

    numbers: Tensor  # of the elements
    values: Tensor
    momentum: Tensor | None


def train(rank: int, world: int, seed: int) -> dict[str, Held]:
    """Build the case, take its steps, and say what is here."""
    case = draw(seed)
    every = {w.name: torch.arange(math.prod(w.shape)).double().view(w.shape) for w in case.weights}
    placed = _place(case, case.values())
    held = {name: _local(t.detach()).flatten().long() for name, t in _place(case, every).items()}
    for weight in case.weights:
        placed[weight.name].requires_grad_(not weight.frozen)
    optimizer = optimizer_for(case, placed, dist.group.WORLD)
    for step in range(STEPS):
        gradients = case.values(step + 1)
        for weight in case.weights:
            p, here = placed[weight.name], held[weight.name]
            p.grad = None
            if not weight.frozen and not misses(case, weight, step, here):
                p.grad = torch.zeros_like(p)
                shard, whole = _local(p.grad), gradients[weight.name]
                if "reduce_gradients" in case.options:
                    whole = of_replica(whole, p, rank, f"{seed} {weight.name} {step}")
                shard.copy_(whole.flatten()[here].view(shard.shape))
        optimizer.step()
    if "reduce_gradients" in case.options:
        optimizer.average_state_()  # type: ignore[attr-defined]
    found = {}
    for name, p in placed.items():
        momentum = optimizer.state[p].get("momentum_buffer")
        kept = None if momentum is None else _local(momentum).flatten().clone()
        found[name] = Held(held[name], _local(p.detach()).flatten().clone(), kept)
    return found


def of_replica(whole: Tensor, parameter: Tensor, rank: int, key: str) -> Tensor:
    """This replica's gradient: they differ, and `whole` is their mean."""
    if isinstance(parameter, DTensor) and parameter.device_mesh.get_coordinate() is None:
        return whole  # a mesh without this rank
    number, count = replica_of(parameter, rank)
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    parts = torch.randn((count, *whole.shape), generator=generator, dtype=torch.float64)
    return whole + (parts - parts.mean(0))[number].to(whole.dtype)


def misses(case: Case, weight: Weight, step: int, held: Tensor) -> bool:
    """Whether those who hold these elements have no gradient: the same for all replicas."""
    if weight.missing[step] != "some":
        return weight.missing[step] == "all"
    key = f"{case.seed} {weight.name} {step} {held.tolist()}"
    return zlib.crc32(key.encode()) % 2 == 0


def optimizer_for(
    case: Case, placed: Mapping[str, Tensor], process_group: Any, **options: Any
) -> torch.optim.Optimizer:
    """The optimizer of a case over parameters, by name."""
    groups = []
    for group in case.groups:
        there = [(w.name, placed[w.name]) for w in group.weights if w.name in placed]
        if there:
            hyper = {
                "orthogonalizer": "svd", "selection": "global",
                **group.hyper, **group.own, **group.extra,
            }  # fmt: skip
            groups.append({"params": there, "algorithm": group.algorithm, **hyper})
    return ortho_func.Muon(groups, process_group=process_group, **{**case.options, **options})


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _place(case: Case, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for number, realm in enumerate(case.realms):
        weights = [w for w in case.weights if w.realm == number]
        found.update(_wrap(realm, weights, {w.name: tensors[w.name] for w in weights}))
    return {name: found[name] for name in tensors}


def _wrap(
    realm: Realm, weights: Iterable[Weight], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    if realm.kind == "ddp":
        return {name: nn.Parameter(t.clone()) for name, t in tensors.items()}
    if realm.kind in ("fsdp", "hsdp"):
        names = ("replicate", "shard")[-len(realm.mesh) :]
        grid = init_device_mesh("cpu", realm.mesh, mesh_dim_names=names)
        return _fully_sharded(tensors, grid)
    if realm.kind == "tp":
        grid = init_device_mesh("cpu", realm.mesh, mesh_dim_names=("fsdp", "tp"))
        return _fully_sharded(_distributed(weights, tensors, grid["tp"]), grid["fsdp"])
    if realm.kind == "axis":
        grid = init_device_mesh("cpu", realm.mesh, mesh_dim_names=("a", "b"))
        return _distributed(weights, tensors, grid["b"])
    grid = DeviceMesh("cpu", torch.tensor(realm.ranks).view(realm.mesh))
    return _distributed(weights, tensors, grid)


def _distributed(
    weights: Iterable[Weight], tensors: Mapping[str, Tensor], grid: DeviceMesh
) -> dict[str, Tensor]:
    return {
        w.name: nn.Parameter(
            distribute_tensor(tensors[w.name].clone(), grid, w.placements, src_data_rank=None)
        )
        for w in weights
    }


def _fully_sharded(tensors: Mapping[str, Tensor], grid: DeviceMesh) -> dict[str, Tensor]:
    safe = {name.replace(".", "_"): name for name in tensors}
    module = Weights({})
    for short, name in safe.items():
        module.register_parameter(short, nn.Parameter(tensors[name].detach().clone()))
    fully_shard(module, mesh=grid)
    return {safe[short]: p for short, p in module.named_parameters()}


# In one process.


class Right(NamedTuple):
    """A parameter after the steps, and its momentum."""

    values: Tensor
    momentum: Tensor | None


def in_one_process(case: Case, found: Sequence[Mapping[str, Held]]) -> dict[str, Right]:
    """What the naive reference makes of a case, and the library of what is rounded or skipped."""
    right: dict[str, Right] = {}
    for group in case.groups:
        wide = [w for w in group.weights if group.by_reference(w)]
        right.update(_by_reference(case, group, wide, found))
    right.update(_by_the_library(case))
    return right


def _by_reference(
    case: Case, group: Group, weights: Sequence[Weight], found: Sequence[Mapping[str, Held]]
) -> dict[str, Right]:
    start = case.values()
    params = {w.name: start[w.name].double() for w in weights}
    state: Any = None
    for step in range(STEPS):
        whole = case.values(step + 1)
        absent = {w.name: _absent(case, w, step, found) for w in weights}
        grads = {
            name: None if gone.all() else whole[name].double().masked_fill(gone, 0)
            for name, gone in absent.items()
        }
        old, before = params, state
        if before is not None:  # a shard without a gradient sends zeros, its momentum too
            state = {n: {**s, **_silenced(s, absent[n])} for n, s in before.items()}
        params, state = NAIVE[group.algorithm](params, [grads], state, **group.hyper, **group.own)
        for name, gone in absent.items():
            params[name] = torch.where(gone, old[name], params[name])
            if before is not None and "momentum_buffer" in state[name]:
                kept = before[name]["momentum_buffer"]
                state[name]["momentum_buffer"] = torch.where(
                    gone, kept, state[name]["momentum_buffer"]
                )
            elif "momentum_buffer" in state[name]:
                state[name]["momentum_buffer"].masked_fill_(gone, 0)
    return {name: Right(params[name], state[name].get("momentum_buffer")) for name in params}


def _silenced(state: Mapping[str, Any], gone: Tensor) -> dict[str, Tensor]:
    if "momentum_buffer" not in state or gone.all():
        return {}
    return {"momentum_buffer": state["momentum_buffer"].masked_fill(gone, 0)}


def _absent(case: Case, weight: Weight, step: int, found: Sequence[Mapping[str, Held]]) -> Tensor:
    """Which elements of a parameter have no gradient in a step."""
    gone = torch.zeros(math.prod(weight.shape), dtype=torch.bool)
    if weight.frozen:
        gone.fill_(True)
    for one in found:
        numbers = one[weight.name].numbers
        if misses(case, weight, step, numbers):
            gone[numbers] = True
    return gone.view(weight.shape)


def _by_the_library(case: Case) -> dict[str, Right]:
    start = case.values()
    narrow = [w for group in case.groups for w in group.weights if not group.by_reference(w)]
    params = {w.name: nn.Parameter(start[w.name], not w.frozen) for w in narrow}
    if not params:
        return {}
    optimizer = optimizer_for(case, params, None, compile=False, reduce_gradients=False)
    for step in range(STEPS):
        whole = case.values(step + 1)
        for w in narrow:
            gone = w.frozen or w.missing[step] == "all"
            params[w.name].grad = None if gone else whole[w.name]
        optimizer.step()
    return {
        name: Right(p.detach(), optimizer.state[p].get("momentum_buffer"))
        for name, p in params.items()
    }


# Comparing.


def difference(case: Case, found: Sequence[Mapping[str, Held]]) -> str | None:
    """The first thing that is not as in one process, in words."""
    right, start = in_one_process(case, found), case.values()
    pairs = [(group, w) for group in case.groups for w in group.weights]
    for group, weight in pairs:
        name, limit = weight.name, TOLERANCE[group.dtype(weight)]
        seen = torch.zeros(math.prod(weight.shape), dtype=torch.int64)
        change = (right[name].values.double() - start[name].double()).flatten()
        size = float(change.norm())
        for rank, one in enumerate(found):
            numbers, values, momentum = one[name]
            seen[numbers] += 1
            moved = values.double() - start[name].double().flatten()[numbers]
            error = float((moved - change[numbers]).norm())
            rounded = 2.0**-8 * float(values.double().norm())  # some elements one step further
            # A parameter that should not move keeps its bits.
            if not error <= limit * size + (rounded if size and limit > 0.01 else 0):
                return f"{name} on rank {rank}: off by {error:.3g}, it moved by {size:.3g}"
            kept = right[name].momentum
            if momentum is not None and kept is not None:
                part = kept.flatten()[numbers]
                worst = relative_error(momentum, part) * float(part.double().norm())
                if not worst <= limit * float(kept.double().norm()) + 1e-12:
                    return f"momentum of {name} on rank {rank}: off by {worst:.3g}"
        if not bool((seen > 0).all()):
            return f"{name}: nobody holds some of it"
    return None


def reproducer(seed: int) -> str:
    """The command that runs one case again."""
    return f"python tests/fuzz.py --seed {seed}"


def _first_cause(error: AssertionError) -> str:
    """In one line, what went wrong on the rank that the others did not wait for in vain."""
    failed = [
        f"rank {rank}: {outcome.kind}: {outcome.message}"
        for rank, outcome in getattr(error, "outcomes", {}).items()
        if hasattr(outcome, "message")
    ]
    failed.sort(key=lambda text: "Connection closed" in text or "Timed out" in text)
    return " ".join((failed[0] if failed else f"{error}").split())


def run(pool: Any, seed: int, *, timeout: float = 60.0) -> str | None:
    """Run a case; None, or what was wrong and how to see it again."""
    case = draw(seed)
    if case.options["compile"]:
        timeout *= 4
    try:
        wrong = difference(case, pool.run(train, seed, world=case.world, timeout=timeout))
    except AssertionError as error:
        wrong = _first_cause(error)
    return None if wrong is None else f"{reproducer(seed)}  # {wrong}"


def fuzz(seeds: Iterable[int], *, patience: float = math.inf) -> list[str]:
    """Run cases; what was wrong, each with its reproducer, printed as it is found."""
    from pool import Pool

    pool, wrong, start, done = Pool(), [], time.monotonic(), 0
    try:
        for seed in seeds:
            if time.monotonic() - start > patience:
                break
            fault = run(pool, seed)
            done += 1
            if fault is not None:
                print(fault, flush=True)
                wrong.append(fault)
    finally:
        pool.close()
    print(f"{done} models, {len(wrong)} wrong, {time.monotonic() - start:.0f} s")
    return wrong


def fuzz_plans(count: int) -> None:
    """Draw plans and simulate every rank of each; a failure prints its example."""
    from hypothesis import given, settings
    from hypothesis import strategies as st
    from test_wire import EXAMPLES, Plan, check_round_trip, plans

    def one(made: Plan, seed: int) -> None:
        torch.manual_seed(seed)
        check_round_trip(made)

    start = time.monotonic()
    chosen = settings(EXAMPLES, max_examples=count, derandomize=False)
    chosen(given(plans(), st.integers(0, 2**31 - 1))(one))()
    print(f"{count} plans, none wrong, {time.monotonic() - start:.0f} s")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("count", type=int, nargs="?", help="how many models")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="one model alone")
    parser.add_argument("--plans", type=int, help="how many plans")
    args = parser.parse_args()
    if args.seed is not None:
        print(draw(args.seed))
    seeds = [] if args.count is None else range(args.first, args.first + args.count)
    wrong = fuzz([args.seed] if args.seed is not None else seeds)
    if args.plans:
        fuzz_plans(args.plans)
    return bool(wrong)


if __name__ == "__main__":
    # Workers import `train` by the module's name, which is not __main__.
    import fuzz as this

    sys.exit(this.main())
