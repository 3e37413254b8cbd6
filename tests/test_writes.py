"""bf16 parameters that follow the fp32 run: rounded at random, or held in two parts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from layouts import (
    WHOLE,
    Replicate,
    Shard,
    by_fully_shard,
    by_placements,
    gather,
    scatter_like,
    whole_tensors,
)
from test_compile import Trace, no_graph_breaks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import ortho_func
from ortho_func import (
    Muon,
    apply_compensated,
    apply_updates,
    compensated_add,
    random_bits,
    state_bytes,
    stochastic_round,
)
from ortho_func.geometry import local
from ortho_func.primitives.rounding import positions

BF16 = torch.bfloat16
KEPT = ("stochastic", "compensated")


# The primitives.


def bits_for(x: Tensor, key: int = 3) -> Tensor:
    return random_bits(torch.arange(x.numel()).reshape(x.shape), torch.tensor(key))


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """The bf16 numbers next to x on either side of it (itself, where it is one), in fp64."""
    nearest = x.to(BF16)
    up = torch.where(
        nearest.double() < x.double(), torch.nextafter(nearest, nearest + torch.inf), nearest
    )
    down = torch.where(nearest.double() > x, torch.nextafter(nearest, nearest - torch.inf), nearest)
    return down.double(), up.double()


def test_one_of_the_two_neighbours() -> None:
    torch.manual_seed(0)
    x = torch.randn(100_000) * torch.randn(100_000).exp2() ** 3
    rounded = stochastic_round(x, bits_for(x)).double()
    down, up = neighbours(x)
    assert ((rounded == down) | (rounded == up)).all()
    assert (rounded == down).any()
    assert (rounded == up).any()
    share = (x.double() - down) / (up - down).clamp_min(1e-300)
    # Over all of them, up is as frequent as it should be: 4.5 deviations of a sum of coins.
    coins = (rounded == up)[up > down].double() - share[up > down]
    assert coins.sum().abs() < 4.5 * (share * (1 - share)).sum().sqrt()


def test_the_mean_is_right() -> None:
    for value in (1.001, -1.001, 0.3, 1e-3, -7.77e-30):
        x = torch.full((200_000,), value)
        rounded = stochastic_round(x, bits_for(x, key=11)).double()
        gap = (rounded.max() - rounded.min()).item()
        assert gap > 0
        assert abs(rounded.mean() - x[0].double()) < 4.5 * gap / 2 / 200_000**0.5, value


def test_what_bf16_holds_stays_and_what_is_not_finite_too() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(BF16)  # all there are
    for key in range(3):
        rounded = stochastic_round(every.float(), bits_for(every.float(), key))
        assert rounded.isnan().equal(every.isnan())
        there = ~every.isnan()
        assert torch.equal(rounded[there].view(torch.int16), every[there].view(torch.int16))
    nans = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert stochastic_round(nans, torch.full((3,), 0xFFFF)).isnan().all()
    with pytest.raises(TypeError, match="float32"):
        stochastic_round(torch.ones(1).double(), torch.ones(1))


def test_bits_are_uniform_and_of_each_place_and_key_alone() -> None:
    place = torch.arange(2**16)
    found = [random_bits(place, torch.tensor(key)) for key in (0, 1, 2, 1 << 32, (1 << 32) + 1)]
    for bits in found:
        ones = torch.stack([(bits >> n & 1).double().mean() for n in range(32)])
        assert ((ones - 0.5).abs() < 5 * 0.5 / 2**8).all()
        assert (bits < 2**32).all()
        assert (bits >= 0).all()
    for n, one in enumerate(found):
        uniform = (one & 0xFFFF).double() / 2**16 - 0.5
        neighbour = (uniform[1:] * uniform[:-1]).mean()
        assert neighbour.abs() < 5 / 12 / 2**8
        for other in found[:n]:
            crossed = (uniform * ((other & 0xFFFF).double() / 2**16 - 0.5)).mean()
            assert crossed.abs() < 5 / 12 / 2**8
    # Of one place over the steps, too.
    steps = torch.stack([random_bits(place[:8], torch.tensor(key)) for key in range(4096)])
    assert ((steps & 0xFFFF).double().mean(0) / 2**16 - 0.5).abs().max() < 5 * 0.29 / 64
    # Beyond what 32 bits count.
    far = random_bits(place + 2**32, torch.tensor(0))
    assert not torch.equal(far, found[0])
    assert torch.equal(random_bits(place[7:9] + 2**32, torch.tensor(0)), far[7:9])


def test_positions_of_a_part_are_those_of_the_whole() -> None:
    whole = torch.arange(3 * 4 * 5).reshape(3, 4, 5)
    terms = positions((1, 0, 2), (2, 3, 3), (3, 4, 5), "cpu")
    assert torch.equal(sum(terms[1:], terms[0]), whole[1:3, 0:3, 2:5])
    assert all(term.untyped_storage().nbytes() <= 3 * 8 for term in terms)


def test_two_parts_are_sixteen_bits() -> None:
    torch.manual_seed(1)
    x, c = torch.randn(1000).to(BF16), torch.zeros(1000).to(BF16)
    right = x.double()
    for _ in range(200):
        update = 1e-4 * torch.randn(1000)
        right = right + update
        x, c = compensated_add(x, c, update)
        assert ((x.double() - right).abs() <= 2.0**-8 * right.abs() + 1e-4).all()  # an ulp
    held = x.double() + c.double()
    assert ((held - right).abs() / (right.abs() + 1e-2)).max() < 200 * 2.0**-17


def test_no_update_changes_neither_part_and_infinity_stays() -> None:
    x, c = torch.tensor([1.0, 1.0078125]).to(BF16), torch.tensor([0.00390625, -0.00390625]).to(BF16)
    new, kept = compensated_add(x, c, torch.zeros(2))  # both are ties
    assert torch.equal(new, x)
    assert torch.equal(kept, c)
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0]).to(BF16)
    for _ in range(2):
        x, c = compensated_add(x, torch.zeros(4).to(BF16), torch.tensor([1.0, 1.0, 1.0, torch.nan]))
        assert x[:2].tolist() == [torch.inf, -torch.inf]
        assert x[2:].isnan().all()
        assert not c[:2].any()


# A hundred steps of every algorithm.


def ones_like(x: Tensor) -> Tensor:
    """An update that is the same in every step and place."""
    return torch.ones_like(x)


MATRIX_OPTIONS: dict[str, dict[str, Any]] = {
    "muon": {},
    "normuon": {"beta2": 0.9},
    "dion2": {"fraction": 1.0, "selection": "global"},
    "dion3": {"fraction": 1.0, "selection": "global", "beta2": 0.9},
    "dion": {"rank_fraction": 0.03},  # of rank one, as ones are
}
SIDE = 32


def constant(algorithm: str, dtype: torch.dtype, lr: float, decay: float, **options: Any) -> Any:
    """An optimizer whose every step adds −lr to every element of ones, and its parameter."""
    shape = (SIDE, SIDE) if algorithm in WHOLE else (SIDE * SIDE,)
    p = nn.Parameter(torch.ones(shape, dtype=dtype))
    p.grad = torch.ones(shape, dtype=dtype)
    group = {"params": [p], "algorithm": algorithm, "momentum_dtype": torch.float32}
    group["variance_dtype"] = torch.float32
    if algorithm in WHOLE:
        group |= {**MATRIX_OPTIONS[algorithm], "adjust_lr_fn": "none"}
    if algorithm == "dion":
        lr, decay = lr * SIDE, decay / SIDE  # PQᵀ of ones has elements 1/√(RC)
    else:
        options = {"orthogonalizer": ones_like, **options}
    return Muon([group], lr=lr, weight_decay=decay, momentum=0.9, **options), p


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("lr", [1e-3, 1e-4])
@pytest.mark.parametrize("algorithm", [*WHOLE, "adamw", "lion"])
def test_a_hundred_small_steps_follow_fp32(algorithm: str, lr: float, decay: float) -> None:
    ends = {}
    for dtype, how in [(torch.float32, "nearest"), *((BF16, how) for how in ("nearest", *KEPT))]:
        optimizer, p = constant(algorithm, dtype, lr, decay, bf16_writes=how)
        for _ in range(100):
            optimizer.step()
        ends[dtype, how] = p.detach().double(), optimizer.state[p].get("compensation")
    right = ends[torch.float32, "nearest"][0]
    gone = 1 - right.mean()
    assert 90 * lr < gone < 200 * lr
    assert (ends[BF16, "nearest"][0] == 1).all()  # what the options are for
    mean = ends[BF16, "stochastic"][0].mean()
    # A step is a coin of one ulp (2⁻⁸) with odds p: a hundred of them, over SIDE² elements.
    odds = gone / 100 * 2**8
    assert (mean - right.mean()).abs() < 4 * (odds * (1 - odds) * 100).sqrt() * 2**-8 / SIDE + 1e-6
    value, kept = ends[BF16, "compensated"]
    assert (value - right).abs().max() <= 2**-8
    assert (value + kept.double() - right).abs().max() < 100 * 2**-18


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_never_further_than_one_unit(algorithm: str) -> None:
    """Each single step ends on a neighbour of where fp32 arithmetic from the same start ends."""
    optimizer, p = constant(algorithm, BF16, 3e-3, 0.5, bf16_writes="stochastic")
    seen = set()
    for _ in range(20):
        before = p.detach().double()
        optimizer.step()
        exact = before - 3e-3 * 0.5 * before - 3e-3
        assert ((p.detach().double() - exact).abs() < 2.0**-8 * 1.001).all()  # an ulp below 1
        seen |= set(p.detach().flatten().tolist())
    assert len(seen) > 5


@pytest.mark.parametrize("how", KEPT)
def test_not_finite_stays(how: str) -> None:
    for algorithm in ("muon", "adamw", "lion"):
        optimizer, p = constant(algorithm, BF16, 1e-3, 0.1, bf16_writes=how)
        with torch.no_grad():
            p.view(-1)[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan]).to(BF16)
        for _ in range(3):
            optimizer.step()
        assert not p.view(-1)[:3].isfinite().any(), algorithm
        assert p.view(-1)[3:].isfinite().all()


# State: what it costs, and what becomes of it.

TREE = {"w": (6, 10), "heads": (8, 6), "stack": (3, 4, 5), "bias": (7,), "lion": (9,)}


def model_of(dtype: torch.dtype = BF16, seed: int = 0) -> dict[str, nn.Parameter]:
    return {n: nn.Parameter(x.to(dtype)) for n, x in whole_tensors(TREE, seed).items()}


def groups_of(params: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [
        {"params": "w"},
        {"params": "heads", "num_heads": 2},
        {"params": "stack", "flatten": False},
        {"params": "bias", "algorithm": "adamw"},
        {"params": "lion", "algorithm": "lion"},
    ]
    here = [group for group in groups if group["params"] in params]
    return [{**group, "params": [(group["params"], params[group["params"]])]} for group in here]


def optimizer_of(algorithm: str, params: dict[str, Any], **options: Any) -> Any:
    cls, _, extra = WHOLE[algorithm]
    return cls(groups_of(params), **{"lr": 1e-3, **extra, **options})


def steps_of(optimizer: Any, params: dict[str, Any], steps: range, missing: bool = False) -> None:
    for step in steps:
        chance = torch.Generator().manual_seed(step)
        found = whole_tensors(TREE, 100 + step)
        for name, grad in ((name, found[name]) for name in params):
            absent = missing and torch.rand((), generator=chance) < 0.4
            grad = grad.to(params[name].dtype)
            params[name].grad = None if absent else scatter_like(grad, params[name])
        optimizer.step()


def bits(x: Tensor) -> Tensor:
    return local(x.detach()).contiguous().view(torch.int16)


def test_what_it_costs() -> None:
    sizes = {n: torch.Size(shape).numel() for n, shape in TREE.items()}
    params = model_of()
    plain = state_bytes(optimizer_of("muon", params))
    random = state_bytes(optimizer_of("muon", params, bf16_writes="stochastic"))
    two = state_bytes(optimizer_of("muon", params, bf16_writes="compensated"))
    assert {n: random[n] - plain[n] for n in TREE} == dict.fromkeys(TREE, 8)
    assert {n: two[n] - plain[n] for n in TREE} == {n: 2 * size for n, size in sizes.items()}
    wide = model_of(torch.float32)
    for how in KEPT:
        found = state_bytes(optimizer_of("muon", wide, bf16_writes=how))
        assert found == state_bytes(optimizer_of("muon", wide))


def test_names_are_checked_and_changes_take_effect() -> None:
    params = model_of()
    with pytest.raises(ValueError, match="bf16_writes must be one of 'nearest', 'stochastic'"):
        optimizer_of("muon", params, bf16_writes="random")
    optimizer = optimizer_of("muon", params)
    for how, key in (("stochastic", "rounding_key"), ("compensated", "compensation")):
        for group in optimizer.param_groups:
            group["bf16_writes"] = how
        steps_of(optimizer, params, range(1))
        for p in params.values():
            there = {"rounding_key", "compensation"} & set(optimizer.state[p])
            assert there == {key}


@pytest.mark.parametrize(
    ("algorithm", "how"), [("muon", KEPT[0]), ("dion3", KEPT[1]), ("dion", KEPT[0])]
)
def test_compiled_once_and_equal(algorithm: str, how: str) -> None:
    """Missing gradients too; and what is missing keeps its bits."""
    models, backend = [model_of(), model_of()], Trace()
    optimizers = [
        optimizer_of(algorithm, params, bf16_writes=how, weight_decay=0.1, compile=option)
        for params, option in zip(models, (False, {"backend": backend}), strict=True)
    ]
    with no_graph_breaks():
        for step in range(4):
            before = {n: (bits(p), p) for n, p in models[1].items()}
            before = {n: (old.clone(), p) for n, (old, p) in before.items()}
            for params, optimizer in zip(models, optimizers, strict=True):
                steps_of(optimizer, params, range(step, step + 1), missing=True)
            for old, p in before.values():
                assert p.grad is not None or torch.equal(bits(p), old)
    assert len(backend.traced) == 1
    for one, two in zip(*(params.values() for params in models), strict=True):
        # Rates are tensors in fp32 there, so a sum may end on the other side of a tie.
        assert (bits(one) - bits(two)).abs().max() <= 1
        assert (bits(one) != bits(two)).float().mean() < 0.05
        for key, value in optimizers[0].state[one].items():
            if value.dtype == torch.int64:
                assert torch.equal(value, optimizers[1].state[two][key])


def test_inductors_code_rounds_alike() -> None:
    """The bits are integers and so equal; sums may be rounded otherwise, once in a while."""
    models = [model_of(), model_of()]
    for params, option in zip(models, (False, True), strict=True):
        optimizer = Muon(
            [{"params": [params["w"]]}, {"params": [params["bias"]], "algorithm": "lion"}],
            lr=1e-2, bf16_writes="stochastic", orthogonalizer=torch.sign, compile=option,
        )  # fmt: skip
        for step in range(8):
            for name in ("w", "bias"):
                params[name].grad = whole_tensors(TREE, step)[name].to(BF16)
            optimizer.step()
    for name in ("w", "bias"):
        one, two = (params[name].detach().float() for params in models)
        assert (one == two).float().mean() > 0.9
        assert (one - two).abs().max() <= 2**-7 * one.abs().max()


@pytest.mark.parametrize("how", KEPT)
@pytest.mark.parametrize("algorithm", list(WHOLE))
def test_resumed_bitwise(algorithm: str, how: str) -> None:
    options = {"bf16_writes": how, "weight_decay": 0.1}
    params = model_of()
    optimizer = optimizer_of(algorithm, params, **options)
    steps_of(optimizer, params, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    kept = {n: p.detach().clone() for n, p in params.items()}
    steps_of(optimizer, params, range(3, 6))
    again = {n: nn.Parameter(x.clone()) for n, x in kept.items()}
    other = optimizer_of(algorithm, again, **options)
    other.load_state_dict(saved)
    steps_of(other, again, range(3, 6))
    for name, p in params.items():
        assert torch.equal(bits(p), bits(again[name]))
    fresh = {n: nn.Parameter(x) for n, x in kept.items()}
    third = optimizer_of(algorithm, fresh, **options)  # of another key, or without what was kept
    steps_of(third, fresh, range(3, 6))
    assert not all(torch.equal(bits(p), bits(fresh[n])) for n, p in params.items())


def test_parameters_and_steps_draw_different_bits() -> None:
    params = [nn.Parameter(torch.ones(40, 40, dtype=BF16)) for _ in range(2)]
    optimizer = Muon(params, lr=1e-3, orthogonalizer=ones_like, bf16_writes="stochastic")
    moved = []
    for _ in range(2):
        before = [p.detach().clone() for p in params]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        moved += [(p.detach() != old).flatten() for p, old in zip(params, before, strict=True)]
    for n, one in enumerate(moved):
        assert 0.1 < one.float().mean() < 0.6
        for other in moved[:n]:
            both = (one & other).float().mean() - one.float().mean() * other.float().mean()
            assert both.abs() < 0.05


# On ranks.


def sharded(kind: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if kind == "hsdp":
        return by_fully_shard(tensors, (2, 2))
    if kind == "ddp":
        return {name: nn.Parameter(x.clone()) for name, x in tensors.items()}
    cuts = {
        "w": [Shard(0), Shard(1)],
        "heads": [Shard(1), Shard(0)],
        "stack": [Shard(0), Shard(1)],
        "bias": [Shard(0), Shard(0)],
        "lion": [Replicate(), Shard(0)],
    }
    return by_placements(tensors, (2, 2), cuts)


def on_ranks(rank: int, world: int, kind: str, how: str, options: dict[str, Any]) -> Any:
    """What ranks made of it, and one process: whole, and this rank's own bits."""
    tensors = {n: x.to(BF16) for n, x in whole_tensors(TREE, 5).items()}
    if options:  # to trace fewer is faster
        tensors = {name: tensors[name] for name in ("w", "bias")}
    one = {name: nn.Parameter(x.clone()) for name, x in tensors.items()}
    many = sharded(kind, tensors)
    group = torch.distributed.group.WORLD if kind == "ddp" else None
    exact = {"orthogonalizer": torch.sign, "wire_dtype": torch.float32, "momentum": 0.5}
    found = []
    for params, where in ((many, group), (one, None)):
        optimizer = optimizer_of(
            "muon", params, bf16_writes=how, process_group=where, **exact, **options
        )
        steps_of(optimizer, params, range(4))
        found.append({n: gather(p) for n, p in params.items()})
        if how == "compensated":
            found[-1] |= {
                f"{n} kept": gather(optimizer.state[p]["compensation"]) for n, p in params.items()
            }
    held = {n: local(p.detach()) for n, p in many.items()}
    return found, held


