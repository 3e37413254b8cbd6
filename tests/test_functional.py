"""The functional interface: pure, the same numbers as the optimizers, and composable."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import reference
import torch
from layouts import (
    by_placements,
    expected,
    gather,
    relative_error,
    scatter_like,
    train,
    whole_tensors,
)
from test_layouts import LAYOUTS
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import functional_call, grad, grad_and_value, stack_module_state, vmap
from torch.utils._pytree import tree_flatten, tree_map

import ortho_func
from ortho_func import (
    Reading,
    Transform,
    adamw,
    add_decayed_weights,
    apply_updates,
    chain,
    clip_by_global_norm,
    dion,
    dion2,
    dion3,
    elementwise,
    inject,
    lion,
    momentum,
    muon,
    normuon,
    on_whole_matrices,
    orthogonalize,
    partition,
    plan,
    scale,
    scale_by_schedule,
    schedules,
    stateless,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "functional"))

Params = dict[str, Tensor]


class Row(NamedTuple):
    """One algorithm: how to make it, its naive reference, and options of both."""

    make: Callable[..., Transform]
    naive: Callable[..., Any]
    options: dict[str, Any]
    matrix: bool = True
    polar: bool = True  # takes an orthogonalizer

    @property
    def exact(self) -> dict[str, Any]:
        return {"orthogonalizer": "svd"} if self.matrix and self.polar else {}

    @property
    def wide(self) -> dict[str, Any]:
        return {"compute_dtype": torch.float32} if self.matrix and self.polar else {}


TABLE = {
    "muon": Row(muon, reference.muon, {}),
    "muon without nesterov": Row(muon, reference.muon, {"nesterov": False, "cautious": True}),
    "normuon": Row(normuon, reference.normuon, {"beta2": 0.9}),
    "dion2": Row(dion2, reference.dion2, {"fraction": 0.3}),
    "dion3": Row(dion3, reference.dion3, {"fraction": 0.3, "beta2": 0.9}),
    "dion": Row(dion, reference.dion, {"rank_fraction": 0.4}, polar=False),
    "adamw": Row(adamw, reference.adamw, {"betas": (0.8, 0.9)}, matrix=False),
    "adamw, cautious": Row(
        adamw, reference.adamw, {"betas": (0.9, 0.99), "cautious": True}, matrix=False
    ),
    "lion": Row(lion, reference.lion, {"betas": (0.8, 0.9), "cautious": True}, matrix=False),
}
MATRIX_ROWS = ("muon", "normuon", "dion2", "dion3", "dion")
MATRIX = [torch.ones(2, 2)]
SHAPES = {
    "wide": (4, 7),
    "tall": (9, 3),
    "twin": (4, 7),
    "qkv": (8, 5),
    "experts": (3, 4, 6),
    "conv": (4, 3, 2, 2),
}
READINGS = {
    "qkv": Reading(split_sizes=(4, 2, 2)),
    "exp*": Reading(flatten=False),
    "conv": Reading(flatten=True),
}
NAIVE_READINGS = {
    "flatten": {"experts": False, "conv": True},
    "split_sizes": {"qkv": (4, 2, 2)},
}


def whole(seed: int, dtype: torch.dtype = torch.float64, shapes: Any = SHAPES) -> Params:
    return {name: x.to(dtype) for name, x in whole_tensors(shapes, seed).items()}


def make(name: str, **options: Any) -> Transform:
    """The algorithm of a row on `SHAPES`, exactly orthogonalized where it is a matrix one."""
    row = TABLE[name]
    extra = {"readings": READINGS} if row.matrix else {}
    hyper = {"lr": 0.1, "weight_decay": 0.2}
    return row.make(**{**hyper, **row.options, **row.exact, **extra, **options})


def run(tx: Transform, params: Any, gradients: list[Any]) -> tuple[Any, Any]:
    state = tx.init(params)
    for grads in gradients:
        updates, state = tx.update(grads, state, params)
        params = apply_updates(params, updates)
    return params, state


def leaves(tree: Any) -> list[Any]:
    return tree_flatten(tree)[0]


def assert_same(tree: Any, other: Any) -> None:
    """Bit for bit."""
    for x, y in zip(leaves(tree), leaves(other), strict=True):
        if x is None or y is None:
            assert x is y
        else:
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


# The same numbers as the naive reference, and as the optimizers.


@pytest.mark.parametrize("name", list(TABLE))
def test_equals_the_formula(name: str) -> None:
    params = whole(0)
    gradients: list[dict[str, Any]] = [whole(1 + n) for n in range(3)]
    gradients[1]["tall"] = None
    row = TABLE[name]
    naive = {"lr": 0.1, "weight_decay": 0.2, **row.options}
    right, _ = row.naive(params, gradients, **naive, **(NAIVE_READINGS if row.matrix else {}))
    found, _ = run(make(name), params, gradients)
    tolerance = 1e-8 if row.matrix else 1e-6  # masks, and AdamW's count of steps, are fp32
    assert max(relative_error(found[key], right[key]) for key in SHAPES) < tolerance


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw", "spectral_norm", "none"])
def test_scale_is_that_of_each_block(adjust: str) -> None:
    params, gradients = whole(0), [whole(1)]
    right, _ = reference.muon(params, gradients, lr=0.1, adjust_lr_fn=adjust, **NAIVE_READINGS)
    found, _ = run(make("muon", weight_decay=0.1, adjust_lr_fn=adjust), params, gradients)
    assert max(relative_error(found[key], right[key]) for key in SHAPES) < 1e-6


@pytest.mark.parametrize("name", MATRIX_ROWS)
def test_equals_the_optimizer(name: str) -> None:
    shapes = {"a": (6, 4), "b": (4, 6), "c": (6, 4)}
    params = whole(0, torch.float32, shapes)
    gradients = [whole(1 + n, torch.float32, shapes) for n in range(3)]
    options = {"lr": 0.1}
    mine, _ = run(TABLE[name].make(**options, **TABLE[name].wide), params, gradients)
    module = nn.ParameterDict({key: nn.Parameter(x.clone()) for key, x in params.items()})
    optimizer = getattr(ortho_func, _class_of(name))(
        module.parameters(), **options, compute_dtype=torch.float32
    )
    for grads in gradients:
        for key, p in module.items():
            p.grad = grads[key].clone()
        optimizer.step()
    for key, p in module.items():
        torch.testing.assert_close(mine[key], p.detach(), rtol=1e-5, atol=1e-6)


def _class_of(name: str) -> str:
    return {"muon": "Muon", "normuon": "NorMuon", "dion2": "Dion2", "dion3": "Dion3",
            "dion": "Dion"}[name]  # fmt: skip


def test_lion_and_adamw_take_any_shape() -> None:
    params = {"scalar": torch.ones(()), "vector": torch.ones(3), "cube": torch.ones(2, 2, 2)}
    for tx in (lion(0.1), adamw(0.1)):
        found, _ = run(tx, params, [tree_map(torch.ones_like, params)])
        assert {key: x.shape for key, x in found.items()} == {k: x.shape for k, x in params.items()}


def test_steps_are_small_in_low_precision() -> None:
    """The sum is rounded once: an update that bf16 cannot hold still moves the parameter."""
    params = [torch.ones(1, dtype=torch.bfloat16)]
    update = [torch.tensor([2**-8 + 2**-16])]
    assert apply_updates(params, update)[0].item() == 1 + 2**-7
    for name in TABLE:
        params = {"wide": torch.randn(4, 7).bfloat16()}
        extra = {"readings": None} if TABLE[name].matrix else {}
        tx = make(name, **extra)
        updates, _ = tx.update(params, tx.init(params), params)
        assert updates["wide"].dtype == torch.float32
        after = apply_updates(params, updates)["wide"]
        assert after.dtype == torch.bfloat16
        assert torch.equal(after, (params["wide"].float() + updates["wide"]).bfloat16())


@pytest.mark.parametrize("name", list(TABLE))
def test_zero_gradients_and_zero_rate_stay_finite(name: str) -> None:
    params = whole(0, torch.float32)
    zeros = tree_map(torch.zeros_like, params)
    orth = {"orthogonalizer": "auto"} if TABLE[name].exact else {}
    found, state = run(make(name, lr=torch.tensor(0.0), **orth), params, [zeros, zeros])
    assert_same(found, params)
    assert all(torch.isfinite(x).all() for x in leaves(state))


# Purity.


def everything() -> dict[str, Transform]:
    made = {name: make(name) for name in TABLE}
    made["chain"] = chain(
        clip_by_global_norm(1.0),
        momentum(0.9, nesterov=True),
        stateless(on_whole_matrices(orthogonalize, readings=READINGS)),
        add_decayed_weights(0.1),
        scale_by_schedule(schedules.linear(-0.1, 0.0, 10)),
    )
    made["partition"] = partition(
        {"a": inject(make("normuon", readings=None), lr=0.1), "b": lion(0.1), "c": adamw(0.1)},
        {"wide": "a", "t*": "b", "*": "c"},
    )
    return made


@pytest.mark.parametrize("name", list(everything()))
def test_inputs_are_never_written_and_calls_repeat(name: str) -> None:
    tx = everything()[name]
    params, grads = whole(0, torch.float32), whole(1, torch.float32)
    _, state = tx.update(whole(2, torch.float32), tx.init(params), params)  # not all zeros
    given = (params, grads, state)
    before = tree_map(torch.clone, given)
    first = tx.update(grads, state, params)
    assert_same(given, before)
    second = tx.update(grads, state, params)
    assert_same(first, second)
    apply_updates(params, first[0])
    assert_same(given, before)
    # Results that are views of inputs would change with them.
    kept = tree_map(torch.clone, first)
    for x in leaves((params, grads)):
        x.fill_(float("nan"))
    assert_same(first, kept)


@pytest.mark.parametrize("name", list(everything()))
def test_none_leaves_parameter_and_state_alone(name: str) -> None:
    tx = everything()[name]
    params, grads = whole(0, torch.float32), whole(1, torch.float32)
    before = tx.update(whole(2, torch.float32), tx.init(params), params)[1]
    updates, after = tx.update({**grads, "wide": None}, before, params)
    assert updates["wide"] is None
    assert all(updates[key] is not None for key in SHAPES if key != "wide")
    assert apply_updates(params, updates)["wide"] is params["wide"]
    for old, new in zip(_of_leaf(before, "wide"), _of_leaf(after, "wide"), strict=True):
        assert torch.equal(old, new)


def _of_leaf(tree: Any, name: str) -> list[Tensor]:
    """State of one parameter, wherever it is."""
    if isinstance(tree, Mapping):
        found = [tree[name]] if isinstance(tree.get(name), Tensor) else []
        return found + [x for value in tree.values() for x in _of_leaf(value, name)]
    if isinstance(tree, (tuple, list)):
        return [x for value in tree for x in _of_leaf(value, name)]
    return []


class Pair(NamedTuple):
    first: Tensor
    rest: list[Tensor]


def nested(flat: Params) -> Any:
    return {
        "blocks": [
            Pair(flat["wide"], [flat["tall"]]),
            (flat["twin"], {"q.kv": flat["qkv"]}),
        ],
        "last": flat["experts"],
    }


@pytest.mark.parametrize("name", list(TABLE))
def test_any_pytree(name: str) -> None:
    params, gradients = nested(whole(0)), [nested(whole(1)), nested(whole(2))]
    flat, flat_gradients = whole(0), [whole(1), whole(2)]
    readings = {"blocks.1.1.q.kv": READINGS["qkv"], "last": READINGS["exp*"]}
    extra = {"readings": readings} if TABLE[name].matrix else {}
    found, state = run(make(name, **extra), params, gradients)
    right, _ = run(make(name), flat, flat_gradients)
    assert isinstance(found["blocks"][0], Pair)
    assert isinstance(found["blocks"][1], tuple)
    assert isinstance(state[1]["blocks"][0], Pair)
    pairs = zip(leaves(found), leaves(nested(right)), strict=True)
    assert all(relative_error(x, y) < 1e-12 for x, y in pairs)


def test_readings_by_predicate_and_flatten_for_all() -> None:
    params = {"a": torch.randn(2, 3, 4), "b": torch.randn(3, 3)}
    tx = muon(readings=lambda name, x: Reading(flatten=False) if x.ndim > 2 else None)
    found, _ = run(tx, params, [params])
    assert_same(found, run(muon(flatten=False), params, [params])[0])


# Schedules and hyperparameters.


def test_hyperparameters_as_numbers_tensors_and_schedules() -> None:
    params, gradients = whole(0), [whole(1 + n) for n in range(3)]
    rates = [0.3, 0.2, 0.1]
    table = torch.tensor(rates, dtype=torch.float64)
    by_hand = params
    state = make("normuon").init(params)
    for rate, grads in zip(rates, gradients, strict=True):
        updates, state = make("normuon", lr=rate).update(grads, state, by_hand)
        by_hand = apply_updates(by_hand, updates)
    scheduled, _ = run(make("normuon", lr=lambda step: table[step]), params, gradients)
    given = params
    tx = make("normuon", lr=1.0)
    state = tx.init(params)
    for rate, grads in zip(table, gradients, strict=True):
        updates, state = tx.update(grads, state, given, lr=rate)
        given = apply_updates(given, updates)
    for key in SHAPES:
        assert relative_error(scheduled[key], by_hand[key]) < 1e-12
        assert relative_error(given[key], by_hand[key]) < 1e-12


def test_injected_hyperparameters_change_without_recompilation() -> None:
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    params, grads = {"w": torch.randn(3, 4)}, {"w": torch.randn(3, 4)}
    tx = inject(chain(momentum(0.9), muon(orthogonalizer="svd")), lr=0.1, weight_decay=0.0)
    state = tx.init(params)
    assert {key: float(x) for key, x in state.hyperparams.items()} == {
        "lr": pytest.approx(0.1),
        "weight_decay": 0.0,
    }
    update = torch.compile(tx.update, fullgraph=True, backend=count)
    sizes = []
    for rate in (0.1, 0.2, 0.4):
        now = state._replace(hyperparams={**state.hyperparams, "lr": torch.tensor(rate)})
        updates, _ = update(grads, now, params)
        sizes.append(float(updates["w"].norm()))
    assert sizes[1] / sizes[0] == pytest.approx(2, rel=1e-4)
    assert sizes[2] / sizes[0] == pytest.approx(4, rel=1e-4)
    assert len(graphs) == 1


def test_schedules_run_in_the_state() -> None:
    tx = scale_by_schedule(schedules.linear(1.0, 0.0, 4))
    state = tx.init([torch.ones(1)])
    seen = []
    for _ in range(6):
        updates, state = tx.update([torch.ones(1)], state)
        seen.append(float(updates[0]))
    assert seen == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


# Combinations.


def test_chain_makes_muon() -> None:
    """Muon's parts in a row are Muon."""
    params, gradients = whole(0), [whole(1), whole(2)]
    square = {key: params[key] for key in ("wide", "twin")}  # wide: shape scale 1
    gradients = [{key: grads[key] for key in square} for grads in gradients]
    tx = chain(
        momentum(0.95, nesterov=True),
        stateless(on_whole_matrices(lambda x: orthogonalize(x, method="svd"))),
        add_decayed_weights(0.2),
        scale(-0.1),
    )
    found, _ = run(tx, square, gradients)
    right, _ = run(make("muon", readings=None), square, gradients)
    assert max(relative_error(found[key], right[key]) for key in square) < 1e-12


