"""QK clipping against its definition: what the clipped weights make of the same input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ortho_func import qk_clip, qk_clip_

FP64 = torch.float64
HEADS, DIM, WIDTH, TOKENS = 6, 4, 10, 12


def logits_of(q: Tensor, k: Tensor, x: Tensor, key_heads: int = HEADS) -> Tensor:
    """[H, T, T]: queries and keys of every head, keys repeated for the query heads that share."""
    queries = (x @ q.mT).view(len(x), HEADS, -1).transpose(0, 1)
    keys = (x @ k.mT).view(len(x), key_heads, -1).transpose(0, 1)
    keys = keys.repeat_interleave(HEADS // key_heads, dim=0)
    return queries @ keys.mT / math.sqrt(queries.shape[-1])


def problem(key_heads: int = HEADS, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    q = torch.randn(HEADS * DIM, WIDTH, dtype=FP64)
    q *= torch.logspace(-1, 1, HEADS).repeat_interleave(DIM)[:, None]  # some heads need it
    k = torch.randn(key_heads * DIM, WIDTH, dtype=FP64)
    return q, k, torch.randn(TOKENS, WIDTH, dtype=FP64)


def tops(logits: Tensor) -> Tensor:
    return logits.amax(dim=(-2, -1))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 6]), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.floats(0.5, 60),
    st.integers(0, 1000),
)  # fmt: skip
def test_each_head_is_clipped_by_its_own_factor(
    key_heads: int, balance: float, threshold: float, seed: int
) -> None:
    q, k, x = problem(key_heads, seed)
    before = logits_of(q, k, x, key_heads)
    options: dict[str, Any] = {"threshold": threshold, "balance": balance, "key_heads": key_heads}
    new_q, new_k = qk_clip(q, k, tops(before), **options)
    after = logits_of(new_q, new_k, x, key_heads)
    assert (tops(after) <= threshold * (1 + 1e-12)).all()
    gamma = (threshold / tops(before)).clamp(max=1)
    gamma = torch.where(tops(before) > 0, gamma, 1.0)
    torch.testing.assert_close(after, before * gamma[:, None, None])
    # Heads that are below the threshold keep every bit where their key head is theirs alone.
    if key_heads == HEADS:
        kept = (tops(before) <= threshold).repeat_interleave(DIM)
        assert torch.equal(new_q[kept], q[kept])
        assert torch.equal(new_k[kept], k[kept])


def test_the_formula_for_one_key_head_each() -> None:
    q, k, x = problem()
    top = tops(logits_of(q, k, x))
    new_q, new_k = qk_clip(q, k, top, threshold=3.0)
    clipped = 0
    for head in range(HEADS):
        rows = slice(head * DIM, (head + 1) * DIM)
        root = math.sqrt(min(1.0, 3.0 / float(top[head])))
        clipped += root < 1
        torch.testing.assert_close(new_q[rows], q[rows] * root)
        torch.testing.assert_close(new_k[rows], k[rows] * root)
    assert 0 < clipped < HEADS


def test_a_shared_key_head_is_clipped_no_more_than_its_gentlest_query_head_asks() -> None:
    q, k = torch.ones(4, 2, dtype=FP64), torch.ones(2, 2, dtype=FP64)
    new_q, new_k = qk_clip(q, k, torch.tensor([4.0, 1.0, 4.0, 16.0]), threshold=1.0, key_heads=2)
    assert new_k[:, 0].tolist() == [1.0, 0.5]
    assert new_q[:, 0].tolist() == [0.25, 1.0, 0.5, 0.125]


def test_latent_attention() -> None:
    """Rotary rows of the query take all of γ; the rotary key, shared, and values take none."""
    torch.manual_seed(3)
    nope, rope, value = 3, 2, 4
    q = (
        torch.randn(HEADS, nope + rope, WIDTH, dtype=FP64)
        * torch.logspace(-1, 1, HEADS)[:, None, None]
    )
    kv = torch.randn(HEADS, nope + value, WIDTH, dtype=FP64)
    k_rope = torch.randn(rope, WIDTH, dtype=FP64)
    x = torch.randn(TOKENS, WIDTH, dtype=FP64)

    def logits(q: Tensor, kv: Tensor) -> Tensor:
        queries = torch.einsum("tc,hdc->htd", x, q)
        keys = torch.einsum("tc,hdc->htd", x, kv[:, :nope])
        shared = (x @ k_rope.mT).expand(HEADS, TOKENS, rope)
        return queries @ torch.cat([keys, shared], dim=-1).mT

    before = logits(q, kv)
    new_q, new_kv = qk_clip(
        q.flatten(0, 1), kv.flatten(0, 1), tops(before),
        threshold=5.0, rope_dim=rope, value_dim=value,
    )  # fmt: skip
    new_q, new_kv = new_q.view_as(q), new_kv.view_as(kv)
    gamma = (5.0 / tops(before)).clamp(max=1)
    assert 0 < int((gamma < 1).sum()) < HEADS
    torch.testing.assert_close(logits(new_q, new_kv), before * gamma[:, None, None])
    torch.testing.assert_close(new_q[:, nope:], q[:, nope:] * gamma[:, None, None])
    torch.testing.assert_close(new_q[:, :nope], q[:, :nope] * gamma.sqrt()[:, None, None])
    torch.testing.assert_close(new_kv[:, :nope], kv[:, :nope] * gamma.sqrt()[:, None, None])
    assert torch.equal(new_kv[:, nope:], kv[:, nope:])


def test_biases_and_stacks_of_layers() -> None:
    q, k, x = problem()
    bias = torch.randn(HEADS * DIM, dtype=FP64)
    top = tops(logits_of(q, k, x))
    new_q, new_k = qk_clip(q, k, top, threshold=2.0)
    new_bias, _ = qk_clip(bias.unsqueeze(-1), k, top, threshold=2.0)
    both, _ = qk_clip(torch.cat([q, bias.unsqueeze(-1)], dim=-1), k, top, threshold=2.0)
    assert torch.equal(both, torch.cat([new_q, new_bias], dim=-1))
    layers = qk_clip(
        torch.stack([q, q]), torch.stack([k, k]), torch.stack([top, top / 1e4]), threshold=2.0
    )
    assert torch.equal(layers[0], torch.stack([new_q, q]))
    assert torch.equal(layers[1], torch.stack([new_k, k]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    q, k, x = problem()
    q, k = q.to(dtype), k.to(dtype)
    top = tops(logits_of(q.double(), k.double(), x))
    new_q, new_k = qk_clip(q, k, top.float(), threshold=2.0)
    wide_q, wide_k = qk_clip(q.double(), k.double(), top.float(), threshold=2.0)
    assert new_q.dtype == new_k.dtype == dtype
    # One rounding, up to a tie that float32 and float64 see differently.
    for low, wide in ((new_q, wide_q), (new_k, wide_k)):
        assert (low.double() - wide).abs().max() <= 0.51 * torch.finfo(dtype).eps * wide.abs().max()
    after = tops(logits_of(new_q.double(), new_k.double(), x))
    assert (after <= 2.0 * (1 + 4 * torch.finfo(dtype).eps)).all()


def test_in_place_is_the_same_and_writes_parameters() -> None:
    q, k, x = problem()
    top = tops(logits_of(q, k, x))
    kept = top.clone()
    expected = qk_clip(q, k, top, threshold=2.0)
    assert torch.equal(top, kept)
    mine, theirs = torch.nn.Parameter(q.clone()), torch.nn.Parameter(k.clone())
    qk_clip_(mine, theirs, top, threshold=2.0)
    assert torch.equal(mine, expected[0])
    assert torch.equal(theirs, expected[1])
    assert not torch.equal(mine, q)
    column = k.T.contiguous().T  # any strides
    qk_clip_(q.clone(), column, top, threshold=2.0)
    assert torch.equal(column, expected[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -5.0, 0.0])
def test_what_is_no_large_logit_clips_nothing(bad: float) -> None:
    q, k, _ = problem()
    new_q, new_k = qk_clip(q, k, torch.full((HEADS,), bad), threshold=1.0)
    assert torch.equal(new_q, q)
    assert torch.equal(new_k, k)


class NoSync(TorchDispatchMode):
    """Fails where a number is read back from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func)
        return func(*args, **(kwargs or {}))


