"""What holds for every orthogonalizer on every input: random, and as hard as we can make it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ortho_func.coefficients import Schedule, schedule
from ortho_func.primitives.orthogonalize import METHODS, orthogonalize

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# These see the matrix itself; "turbo_muon" sees it with its rows (of the short side) rescaled.
TRUE = tuple(name for name in METHODS if name != "turbo_muon")
# The largest singular value that the method's steps leave, and room for bfloat16.
CEILING = {"jordan": 1.22, "you": 1.17, "turbo_muon": 1.17, "polar_express": 1.15, "cans": 1.32}

methods, true_methods = st.sampled_from(METHODS), st.sampled_from(TRUE)
sizes, seeds = st.integers(1, 10), st.integers(0, 2**31 - 1)
many, some = settings(max_examples=60, deadline=None), settings(max_examples=30, deadline=None)


def with_spectrum(s: Tensor, rows: int, cols: int) -> Tensor:
    u = torch.linalg.qr(torch.randn(rows, len(s), dtype=FP64)).Q
    v = torch.linalg.qr(torch.randn(cols, len(s), dtype=FP64)).Q
    return (u * s.double()) @ v.mT


def hard(kind: str, m: int, n: int) -> Tensor:
    """A matrix in float64 with entries up to about one; the seed is the caller's."""
    k = min(m, n)
    spectra = {
        "rank 1": torch.ones(1),
        "half rank": torch.linspace(0.1, 1, max(1, k // 2)),
        "repeated": torch.ones(k),
        "pairs": torch.tensor([1.0, 1.0, 0.1, 0.1])[:k],
        "near one": 1 + 1e-3 * (torch.rand(k) - 0.5),
        "one spike": torch.tensor([1.0] + [1e-3] * (k - 1)),
        "steep": torch.logspace(0, -6, k),
        "even": torch.linspace(0.3, 1, k),
    }
    if kind in spectra:
        return with_spectrum(spectra[kind], m, n)
    if kind == "signs":  # a diagonal of signs: nothing averages out
        x = torch.zeros(m, n, dtype=FP64)
        x.diagonal().copy_(torch.randint(0, 2, (k,)) * 2.0 - 1)
        return x[torch.randperm(m)]
    if kind == "ones":
        return torch.ones(m, n, dtype=FP64)
    if kind == "sparse":
        return torch.randn(m, n, dtype=FP64) * (torch.rand(m, n) < 0.2)
    assert kind == "gaussian"
    return torch.randn(m, n, dtype=FP64)


KINDS = (
    "gaussian", "rank 1", "half rank", "repeated", "pairs", "near one", "one spike", "steep",
    "even", "signs", "ones", "sparse",
)  # fmt: skip
kinds = st.sampled_from(KINDS)


def steps_of(method: str) -> Schedule:
    return schedule("minimax" if method.endswith("newton_schulz") else method)


def near(got: Tensor, right: Tensor, tolerance: float) -> bool:
    return float((got.double() - right.double()).abs().max()) <= tolerance if got.numel() else True


@many
@given(
    methods,
    st.lists(st.integers(0, 6), min_size=2, max_size=4),
    st.sampled_from([BF16, FP16, FP32, FP64]),
)
def test_zeros_give_zeros(method: str, shape: list[int], dtype: torch.dtype) -> None:
    got = orthogonalize(torch.zeros(shape, dtype=dtype), method=method)
    assert got.shape == tuple(shape)
    assert got.dtype == dtype
    assert not got.any()


@many
@given(methods, kinds, sizes, sizes, st.integers(-99, 99), st.sampled_from([BF16, FP32]), seeds)
def test_a_power_of_two_changes_no_bit(
    method: str, kind: str, m: int, n: int, exponent: int, dtype: torch.dtype, seed: int
) -> None:
    """From 1e-30 to 1e30; a power of two is exact, so nothing but the scale may differ."""
    torch.manual_seed(seed)
    x = hard(kind, m, n).to(dtype)
    x = torch.where(x.abs() < 1e-7, 0, x)  # what would be lost below the least normal number
    got = orthogonalize(x * 2.0**exponent, method=method)
    expected = orthogonalize(x, method=method)
    assert near(got, expected, 1e-6 if method == "svd" else 0.0)


@many
@given(true_methods, sizes, sizes, st.floats(-30, 30), st.sampled_from([BF16, FP16, FP32]), seeds)
def test_any_scale_is_the_same_up_to_rounding_the_input(
    method: str, m: int, n: int, exponent: float, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x = hard("even", m, n)
    if dtype == FP16:  # its range: smaller entries have few bits, larger ones are infinite
        exponent = exponent / 30 * 4 - 0.5 if exponent > 0 else exponent / 10
    scaled = (x * 10.0**exponent).to(dtype)
    expected = orthogonalize(x.to(FP32), method=method, compute_dtype=FP32)
    got = orthogonalize(scaled, method=method, compute_dtype=FP32)
    assert near(got, expected, {FP32: 1e-4, FP16: 0.02, BF16: 0.06}[dtype])


@many
@given(methods, kinds, sizes, sizes, seeds)
def test_the_transpose_gives_the_transpose(
    method: str, kind: str, m: int, n: int, seed: int
) -> None:
    assume(method != "turbo_muon" or m != n)
    torch.manual_seed(seed)
    x = hard(kind, m, n)
    assert near(orthogonalize(x.mT, method=method).mT, orthogonalize(x, method=method), 1e-8)


@many
@given(
    methods, kinds, sizes, sizes, st.integers(0, 4), st.integers(0, 4),
    st.sampled_from([BF16, FP32, FP64]), seeds,
)  # fmt: skip
def test_zero_rows_and_columns_stay_zero_and_change_nothing_else(
    method: str, kind: str, m: int, n: int, rows: int, cols: int, dtype: torch.dtype, seed: int
) -> None:
    # One that becomes many is no vector any more, and what was the short side must stay it.
    assume(min(m, n) > 1 or method != "auto")
    assume(method != "turbo_muon" or (m <= n) == (m + rows <= n + cols))
    torch.manual_seed(seed)
    x = hard(kind, m, n).to(dtype)
    padded = torch.zeros(m + rows, n + cols, dtype=dtype)
    where = torch.randperm(m + rows)[:m, None], torch.randperm(n + cols)[None, :n]
    padded[where] = x
    # One dtype for both: "auto" may choose another method for another shape.
    got = orthogonalize(padded, method=method, compute_dtype=FP64)
    expected = orthogonalize(x, method=method, compute_dtype=FP64)
    assert near(got[where], expected, {BF16: 1e-2, FP32: 1e-5, FP64: 1e-8}[dtype])
    outside = got.clone()
    outside[where] = 0
    assert near(outside, torch.zeros(()), 1e-9 if method == "svd" else 0.0)
    low = orthogonalize(padded, method=method)
    low[where] = 0
    assert near(low, torch.zeros(()), 1e-6 if method == "svd" else 0.0)


@many
@given(true_methods, kinds, sizes, sizes, st.sampled_from([BF16, FP32, FP64]), seeds)
def test_no_singular_value_turns_its_sign_or_blows_up(
    method: str, kind: str, m: int, n: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x = hard(kind, m, n)
    got = orthogonalize(x, method=method, compute_dtype=dtype).double()
    assert got.isfinite().all()
    largest = float(torch.linalg.svdvals(got)[0])
    assert largest < CEILING.get(method, 1.06)
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    became = (u.mT @ got @ vt.mT).diagonal()
    # Below this, rounding the input to the compute dtype hides a value behind the others.
    hidden = {BF16: 0.02, FP32: 1e-5, FP64: 1e-12}[dtype] * float(s[0])
    assert (became[s > hidden] > 0).all()
    assert (became[s > 0.05 * s[0]] > 0.2).all()


@many
@given(kinds, sizes, sizes, st.sampled_from([BF16, FP32, FP64]), seeds)
def test_almost_orthogonal_scaling_does_not_blow_up(
    kind: str, m: int, n: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x = hard(kind, m, n)
    got = orthogonalize(x, method="turbo_muon", compute_dtype=dtype).double()
    assert got.isfinite().all()
    assert float(torch.linalg.svdvals(got)[0]) < CEILING["turbo_muon"] + 0.03
    # Every row keeps to the side it was on: O X^T has the trace of a positive definite matrix.
    assert float((got * x).sum()) > 0 or not x.any()


@some
@given(methods, st.integers(1, 12), st.booleans(), st.sampled_from([BF16, FP32, FP64]), seeds)
def test_a_single_row_or_column(
    method: str, n: int, column: bool, dtype: torch.dtype, seed: int
) -> None:
    """Its only singular value goes where the steps send one; with auto and svd, to one."""
    torch.manual_seed(seed)
    x = torch.randn(1, n, dtype=FP64).to(dtype)
    assume(bool(x.any()))
    shaped = x.mT if column else x
    end = 1.0 if method in ("auto", "svd") else steps_of(method)(1.0)
    expected = shaped.double() / x.double().norm() * end
    got = orthogonalize(shaped, method=method, compute_dtype=FP64)
    assert near(got, expected, {BF16: 5e-3, FP32: 1e-6, FP64: 1e-9}[dtype])
    # In bfloat16 a single value walks the steps by itself, with all of its rounding.
    low = orthogonalize(shaped, method=method)
    assert 0.6 < float(low.double().norm()) < 1.35
    assert float((low.double() * shaped).sum()) > 0.6 * float(x.double().norm())
    one = orthogonalize(x[:, :1], method=method)
    assert torch.equal(one.sign(), x[:, :1].sign())


@some
@given(methods, kinds, st.integers(1, 4), sizes, sizes, seeds)
def test_a_batch_equals_its_slices(
    method: str, kind: str, count: int, m: int, n: int, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.stack([hard(kind, m, n) for _ in range(count)])
    x = x * (10.0 ** torch.randint(-20, 20, (count, 1, 1)))  # each has a scale of its own
    single = torch.stack([orthogonalize(one, method=method) for one in x])
    assert near(orthogonalize(x, method=method), single, 1e-8)
    assert near(orthogonalize(x[None], method=method)[0], single, 1e-8)


@some
@given(methods, kinds, sizes, sizes, st.integers(1, 3), st.integers(1, 3), st.booleans(), seeds)
def test_strides_do_not_matter(
    method: str, kind: str, m: int, n: int, down: int, along: int, turned: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    view = hard(kind, m, n)[::down, ::along]
    view = view.mT if turned else view
    got = orthogonalize(view, method=method)
    assert near(got, orthogonalize(view.contiguous(), method=method), 1e-9)
    stack = view.expand(3, *view.shape)
    assert near(orthogonalize(stack, method=method), got.expand_as(stack), 1e-8)


@some
@given(methods, kinds, sizes, sizes, seeds)
def test_double_is_not_rounded_on_the_way(
    method: str, kind: str, m: int, n: int, seed: int
) -> None:
    """A change of 1e-11 in the input is seen in the result, and not much more than that."""
    torch.manual_seed(seed)
    x = hard(kind, m, n)
    assume(min(m, n) > 1 and kind in ("even", "repeated", "near one", "signs"))
    for asked in (None, FP64):
        got = orthogonalize(x, method=method, compute_dtype=asked)
        assert got.dtype == FP64
        move = torch.randn_like(x)
        moved = orthogonalize(x + 1e-11 * move, method=method, compute_dtype=asked)
        change = float((moved - got).norm() / move.norm())
        assert change < 1e-7
        assert change > 0 or method == "svd"


@many
@given(
    methods, st.integers(2, 4), sizes, sizes,
    st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    st.sampled_from([BF16, FP16, FP32, FP64]), st.data(),
)  # fmt: skip
def test_what_is_not_finite_stays_in_its_matrix(
    method: str, count: int, m: int, n: int, bad: float, dtype: torch.dtype, data: Any
) -> None:
    torch.manual_seed(data.draw(seeds))
    x = torch.randn(count, m, n).to(dtype)
    expected = orthogonalize(x, method=method)
    poisoned = data.draw(st.integers(0, count - 1))
    x[poisoned, data.draw(st.integers(0, m - 1)), data.draw(st.integers(0, n - 1))] = bad
    got = orthogonalize(x, method=method)
    assert not got[poisoned].isfinite().any()
    others = [k for k in range(count) if k != poisoned]
    assert torch.equal(got[others], expected[others])


@pytest.mark.parametrize("method", METHODS)
def test_every_kind_is_met_by_every_method(method: str) -> None:
    """The draws above are random: here each pair is seen once."""
    for kind in KINDS:
        for shape in ((6, 6), (4, 9), (9, 4), (1, 5), (5, 1), (1, 1)):
            got = orthogonalize(hard(kind, *shape).float(), method=method)
            assert got.isfinite().all(), (kind, shape)
            assert float(torch.linalg.matrix_norm(got.double(), 2)) < 1.4, (kind, shape)
