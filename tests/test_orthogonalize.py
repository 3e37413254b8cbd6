"""Orthogonalizers: exact properties, ranges of singular values, and the schedules' errors."""

import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz as torch_newton_schulz
from torch.utils.flop_counter import FlopCounterMode

from ortho_func.coefficients import SCHEDULE_NAMES, Schedule, schedule
from ortho_func.primitives.iterations import largest_eigenvalue_bound
from ortho_func.primitives.orthogonalize import (
    METHODS,
    Orthogonalizer,
    cost,
    flops,
    get_orthogonalizer,
    gram_newton_schulz,
    newton_schulz,
    normalize_vector,
    orthogonalize,
    polar_svd,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = (BF16, FP16, FP32, FP64)
ITERATED = ("newton_schulz", "gram_newton_schulz", *SCHEDULE_NAMES[1:])
# Rounding of results in bfloat16, times a few for the steps before.
BF16_NOISE = 0.06


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(torch.seed() % 2**31)


def with_spectrum(s: Tensor, rows: int, cols: int) -> Tensor:
    """A random matrix with singular values ``s``."""
    u = torch.linalg.qr(torch.randn(rows, len(s), dtype=FP64)).Q
    v = torch.linalg.qr(torch.randn(cols, len(s), dtype=FP64)).Q
    return (u * s.double()) @ v.mT


def singular(x: Tensor) -> Tensor:
    return torch.linalg.svdvals(x.double())


def relative_error(got: Tensor, polar: Tensor) -> float:
    return float((got.double() - polar.double()).norm() / polar.double().norm())


def alignment(got: Tensor, x: Tensor, rank: int | None = None) -> Tensor:
    """What each of x's leading singular values became: the diagonal of U^T got V."""
    u, _, vt = torch.linalg.svd(x.double(), full_matrices=False)
    return (u.mT @ got.double() @ vt.mT).diagonal(dim1=-2, dim2=-1)[..., :rank]


# --- exact properties ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (8, 8), (6, 20), (20, 6), (3, 5, 9)])
def test_zeros_shape_and_dtype(method: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    f = get_orthogonalizer(method)
    zeros = f(torch.zeros(shape, dtype=dtype))
    assert zeros.dtype == dtype
    assert zeros.shape == shape
    assert not zeros.any()
    got = f(torch.randn(shape).to(dtype))
    assert got.dtype == dtype
    assert got.shape == shape
    assert got.isfinite().all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 3, 4), (2, 0, 0)])
def test_empty(method: str, shape: tuple[int, ...]) -> None:
    assert orthogonalize(torch.zeros(shape), method=method).shape == shape


@pytest.mark.parametrize("method", METHODS)
def test_input_is_not_written_and_result_is_fresh(method: str) -> None:
    for dtype in DTYPES:
        for shape in ((1, 5), (6, 12), (12, 6), (2, 6, 6)):
            x = torch.randn(shape).to(dtype)
            kept = x.clone()
            got = orthogonalize(x, method=method)
            assert torch.equal(x, kept)
            assert got.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("shape", [(1, 9), (12, 12), (8, 24), (3, 10, 5)])
def test_powers_of_two_change_nothing(
    method: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape).to(dtype)
    exponents = (-100, -30, 1, 30, 100) if dtype != FP16 else (-4, 3)
    expected = orthogonalize(x, method=method)
    for exponent in exponents:
        got = orthogonalize(x * 2.0**exponent, method=method)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-7 if dtype == FP32 else 1e-3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-12, 1e-7, 1e7, 1e20, 1e30])
def test_scale_invariance(method: str, scale: float) -> None:
    x = with_spectrum(torch.linspace(0.5, 1, 16), 16, 24).float()
    expected = orthogonalize(x, method=method, compute_dtype=FP64)
    for dtype in (FP32, BF16):
        # Rounding to dtype comes after scaling, so in bfloat16 the two inputs differ.
        got = orthogonalize((x * scale).to(dtype), method=method, compute_dtype=FP64)
        assert relative_error(got, expected) < (1e-5 if dtype == FP32 else 0.05)
    got = orthogonalize(x * scale, method=method)
    assert relative_error(got, expected) < BF16_NOISE


