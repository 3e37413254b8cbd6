"""A matrix algorithm as three pure functions around the round trip.

`emit` runs on shards and says what travels; `whole` runs on whole matrices, on their owner;
`absorb` runs on shards again and says what to add to the parameters. None of them knows how a
parameter is sharded, and none writes its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ortho_func.factors import Held, Part
from ortho_func.geometry import Reading
from ortho_func.plan import Travel
from ortho_func.primitives import foreach
from ortho_func.primitives.momentum import Scalar
from ortho_func.primitives.orthogonalize import (
    Iteration,
    Orthogonalizer,
    flops,
    flops_of_share,
    get_orthogonalizer,
)
from ortho_func.primitives.scaling import Descent, lr_scale
from ortho_func.primitives.teamwork import followed_by, orthogonalize_in_team, rounds
from ortho_func.shares import Within

__all__ = [
    "Cost",
    "Emission",
    "Frame",
    "Hyper",
    "MatrixRule",
    "State",
    "Step",
    "check_state_dtypes",
    "state_dtype",
]

Hyper = Mapping[str, Scalar]
Step = Descent | list[Tensor]
State = dict[str, list[Tensor]]


def state_dtype(
    name: str, momentum_dtype: torch.dtype | None, variance_dtype: torch.dtype | None
) -> torch.dtype | None:
    """The dtype that was asked for state of this name, None for the default."""
    if name in ("momentum_buffer", "exp_avg"):
        return momentum_dtype
    return variance_dtype if name in ("row_variance", "exp_avg_sq") else None


def check_state_dtypes(
    momentum_dtype: torch.dtype | None, variance_dtype: torch.dtype | None
) -> None:
    """Raise `ValueError` for a dtype that state cannot have."""
    allowed = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    for name, dtype in (("momentum_dtype", momentum_dtype), ("variance_dtype", variance_dtype)):
        if dtype is not None and dtype not in allowed:
            names = ", ".join(str(one) for one in allowed)
            raise ValueError(f"{name} must be None or one of {names}, got {dtype!r}.")
    if variance_dtype == torch.float16:
        raise ValueError(
            "variance_dtype must not be torch.float16: squares of small gradients are zero there. "
            "Take torch.bfloat16."
        )


class Frame(NamedTuple):
    """How a rule sees one shard: as [stack, rows, cols], and what of it travels.

    `blocks` are the rows of each row block in the shard; `kinds` says of each side vector and
    block whether it has a value per row or per column; `scale` is the shape scale of lr; `held`
    is what of a part of the parameter is here, for rules that send factors; `within` where the
    share of the parameter that this is about lies in the shard, if it is not all of it.
    """

    shape: tuple[int, int, int]
    sent: tuple[int, int, int]
    blocks: tuple[int, ...]
    kinds: tuple[tuple[str, ...], ...]
    scale: float | Tensor
    held: Held | None = None
    within: Within | None = None


class Emission(NamedTuple):
    """What a rule sends, by shard; `carry` comes back to `absorb`, `state` is written at once.

    Shards have the frame's `sent` shape, or one that can be reshaped to it.
    """

    shards: list[Tensor]
    sides: Sequence[tuple[Tensor, ...]]
    carry: Any
    state: State


@dataclass(frozen=True)
class Cost:
    """What one matrix costs to orthogonalize: a value, since plans are compared and pickled.

    `share` is the part of the matrix's slices that the owner works on.
    """

    method: str
    steps: int | None
    share: float = 1.0

    def __call__(self, rows: int, cols: int) -> float:
        """Floating-point operations for a matrix of this shape."""
        return self.share * flops(rows, cols, method=self.method, steps=self.steps)


@dataclass(frozen=True)
class TeamCost:
    """What a share of a matrix of this shape costs its owner."""

    method: str
    steps: int | None
    shape: tuple[int, int]

    def __call__(self, rows: int, cols: int) -> float:
        """Floating-point operations for a share of these extents."""
        whole_rows, whole_cols = self.shape
        share = rows * cols / (whole_rows * whole_cols)
        return flops_of_share(*self.shape, share, method=self.method, steps=self.steps)


@dataclass(frozen=True)
class MatrixRule:
    """The static part of an algorithm: everything that changes what is traced.

    Subclasses say what state they keep ("param": of the parameter's shape; "row": one value a
    row), which side vectors travel, and which hyperparameters may change from step to step.
    """

    adjust_lr_fn: str | None = None
    cautious: bool = False
    orthogonalizer: Any = field(default_factory=lambda: get_orthogonalizer("auto"))
    nonfinite: str = field(default="propagate", kw_only=True)
    momentum_dtype: torch.dtype | None = field(default=None, kw_only=True)
    variance_dtype: torch.dtype | None = field(default=None, kw_only=True)
    # For shares of matrices that are owned by teams: the whole matrices' rows and columns.
    team: tuple[int, int] | None = field(default=None, kw_only=True)

    name: ClassVar[str]
    state: ClassVar[dict[str, str]] = {"momentum_buffer": "param"}
    sides: ClassVar[tuple[str, ...]] = ()
    # By side, the state that travels in it: where a gradient is missing too, as columns share it.
    told: ClassVar[Mapping[int, str]] = {}
    scalars: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "momentum")
    # State that is no shard's own: it is written where a gradient is missing too, as elsewhere.
    shared: ClassVar[tuple[str, ...]] = ()
    team_sums: ClassVar[int | None] = None  # of `whole_in_team` beside the iteration's; None: none
    early: ClassVar[bool] = False  # whether `emit_` writes state
    carried: ClassVar[str] = ""  # under which name of `state` the leg before's results come
    default_adjust: ClassVar[str | None] = None  # what adjust_lr_fn=None means

    @property
    def then(self) -> MatrixRule | None:
        """The rule of a second round trip, to which `absorb` of this one passes its results."""
        return None

    def parts(self, shape: Sequence[int], reading: Reading) -> tuple[Part, ...]:
        """Which parts of a parameter travel each on its own, where there is a successor."""
        raise NotImplementedError

    def scale(self, rows: int, cols: int) -> float:
        """The shape scale of lr."""
        adjust = self.default_adjust if self.adjust_lr_fn is None else self.adjust_lr_fn
        return lr_scale(rows, cols, adjust)

    def emitted(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of what a parameter of this dtype sends, before it is rounded for the wire."""
        return torch.promote_types(dtype, self.momentum_dtype or dtype)

    def for_cut(self, cut: str | None) -> MatrixRule:
        """The rule for parameters whose shards are cut along rows, columns or neither."""
        return self

    def in_teams(self, rows: int, cols: int) -> MatrixRule | None:
        """The rule for shares of matrices of this shape; None where a team cannot own them."""
        one = self.orthogonalizer
        if self.team_sums is None or not isinstance(one, Orthogonalizer):
            return None
        return None if one.iteration(rows, cols) is None else replace(self, team=(rows, cols))

    @property
    def iteration(self) -> Iteration:
        """In a team: what its members do together."""
        assert self.team is not None
        found: Iteration | None = self.orthogonalizer.iteration(*self.team)
        assert found is not None
        return found

    @property
    def tall(self) -> bool:
        """In a team: whether shares are of rows."""
        assert self.team is not None
        return self.team[0] > self.team[1]

    @property
    def rounds(self) -> int:
        """In a team: how many sums over it a step takes."""
        return rounds(self.iteration) + (self.team_sums or 0)

    @property
    def sums(self) -> int:
        """In a team: bytes of a member's terms of all Gram matrices."""
        if self.team is None:
            return 0
        dtype = self.iteration.compute_dtype or torch.bfloat16
        if self.iteration.cuts is not None:
            dtype = torch.promote_types(dtype, torch.float32)
        return rounds(self.iteration) * dtype.itemsize * min(self.team) ** 2

    def travel(self, **common: Any) -> Travel:
        """What travels for this rule, as the plan needs to know it."""
        narrow = getattr(self.orthogonalizer, "input_dtype", None)
        settled = {"local_dtype": narrow, **common}
        return Travel(
            algorithm=self.name, sides=self.sides, cost=self.cost(), sums=self.sums, **settled
        )

    def cost(self, share: float = 1.0) -> Callable[[int, int], float]:
        """What one matrix that travels costs; a callable orthogonalizer counts as the default."""
        one = self.orthogonalizer
        if isinstance(one, Orthogonalizer):
            if self.team is not None:
                return TeamCost(one.method, one.steps, self.team)
            return Cost(one.method, one.steps, share)
        return Cost("auto", None, share)

    def emit(
        self, grads: list[Tensor], state: State, hyper: Hyper, frames: Sequence[Frame]
    ) -> Emission:
        """Shards and side vectors that travel."""
        raise NotImplementedError

    def emit_(
        self, grads: list[Tensor], state: State, hyper: Hyper, frames: Sequence[Frame]
    ) -> Emission:
        """`emit` with its state already written, so that it is not computed beside the old."""
        sent = self.emit(grads, state, hyper, frames)
        for name, new in sent.state.items():
            foreach.copy_(state[name], new)
        return sent._replace(state={})

    def emit_where_(
        self,
        grads: list[Tensor],
        state: State,
        hyper: Hyper,
        frames: Sequence[Frame],
        present: Tensor,
        numbers: Sequence[int],
    ) -> Emission | None:
        """`emit_` by the operators of `opaque`; None where it has to be written out."""
        return None

    def whole(
        self, x: Tensor, sides: tuple[Tensor, ...], hyper: Hyper
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """From what arrived, [n, R, C], to what goes back."""
        return self.orthogonalizer(x), sides

    def whole_in_team(self, x: Tensor, sides: tuple[Tensor, ...], hyper: Hyper) -> Any:
        """`whole` of shares: sums over the team, and then what goes back."""
        shares = orthogonalize_in_team(x, self.iteration, tall=self.tall)
        return followed_by(shares, lambda o: (o, sides))

    def updated_part(self, x: Tensor) -> Tensor:
        """Of what `whole` made of matrices, what is no zero by design, [n, R', C']."""
        return x

    def absorb(
        self,
        params: list[Tensor],
        results: list[Tensor],
        sides: list[tuple[Tensor, ...]],
        emission: Emission,
        hyper: Hyper,
        frames: Sequence[Frame],
    ) -> tuple[Step, State]:
        """What to add to each parameter, or a descent that says it; and new state.

        Where there is a successor, instead of steps: what it gets as `state[carried]`.
        """
        return self.descend(results, hyper, frames), {}

    def descend(
        self,
        directions: list[Tensor],
        hyper: Hyper,
        frames: Sequence[Frame],
    ) -> Descent:
        """−lr·s·U − lr·λ·X."""
        scales = [frame.scale for frame in frames]
        return Descent(directions, hyper["lr"], hyper["weight_decay"], scales, self.cautious)
