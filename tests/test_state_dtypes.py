"""Momentum and variance in a dtype of their own: rounded once, whatever the layout or form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from layouts import (
    WHOLE,
    Shard,
    by_fully_shard,
    by_placements,
    exact,
    gather,
    relative_error,
    train,
    whole_tensors,
)
from torch import Tensor, nn

import ortho_func
from ortho_func import apply_updates, state_bytes
from ortho_func.primitives.momentum import ema, heavy_ball, nesterov

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = {"wide": (4, 9), "tall": (9, 4), "square": (6, 6)}
HYPER = {"lr": 0.1, "weight_decay": 0.2}
BOTH = {"momentum_dtype": BF16, "variance_dtype": BF16}


def weights(dtype: torch.dtype = FP32, seed: int = 0) -> dict[str, nn.Parameter]:
    return {n: nn.Parameter(x.to(dtype)) for n, x in whole_tensors(SHAPES, seed).items()}


def gradients(count: int, dtype: torch.dtype = FP32) -> list[dict[str, Any]]:
    return [
        {name: x.to(dtype) for name, x in whole_tensors(SHAPES, 1 + n).items()}
        for n in range(count)
    ]


def dtypes(optimizer: torch.optim.Optimizer) -> dict[str, set[torch.dtype]]:
    found: dict[str, set[torch.dtype]] = {}
    for state in optimizer.state.values():
        for name, tensor in state.items():
            found.setdefault(name, set()).add(tensor.dtype)
    return found


# What the sums are rounded to, and how often.


def rounded(x: Tensor) -> Tensor:
    return x.double().to(BF16)


@pytest.mark.parametrize("grad_dtype", [BF16, FP32])
@pytest.mark.parametrize("tensor", [False, True])
def test_sums_are_rounded_once(grad_dtype: torch.dtype, tensor: bool) -> None:
    torch.manual_seed(0)
    m, g = torch.randn(4096).to(BF16), torch.randn(4096).to(grad_dtype)
    number = 0.91731  # of which no multiples of a few bits are ties
    beta: Any = torch.tensor(number) if tensor else number
    wide_m, wide_g = m.double(), g.double()
    (new,) = ema([m], [g], beta)
    right = number * wide_m + (1 - number) * wide_g
    assert new.dtype == BF16
    assert (new != rounded(right)).float().mean() < 1e-3  # ties that fp32 and fp64 see differently
    (ahead,) = nesterov([m], [g], beta)
    assert ahead.dtype == torch.promote_types(BF16, grad_dtype)
    right = (1 - number) * wide_g + number * wide_m
    assert relative_error(ahead, right) < (2e-3 if grad_dtype == BF16 else 1e-6)
    (total,), (shown,) = heavy_ball([m], [g])
    assert total.dtype == FP32
    assert torch.equal(total, m.float() + g.float())
    assert shown.dtype == torch.promote_types(BF16, grad_dtype)


def test_wider_state_is_not_rounded_at_all() -> None:
    m, g = torch.randn(100), torch.randn(100).to(BF16)
    for beta in (0.9, torch.tensor(0.9)):
        (new,) = ema([m], [g], beta)
        torch.testing.assert_close(new, 0.9 * m + 0.1 * g.float())
    (total,), (shown,) = heavy_ball([m], [g])
    assert torch.equal(total, m + g.float())
    assert torch.equal(shown, total)


# The optimizers, against the formula with its state rounded after each step.


def test_default_dtypes_stay() -> None:
    for algorithm, (cls, _, extra) in WHOLE.items():
        for dtype in (BF16, FP32):
            found = dtypes(cls(list(weights(dtype).values()), **extra))
            assert found.pop("momentum_buffer") == {dtype}, algorithm
            assert all(kinds == {FP32} for kinds in found.values()), algorithm


def stepwise(algorithm: str, steps: list[dict[str, Any]], start: dict[str, Any]) -> dict[str, Any]:
    """The reference, one step at a time, with M and V rounded to bf16 in between."""
    _, naive, extra = WHOLE[algorithm]
    params, state = {name: p.detach() for name, p in start.items()}, None
    for grads in steps:
        params, state = naive(params, [grads], state, **{**extra, **HYPER})
        for one in state.values():
            one["momentum_buffer"] = rounded(one["momentum_buffer"]).double()
            if "second_moment" in one:
                one["second_moment"] = [rounded(v).double() for v in one["second_moment"]]
    return params


def at_once(state: dict[str, Any], g: Tensor, momentum: float, ahead: bool) -> Tensor:
    """The reference's momentum, rounded before it is looked ahead from."""
    m = rounded(momentum * state["momentum_buffer"] + (1 - momentum) * g).double()
    state["momentum_buffer"] = m
    return (1 - momentum) * g + momentum * m if ahead else m


