"""The naive references against hand values and torch's own optimizers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from reference import Params
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

ALGORITHMS = [
    reference.muon,
    reference.normuon,
    reference.dion2,
    reference.dion3,
    reference.dion,
    reference.lion,
    reference.adamw,
]
MATRIX_ALGORITHMS = ALGORITHMS[:5]

algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda f: f.__name__)
matrix_algorithms = pytest.mark.parametrize(
    "algorithm", MATRIX_ALGORITHMS, ids=lambda f: f.__name__
)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def problem(*shape: int, steps: int = 3) -> tuple[Params, list[dict[str, Tensor]]]:
    grads: list[dict[str, Tensor]] = [{"w": randn(*shape, seed=step + 1)} for step in range(steps)]
    return {"w": randn(*shape)}, grads


def identity(x: Tensor) -> Tensor:
    return x


def newton_schulz(x: Tensor) -> Tensor:
    coefficients = (3.4445, -4.7750, 2.0315)
    return _zeropower_via_newtonschulz(x, coefficients, 5, 1e-7)


# Building blocks


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (5, 5), (1, 6), (6, 1)])
def test_polar_factor(shape: tuple[int, int]) -> None:
    x = randn(*shape)
    o = reference.polar(x)
    small = o @ o.T if shape[0] <= shape[1] else o.T @ o
    torch.testing.assert_close(small, torch.eye(min(shape), dtype=torch.float64))
    h = o.T @ x  # the other factor is symmetric and positive
    torch.testing.assert_close(h, h.T)
    assert torch.linalg.eigvalsh(h).min() > -1e-10


def test_polar_factor_of_less_than_full_rank() -> None:
    assert torch.equal(reference.polar(torch.zeros(3, 4)), torch.zeros(3, 4))
    x = torch.tensor([[0.0, 5.0], [0.0, 0.0]])
    torch.testing.assert_close(reference.polar(x), x / 5)


def test_matrices() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    assert [m.tolist() for m in reference.matrices(x, flatten=False)] == x.tolist()
    (flat,) = reference.matrices(x, flatten=True)
    assert flat.tolist() == x.view(2, 12).tolist()
    blocks = reference.matrices(x[0], split_sizes=[1, 2])
    assert [m.tolist() for m in blocks] == [x[0, :1].tolist(), x[0, 1:].tolist()]
    heads = reference.matrices(x.view(6, 4), num_heads=3)
    assert [m.shape for m in heads] == [(2, 4)] * 3
    assert len(reference.matrices(torch.zeros(2, 2, 4, 3), flatten=False, num_heads=2)) == 8
    blocks[1].zero_()
    assert x[0, 1:].eq(0).all()


def test_matrices_refuse_silence_and_bad_blocks() -> None:
    with pytest.raises(ValueError, match="flatten=True or flatten=False"):
        reference.matrices(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="add up to 6 rows"):
        reference.matrices(torch.zeros(6, 4), split_sizes=[3, 2])
    with pytest.raises(ValueError, match="add up to 6 rows"):
        reference.matrices(torch.zeros(6, 4), num_heads=4)
    with pytest.raises(ValueError, match="no matrix"):
        reference.matrices(torch.zeros(6))


def test_selection() -> None:
    m = torch.tensor([[1.0, -1, 1, 0], [5, 0, 0, 0], [0, -2, -2, 0]])
    assert reference.select(m, 0.34) == (0, [1, 2])  # ⌈1.02⌉ rows, L1 norms 3, 5, 4
    assert reference.select(m.T, 0.34) == (1, [1, 2])
    assert reference.select(torch.ones(4, 4), 0.5) == (0, [0, 1])
    assert reference.select(m, 0.34, [(0, 2), (2, 3), (3, 3)]) == (0, [1, 2])
    tall = torch.arange(8.0).view(8, 1)
    assert reference.select(tall, 0.5, [(0, 3), (3, 6), (6, 8)]) == (0, [1, 2, 4, 5, 6, 7])


def test_shards_of_row_blocks() -> None:
    shards = [(0, 3), (3, 6), (6, 6)]
    assert reference.block_shards(shards, [4, 2]) == [
        [(0, 3), (3, 4), (6, 6)],
        [(0, 0), (0, 2), (2, 2)],
    ]


@pytest.mark.parametrize(
    ("name", "wide", "tall"),
    [
        (None, 1.0, 2.0),
        ("original", 1.0, 2.0),
        ("match_rms_adamw", 0.8, 0.8),
        ("spectral_norm", 0.5, 2.0),
        ("none", 1.0, 1.0),
    ],
)
def test_shape_scale(name: str | None, wide: float, tall: float) -> None:
    assert reference.shape_scale(name, 4, 16) == pytest.approx(wide)
    assert reference.shape_scale(name, 16, 4) == pytest.approx(tall)


def test_unknown_shape_scale() -> None:
    with pytest.raises(ValueError, match="unknown adjust_lr_fn 'rms'"):
        reference.shape_scale("rms", 4, 4)


def test_cautious_decay_only_where_signs_agree() -> None:
    x = torch.tensor([2.0, 2.0, -2.0, -2.0, 2.0])
    u = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0])
    reference.apply_update_(x, u, lr=0.5, weight_decay=0.5, cautious=True)
    assert x.tolist() == [0.5, 3.0, -3.0, -0.5, 2.0]


# What all have in common


@algorithms
def test_no_gradient_touches_nothing(algorithm: Callable[..., Any]) -> None:
    params, steps = problem(4, 6)
    once = algorithm(params, steps[:1], weight_decay=0.5)
    then = algorithm(params, [steps[0], {"w": None}, {}], weight_decay=0.5)
    torch.testing.assert_close(once, then, rtol=0, atol=0)


@algorithms
def test_arguments_are_left_alone_and_state_continues(algorithm: Callable[..., Any]) -> None:
    params, steps = problem(4, 6)
    before = params["w"].clone()
    half, state = algorithm(params, steps[:2])
    kept = reference._copy(state)
    rest = algorithm(half, steps[2:], state)
    torch.testing.assert_close(rest, algorithm(params, steps), rtol=0, atol=0)
    torch.testing.assert_close(state, kept, rtol=0, atol=0)
    assert torch.equal(params["w"], before)


@algorithms
def test_zero_gradients_only_decay(algorithm: Callable[..., Any]) -> None:
    params = {"w": randn(4, 6)}
    new, state = algorithm(params, [{"w": torch.zeros(4, 6)}] * 2, lr=0.1, weight_decay=0.5)
    torch.testing.assert_close(new["w"], 0.95**2 * params["w"])
    for value in state["w"].values():
        for tensor in value if isinstance(value, list) else [value]:
            assert torch.isfinite(tensor).all()


@algorithms
def test_float32_is_near_float64(algorithm: Callable[..., Any]) -> None:
    params, steps = problem(4, 6)
    single = algorithm(params, steps, lr=0.1, dtype=torch.float32)[0]["w"]
    assert single.dtype == torch.float32
    double = algorithm(params, steps, lr=0.1)[0]["w"]
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-5)


@matrix_algorithms
@pytest.mark.parametrize("shape", [(3, 4, 6), (3, 6, 4)])
def test_stack_and_row_blocks_equal_separate(
    algorithm: Callable[..., Any], shape: tuple[int, int, int]
) -> None:
    stack, steps = problem(*shape)
    together = algorithm(stack, steps, lr=0.1, flatten=False)[0]["w"]
    fused_steps = [{"w": grads["w"].flatten(0, 1)} for grads in steps]
    fused = {"w": stack["w"].flatten(0, 1)}
    heads = algorithm(fused, fused_steps, lr=0.1, num_heads=shape[0])[0]["w"]
    sizes = {"w": [shape[1]] * shape[0]}
    blocks = algorithm(fused, fused_steps, lr=0.1, split_sizes=sizes)[0]["w"]
    torch.testing.assert_close(heads.view(shape), together)
    torch.testing.assert_close(blocks.view(shape), together)
    if algorithm is not reference.dion:  # its start depends on the matrix's index
        alone = [
            algorithm({"w": w}, [{"w": grads["w"][i]} for grads in steps], lr=0.1)[0]["w"]
            for i, w in enumerate(stack["w"])
        ]
        torch.testing.assert_close(torch.stack(alone), together)


@matrix_algorithms
def test_convolution_is_one_flat_matrix(algorithm: Callable[..., Any]) -> None:
    conv, steps = problem(6, 2, 3, 3)
    flat_steps = [{"w": grads["w"].flatten(1)} for grads in steps]
    flat = algorithm({"w": conv["w"].flatten(1)}, flat_steps, lr=0.1)[0]["w"]
    new = algorithm(conv, steps, lr=0.1, flatten=True)[0]["w"]
    torch.testing.assert_close(new.flatten(1), flat)


# One by one


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(8, 20), (20, 8)])
def test_muon_is_torchs(shape: tuple[int, int], nesterov: bool, adjust_lr_fn: str | None) -> None:
    params = {"w": randn(*shape, dtype=torch.float32)}
    steps: list[dict[str, Tensor]] = [
        {"w": randn(*shape, seed=i, dtype=torch.float32)} for i in (1, 2, 3)
    ]
    hyper: dict[str, Any] = {
        "lr": 0.1,
        "weight_decay": 0.3,
        "momentum": 0.9,
        "nesterov": nesterov,
        "adjust_lr_fn": adjust_lr_fn,
    }
    p = torch.nn.Parameter(params["w"].clone())
    optimizer = torch.optim.Muon([p], **hyper)
    for grads in steps:
        p.grad = grads["w"]
        optimizer.step()  # type: ignore[no-untyped-call]
    new, state = reference.muon(params, steps, **hyper, orth=newton_schulz, dtype=torch.float32)
    torch.testing.assert_close(new["w"], p.detach(), rtol=0, atol=3e-3)  # bf16 iteration
    torch.testing.assert_close(state["w"]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])


def test_muon_by_hand() -> None:
    params = {"w": torch.tensor([[1.0, 2.0]])}
    new, state = reference.muon(
        params, [{"w": torch.tensor([[3.0, 4.0]])}], lr=0.5, weight_decay=0.2, momentum=0.9
    )
    torch.testing.assert_close(
        new["w"], torch.tensor([[0.9 - 0.5 * 0.6, 1.8 - 0.5 * 0.8]], dtype=torch.float64)
    )
    torch.testing.assert_close(
        state["w"]["momentum_buffer"], torch.tensor([[0.3, 0.4]], dtype=torch.float64)
    )


def test_nesterov_and_plain_momentum() -> None:
    params, steps = {"w": torch.zeros(1, 1)}, [{"w": torch.ones(1, 1)}, {"w": torch.zeros(1, 1)}]
    hyper: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.5, "orth": identity}
    plain = reference.muon(params, steps, nesterov=False, **hyper)[0]["w"]
    ahead = reference.muon(params, steps, nesterov=True, **hyper)[0]["w"]
    assert plain.item() == -(0.5 + 0.25)
    assert ahead.item() == -(0.5 + 0.5 * 0.5 + 0.5 * 0.25)


def test_normuon_by_hand() -> None:
    g = torch.tensor([[3.0, 4.0], [0.0, 10.0]])
    new, state = reference.normuon(
        {"w": torch.zeros(2, 2)},
        [{"w": g}],
        lr=1.0,
        weight_decay=0.0,
        momentum=0.0,
        beta2=0.75,
        eps=0.0,
        orth=identity,
    )
    torch.testing.assert_close(
        state["w"]["second_moment"][0],
        torch.tensor([[0.25 * 12.5], [0.25 * 50.0]], dtype=torch.float64),
    )
    direction = torch.tensor([[3.0, 4.0], [0.0, 5.0]], dtype=torch.float64)
    torch.testing.assert_close(new["w"], -direction * math.sqrt(125 / 50))


def test_normuon_keeps_the_norm() -> None:
    params, steps = problem(4, 6)
    muon = reference.muon(params, steps[:1], lr=1.0)[0]["w"] - 0.9 * params["w"]
    normuon = reference.normuon(params, steps[:1], lr=1.0)[0]["w"] - 0.9 * params["w"]
    torch.testing.assert_close(torch.linalg.norm(normuon), torch.linalg.norm(muon))
    rows = torch.linalg.norm(normuon, dim=1)
    torch.testing.assert_close(rows, torch.ones_like(rows))


def test_dion2_by_hand() -> None:
    g = torch.tensor([[1.0, 0.0, 0.0], [0.0, -4.0, 0.0]])
    new, state = reference.dion2(
        {"w": torch.ones(2, 3)},
        [{"w": g}] * 2,
        lr=0.5,
        weight_decay=0.2,
        momentum=0.5,
        fraction=0.5,
    )
    # Row 1 is taken twice; row 0 gathers.
    torch.testing.assert_close(
        state["w"]["momentum_buffer"],
        torch.tensor([[2.0, 0.0, 0.0], [0.0, -3.0, 0.0]], dtype=torch.float64),
    )
    expected = torch.full((2, 3), 0.81, dtype=torch.float64)
    expected[1, 1] = (0.9 + 0.5) * 0.9 + 0.5
    torch.testing.assert_close(new["w"], expected)


def test_dion2_scale_is_the_whole_matrix() -> None:
    g = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0])).repeat(4, 1)  # (16, 4): columns
    new, _ = reference.dion2(
        {"w": torch.zeros(16, 4)}, [{"w": g}], lr=1.0, weight_decay=0.0, fraction=0.25
    )
    expected = torch.zeros(16, 4, dtype=torch.float64)
    expected[3::4, 3] = -2.0 / 2.0  # s = √(16/4), a column of four equal entries has norm 1
    torch.testing.assert_close(new["w"], expected)


def test_dion2_of_all_slices_is_muon_on_gathered_momentum() -> None:
    params, steps = problem(4, 6, steps=1)
    full = reference.dion2(params, steps, lr=0.1, fraction=1.0)[0]
    torch.testing.assert_close(full, reference.muon(params, steps, lr=0.1)[0])
    local = reference.dion2(params, steps, lr=0.1, fraction=1.0, shards=[(0, 2), (2, 4)])[0]
    torch.testing.assert_close(full, local)


@pytest.mark.parametrize("algorithm", [reference.dion2, reference.dion3])
def test_local_selection(algorithm: Callable[..., Any]) -> None:
    params, steps = problem(5, 6, steps=1)
    shards = [(0, 3), (3, 5), (5, 5)]
    state = algorithm(params, steps, fraction=0.5, momentum=0.0, shards={"w": shards})[1]
    rows = reference.select(steps[0]["w"], 0.5, shards)[1]
    gone = state["w"]["momentum_buffer"].eq(0).all(dim=1)
    assert len(rows) == 2
    assert gone.nonzero().flatten().tolist() == rows


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
def test_dion3_of_all_rows_is_normuon(shape: tuple[int, int]) -> None:
    params, steps = problem(*shape, steps=1)
    hyper: dict[str, Any] = {"lr": 0.1, "adjust_lr_fn": "none"}
    new = reference.dion3(params, steps, fraction=1.0, **hyper)[0]["w"]
    torch.testing.assert_close(new, reference.normuon(params, steps, **hyper)[0]["w"])


def test_dion3_keeps_statistics_of_slices_not_selected() -> None:
    params, steps = problem(4, 6, steps=1)
    v = reference.dion3(params, steps, fraction=0.5)[1]["w"]["second_moment"][0]
    chosen = reference.select(steps[0]["w"], 0.5)[1]
    assert v.shape == (4, 1)
    assert v.flatten().nonzero().flatten().tolist() == chosen


def test_dion_of_full_rank_and_orthogonal_gradient() -> None:
    g = 3 * reference.polar(randn(4, 4))
    params = {"w": torch.zeros(4, 4)}
    hyper: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.0, "rank_fraction": 1.0}
    new, state = reference.dion(params, [{"w": g}], momentum=0.9, **hyper)
    torch.testing.assert_close(new["w"], -0.1 * g / 3)
    torch.testing.assert_close(state["w"]["momentum_buffer"], 0.9 * g)


def test_dion_rank_and_given_start() -> None:
    params, steps = problem(6, 8)
    q = {"w": [torch.eye(8, 2)]}
    new, state = reference.dion(params, steps[:1], q=q, rank_fraction=0.3, lr=1.0, weight_decay=0.0)
    update = (params["w"] - new["w"]) / math.sqrt(6 / 8)
    assert torch.linalg.matrix_rank(update) == 2
    assert state["w"]["q"][0].shape == (8, 2)
    norms = torch.linalg.norm(state["w"]["q"][0], dim=0)
    torch.testing.assert_close(norms, torch.ones_like(norms))


def test_lion_by_hand() -> None:
    params = {"b": torch.tensor([1.0, -1.0])}
    steps = [{"b": torch.tensor([2.0, 0.0])}, {"b": torch.tensor([-0.1, -1.0])}]
    new, state = reference.lion(params, steps, lr=0.25, weight_decay=0.4, betas=(0.5, 0.75))
    expected = torch.tensor([(0.9 - 0.25) * 0.9 - 0.25, -0.9 * 0.9 + 0.25], dtype=torch.float64)
    torch.testing.assert_close(new["b"], expected)
    moment = torch.tensor([0.75 * 0.5 - 0.25 * 0.1, -0.25], dtype=torch.float64)
    torch.testing.assert_close(state["b"]["momentum_buffer"], moment)


def test_adamw_is_torchs() -> None:
    params, steps = problem(7)
    p = torch.nn.Parameter(params["w"].clone())
    optimizer = torch.optim.AdamW([p], lr=0.1, weight_decay=0.3)
    for grads in steps:
        p.grad = grads["w"]
        optimizer.step()
    new, state = reference.adamw(params, steps, lr=0.1, weight_decay=0.3)
    torch.testing.assert_close(new["w"], p.detach(), rtol=0, atol=0)
    torch.testing.assert_close(state["w"]["exp_avg"], optimizer.state[p]["exp_avg"])


def test_cautious_adamw_decays_some_entries() -> None:
    params, steps = problem(64, steps=1)
    without = reference.adamw(params, steps, lr=0.1, weight_decay=0.0)[0]["w"]
    cautious = reference.adamw(params, steps, lr=0.1, weight_decay=0.3, cautious=True)[0]["w"]
    agrees = torch.sign(steps[0]["w"]) == torch.sign(params["w"])
    expected = without - 0.1 * 0.3 * params["w"] * agrees
    torch.testing.assert_close(cautious, expected)