@pytest.mark.parametrize("how", KEPT)
@pytest.mark.parametrize("kind", ["hsdp", "ddp", "two dims"])
def test_every_layout_and_replica_has_the_same_bits(pool: Any, kind: str, how: str) -> None:
    """Signs for orthogonal factors: then arithmetic is exact whatever the sharding."""
    traced = kind == "hsdp" and how == "stochastic"
    options = {"compile": {"backend": "eager"}} if traced else {}
    results = pool.run(on_ranks, kind, how, options, world=4)
    for (many, one), _ in results:
        for name, right in one.items():
            assert torch.equal(many[name], right), (kind, name)
            assert torch.equal(many[name], results[0][0][0][name])
    if kind == "ddp":
        for _, held in results:
            assert all(torch.equal(x, results[0][1][n]) for n, x in held.items())


def in_teams(rank: int, world: int) -> dict[str, Tensor]:
    tensors = {n: x.to(BF16) for n, x in whole_tensors({"w": (8, 24)}, 5).items()}
    params = by_fully_shard(tensors, (world,))
    optimizer = Muon(
        list(params.items()), lr=1e-3, momentum=0.5, team_size=world, bf16_writes="stochastic"
    )
    assert "team" in optimizer.plan.describe()
    for step in range(3):
        params["w"].grad = scatter_like(
            whole_tensors({"w": (8, 24)}, step)["w"].to(BF16), params["w"]
        )
        optimizer.step()
    return {"w": gather(params["w"]), "before": tensors["w"]}


