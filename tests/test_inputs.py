"""Bad input: each a clear error at construction, or a right result. What `test_optimizer` has not.

Errors on one rank of several are in `test_agreement`.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from layouts import WHOLE, by_fully_shard, gather, relative_error, scatter_like
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import ortho_func
from ortho_func import Muon

every = pytest.mark.parametrize("algorithm", list(WHOLE))

# Values of a wrong type: what each option is given, and what the error says.
WRONG_TYPES: list[tuple[str, Any, type[Exception], str]] = [
    ("lr", 1j, TypeError, "lr must be a number, got 1j"),
    ("lr", torch.tensor(True), TypeError, "lr as a tensor must be real, got torch.bool"),
    ("lr", torch.tensor(1j), TypeError, "lr as a tensor must be real, got torch.complex64"),
    ("lr", [0.1], TypeError, r"lr must be a number, got \[0.1\]"),
    ("weight_decay", "0.1", TypeError, "weight_decay must be a number, got '0.1'"),
    ("weight_decay", True, TypeError, "weight_decay must be a number, got True"),
    ("momentum", "0.9", TypeError, "momentum must be a number, got '0.9'"),
    ("momentum", False, TypeError, "momentum must be a number, got False"),
    ("eps", None, TypeError, "eps must be a number, got None"),
    ("eps", True, TypeError, "eps must be a number, got True"),
    ("eps", math.nan, ValueError, "eps must lie in"),
    ("nesterov", None, TypeError, "nesterov must be True or False, got None"),
    ("nesterov", "no", TypeError, "nesterov must be True or False, got 'no'"),
    ("cautious", 0, TypeError, "cautious must be True or False, got 0"),
    ("ns_steps", 2.5, TypeError, "ns_steps must be a whole number, got 2.5"),
    ("ns_steps", True, TypeError, "ns_steps must be a whole number, got True"),
    ("ns_steps", "4", TypeError, "ns_steps must be a whole number, got '4'"),
    ("ns_steps", -1, ValueError, "steps"),
    ("flatten", 1, TypeError, "flatten must be True, False or None, got 1"),
    ("flatten", "yes", TypeError, "flatten must be True, False or None, got 'yes'"),
    ("split_sizes", 4, TypeError, "split_sizes must be a tuple of whole numbers, got 4"),
    ("split_sizes", "22", TypeError, "split_sizes must be a tuple of whole numbers, got '22'"),
    ("split_sizes", (2.0, 2.0), TypeError, "each of split_sizes must be a whole number, got 2.0"),
    ("split_sizes", (True, 3), TypeError, "each of split_sizes must be a whole number, got True"),
    ("num_heads", 2.0, TypeError, "num_heads must be a whole number, got 2.0"),
    ("num_heads", True, TypeError, "num_heads must be a whole number, got True"),
    ("adjust_lr_fn", 3, ValueError, "adjust_lr_fn must be one of"),
    ("orthogonalizer", None, TypeError, "orthogonalizer"),
    ("nonfinite", "ignore", ValueError, "nonfinite must be 'propagate' or 'skip', got 'ignore'"),
    ("nonfinite", None, ValueError, "nonfinite must be 'propagate' or 'skip', got None"),
    ("wire_dtype", None, ValueError, "wire_dtype must be one of"),
    ("compute_dtype", "float32", ValueError, "compute_dtype must be one of"),
]
# The same of options that only the optimizer has, not a group.
WRONG_SETTINGS: list[tuple[str, Any, type[Exception], str]] = [
    ("bucket_bytes", True, TypeError, "bucket_bytes must be a whole number, got True"),
    ("bucket_bytes", 1.5, TypeError, "bucket_bytes must be a whole number, got 1.5"),
    ("bucket_bytes", "64", TypeError, "bucket_bytes must be a whole number, got '64'"),
    ("wire", None, ValueError, "wire must be 'auto', 'dense' or 'exact', got None"),
    ("balance", "even", ValueError, "balance must be 'cost' or 'uniform', got 'even'"),
    ("compile", "yes", TypeError, "compile must be True, False or a dict .* got 'yes'"),
    ("compile", 1, TypeError, "compile must be True, False or a dict .* got 1"),
    ("reduce_gradients", "yes", TypeError, "reduce_gradients must be True or False, got 'yes'"),
    ("process_group", "world", TypeError, "process_group must be a .*ProcessGroup, got str"),
    ("process_group", 3, TypeError, "process_group must be a .*ProcessGroup, got int"),
]


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


@pytest.mark.parametrize(("option", "value", "kind", "match"), WRONG_TYPES)
def test_options_of_wrong_types(option: str, value: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        Muon([weight(4, 4)], **{option: value})
    with pytest.raises(kind, match=match):
        Muon([{"params": [weight(4, 4)], option: value}])


@pytest.mark.parametrize(("option", "value", "kind", "match"), WRONG_SETTINGS)
def test_settings_of_wrong_types(
    option: str, value: Any, kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        Muon([weight(4, 4)], **{option: value})


@pytest.mark.parametrize("compiled", [False, {"backend": "eager"}], ids=["eager", "compiled"])
@pytest.mark.parametrize("value", [torch.tensor([0.1]), torch.tensor(0.1, dtype=torch.float64)])
def test_tensors_of_one_element_are_numbers(value: Tensor, compiled: Any) -> None:
    first, second = weight(4, 6), weight(4, 6)
    second.data.copy_(first.data)
    one = Muon([first], lr=value, compile=compiled, compute_dtype=torch.float32)
    two = Muon([second], lr=0.1, compute_dtype=torch.float32)
    for p in (first, second):
        p.grad = torch.ones_like(p).tril()
    one.step()
    two.step()
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


SPARSE = [*WHOLE, "adamw", "lion"]


@pytest.mark.parametrize("algorithm", SPARSE)
def test_sparse_gradients_are_their_dense_selves(algorithm: str) -> None:
    table = nn.Embedding(8, 6, sparse=True)
    dense = nn.Embedding(8, 6)
    dense.weight.data.copy_(table.weight.data)
    optimizers = [
        Muon([{"params": [e.weight], "algorithm": algorithm}], compute_dtype=torch.float32)
        for e in (table, dense)
    ]
    for _ in range(2):
        words = torch.tensor([1, 5, 5, 7])
        for embedding, optimizer in zip((table, dense), optimizers, strict=True):
            embedding(words).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(table.weight, dense.weight)


def sparse_of_a_replica(rank: int, world: int) -> float:
    """Under DDP one rank's gradient is sparse."""
    import torch.distributed as dist

    first = nn.Parameter(torch.arange(24.0).view(4, 6))
    second = nn.Parameter(first.detach().clone())
    one = Muon([first], process_group=dist.group.WORLD, wire_dtype=torch.float32)
    two = Muon([second], process_group=dist.group.WORLD, wire_dtype=torch.float32)
    gradient = torch.ones(4, 6).tril()
    first.grad = gradient.to_sparse() if rank else gradient.clone()
    second.grad = gradient.clone()
    one.step()
    two.step()
    return relative_error(first.detach(), second.detach())