def test_nothing_waits_and_one_graph_serves_all_logits() -> None:
    q, k, x = problem(key_heads=3)
    top = tops(logits_of(q, k, x, 3))
    with NoSync():
        expected = qk_clip(q, k, top, threshold=2.0, key_heads=3)
        qk_clip_(q.clone(), k.clone(), top, threshold=2.0, key_heads=3)
    graphs = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(qk_clip, fullgraph=True, backend=backend)
    got = compiled(q, k, top, threshold=2.0, key_heads=3)
    compiled(q, k, top / 50, threshold=2.0, key_heads=3)
    torch.testing.assert_close(got, expected)
    assert len(graphs) == 1
    torch.testing.assert_close(
        torch.vmap(lambda s: qk_clip(q, k, s, threshold=2.0, key_heads=3)[0])(top[None]),
        expected[0][None],
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"threshold": 0.0}, "threshold"),
        ({"threshold": 1.0, "balance": 1.5}, "balance"),
        ({"threshold": 1.0, "key_heads": 4}, "key_heads must divide the 6"),
        ({"threshold": 1.0, "rope_dim": 5}, r"rope_dim must lie in \[0, 4\]"),
        ({"threshold": 1.0, "value_dim": -1}, "value_dim"),
    ],
)
def test_errors(options: dict[str, Any], match: str) -> None:
    q, k, _ = problem()
    with pytest.raises(ValueError, match=match):
        qk_clip(q, k, torch.ones(HEADS), **options)


def test_shapes_that_are_no_heads() -> None:
    q, k, _ = problem()
    with pytest.raises(ValueError, match="divisible into 5 heads"):
        qk_clip(q, k, torch.ones(5), threshold=1.0)
    with pytest.raises(ValueError, match="unsqueeze"):
        qk_clip(q[:, 0], k, torch.ones(HEADS), threshold=1.0)
    with pytest.raises(ValueError, match="max_logits"):
        qk_clip(q, k, torch.tensor(1.0), threshold=1.0)