def test_shares_of_a_matrix_are_at_their_places(pool: Any) -> None:
    found = pool.run(in_teams, world=2)
    assert torch.equal(found[0]["w"], found[1]["w"])
    assert not torch.equal(found[0]["w"], found[0]["before"])


def saved_and_loaded(rank: int, world: int, how: str, directory: str) -> bool:
    """Saved by torch's distributed checkpoint, loaded anew: the same bits three steps later."""
    tensors = {n: x.to(BF16) for n, x in whole_tensors(TREE, 5).items()}
    runs = []
    for load in (False, True):
        model = nn.Module()
        for name, p in by_fully_shard(tensors, (world,)).items():
            model.register_parameter(name, p)
        params = dict(model.named_parameters())
        optimizer = optimizer_of("normuon", params, bf16_writes=how)
        if load:
            with torch.no_grad():
                for name, p in params.items():
                    local(p).copy_(runs[0][0][name])
            state = get_optimizer_state_dict(model, optimizer)
            dcp.load({"optim": state}, checkpoint_id=directory)
            set_optimizer_state_dict(model, optimizer, state)
        else:
            steps_of(optimizer, params, range(3))
            state = get_optimizer_state_dict(model, optimizer)
            dcp.save({"optim": state}, checkpoint_id=directory)
        between = {n: local(p.detach()).clone() for n, p in params.items()}
        steps_of(optimizer, params, range(3, 6))
        runs.append((between, {n: local(p.detach()) for n, p in params.items()}))
    return all(torch.equal(runs[0][1][n], x) for n, x in runs[1][1].items())