def test_partition_gives_each_leaf_its_own() -> None:
    params, grads = whole(0), whole(1)
    tx = partition(
        {"m": make("muon", readings=None), "l": lion(0.1, 0.2)},
        lambda name, x: "m" if name == "tall" else "l",
    )
    found, state = run(tx, params, [grads])
    assert list(state.inner["m"].momentum_buffer) == ["tall"]
    alone, _ = run(make("muon", readings=None), {"tall": params["tall"]}, [{"tall": grads["tall"]}])
    rest, _ = run(lion(0.1, 0.2), params, [grads])
    assert_same(found, {**rest, **alone})


def test_clipping_uses_one_norm() -> None:
    grads = {"a": torch.full((2, 2), 3.0), "b": torch.full((4,), 4.0), "c": None}
    clipped, _ = clip_by_global_norm(1.0).update(grads, ())
    assert clipped["c"] is None
    assert float(sum(g.square().sum() for g in clipped.values() if g is not None)) == pytest.approx(
        1
    )
    assert float(clipped["a"][0, 0] / clipped["b"][0]) == pytest.approx(0.75)
    untouched, _ = clip_by_global_norm(100.0).update(grads, ())
    assert_same(untouched, grads)
    zero, _ = clip_by_global_norm(1.0).update({"a": torch.zeros(2)}, ())
    assert torch.equal(zero["a"], torch.zeros(2))