@pytest.mark.parametrize("algorithm", list(WHOLE))
def test_rounded_state_is_the_formulas(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_muon_momentum_", at_once)
    parameters, steps = weights(), gradients(4)
    right = stepwise(algorithm, steps, parameters)
    optimizer = train(parameters, steps, algorithm, **exact(algorithm), **HYPER, **BOTH)
    found = dtypes(optimizer)
    assert found["momentum_buffer"] == {BF16}
    assert found.get("row_variance", {BF16}) == {BF16}
    assert found.get("right_factor", {FP32}) == {FP32}
    for name, p in parameters.items():
        assert p.dtype == FP32
        # A tie that fp32 and fp64 see differently moves one entry of M by 2**-9 of it.
        assert relative_error(p.detach(), right[name]) < 3e-4, name
    # Rounding is seen: the formula without it is further away.
    _, naive, extra = WHOLE[algorithm]
    monkeypatch.undo()
    plain = naive(weights(), steps, **{**extra, **HYPER})[0]
    worst = max(relative_error(right[name], plain[name]) for name in SHAPES)
    assert worst > 1e-4


@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
def test_elementwise_groups(algorithm: str) -> None:
    start = {n: p.detach() for n, p in weights().items()}
    parameters, steps = weights(), gradients(4)
    group = {"params": list(parameters.values()), "algorithm": algorithm, "betas": (0.8, 0.9)}
    optimizer = ortho_func.Muon([group], **HYPER, **BOTH)
    names = ("exp_avg", "exp_avg_sq") if algorithm == "adamw" else ("momentum_buffer",)
    naive = getattr(reference, algorithm)
    right, state = start, None
    for grads in steps:
        for name, p in parameters.items():
            p.grad = grads[name]
        optimizer.step()
        right, state = naive(right, [grads], state, betas=(0.8, 0.9), **HYPER)
        for one in state.values():
            one.update({key: rounded(one[key]).double() for key in names})
    found = dtypes(optimizer)
    assert all(found[name] == {BF16} for name in names)
    assert found.get("step", {FP32}) == {FP32}
    assert max(relative_error(p.detach(), right[n]) for n, p in parameters.items()) < 3e-4


def test_double_parameters_may_have_single_momentum() -> None:
    parameters = weights(FP64)
    optimizer = train(
        parameters, gradients(3, FP64), "normuon", orthogonalizer="svd", momentum_dtype=FP32,
        variance_dtype=FP64, **HYPER,
    )  # fmt: skip
    assert dtypes(optimizer) == {"momentum_buffer": {FP32}, "row_variance": {FP64}}
    right = reference.normuon(weights(FP64), gradients(3, FP64), beta2=0.9, **HYPER)[0]
    assert max(relative_error(p.detach(), right[n]) for n, p in parameters.items()) < 1e-5


# Forms: compiled, functional, sharded, saved.


@pytest.mark.parametrize("algorithm", list(WHOLE))
def test_compiled_once_and_equal(algorithm: str) -> None:
    graphs = []

    def backend(module: Any, _: Any) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    cls, _, extra = WHOLE[algorithm]
    torch._dynamo.reset()
    models = [weights(), weights()]
    optimizers = [
        cls(
            [
                {"params": [m["wide"], m["tall"]]},
                {"params": [m["square"]], "algorithm": "adamw", "lr": 0.01},
            ],
            compile=option, **{**extra, **HYPER, **exact(algorithm), **BOTH},
        )
        for m, option in zip(models, (False, {"backend": backend}), strict=True)
    ]  # fmt: skip
    for grads in gradients(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            for name, p in model.items():
                p.grad = grads[name].clone()
            optimizer.step()
    assert len(graphs) == 1
    assert dtypes(optimizers[1]) == dtypes(optimizers[0])
    for p, q in zip(*(m.values() for m in models), strict=True):
        assert relative_error(q.detach(), p.detach()) < 1e-3


@pytest.mark.parametrize("algorithm", list(WHOLE))
def test_the_functional_form_is_the_same(algorithm: str) -> None:
    options = {**WHOLE[algorithm][2], **HYPER, **exact(algorithm), **BOTH}
    parameters, steps = weights(), gradients(4)
    tx = getattr(ortho_func, algorithm)(**options)
    params = {name: p.detach().clone() for name, p in parameters.items()}
    state = tx.init(params)
    for grads in steps:
        updates, state = tx.update(grads, state, params)
        params = apply_updates(params, updates)
        assert {x.dtype for x in state.momentum_buffer.values()} == {BF16}
        if hasattr(state, "row_variance"):
            assert {x.dtype for x in state.row_variance.values()} == {BF16}
    optimizer = train(parameters, steps, algorithm, **options)
    for name, p in parameters.items():
        assert relative_error(params[name], p.detach()) < 1e-3
        held = optimizer.state[p]["momentum_buffer"]
        assert relative_error(state.momentum_buffer[name], held) < 1e-3


def test_functional_elementwise_and_chained_momentum() -> None:
    params = {name: p.detach() for name, p in weights().items()}
    (grads,) = gradients(1)
    for tx, names in (
        (ortho_func.adamw(**BOTH), ("exp_avg", "exp_avg_sq")),
        (ortho_func.lion(momentum_dtype=BF16), ("momentum_buffer",)),
        (ortho_func.momentum(0.9, momentum_dtype=BF16), ("momentum_buffer",)),
    ):
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(grads, state, params)
        assert {u.dtype for u in updates.values()} <= {FP32, BF16}
        for name in names:
            assert {x.dtype for x in getattr(state, name).values()} == {BF16}


def placed(kind: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if kind == "uneven rows":
        return by_fully_shard(tensors, (4,))
    return by_placements(tensors, (2, 2), [Shard(0), Shard(1)])


def on_ranks(rank: int, world: int, algorithm: str, kind: str, seed: int, dtype: Any) -> float:
    shapes = {"w": (5, 12), "v": (9, 4), "u": (2, 7)}
    tensors = {name: x.to(dtype) for name, x in whole_tensors(shapes, seed).items()}
    steps = [
        {name: x.to(dtype) for name, x in whole_tensors(shapes, seed + 1 + n).items()}
        for n in range(3)
    ]
    options = {**HYPER, **exact(algorithm), "wire_dtype": FP32, **BOTH}
    if dtype == BF16:
        options |= {"momentum_dtype": FP32, "variance_dtype": FP32}
    sharded = placed(kind, tensors)
    one = {name: nn.Parameter(x.clone()) for name, x in tensors.items()}
    optimizers = [train(model, steps, algorithm, **options) for model in (sharded, one)]
    assert dtypes(optimizers[0]) == dtypes(optimizers[1])
    pairs = [(gather(sharded[name]), one[name].detach()) for name in shapes]
    pairs += [
        (gather(optimizers[0].state[sharded[name]][key]), value)
        for name in shapes
        for key, value in optimizers[1].state[one[name]].items()
        if key != "right_factor"
    ]
    return max(relative_error(mine, right) for mine, right in pairs)


@pytest.mark.parametrize("kind", ["uneven rows", "rows and columns"])
@pytest.mark.parametrize("algorithm", list(WHOLE))
def test_no_layout_matters(pool: Any, algorithm: str, kind: str) -> None:
    seed = torch.seed() % 2**31
    # State that depends on the orthogonal factor differs by its last bit, of bfloat16, at times.
    tolerance = 1e-5 if algorithm in ("muon", "dion2") else 4e-3
    assert max(pool.run(on_ranks, algorithm, kind, seed, FP32, world=4)) < tolerance, seed


@pytest.mark.parametrize("algorithm", ["muon", "dion2"])
def test_wide_state_of_narrow_parameters(pool: Any, algorithm: str) -> None:
    """What stays on its rank is as wide as what travels: both come from fp32 momenta."""
    seed = torch.seed() % 2**31
    found = pool.run(on_ranks, algorithm, "uneven rows", seed, BF16, world=4)
    assert max(found) < 4e-3, seed


def test_state_dicts_and_copies() -> None:
    first, second = weights(), weights()
    steps = gradients(5)
    one = train(first, steps[:3], "normuon", **HYPER, **BOTH)
    saved = one.state_dict()
    assert saved["param_groups"][0]["momentum_dtype"] == "torch.bfloat16"
    two = ortho_func.NorMuon(list(second.items()), **HYPER, **BOTH, beta2=0.9)
    two.load_state_dict(saved)
    wide = ortho_func.NorMuon(list(weights().items()), **HYPER, beta2=0.9)
    wide.load_state_dict(saved)  # the dtype here stays
    assert dtypes(wide) == {"momentum_buffer": {FP32}, "row_variance": {FP32}}
    assert dtypes(two) == {"momentum_buffer": {BF16}, "row_variance": {BF16}}
    for name in SHAPES:
        for key in ("momentum_buffer", "row_variance"):
            held = one.state[first[name]][key]
            assert torch.equal(two.state[second[name]][key], held)


def test_a_change_of_dtype_takes_effect() -> None:
    parameters = weights()
    optimizer = train(parameters, gradients(2), "muon", **HYPER)
    before = {name: optimizer.state[p]["momentum_buffer"].clone() for name, p in parameters.items()}
    optimizer.param_groups[0]["momentum_dtype"] = BF16
    for name, p in parameters.items():
        p.grad = torch.zeros_like(before[name])
    optimizer.step()
    for name, p in parameters.items():
        held = optimizer.state[p]["momentum_buffer"]
        assert held.dtype == BF16
        torch.testing.assert_close(held.float(), 0.95 * before[name], rtol=0.01, atol=1e-3)


def test_state_bytes() -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2, bias=False))

    def groups() -> list[dict[str, Any]]:
        return [
            {"params": [("a", net[0].weight), ("b", net[1].weight)]},
            {"params": [("c", net[0].bias)], "algorithm": "adamw"},
        ]

    found = state_bytes(ortho_func.NorMuon(groups()))
    assert found == {"a": 4 * 32 + 4 * 4, "b": 4 * 8 + 4 * 2, "c": 2 * 4 * 4 + 4}
    found = state_bytes(ortho_func.NorMuon(groups(), **BOTH))
    assert found == {"a": 2 * 32 + 2 * 4, "b": 2 * 8 + 2 * 2, "c": 2 * 2 * 4 + 4}
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    assert sum(state_bytes(sgd).values()) == 0
    net(torch.randn(3, 8)).sum().backward()
    sgd.step()
    assert state_bytes(sgd)["parameter 0 of group 0"] == 4 * 32


def bytes_on_ranks(rank: int, world: int) -> dict[str, int]:
    parameters = by_fully_shard(whole_tensors({"w": (5, 8)}, 0), (world,))
    return state_bytes(ortho_func.NorMuon(list(parameters.items()), momentum_dtype=BF16))


def test_state_bytes_are_those_of_the_shards(pool: Any) -> None:
    found = pool.run(bytes_on_ranks, world=4)  # two, two, one and no row
    assert [one["w"] for one in found] == [rows * (8 * 2 + 4) for rows in (2, 2, 1, 0)]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"momentum_dtype": torch.int32}, "momentum_dtype must be None or one of"),
        ({"momentum_dtype": "bfloat16"}, "momentum_dtype must be None or one of"),
        ({"variance_dtype": torch.float8_e4m3fn}, "variance_dtype must be None or one of"),
        ({"variance_dtype": FP16}, "squares of small gradients"),
    ],
)
def test_errors(options: dict[str, Any], match: str) -> None:
    (weight,) = [nn.Parameter(torch.randn(2, 3))]
    for make in (
        lambda: ortho_func.NorMuon([weight], **options),
        lambda: ortho_func.NorMuon([{"params": [weight], "algorithm": "adamw"}], **options),
        lambda: ortho_func.normuon(**options),
        lambda: ortho_func.adamw(**options),
    ):
        with pytest.raises(ValueError, match=match):
            make()