@pytest.mark.parametrize("how", KEPT)
def test_distributed_checkpoints_restore_it(pool: Any, tmp_path: Path, how: str) -> None:
    assert all(pool.run(saved_and_loaded, how, str(tmp_path), world=3))


# As functions.


def test_functions_round_by_a_key_or_keep_two_parts() -> None:
    start = {"w": torch.ones(32, 32).to(BF16), "wide": torch.ones(4, 4), "still": None}
    tx = ortho_func.lion(lr=1e-3, weight_decay=0.5)
    live = {name: x for name, x in start.items() if x is not None}

    def run(apply: Callable[..., Any], dtype: torch.dtype) -> Any:
        params = {n: x.to(dtype if n == "w" else x.dtype) for n, x in live.items()}
        state, kept = tx.init(params), {"w": torch.zeros_like(params["w"]), "wide": None}
        grads = {n: torch.ones_like(x) for n, x in params.items()}
        for _ in range(100):
            updates, new = tx.update(grads, state, params)
            params, kept = apply(params, kept, updates, state.steps)
            state = new
        return params

    right = run(lambda p, c, u, n: (apply_updates(p, u), c), torch.float32)
    nearest = run(lambda p, c, u, n: (apply_updates(p, u), c), BF16)
    random = run(lambda p, c, u, n: (apply_updates(p, u, rounding_key=n), c), BF16)
    two = run(lambda p, c, u, n: apply_compensated(p, c, u), BF16)
    traced = torch.compile(apply_updates, fullgraph=True, backend="eager")
    compiled = run(lambda p, c, u, n: (traced(p, u, rounding_key=n), c), BF16)
    assert (nearest["w"] == 1).all()
    assert (random["w"].float().mean() - right["w"].mean()).abs() < 3e-3
    assert (two["w"].float() - right["w"]).abs().max() <= 2**-8
    assert torch.equal(compiled["w"], random["w"])
    for found in (nearest, random, two):
        assert torch.equal(found["wide"], right["wide"])
    mapped = torch.func.vmap(lambda x: apply_updates(x, -1e-3 * x, rounding_key=torch.tensor(1)))
    assert mapped(torch.ones(2, 8).to(BF16)).shape == (2, 8)