# What is refused, and how it is said.

REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "negative rate": (ValueError, "lr must lie in", lambda: muon(lr=-1.0)),
    "momentum of one": (ValueError, r"momentum must lie in \[0, 1\)", lambda: muon(momentum=1.0)),
    "text as a rate": (TypeError, "lr must be a number", lambda: adamw(lr="0.1")),  # type: ignore[arg-type]
    "a vector of rates": (ValueError, "must be 0-d", lambda: muon(lr=torch.ones(2))),
    "unknown scale": (ValueError, "adjust_lr_fn", lambda: muon(adjust_lr_fn="no")),
    "unknown method": (ValueError, "orthogonalizer", lambda: muon(orthogonalizer="no")),
    "fraction": (ValueError, "fraction", lambda: dion2(fraction=0.0)),
    "selection": (ValueError, "selection", lambda: dion3(selection="some")),
    "betas": (ValueError, "betas", lambda: lion(betas=(0.9, 1.0))),
    "vector": (ValueError, "bias has shape", lambda: muon().init({"bias": torch.ones(3)})),
    "integers": (ValueError, "w has dtype", lambda: muon().init({"w": torch.ones(2, 2).int()})),
    "three dims": (ValueError, "flatten=False", lambda: muon().init({"w": torch.ones(2, 2, 2)})),
    "no params": (
        ValueError, "needs the parameters",
        lambda: muon().update({"w": torch.ones(2, 2)}, muon().init({"w": torch.ones(2, 2)})),
    ),
    "reading of nothing": (
        ValueError, "readings speak of 'v'",
        lambda: muon(readings={"v": Reading()}).init({"w": torch.ones(2, 2)}),
    ),
    "no label": (
        ValueError, "no label matches b of shape",
        lambda: partition({"m": muon()}, {"a": "m"}).init({"a": MATRIX[0], "b": torch.ones(2)}),
    ),
    "no transform": (
        ValueError, "no transform for the label n", lambda: partition({"m": muon()}, {"a": "n"}),
    ),
    "no such hyperparameter": (TypeError, "beta2", lambda: inject(muon(), beta2=0.9)),
    "no such keyword": (
        TypeError, "keywords, not beta3",
        lambda: muon().update(MATRIX, muon().init(MATRIX), MATRIX, beta3=1.0),
    ),
    "other parameters than planned": (
        ValueError, r"got \('v', \(2, 2\)\), planned \('w', \(2, 2\)\)",
        lambda: muon(plan=plan({"w": torch.ones(2, 2)})).init({"v": torch.ones(2, 2)}),
    ),
    "readings beside a plan": (
        ValueError, "give readings= to plan",
        lambda: muon(flatten=True, plan=plan({"w": torch.ones(2, 2)})),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(name: str) -> None:
    kind, text, call = REFUSED[name]
    with pytest.raises(kind, match=text):
        call()


# Composition with torch.func and torch.compile.

STUDENT = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def student(seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=dtype) * 0.3
        for name, p in STUDENT.named_parameters()
    }