def test_sparse_gradients_of_one_rank(pool: Any) -> None:
    assert max(pool.run(sparse_of_a_replica, world=2)) == 0.0


@every
def test_a_parameter_listed_twice(algorithm: str) -> None:
    one = weight(4, 4)
    cls = WHOLE[algorithm][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns, and goes on
        with pytest.raises(ValueError, match=r"parameter 1 of group 0 is the same .* parameter 0"):
            cls([one, one])
        with pytest.raises(ValueError, match=r"tied\.head is the same parameter as embedding"):
            cls([("embedding", one), ("tied.head", one)])
    with pytest.raises(ValueError, match="more than one parameter group"):
        cls([{"params": [one]}, {"params": [one]}])


@every
def test_an_empty_group(algorithm: str) -> None:
    one = weight(4, 4)
    optimizer = WHOLE[algorithm][0]([{"params": []}, {"params": [one]}, {"params": []}])
    before = one.detach().clone()
    one.grad = torch.randn(4, 4)
    optimizer.step()
    assert not torch.equal(one, before)
    only = WHOLE[algorithm][0]([{"params": []}])
    only.step()
    assert only.state_dict()["state"] == {}


NOTHING: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((0, 4), {}),
    ((4, 0), {}),
    ((0, 0), {}),
    ((0, 3, 4), {"flatten": False}),
    ((3, 0, 4), {"flatten": False}),
    ((3, 4, 0), {"flatten": False}),
    ((0, 3, 2), {"flatten": True}),
    ((3, 0, 2), {"flatten": True}),
]


