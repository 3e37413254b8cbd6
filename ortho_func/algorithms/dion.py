"""Dion: low-rank orthonormalized updates with error feedback.

B = M + G;  P = orthonormal basis of BQ;  W = BᵀP;  M ← B − (1 − μ)PWᵀ;
Q ← W with columns of norm 1;  X ← (1 − lr·λ)X − lr·s·PQᵀ,  s = √(R/C)

Two round trips of thin factors: BQ is summed over the ranks that share rows and P comes back,
then BᵀP is summed over those that share columns and the new Q comes back. B never travels.

A column of W below 1e-6 of the longest is rounding (B has a lower rank than P): it gives no
update, and that column of Q stays.

Source: arXiv 2504.05295, Algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ortho_func.algorithms.rule import Emission, Frame, Hyper, MatrixRule, State, Step
from ortho_func.factors import Held, Part, parts_of
from ortho_func.geometry import Reading
from ortho_func.primitives import foreach
from ortho_func.primitives.scaling import widen

__all__ = ["DionRule"]

# About what rounding in fp32 leaves of a direction that is not in B, over ‖B‖.
RELATIVE_TINY = 1e-6


@dataclass(frozen=True)
class FactorCost:
    """What a factor's owner does: a QR of R×r (4Rr² operations), or the norms of C×r."""

    square: bool

    def __call__(self, rows: int, cols: int) -> float:
        """Floating-point operations."""
        return 4.0 * rows * cols * (cols if self.square else 1)


@dataclass(frozen=True)
class _Dion(MatrixRule):
    """What both trips share."""

    rank_fraction: float = 0.25

    name: ClassVar[str] = "dion"
    state: ClassVar[dict[str, str]] = {"momentum_buffer": "param", "right_factor": "factor"}
    shared: ClassVar[tuple[str, ...]] = ("right_factor",)
    default_adjust: ClassVar[str] = "spectral_norm"

    def parts(self, shape: Sequence[int], reading: Reading) -> tuple[Part, ...]:
        """Runs of equal row blocks: r depends on a block's shape."""
        return parts_of(shape, reading, self.rank_fraction)

    def travel(self, **common: Any) -> Any:
        """Products travel as they are; nothing is narrowed for an orthogonalizer."""
        return super().travel(**{**common, "local_dtype": None})