@pytest.mark.parametrize("scale", [2.0**-14, 2.0**-8, 1.0, 2.0**13])
def test_half_precision_range(scale: float) -> None:
    x = with_spectrum(torch.linspace(0.5, 1, 8), 8, 16)
    got = orthogonalize((x * scale).to(FP16), compute_dtype=FP32)
    assert relative_error(got, polar_svd(x)) < 0.03


def test_double_range_reaches_beyond_single() -> None:
    x = torch.randn(6, 9, dtype=FP64)
    for method in METHODS:
        for dtype in (None, FP32):
            expected = orthogonalize(x, method=method, compute_dtype=dtype)
            for scale in (1e-200, 1e200):
                got = orthogonalize(x * scale, method=method, compute_dtype=dtype)
                assert relative_error(got, expected) < 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_transpose(method: str) -> None:
    for shape in ((1, 8), (7, 7), (5, 16), (4, 6, 9)):
        if method == "turbo_muon" and shape == (7, 7):
            continue  # it scales a square matrix's rows, and its transpose's
        x = torch.randn(shape, dtype=FP64)
        got = orthogonalize(x.mT, method=method)
        torch.testing.assert_close(got.mT, orthogonalize(x, method=method))
    x = torch.randn(5, 16)
    got = orthogonalize(x.mT.contiguous(), method=method).mT
    assert relative_error(got, orthogonalize(x, method=method)) < BF16_NOISE


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [BF16, FP32, FP64])
def test_zero_rows_and_columns_stay_and_change_nothing_else(
    method: str, dtype: torch.dtype
) -> None:
    x = torch.randn(6, 10).to(dtype)
    padded = torch.zeros(9, 13, dtype=dtype)
    rows, cols = torch.tensor([0, 2, 3, 5, 6, 8]), torch.arange(1, 11)
    padded[rows[:, None], cols] = x
    got = orthogonalize(padded, method=method)
    outside = got.clone()
    outside[rows[:, None], cols] = 0
    if method != "svd":
        assert not outside.any()
    expected = orthogonalize(x, method=method)
    error = relative_error(got[rows[:, None], cols], expected)
    assert error < {BF16: BF16_NOISE, FP32: BF16_NOISE, FP64: 1e-10}[dtype]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_batch_equals_slices(method: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 6, 15, dtype=dtype)
    got = orthogonalize(x, method=method, compute_dtype=dtype)
    single = [orthogonalize(m, method=method, compute_dtype=dtype) for m in x.flatten(0, 1)]
    torch.testing.assert_close(
        got.flatten(0, 1), torch.stack(single), rtol=0, atol=1e-4 if dtype == FP32 else 1e-12
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_non_finite_and_zero_matrices_poison_only_themselves(
    method: str, bad: float, dtype: torch.dtype
) -> None:
    for shape in ((4, 6, 12), (4, 12, 6), (4, 1, 6)):
        x = torch.randn(shape).to(dtype)
        expected = orthogonalize(x, method=method)
        x[1, 0, 3 % shape[-1]] = bad
        x[2] = 0
        got = orthogonalize(x, method=method)
        assert got[1].isnan().all()
        assert not got[2].any()
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[3], expected[3])


@pytest.mark.parametrize("method", METHODS)
def test_strided_and_expanded_input(method: str) -> None:
    base = torch.randn(2, 12, 20, dtype=FP64)
    for view in (base[:, ::2, 1::3], base.mT[..., 3:], base.transpose(0, 1), base[0].flip(0)):
        got = orthogonalize(view, method=method)
        torch.testing.assert_close(got, orthogonalize(view.contiguous(), method=method))
    row = torch.randn(1, 9, dtype=FP64).expand(5, 9)
    got = orthogonalize(row, method=method)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, got[:1].expand(5, 9), atol=1e-9, rtol=0)
    stack = torch.randn(4, 7, dtype=FP64).expand(3, 4, 7)
    expected = orthogonalize(stack[0].clone(), method=method).expand(3, 4, 7)
    torch.testing.assert_close(orthogonalize(stack, method=method), expected)


