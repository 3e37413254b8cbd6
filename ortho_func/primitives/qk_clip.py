"""QK clipping: attention logits held below a threshold by scaling query and key weights.

Shape suffixes: H query heads, G key heads, N rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["qk_clip", "qk_clip_"]


def qk_clip(
    q: Tensor,
    k: Tensor,
    max_logits: Tensor,
    *,
    threshold: float,
    key_heads: int | None = None,
    balance: float = 0.5,
    rope_dim: int = 0,
    value_dim: int = 0,
) -> tuple[Tensor, Tensor]:
    """Scale query and key weights so that no head's largest logit exceeds a threshold.

    With γ_h = min(1, τ / S_h), S_h the head's largest logit: W_q,h ← γ_h^α W_q,h and
    W_k,h ← γ_h^(1−α) W_k,h, so that every logit of head h is multiplied by γ_h and other heads are
    left alone. Run it after the optimizer's step, with the logits of that step's forward.

    A key head that several query heads share (grouped queries) takes the largest κ = γ_h^(1−α)
    among them, and each query head what is left, γ_h / κ: again every head's logits are multiplied
    by its own γ_h.

    In multi-head latent attention a head's logit is q_C·k_C + q_R·k_R, and the rotary key k_R is
    shared by all heads. It stays as it is: q_C and k_C are scaled as above, the rotary rows of the
    query by all of γ_h.

    Args:
        q: [..., H·d, C], the weight whose rows are query heads, one after another. A bias is
            given as ``bias.unsqueeze(-1)``.
        k: [..., G·d', C'], likewise of key heads.
        max_logits: S, [..., H], any dtype: before the softmax, times the attention's own scale
            (1/√d), over all queries and keys, and over all ranks that share the heads. Where it
            is NaN or infinite nothing is clipped.
        threshold: τ.
        key_heads: G; None is H.
        balance: α, the query's share of the clipping, in [0, 1].
        rope_dim: rows at the end of each query head that meet the shared rotary key.
        value_dim: rows at the end of each head of `k` that are no keys, as where one weight makes
            keys and values.

    Returns:
        New q and k. The factors are computed in fp32 at least, each weight is rounded once.
        Nothing waits for the device. Weights that are sharded by heads are clipped by passing
        each rank's own heads and their logits.

    Raises:
        ValueError: for heads that do not divide the rows or each other, and numbers out of range.

    Source: Kimi K2, arXiv 2507.20534, section 2.1 and Algorithm 1 (α is 1/2 there); the rule for
    shared key heads follows what it does with the shared rotary key.

    Examples:
        >>> q, k = torch.ones(4, 3), torch.ones(4, 3)  # two heads of two rows
        >>> q, k = qk_clip(q, k, torch.tensor([400.0, 7.0]), threshold=100.0)
        >>> q[:, 0], k[:, 0]
        (tensor([0.5000, 0.5000, 1.0000, 1.0000]), tensor([0.5000, 0.5000, 1.0000, 1.0000]))
    """
    on_q, on_k = _row_factors(
        q, k, max_logits, threshold, key_heads, balance, (rope_dim, value_dim)
    )
    return (q * on_q).to(q.dtype), (k * on_k).to(k.dtype)


@torch.no_grad()
def qk_clip_(
    q: Tensor,
    k: Tensor,
    max_logits: Tensor,
    *,
    threshold: float,
    key_heads: int | None = None,
    balance: float = 0.5,
    rope_dim: int = 0,
    value_dim: int = 0,
) -> None:
    """`qk_clip` written into q and k.

    Args:
        q: as in `qk_clip`; parameters too.
        k: likewise.
        max_logits: likewise.
        threshold: likewise.
        key_heads: likewise.
        balance: likewise.
        rope_dim: likewise.
        value_dim: likewise.

    Raises:
        ValueError: as `qk_clip` does.

    Examples:
        >>> layer = torch.nn.Linear(3, 4, bias=False)
        >>> before = layer.weight.detach().clone()
        >>> qk_clip_(layer.weight, torch.ones(4, 3), torch.tensor([4.0, 0.1]), threshold=1.0)
        >>> torch.equal(layer.weight[:2], before[:2] / 2), torch.equal(layer.weight[2:], before[2:])
        (True, True)
    """
    on_q, on_k = _row_factors(
        q, k, max_logits, threshold, key_heads, balance, (rope_dim, value_dim)
    )
    q.mul_(on_q)
    k.mul_(on_k)


def _row_factors(
    q: Tensor,
    k: Tensor,
    max_logits: Tensor,
    threshold: float,
    key_heads: int | None,
    balance: float,
    tails: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """What each row of q and k is multiplied by, [..., N, 1]."""
    heads = max_logits.shape[-1] if max_logits.ndim else 0
    groups = heads if key_heads is None else key_heads
    _check_numbers(threshold, balance, heads, groups)
    rope, values = tails
    q_rows = _rows_of_a_head("q", q, heads, "rope_dim", rope)
    k_rows = _rows_of_a_head("k", k, groups, "value_dim", values)
    top_H = max_logits.detach().to(torch.promote_types(max_logits.dtype, torch.float32))
    clips = (top_H > threshold) & torch.isfinite(top_H)
    gamma_H = torch.where(clips, threshold / top_H, 1.0)
    kappa_G = (gamma_H ** (1 - balance)).unflatten(-1, (groups, heads // groups)).amax(dim=-1)
    rest_H = gamma_H / kappa_G.repeat_interleave(heads // groups, dim=-1)
    on_q = _spread(rest_H, q_rows - rope, gamma_H, rope)
    on_k = _spread(kappa_G, k_rows - values, torch.ones_like(kappa_G), values)
    return on_q, on_k


def _spread(first_H: Tensor, rows: int, last_H: Tensor, tail: int) -> Tensor:
    """A factor for the first rows of each head and another for the last, as [..., N, 1]."""
    parts = [
        first_H.unsqueeze(-1).expand(*first_H.shape, rows),
        last_H.unsqueeze(-1).expand(*last_H.shape, tail),
    ]
    return torch.cat(parts, dim=-1).flatten(-2).unsqueeze(-1)


def _check_numbers(threshold: float, balance: float, heads: int, groups: int) -> None:
    if not threshold > 0:
        raise ValueError(f"threshold must be positive, got {threshold}.")
    if not 0 <= balance <= 1:
        raise ValueError(f"balance must lie in [0, 1], got {balance}.")
    if heads < 1:
        raise ValueError("max_logits must be [..., heads], one value a query head.")
    if groups < 1 or heads % groups:
        raise ValueError(f"key_heads must divide the {heads} query heads, got {groups}.")


def _rows_of_a_head(name: str, weight: Tensor, heads: int, option: str, tail: int) -> int:
    shape = tuple(weight.shape)
    if weight.ndim < 2 or shape[-2] % heads:
        raise ValueError(
            f"{name} of shape {shape} must be [..., rows, columns] with rows divisible into "
            f"{heads} heads; give a bias as bias.unsqueeze(-1)."
        )
    rows = shape[-2] // heads
    if not 0 <= tail <= rows:
        raise ValueError(f"{option} must lie in [0, {rows}], the rows of a head of {name}.")
    return rows