@dataclass(frozen=True)
class DionRule(_Dion):
    """The first trip: from Y = BQ to P."""

    @property
    def then(self) -> MatrixRule:
        """The second trip."""
        return _SecondTrip(
            adjust_lr_fn=self.adjust_lr_fn,
            cautious=self.cautious,
            orthogonalizer=self.orthogonalizer,
            rank_fraction=self.rank_fraction,
            nonfinite=self.nonfinite,
            momentum_dtype=self.momentum_dtype,
            variance_dtype=self.variance_dtype,
        )

    def cost(self, share: float = 1.0) -> FactorCost:
        """That of a QR decomposition."""
        return FactorCost(square=True)

    def emit(
        self, grads: list[Tensor], state: State, hyper: Hyper, frames: Sequence[Frame]
    ) -> Emission:
        """Each shard's term of BQ."""
        stacks = [frame.shape[0] for frame in frames]
        sums = _sums(state["momentum_buffer"], grads, frames, stacks)
        shards = [
            _left(b, q, frame).reshape(frame.sent)
            for b, q, frame in zip(sums, state["right_factor"], frames, strict=True)
        ]
        return Emission(shards, [()] * len(shards), None, {})

    def whole(
        self, x: Tensor, sides: tuple[Tensor, ...], hyper: Hyper
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """An orthonormal basis of the columns, by Householder QR."""
        return torch.linalg.qr(widen(x)).Q, ()

    def absorb(
        self,
        params: list[Tensor],
        results: list[Tensor],
        sides: list[tuple[Tensor, ...]],
        emission: Emission,
        hyper: Hyper,
        frames: Sequence[Frame],
    ) -> tuple[Step, State]:
        """P, for the second trip."""
        found = zip(results, frames, strict=True)
        return [p.reshape(f.shape[0], _held(f).count, _held(f).part.rank) for p, f in found], {}


@dataclass(frozen=True)
class _SecondTrip(_Dion):
    """From W = BᵀP to the new Q and the step."""

    sides: ClassVar[tuple[str, ...]] = ("col",)
    carried: ClassVar[str] = "left_factor"

    def cost(self, share: float = 1.0) -> FactorCost:
        """That of the norms of columns."""
        return FactorCost(square=False)

    def emit(
        self, grads: list[Tensor], state: State, hyper: Hyper, frames: Sequence[Frame]
    ) -> Emission:
        """Each shard's term of BᵀP; the columns' norms will come back beside their sum."""
        stacks = [_stacked(frame)[0] for frame in frames]
        sums = _sums(state["momentum_buffer"], grads, frames, stacks)
        lefts = [widen(p) for p in state[self.carried]]
        shards = [
            _right(b, p, frame).reshape(frame.sent)
            for b, p, frame in zip(sums, lefts, frames, strict=True)
        ]
        norms = [
            b.new_zeros(frame.sent[0], _held(frame).part.rank)
            for b, frame in zip(sums, frames, strict=True)
        ]
        carry = (sums, lefts, state["momentum_buffer"], state["right_factor"])
        return Emission(shards, [(side,) for side in norms], carry, {})

    def whole(
        self, x: Tensor, sides: tuple[Tensor, ...], hyper: Hyper
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """W with columns of norm 1, and their norms; columns of rounding become zero."""
        w = widen(x)
        largest = w.abs().amax(dim=(-2, -1), keepdim=True)  # squares would leave fp32's range
        w = w / torch.where(largest == 0, 1, largest)
        norms = torch.linalg.vector_norm(w, dim=-2)
        real = norms > RELATIVE_TINY * norms.amax(dim=-1, keepdim=True)
        unit = torch.where(real, 1 / torch.where(real, norms, 1), 0)
        lengths = torch.where(real, norms * largest.squeeze(-2), 0)
        return w * unit.unsqueeze(-2), (lengths,)

    def absorb(
        self,
        params: list[Tensor],
        results: list[Tensor],
        sides: list[tuple[Tensor, ...]],
        emission: Emission,
        hyper: Hyper,
        frames: Sequence[Frame],
    ) -> tuple[Step, State]:
        """−lr·s·PQᵀ, M = B − (1 − μ)PWᵀ, and the new Q."""
        sums, lefts, old_momenta, old_factors = emission.carry
        rights = [
            widen(q).reshape(*_stacked(frame), _held(frame).cols, _held(frame).part.rank)
            for q, frame in zip(results, frames, strict=True)
        ]
        norms = [
            side[0].reshape(*_stacked(frame), 1, _held(frame).part.rank)
            for side, frame in zip(sides, frames, strict=True)
        ]
        directions = [
            _outer(p, q, frame) for p, q, frame in zip(lefts, rights, frames, strict=True)
        ]
        seen = [
            _outer(p, q * n, frame)
            for p, q, n, frame in zip(lefts, rights, norms, frames, strict=True)
        ]
        left_over = foreach.sub(sums, foreach.mul(seen, 1 - hyper["momentum"]))
        momenta = [m.reshape(old.shape) for m, old in zip(left_over, old_momenta, strict=True)]
        factors = [
            _next_factor(q, n, old, frame)
            for q, n, old, frame in zip(rights, norms, old_factors, frames, strict=True)
        ]
        step = self.descend(directions, hyper, frames)
        return step, {"momentum_buffer": momenta, "right_factor": factors}


# Shapes: s matrices of a stack, k row blocks, R rows of a shard, C columns of it, r the rank.


def _held(frame: Frame) -> Held:
    assert frame.held is not None
    return frame.held


def _stacked(frame: Frame) -> tuple[int, int]:
    """Matrices of the stack, and row blocks, of a frame of the second trip."""
    blocks = _held(frame).part.blocks
    return frame.shape[0] // blocks, blocks


def _sums(
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    frames: Sequence[Frame],
    stacks: Sequence[int],
) -> list[Tensor]:
    """B = M + G by shard, [s, R, C], in fp32 at least."""
    wide = [widen(m) for m in momenta]
    total = foreach.add(wide, [g.to(m.dtype) for g, m in zip(grads, wide, strict=True)])
    return [
        b.reshape(stack, _held(frame).count, _held(frame).cols)
        for b, frame, stack in zip(total, frames, stacks, strict=True)
    ]


def _left(b_sRC: Tensor, q: Tensor, frame: Frame) -> Tensor:
    """BQ of each block's rows, [s, R, r]."""
    held = _held(frame)
    if not held.count:  # then the entry has no matrices, though the factors here have
        return b_sRC.new_zeros(b_sRC.shape[0], 0, held.part.rank)
    q_sCkr = q.reshape(b_sRC.shape[0], held.cols, held.part.blocks, held.part.rank)
    parts = [
        rows @ q_sCkr[:, :, block].to(rows.dtype)
        for block, rows in enumerate(b_sRC.split(held.rows, dim=1))
        if held.rows[block]
    ]
    return _joined(parts)


def _right(b_sRC: Tensor, p_sRr: Tensor, frame: Frame) -> Tensor:
    """BᵀP of each block, [s, k, C, r]; zero where the shard has none of its rows."""
    held = _held(frame)
    nothing = b_sRC.new_zeros(b_sRC.shape[0], held.cols, held.part.rank)
    blocks = zip(
        held.rows, b_sRC.split(held.rows, dim=1), p_sRr.split(held.rows, dim=1), strict=True
    )
    terms = [b.mT @ p.to(b.dtype) if rows else nothing for rows, b, p in blocks]
    return torch.stack(terms, dim=1)


def _outer(p_sRr: Tensor, q_skCr: Tensor, frame: Frame) -> Tensor:
    """PQᵀ of each block's rows, [s, R, C]."""
    held = _held(frame)
    parts = [
        p @ q_skCr[:, block].mT.to(p.dtype)
        for block, p in enumerate(p_sRr.split(held.rows, dim=1))
        if held.rows[block]
    ]
    return _joined(parts) if parts else p_sRr.new_zeros(q_skCr.shape[0], 0, held.cols)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _next_factor(q_skCr: Tensor, norms: Tensor, old: Tensor, frame: Frame) -> Tensor:
    """The new Q in the shape of the old, whose columns stay where B had nothing."""
    stack, blocks = _stacked(frame)
    held = _held(frame)
    new = q_skCr.transpose(1, 2)
    before = old.reshape(stack, held.cols, blocks, held.part.rank)
    kept = torch.where(norms.transpose(1, 2) > 0, new, before.to(new.dtype))
    return kept.reshape(old.shape)