@pytest.mark.parametrize("method", ["newton_schulz", "gram_newton_schulz", "auto", "you"])
def test_double_stays_double(method: str) -> None:
    x = with_spectrum(torch.linspace(0.3, 1, 8), 8, 32)
    made = schedule("you" if method == "you" else "minimax")
    got = alignment(orthogonalize(x, method=method), x)
    # In float64 every singular value follows the scalar polynomial, off-diagonals vanish.
    exact = orthogonalize(x, method=method)
    assert len(made.steps) in (4, 5)
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close(u @ got.diag() @ vt, exact, atol=1e-13, rtol=0)


# --- vectors -------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.sampled_from(DTYPES), st.integers(-8, 8), st.booleans())
def test_vectors_are_normalized_exactly(
    n: int, dtype: torch.dtype, exponent: int, column: bool
) -> None:
    x = (torch.randn(3, 1, n) * 2.0**exponent).to(dtype)
    x = x.mT if column else x
    expected = x.double() / x.double().norm(dim=(-2, -1), keepdim=True)
    torch.testing.assert_close(orthogonalize(x), expected.to(dtype), rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(normalize_vector(x), orthogonalize(x))


@pytest.mark.parametrize("name", ITERATED)
def test_vectors_through_the_polynomials(name: str) -> None:
    x = torch.randn(1, 16, dtype=FP64)
    made = schedule("minimax" if name.endswith("newton_schulz") else name)
    got = orthogonalize(x, method=name).norm()
    assert got.item() == pytest.approx(made(1.0), rel=1e-9)


def test_jordan_on_ones() -> None:
    for f in (newton_schulz, gram_newton_schulz):
        got = f(torch.ones(1, 16), schedule="jordan", compute_dtype=FP32)
        torch.testing.assert_close(got, torch.full((1, 16), 0.17411), atol=1e-5, rtol=0)


# --- against the reference implementations -------------------------------------------------------


@pytest.mark.parametrize("shape", [(12, 12), (16, 48), (48, 16), (1, 9)])
def test_agrees_with_torch_in_single_precision(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = with_spectrum(torch.linspace(0.2, 1, min(shape)), *shape).float()
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    expected = torch_newton_schulz(x, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    got = newton_schulz(x, schedule="jordan", compute_dtype=FP32)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize("ratio", [1, 2, 8])
@pytest.mark.parametrize("batch", [(), (4,)])
def test_gram_equals_standard(name: str, ratio: int, batch: tuple[int, ...]) -> None:
    x = torch.randn(*batch, 16, 16 * ratio, dtype=FP64)
    expected = newton_schulz(x, schedule=name)
    for restarts in (None, (), (1,), (1, 2, 3)):
        got = gram_newton_schulz(x, schedule=name, restarts=restarts)
        torch.testing.assert_close(got, expected, atol=1e-9, rtol=0)
        got = gram_newton_schulz(x.float(), schedule=name, restarts=restarts, compute_dtype=FP32)
        assert relative_error(got, expected) < 3e-3


@pytest.mark.parametrize("name", [n for n in SCHEDULE_NAMES if n != "turbo_muon"])
def test_matrices_follow_the_scalar_polynomial(name: str) -> None:
    s = torch.logspace(0, -4, 12, dtype=FP64)
    x = with_spectrum(s, 12, 30)
    made = schedule(name)
    if made.scale == "frobenius":
        scale = s.norm()
    else:
        scale = largest_eigenvalue_bound((s**2).diag()[None], (s**4).diag()[None]).sqrt().item()
    expected = torch.tensor([made(float(v / scale)) for v in s], dtype=FP64)
    got = alignment(newton_schulz(x, schedule=name), x)
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (9, 9), (1, 7)])
@pytest.mark.parametrize("spread", [1.0, 1e6])
def test_almost_orthogonal_scaling_is_the_definition(shape: tuple[int, int], spread: float) -> None:
    """D by its formula, the bound of one, and the steps on what D leaves."""
    x = torch.randn(shape, dtype=FP64) * torch.logspace(0, 1, shape[0]).log10().mul(spread)[:, None]
    wide = x if shape[0] <= shape[1] else x.mT
    scaled = wide * (wide @ wide.mT).abs().sum(dim=-1, keepdim=True).nan_to_num(1).rsqrt()
    scaled = torch.where(wide == 0, 0, scaled)
    s = singular(scaled)
    assert s.max() <= 1 + 1e-12
    made = schedule("turbo_muon")
    u, s, vt = torch.linalg.svd(scaled, full_matrices=False)
    expected = (u * torch.tensor([made(float(v)) for v in s], dtype=FP64)) @ vt
    for f in (newton_schulz, gram_newton_schulz):
        got = f(x, schedule="turbo_muon")
        got = got if shape[0] <= shape[1] else got.mT
        torch.testing.assert_close(got, expected, atol=1e-9, rtol=0)


def test_almost_orthogonal_scaling_changes_the_polar_factor() -> None:
    """As its docstring says: the result is the polar factor of DX."""
    x = torch.tensor([[3.0, 1.0, 0.0], [1.0, 0.1, 0.2]], dtype=FP64)
    d = (x @ x.mT).abs().sum(dim=-1, keepdim=True).rsqrt()
    got = newton_schulz(x, schedule="turbo_muon")
    assert relative_error(got, polar_svd(d * x)) < 0.15 < relative_error(got, polar_svd(x))


def test_the_bfloat16_gram_iteration_is_float32_inside() -> None:
    """Applied in bfloat16, its factors left singular values near two on matrices like these."""
    s = torch.tensor([1.0, 1.0, 0.1, 0.1])
    for _ in range(200):
        x = with_spectrum(s, 6, 6)
        got = gram_newton_schulz(x, compute_dtype=BF16)
        assert singular(got).max() < 1.05
        assert torch.equal(got, gram_newton_schulz(x.bfloat16(), compute_dtype=FP32).to(FP64)) or (
            relative_error(got, gram_newton_schulz(x.bfloat16().float(), compute_dtype=FP32)) < 0.01
        )


def test_svd_is_the_polar_factor() -> None:
    for shape in ((7, 7), (5, 12), (3, 12, 5)):
        x = torch.randn(shape, dtype=FP64)
        u, _, vt = torch.linalg.svd(x, full_matrices=False)
        torch.testing.assert_close(polar_svd(x), u @ vt)
    rank2 = with_spectrum(torch.tensor([3.0, 1.0]), 6, 9)
    expected = torch.tensor([1.0, 1, 0, 0, 0, 0], dtype=FP64)
    torch.testing.assert_close(singular(polar_svd(rank2)), expected, atol=1e-12, rtol=0)


# --- hard spectra --------------------------------------------------------------------------------


def hard_spectra(m: int) -> dict[str, Tensor]:
    return {
        "rank 1": torch.tensor([1.0] + [0.0] * (m - 1)),
        "rank m/2": torch.cat([torch.linspace(0.1, 1, m // 2), torch.zeros(m - m // 2)]),
        "repeated": torch.ones(m),
        "two clusters": torch.cat([torch.ones(m // 2), torch.full((m - m // 2,), 1e-2)]),
        "near 1": 1 - 1e-3 * torch.rand(m),
        "log 1e-3": torch.logspace(0, -3, m),
        "log 1e-6": torch.logspace(0, -6, m),
        "one spike": torch.tensor([1.0] + [1e-3] * (m - 1)),
        "uniform": torch.rand(m) * 0.98 + 0.02,
    }


# The largest singular value a method may leave, in any compute dtype.
CEILING = {
    "minimax": 1.06, "jordan": 1.22, "you": 1.16, "polar_express": 1.14, "cans": 1.32,
    "cubic": 1.03,
}  # fmt: skip


@pytest.mark.parametrize("name", CEILING)
@pytest.mark.parametrize("dtype", [BF16, FP32, FP64])
@pytest.mark.parametrize("shape", [(32, 32), (32, 96)])
def test_ranges_and_signs_on_hard_spectra(
    name: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    m = min(shape)
    for label, s in hard_spectra(m).items():
        x = with_spectrum(s, *shape).to(FP64 if dtype == FP64 else FP32)
        for f in (newton_schulz, gram_newton_schulz):
            got = f(x, schedule=name, compute_dtype=dtype)
            assert singular(got).max() < CEILING[name], (label, f)
            kept = int((s > 0.02).sum())
            least = alignment(got, x, kept).min() if kept else torch.tensor(1.0)
            assert least > 0.2, (label, f)


@pytest.mark.parametrize("steps", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_diagonal_matrices_keep_every_sign(steps: int, dtype: torch.dtype) -> None:
    # On a diagonal matrix rounding doesn't average out: each entry walks the polynomials by itself.
    low = torch.rand(2**14) * 0.97 + 0.03
    high = torch.rand(2**14) * 0.5 + 0.5
    for x in (torch.stack([high, low], dim=-1), low.view(-1, 8), low.view(-1, 1)):
        got = newton_schulz(torch.diag_embed(x), steps=steps, compute_dtype=dtype)
        kept = got.diagonal(dim1=-2, dim2=-1)
        assert kept.min() > (0.2 if steps == 2 else 0.9)
        assert kept.max() < (1.25 if steps == 2 else 1.07)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=12),
    st.sampled_from([BF16, FP32, FP64]),
    st.integers(0, 2**31 - 1),
)
def test_the_scale_is_an_upper_bound(spectrum: list[float], dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    s = torch.tensor([*spectrum, 1.0], dtype=FP64)
    u = torch.linalg.qr(torch.randn(len(s), len(s), dtype=FP64)).Q
    gram = ((u * s) @ u.mT).to(dtype)[None]
    bound = largest_eigenvalue_bound(gram, gram @ gram).double().item()
    assert bound > {BF16: 0.99, FP32: 1 - 1e-5, FP64: 1 - 1e-12}[dtype]
    schatten = float((s**4).sum() ** 0.25)
    assert bound < 1.02 * schatten + 0.02
    assert bound < 1.02 * len(s) ** 0.25


def test_the_scale_is_exact_for_one_singular_value() -> None:
    s = torch.tensor([1.0, 0, 0], dtype=FP64).diag()[None]
    assert largest_eigenvalue_bound(s, s).item() == pytest.approx(1.0, rel=1e-12)


# --- the default's errors ------------------------------------------------------------------------


def design_spectra() -> list[Tensor]:
    return [
        torch.randn(256, 1024, dtype=FP64),
        torch.randn(256, 256, dtype=FP64),
        with_spectrum(torch.logspace(0, -3, 256), 256, 512),
    ]


@pytest.fixture(scope="module")
def errors() -> Callable[..., list[float]]:
    matrices = design_spectra()
    polar = [polar_svd(x) for x in matrices]

    def measure(name: str, steps: int | None, dtype: torch.dtype, f=newton_schulz) -> list[float]:  # type: ignore[no-untyped-def]
        got = [f(x, schedule=name, steps=steps, compute_dtype=dtype) for x in matrices]
        return [relative_error(a, b) for a, b in zip(got, polar, strict=True)]

    return measure


@pytest.mark.parametrize("peer", ["jordan", "you", "polar_express", "cans"])
@pytest.mark.parametrize("dtype", [BF16, FP64])
def test_four_steps_are_no_worse_than_five_of_any_peer(
    errors: Callable[..., list[float]], peer: str, dtype: torch.dtype
) -> None:
    ours, theirs = errors("minimax", 4, dtype), errors(peer, 5, dtype)
    assert all(a <= b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize("dtype", [BF16, FP64])
def test_three_steps_are_no_worse_than_five_of_jordan(
    errors: Callable[..., list[float]], dtype: torch.dtype
) -> None:
    ours, theirs = errors("minimax", 3, dtype), errors("jordan", 5, dtype)
    assert all(a <= b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


def test_bfloat16_gram_keeps_the_accuracy(errors: Callable[..., list[float]]) -> None:
    ours, theirs = (errors("minimax", 4, BF16, f) for f in (gram_newton_schulz, newton_schulz))
    assert all(a <= 1.1 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


def test_many_steps_converge() -> None:
    x = with_spectrum(torch.logspace(0, -3, 20), 20, 30)
    for name in ("minimax", "polar_express", "cans"):
        for f in (newton_schulz, gram_newton_schulz):
            assert relative_error(f(x, schedule=name, steps=14), polar_svd(x)) < 1e-6


# --- the interface -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [m for m in METHODS if m != "svd"])
def test_compiles_whole(method: str) -> None:
    torch.compiler.reset()
    f = get_orthogonalizer(method)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for shape in ((6, 10), (3, 8, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), f(x), atol=BF16_NOISE, rtol=0)


def test_vmap_and_gradient() -> None:
    x = torch.randn(3, 5, 8, dtype=FP64)
    for f in (newton_schulz, gram_newton_schulz, partial(newton_schulz, schedule="jordan")):
        torch.testing.assert_close(torch.vmap(f)(x), f(x))
        small = torch.randn(3, 4, dtype=FP64, requires_grad=True)
        assert torch.autograd.gradcheck(f, (small,))


def test_no_graph_is_kept_without_gradients() -> None:
    assert orthogonalize(torch.randn(4, 8)).grad_fn is None


def test_operations_do_not_grow_with_the_batch() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.calls += 1
            return func(*args, **(kwargs or {}))

    def count(n: int) -> int:
        with Count() as counted:
            newton_schulz(torch.randn(n, 8, 12))
        return counted.calls

    assert count(50) == count(2)


def test_names_and_callables() -> None:
    assert set(METHODS) == {"auto", "newton_schulz", "gram_newton_schulz", "svd", *SCHEDULE_NAMES}
    x = torch.randn(6, 9)
    for name in METHODS:
        f = get_orthogonalizer(name)
        assert f == get_orthogonalizer(name)
        assert hash(f) == hash(get_orthogonalizer(name))
        assert pickle.loads(pickle.dumps(f)) == f
        assert torch.equal(f(x), orthogonalize(x, method=name))
    assert get_orthogonalizer("auto", steps=3) != get_orthogonalizer("auto", steps=4)
    assert get_orthogonalizer(torch.sign) is torch.sign
    assert isinstance(get_orthogonalizer("jordan", compute_dtype=FP64), Orthogonalizer)


def counted(f: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Operations in the matrix products that really run."""
    with FlopCounterMode(display=False) as counter:
        f(x)
    return counter.get_total_flops()


@pytest.mark.parametrize("steps", [None, 3, 7])
@pytest.mark.parametrize("method", [m for m in METHODS if m != "svd"])
def test_flops_are_those_that_run(method: str, steps: int | None) -> None:
    for rows, cols in ((8, 8), (8, 24), (40, 8), (16, 18)):
        for dtype in (BF16, FP32, FP64):
            try:
                f = get_orthogonalizer(method, steps=steps, compute_dtype=dtype)
            except ValueError:
                assert steps == 3  # schedules that can't be cut
                continue
            expected = flops(rows, cols, method=method, steps=steps, compute_dtype=dtype)
            assert counted(f, torch.randn(3, rows, cols)) == 3 * expected, (rows, cols, dtype)


def test_flops() -> None:
    for name in METHODS:
        assert flops(64, 96, method=name) == flops(96, 64, method=name) > 0
    assert flops(1, 100) < 1000
    m, n = 256, 1024
    quintic = 4 * m * m * n + 2 * m**3
    assert flops(m, n, method="jordan", steps=5) == 5 * quintic
    assert flops(m, n, steps=4) == 4 * quintic + 2 * m**3
    assert flops(m, n, steps=4) < 0.83 * flops(m, n, method="polar_express")
    assert flops(m, m, steps=4) < 0.87 * flops(m, m, method="polar_express")
    gram = flops(m, n, method="gram_newton_schulz", compute_dtype=FP32)
    assert gram < flops(m, n, method="newton_schulz")
    assert gram == flops(m, n, compute_dtype=FP32)


@pytest.mark.parametrize("steps", [2, 3, 4, 5, 9])
@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_auto_runs_what_the_model_says(steps: int, dtype: torch.dtype) -> None:
    for short in (2, 5, 16):
        for ratio in (1, 1.5, 2, 3, 6, 16):
            shape = (short, int(short * ratio))
            auto = Orthogonalizer("auto", steps, dtype)
            ran = counted(auto, torch.randn(shape))
            plain, gram = (
                (
                    cost(*shape, method=name, steps=steps, compute_dtype=dtype),
                    flops(*shape, method=name, steps=steps, compute_dtype=dtype),
                )
                for name in ("newton_schulz", "gram_newton_schulz")
            )
            assert ran == min(plain, gram)[1]
            assert cost(*shape, steps=steps, compute_dtype=dtype) == min(plain, gram)[0]
            if gram[0] < plain[0]:  # never against the operations, and once long enough, always
                assert gram[1] < plain[1]


def test_the_model_by_shape() -> None:
    """In operations: break-even at 3:2, later for short sides, and soon after for long ones."""

    def takes_gram(rows: int, cols: int, dtype: torch.dtype = FP32) -> bool:
        gram = flops(rows, cols, method="gram_newton_schulz")
        return flops(rows, cols, compute_dtype=dtype) == gram

    for m in (64, 512, 4096):
        assert not takes_gram(m, m)
        assert not takes_gram(m, 7 * m // 5)
        assert takes_gram(m, 3 * m)
        assert takes_gram(3 * m, m)
        assert not takes_gram(m, 8 * m, BF16)
    assert takes_gram(4096, 2 * 4096)
    assert not takes_gram(32, 96)
    assert takes_gram(32, 192)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: get_orthogonalizer("jordn"), ValueError, "polar_express"),
        (lambda: get_orthogonalizer("cans", steps=2), ValueError, "can't be cut"),
        (lambda: get_orthogonalizer("auto", steps=0), ValueError, "at least 1"),
        (lambda: get_orthogonalizer("auto", compute_dtype=FP16), ValueError, "compute_dtype"),
        (lambda: get_orthogonalizer(3), TypeError, "callable"),  # type: ignore[arg-type]
        (lambda: orthogonalize(torch.ones(3, 3), method="qr"), ValueError, "newton_schulz"),
        (lambda: orthogonalize(torch.ones(3)), ValueError, "shape"),
        (lambda: orthogonalize(torch.ones(3, 3, dtype=torch.int64)), TypeError, "floating"),
        (lambda: newton_schulz(torch.ones(3, 3), schedule="x"), ValueError, "unknown schedule"),
        (lambda: gram_newton_schulz(torch.ones(3, 3), restarts=(4,)), ValueError, "restarts"),
        (lambda: flops(3, 3, method="qr"), ValueError, "svd"),
    ],
)
def test_errors(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_schedule_of_ones_own() -> None:
    cubic = Schedule("cubic", ((1.5, -0.5),) * 25, source="Newton-Schulz")
    same = Schedule("cubic", ((1.5, -0.5, 0.0),) * 25, source="Newton-Schulz")
    for scale in ("frobenius", "schatten8"):
        mine = Schedule("mine", cubic.steps, scale, "test")  # type: ignore[arg-type]
        x = with_spectrum(torch.linspace(0.1, 1, 6), 6, 8)
        for f in (newton_schulz, gram_newton_schulz):
            torch.testing.assert_close(f(x, schedule=mine), polar_svd(x), atol=1e-9, rtol=0)
            quintic = Schedule("mine", same.steps, scale, "test")  # type: ignore[arg-type]
            torch.testing.assert_close(f(x, schedule=mine), f(x, schedule=quintic))
    nonic = Schedule("nonic", ((315 / 128, -420 / 128, 378 / 128, -180 / 128, 35 / 128),) * 8)
    torch.testing.assert_close(newton_schulz(x, schedule=nonic), polar_svd(x), atol=1e-9, rtol=0)