@every
@pytest.mark.parametrize("compiled", [False, {"backend": "eager"}], ids=["eager", "compiled"])
def test_parameters_of_no_elements(algorithm: str, compiled: Any) -> None:
    """They are there, with state, and the others' step is what it is without them."""
    beside, alone = weight(4, 6), weight(4, 6)
    alone.data.copy_(beside.data)
    nothing = [weight(*shape) for shape, _ in NOTHING]
    groups = [{"params": [p], **own} for p, (_, own) in zip(nothing, NOTHING, strict=True)]
    cls, options = WHOLE[algorithm][0], {"wire_dtype": torch.float32}
    one = cls([*groups, {"params": [beside]}], compile=compiled, **options)
    two = cls([alone], **options)
    for _ in range(2):
        for p in (*nothing, beside, alone):
            p.grad = torch.ones_like(p).tril() if p.ndim == 2 else torch.ones_like(p)
        one.step()
        two.step()
    torch.testing.assert_close(beside, alone, rtol=1e-5, atol=1e-6)
    saved = one.state_dict()
    one.load_state_dict(saved)
    cls([{"params": [weight(0, 4)]}]).step()  # nothing else at all


def nothing_sharded(rank: int, world: int, algorithm: str) -> float:
    tensors = {"none": torch.zeros(4, 0), "w": torch.arange(30.0).view(5, 6).cos()}
    parameters = by_fully_shard(tensors, (world,))
    optimizer = WHOLE[algorithm][0](
        list(parameters.items()), wire_dtype=torch.float32, compute_dtype=torch.float32
    )
    own = nn.Parameter(tensors["w"].clone())
    other = WHOLE[algorithm][0]([own], compute_dtype=torch.float32, **selection(algorithm))
    optimizer.param_groups[0].update(selection(algorithm))
    own.grad = torch.ones(5, 6).tril()
    parameters["none"].grad = torch.zeros_like(parameters["none"])
    parameters["w"].grad = scatter_like(own.grad, parameters["w"])
    optimizer.step()
    other.step()
    return relative_error(gather(parameters["w"]), own.detach())


def selection(algorithm: str) -> dict[str, Any]:
    return {"selection": "global"} if algorithm in ("dion2", "dion3") else {}


@every
def test_parameters_of_no_elements_on_shards(pool: Any, algorithm: str) -> None:
    assert max(pool.run(nothing_sharded, algorithm, world=3)) < 1e-4


@every
def test_parameters_of_no_elements_as_functions(algorithm: str) -> None:
    tx = getattr(ortho_func, algorithm)(lr=0.1)
    params = {"none": torch.zeros(0, 4), "w": torch.randn(4, 6)}
    updates, _ = tx.update(
        {k: torch.ones_like(v) for k, v in params.items()}, tx.init(params), params
    )
    assert updates["none"].shape == (0, 4)
    assert bool((updates["w"] != 0).any())