def data(number: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    x = torch.randn(12, 5, generator=generator, dtype=dtype)
    return x, torch.sin(x[:, :3] * 2)


def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
    return (functional_call(STUDENT, params, (x,)) - y).square().mean()


def optimizer(name: str, lr: Any = 0.05) -> Transform:
    matrices = TABLE[name].make(lr=lr, **TABLE[name].wide, **TABLE[name].options)
    return partition({"m": matrices, "r": adamw(lr=0.01)}, lambda _, p: "m" if p.ndim > 1 else "r")


def training_step(tx: Transform) -> Callable[..., tuple[Params, Any, Tensor]]:
    def step(params: Params, state: Any, x: Tensor, y: Tensor) -> tuple[Params, Any, Tensor]:
        grads, value = grad_and_value(loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return apply_updates(params, updates), state, value

    return step


def trained(tx: Transform, params: Params, batches: list[Any]) -> tuple[Params, Tensor]:
    state, step = tx.init(params), training_step(tx)
    for x, y in batches[:-1]:
        params, state, _ = step(params, state, x, y)
    return params, loss(params, *batches[-1])


@pytest.mark.parametrize("name", ["muon", "dion3"])
def test_a_whole_training_step_is_one_graph(name: str) -> None:
    tx = chain(clip_by_global_norm(1.0), optimizer(name, lr=schedules.cosine(0.1, 9, warmup=2)))
    step = training_step(tx)
    traced = torch.compile(step, fullgraph=True, backend="aot_eager")
    params = student()
    mine = theirs = (params, tx.init(params))
    for number in range(3):
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            *mine, value = traced(*mine, *data(number))
        *theirs, right = step(*theirs, *data(number))
        torch.testing.assert_close(value, right)
    torch.testing.assert_close(mine[0], theirs[0])


def test_all_of_it_can_be_built_inside_a_trace() -> None:
    params, grads = (
        {"w": torch.randn(3, 5), "b": torch.randn(3)},
        {"w": torch.randn(3, 5), "b": None},
    )

    def sweep(params: Params, grads: Params, rates: Tensor) -> Any:
        def one(lr: Tensor) -> Params:
            tx = partition(
                {"m": normuon(lr, orthogonalizer="svd"), "r": lion()}, {"w": "m", "*": "r"}
            )
            updates, _ = tx.update(grads, tx.init(params), params)
            return apply_updates(params, updates)

        return vmap(one)(rates)

    rates = torch.tensor([0.1, 0.2])
    found = torch.compile(sweep, fullgraph=True, backend="aot_eager")(params, grads, rates)
    torch.testing.assert_close(found, sweep(params, grads, rates))


@pytest.mark.parametrize("name", MATRIX_ROWS)
def test_a_sweep_equals_separate_runs(name: str) -> None:
    batches = [data(number) for number in range(4)]
    params, rates = student(), torch.tensor([0.01, 0.05, 0.2])

    def run_at(lr: Tensor) -> tuple[Params, Tensor]:
        return trained(optimizer(name, lr=lr), params, batches)

    together, values = vmap(run_at)(rates)
    for n, rate in enumerate(rates):
        alone, value = run_at(rate)
        torch.testing.assert_close(values[n], value, rtol=1e-4, atol=1e-6)
        for key in alone:
            torch.testing.assert_close(together[key][n], alone[key], rtol=1e-3, atol=1e-5)


def test_a_sweep_over_injected_hyperparameters() -> None:
    """Only the state is mapped over: one compiled or eager update serves all."""
    params, (x, y) = student(), data(0)
    matrices = {key: p for key, p in params.items() if p.ndim > 1}
    grads = {key: g for key, g in grad(loss)(params, x, y).items() if key in matrices}
    tx = inject(muon(compute_dtype=torch.float32), lr=0.1, momentum=0.9)
    state = tx.init(matrices)
    rates = torch.tensor([0.1, 0.2])
    many = state._replace(hyperparams={**state.hyperparams, "lr": rates})
    where = state._replace(hyperparams={"lr": 0, "momentum": None}, inner=None)
    updates, _ = vmap(lambda s: tx.update(grads, s, matrices), in_dims=(where,))(many)
    for n, rate in enumerate(rates):
        right, _ = tx.update(grads, state, matrices, lr=rate)
        for key in matrices:
            torch.testing.assert_close(updates[key][n], right[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MATRIX_ROWS)
@pytest.mark.parametrize("dead", [False, True], ids=["", "dead unit"])
def test_hypergradient_equals_finite_differences(name: str, dead: bool) -> None:
    batches = [data(number, torch.float64) for number in range(4)]
    params = student(dtype=torch.float64)
    if dead:  # rows of zero gradient: no derivative may become NaN
        params["0.bias"][0], params["0.weight"][0], params["2.weight"][:, 0] = 50.0, 0.0, 0.0

    def validation(lr: Tensor) -> Tensor:
        options = {**TABLE[name].options, "lr": lr, "weight_decay": 0.1}
        tx = partition(
            {"m": TABLE[name].make(**options), "r": adamw(lr=lr * 0.1)},
            lambda _, p: "m" if p.ndim > 1 else "r",
        )
        return trained(tx, params, batches)[1]

    lr, h = torch.tensor(0.05, dtype=torch.float64), 1e-6
    slope = grad(validation)(lr)
    difference = (validation(lr + h) - validation(lr - h)) / (2 * h)
    torch.testing.assert_close(slope, difference, rtol=1e-5, atol=1e-8)
    assert float(slope.abs()) > 1e-3


@pytest.mark.parametrize("name", MATRIX_ROWS)
def test_an_ensemble_of_stacked_models(name: str) -> None:
    models = [copy.deepcopy(STUDENT) for _ in range(3)]
    for model in models:
        for p in model.parameters():
            nn.init.normal_(p, std=0.3)
    stacked, _ = stack_module_state(models)  # type: ignore[arg-type]
    params = {key: p.detach() for key, p in stacked.items()}
    tx = optimizer(name)
    state = vmap(tx.init)(params)
    found = params
    for number in range(2):
        grads = vmap(grad(loss), in_dims=(0, None, None))(found, *data(number))
        updates, state = vmap(tx.update)(grads, state, found)
        found = apply_updates(found, updates)
    for n in range(3):
        one = {key: p[n] for key, p in params.items()}
        right, _ = trained(tx, one, [data(0), data(1), data(2)])
        for key in right:
            torch.testing.assert_close(found[key][n], right[key], rtol=1e-3, atol=1e-5)


# With a plan: on shards, the numbers of one process.

SHARDED = [
    "fsdp 5 rows on 4",
    "columns, 5 on 4",
    "hsdp 2x2",
    "fsdp x tp",
    "fsdp x tp uneven",
    "both dims, crossed",
    "experts on 4",
    "experts x fsdp",
    "qkv across shards",
    "heads across shards",
    "convolution",
    "replicated",
]


def placed(layout: str, seed: int) -> tuple[Params, dict[str, Any], list[Params]]:
    """Parameters of a layout, how they are read, and whole gradients."""
    _, shapes, place, arguments, own = LAYOUTS[layout]
    tensors = whole_tensors(shapes, seed)
    params = {name: p.detach() for name, p in place(tensors, **arguments).items()}
    reading = Reading(own.get("flatten"), own.get("split_sizes"), own.get("num_heads"))
    options = {"readings": lambda name, x: reading, "wire_dtype": torch.float32}
    return params, options, [whole_tensors(shapes, seed + 1 + n) for n in range(3)]


def scattered(wholes: Mapping[str, Any], params: Params) -> dict[str, Any]:
    return {
        name: None if x is None else scatter_like(x, params[name]) for name, x in wholes.items()
    }


def copy_of(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def local_shards(tree: Any) -> Any:
    return tree_map(lambda x: x.to_local() if isinstance(x, DTensor) else x, tree)


def check_shards(rank: int, world: int, layout: str, seed: int, bucket_bytes: int) -> float:
    """Largest relative error of parameters and momenta against the optimizers, over algorithms."""
    worst = 0.0
    for name in MATRIX_ROWS:
        _, _, place, arguments, own = LAYOUTS[layout]
        params, options, gradients = placed(layout, seed)
        steps: list[Any] = [dict(grads) for grads in gradients]
        if rank == world - 1:
            steps[1][next(iter(params))] = None  # on one rank only
        hyper = {"lr": 0.1, "weight_decay": 0.2, "adjust_lr_fn": "match_rms_adamw"}
        extra = {**hyper, **TABLE[name].options, **TABLE[name].exact}
        made = plan(params, bucket_bytes=bucket_bytes, **options)
        tx = TABLE[name].make(plan=made, **extra)
        found, state = params, tx.init(params)
        for grads in steps:
            given = (scattered(grads, params), state, found)
            before = tree_map(copy_of, given)
            updates, state = tx.update(*given)
            assert_same(local_shards(given), local_shards(before))
            assert_same(local_shards(updates), local_shards(tx.update(*given)[0]))
            found = apply_updates(found, updates)
        theirs = place(whole_tensors(LAYOUTS[layout][1], seed), **arguments)
        optimizer = train(theirs, steps, name, wire_dtype=torch.float32, **extra, **own)
        for key, p in theirs.items():
            assert found[key].placements == p.placements
            buffer = optimizer.state[p]["momentum_buffer"]
            worst = max(worst, relative_error(gather(found[key]), gather(p)))
            worst = max(worst, relative_error(gather(state.momentum_buffer[key]), gather(buffer)))
            if "row_variance" in optimizer.state[p]:
                mine, right = state.row_variance[key], optimizer.state[p]["row_variance"]
                assert mine.placements == right.placements
                worst = max(worst, relative_error(gather(mine), gather(right)))
    return worst


@pytest.mark.parametrize("layout", SHARDED)
def test_shards_equal_the_optimizer(pool: Any, layout: str) -> None:
    for bucket_bytes in (2**26, 256):  # the second: stacks in parts
        errors = pool.run(check_shards, layout, 11, bucket_bytes, world=LAYOUTS[layout][0])
        assert max(errors) < 1e-6, errors


def check_own(rank: int, world: int, layout: str, seed: int) -> float:
    """The example's algorithm on shards against itself on whole tensors."""
    soft_muon = importlib.import_module("own_algorithm").soft_muon
    params, options, gradients = placed(layout, seed)
    tx = soft_muon(lr=0.1, plan=plan(params, **options))
    found, _ = run(tx, params, [scattered(grads, params) for grads in gradients])
    alone = soft_muon_on_blocks(layout)
    right, _ = run(alone, whole_tensors(LAYOUTS[layout][1], seed), gradients)
    assert all(found[name].placements == p.placements for name, p in params.items())
    return max(relative_error(gather(found[name]), right[name]) for name in right)


def soft_muon_on_blocks(layout: str) -> Transform:
    """The example as it is without a plan, on leaves cut into their matrices by hand."""
    soft_muon = importlib.import_module("own_algorithm").soft_muon
    own = LAYOUTS[layout][4]
    tx = soft_muon(lr=0.1)

    def cut(tree: Any) -> Any:
        return {name: reference.matrices(x.clone(), **own) for name, x in tree.items()}

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        blocks, state = tx.update(cut(grads), state)
        return {name: _glue(blocks[name], grads[name]) for name in grads}, state

    return Transform(lambda params: tx.init(cut(params)), update)


def _glue(blocks: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([block.reshape(-1) for block in blocks]).reshape(like.shape)


@pytest.mark.parametrize("layout", SHARDED)
def test_an_algorithm_of_ones_own_on_shards(pool: Any, layout: str) -> None:
    errors = pool.run(check_own, layout, 5, world=LAYOUTS[layout][0])
    assert max(errors) < 1e-5, errors


def check_compiled(rank: int, world: int, layout: str) -> float:
    params, options, gradients = placed(layout, 3)
    tx = chain(
        clip_by_global_norm(1.0),
        normuon(0.1, compute_dtype=torch.float32, plan=plan(params, **options)),
    )

    def step(params: Params, grads: Params, state: Any) -> tuple[Params, Any]:
        updates, state = tx.update(grads, state, params)
        return apply_updates(params, updates), state

    traced = torch.compile(step, fullgraph=True, backend="aot_eager")
    mine = theirs = (params, tx.init(params))
    for number, grads in enumerate(gradients[:2]):
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            mine = traced(mine[0], scattered(grads, params), mine[1])
        theirs = step(theirs[0], scattered(grads, params), theirs[1])
    errors = []
    for x, y in zip(leaves(mine), leaves(theirs), strict=True):
        assert isinstance(x, DTensor) == isinstance(y, DTensor)
        if isinstance(x, DTensor):
            assert x.placements == y.placements
            errors.append(relative_error(gather(x), gather(y)))
    return max(errors)


@pytest.mark.parametrize("layout", ["fsdp on 2", "fsdp x tp"])
def test_a_step_on_shards_is_one_graph(pool: Any, layout: str) -> None:
    errors = pool.run(check_compiled, layout, world=LAYOUTS[layout][0], timeout=150)
    assert max(errors) < 1e-5


def check_clipping(rank: int, world: int) -> list[float]:
    grid = {"mesh": (2, 2), "placements": {"a": [Replicate(), Shard(0)], "b": [Shard(0), Shard(1)]}}
    grads = by_placements(whole_tensors({"a": (3, 4), "b": (5, 3)}, 0), **grid)
    grads = {name: g.detach() for name, g in grads.items()}
    grads["c"] = torch.ones(3)
    clipped, _ = clip_by_global_norm(1.0).update(grads, ())
    params, missing = dict(grads), {**grads, "b": None if rank == 1 else grads["b"]}
    clip_by_global_norm(1.0).update(missing, (), params)  # ends, on all ranks
    return [float(gather(g).norm()) for g in clipped.values()]


def test_clipping_counts_each_element_once(pool: Any) -> None:
    for norms in pool.run(check_clipping, world=4):
        assert sum(x * x for x in norms) == pytest.approx(1.0, rel=1e-5)


def check_replicas(rank: int, world: int) -> float:
    """Plain tensors that all ranks hold, as under DDP."""
    params = whole_tensors({"w": (6, 4), "v": (3, 5), "u": (4, 4)}, 0)
    grads = whole_tensors({"w": (6, 4), "v": (3, 5), "u": (4, 4)}, 1)
    made = plan(params, process_group=torch.distributed.group.WORLD, wire_dtype=torch.float32)
    found, _ = run(muon(0.1, orthogonalizer="svd", plan=made), params, [grads])
    right = expected(params, [grads], "muon", lr=0.1)  # type: ignore[list-item]
    return max(relative_error(found[name], right[name]) for name in params)


def test_replicas_share_the_work(pool: Any) -> None:
    assert max(pool.run(check_replicas, world=2)) < 1e-5


def check_refusals(rank: int, world: int) -> list[str]:
    params, _, _ = placed("fsdp on 2", 0)
    other = by_placements(whole_tensors({"up": (20, 6), "down": (6, 20)}, 0), (2,), [Shard(1)])
    texts = []
    for call in (lambda: muon().init(params), lambda: muon(plan=plan(params)).init(other)):
        with pytest.raises(ValueError, match=r"DTensor|sharded") as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_shards_need_their_plan(pool: Any) -> None:
    for texts in pool.run(check_refusals, world=2):
        assert "up is a DTensor: pass plan=" in texts[0]
        assert "up is sharded otherwise" in texts[1]


def test_structures_must_agree() -> None:
    with pytest.raises(ValueError, match="b"):
        apply_updates({"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1)})
    tx, params = lion(), {"a": torch.ones(1), "b": torch.ones(1)}
    state = tx.init(params)
    with pytest.raises(ValueError, match="b"):
        tx.update({"a": torch.ones(1)}, state, params)


def test_elementwise_skips_none() -> None:
    assert elementwise(torch.add, [torch.ones(1), None], [None, torch.ones(1)]) == [None, None]