# What the functional form says at construction; `every` runs the optimizers' own tables above.
WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    *[
        (algorithm, {name: value}, kind, name)
        for algorithm in (*WHOLE, "adamw", "lion")
        for name, value, kind in [
            ("lr", math.nan, ValueError),
            ("lr", math.inf, ValueError),
            ("lr", -1.0, ValueError),
            ("lr", True, TypeError),
            ("lr", "0.1", TypeError),
            ("weight_decay", -0.1, ValueError),
            ("weight_decay", None, TypeError),
            ("cautious", 1, TypeError),
            ("nonfinite", True, ValueError),
            ("momentum_dtype", "fp32", ValueError),
        ]
    ],
    *[
        (algorithm, {name: value}, kind, name)
        for algorithm in WHOLE
        for name, value, kind in [
            ("momentum", 1.0, ValueError),
            ("momentum", math.nan, ValueError),
            ("momentum", False, TypeError),
            ("adjust_lr_fn", "rms", ValueError),
        ]
    ],
    ("muon", {"nesterov": 1}, TypeError, "nesterov"),
    ("muon", {"ns_steps": 0}, ValueError, "steps"),
    ("normuon", {"nesterov": "yes"}, TypeError, "nesterov"),
    ("normuon", {"beta2": 1.0}, ValueError, "beta2"),
    ("normuon", {"eps": -1e-8}, ValueError, "eps"),
    ("dion3", {"eps": math.nan}, ValueError, "eps"),
    ("dion2", {"fraction": True}, TypeError, "fraction"),
    ("dion2", {"fraction": "0.5"}, TypeError, "fraction"),
    ("dion2", {"fraction": 0.0}, ValueError, "fraction"),
    ("dion3", {"fraction": math.nan}, ValueError, "fraction"),
    ("dion3", {"selection": "all"}, ValueError, "selection"),
    ("dion", {"rank_fraction": 1.5}, ValueError, "rank_fraction"),
    ("dion", {"rank_fraction": None}, TypeError, "rank_fraction"),
    ("adamw", {"eps": -1.0}, ValueError, "eps"),
    ("adamw", {"betas": 0.9}, TypeError, "betas"),
    ("adamw", {"betas": (0.9, True)}, TypeError, "betas"),
    ("adamw", {"betas": (0.9, math.nan)}, ValueError, "betas"),
    ("lion", {"betas": (0.9, 1.0)}, ValueError, "betas"),
]


@pytest.mark.parametrize(("algorithm", "options", "kind", "named"), WRONG)
def test_functions_of_wrong_settings(
    algorithm: str, options: dict[str, Any], kind: type[Exception], named: str
) -> None:
    with pytest.raises(kind, match=named):
        getattr(ortho_func, algorithm)(**options)


LEAVES = {
    "no dim": torch.tensor(1.0),
    "one dim": torch.ones(3),
    "integers": torch.ones(2, 2, dtype=torch.int64),
    "complex": torch.ones(2, 2, dtype=torch.complex64),
}


@pytest.mark.parametrize("kind", list(LEAVES))
@every
def test_functions_of_what_is_no_matrix(algorithm: str, kind: str) -> None:
    with pytest.raises(ValueError, match="w"):
        getattr(ortho_func, algorithm)().init({"w": LEAVES[kind]})


@every
def test_a_parameter_of_tensors_within(algorithm: str) -> None:
    """A wrapper subclass: all that touches it is dispatched, none reads its storage."""
    cls = WHOLE[algorithm][0]
    first, gradient = torch.randn(4, 6), torch.randn(4, 6)
    inner = nn.Parameter(TwoTensor(first.clone(), first.clone()))
    plain = nn.Parameter(first.clone())
    inner.grad, plain.grad = TwoTensor(gradient.clone(), gradient.clone()), gradient.clone()
    for p in (inner, plain):
        cls([p], lr=0.1).step()
    for part in (inner.a, inner.b):
        assert relative_error(part.detach(), plain.detach()) < 1e-6
