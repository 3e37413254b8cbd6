"""Functions of whole matrices over pytrees: rules as transforms, and functions of one's own.

Without a plan every matrix is whole here. With one, leaves are this rank's shards of DTensors
(or replicas under DDP), and matrices are assembled on their owners and sent home.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from ortho_func.algorithms.distributed import program_of, shard_step
from ortho_func.algorithms.local import local_step
from ortho_func.algorithms.program import Program
from ortho_func.algorithms.rule import Emission, Frame, Hyper, MatrixRule, State, state_dtype
from ortho_func.algorithms.transform import (
    Hyperparameter,
    Transform,
    Tree,
    checked,
    first_step,
    needed,
    values_at,
)
from ortho_func.factors import first_factor
from ortho_func.geometry import Reading, aligned, layout_of, like, local, on_mesh
from ortho_func.plan import Plan
from ortho_func.primitives.momentum import Scalar
from ortho_func.trees import Readings, named_leaves, readings_of

__all__ = ["Leaves", "first_state", "matrix_transform", "on_whole_matrices", "zeros_for"]


@dataclass(frozen=True, eq=False)
class Leaves:
    """Which leaves there are and how they are read: from the arguments, or as a plan says.

    `step` runs a rule over all of them, in this process or as the plan's program.
    """

    rule: MatrixRule
    flatten: bool | None
    readings: Readings | None
    program: Program | None

    @staticmethod
    def of(
        rule: MatrixRule, flatten: bool | None, readings: Readings | None, plan: Plan | None
    ) -> Leaves:
        """Bind a rule to a plan, if there is one."""
        if plan is None:
            return Leaves(rule, flatten, readings, None)
        if flatten is not None or readings is not None:
            raise ValueError("a plan knows how parameters are read: give readings= to plan(...).")
        return Leaves(rule, None, None, program_of(plan, rule))

    def check(self, names: Sequence[str], leaves: Sequence[Tensor | None]) -> list[Reading]:
        """The readings of the leaves, which must be the plan's parameters if there is a plan."""
        if self.program is not None:
            return _planned(self.program, names, leaves)
        there = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if leaf is not None]
        for name, leaf in there:
            if on_mesh(leaf):
                raise ValueError(f"{name} is a DTensor: pass plan=ortho_func.plan(params).")
        default = Reading(flatten=self.flatten)
        found = readings_of([n for n, _ in there], [x for _, x in there], self.readings, default)
        chosen = iter(found)
        return [default if leaf is None else next(chosen) for leaf in leaves]

    def check_layouts(self, names: Sequence[str], leaves: Sequence[Tensor]) -> None:
        """DTensors must be sharded as they were when they were planned."""
        for n, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            if not leaf.dtype.is_floating_point:
                raise ValueError(f"{name} has dtype {leaf.dtype}: only real floating ones train.")
            if self.program is None or not on_mesh(leaf):
                continue
            if layout_of(leaf, name=name) != self.program.params[n].layout:
                raise ValueError(f"{name} is sharded otherwise than when it was planned.")

    def stand_in(self, number: int) -> Tensor:
        """What stands for a leaf that is None: only its dtype and device count."""
        if self.program is None:
            return torch.zeros(0)
        made = self.program
        return torch.zeros(0, dtype=made.params[number].dtype, device=made.places[number].device)

    def step(
        self,
        readings: Sequence[Reading],
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        state: Sequence[dict[str, Tensor]],
        hyper: Hyper,
    ) -> tuple[list[Tensor | None], list[dict[str, Tensor]]]:
        """The rule's step over shards: updates, None without a gradient, and new state."""
        if self.program is not None:
            return shard_step(self.program, params, grads, state, hyper)
        here = [n for n, g in enumerate(grads) if g is not None]
        moved, new = local_step(
            self.rule,
            [readings[n] for n in here],
            [params[n] for n in here],
            [g for g in grads if g is not None],
            [state[n] for n in here],
            hyper,
        )
        updates = dict(zip(here, moved, strict=True))
        states = dict(zip(here, new, strict=True))
        count = range(len(grads))
        return [updates.get(n) for n in count], [states.get(n, state[n]) for n in count]


def _planned(
    program: Program, names: Sequence[str], leaves: Sequence[Tensor | None]
) -> list[Reading]:
    specs = program.params
    planned: list[Any] = [(spec.name, spec.layout.shape) for spec in specs]
    mine = [
        (name, None if leaf is None else tuple(leaf.shape))
        for name, leaf in zip(names, leaves, strict=True)
    ]
    if len(mine) == len(planned):  # a leaf that is None has any shape
        mine = [(n, s or shape) for (n, s), (_, shape) in zip(mine, planned, strict=True)]
    if mine != planned:
        raise ValueError(
            "these are not the parameters that were planned. First difference: "
            f"{_difference(mine, planned)}. Make the plan of just the parameters, in their "
            "order, that are given here."
        )
    return [spec.reading for spec in specs]


def _difference(mine: Sequence[Any], planned: Sequence[Any]) -> str:
    for found, expected in zip(mine, planned, strict=False):
        if found != expected:
            return f"got {found}, planned {expected}"
    return f"got {len(mine)} parameters, planned {len(planned)}"


def matrix_transform(
    kind: Callable[..., Any], hyper: Mapping[str, Hyperparameter], leaves: Leaves
) -> Transform:
    """A rule as a transform.

    Args:
        kind: the state, a NamedTuple of `steps` and the rule's state by name.
        hyper: numbers, 0-d tensors or schedules, by the names in the rule's `scalars`.
        leaves: the rule, bound.
    """
    one = _Matrixwise(kind, checked(hyper), leaves)
    return Transform(one.init, one.update, frozenset(hyper))


@dataclass(frozen=True, eq=False)
class _Matrixwise:
    kind: Callable[..., Any]
    hyper: Mapping[str, Hyperparameter]
    leaves: Leaves

    def init(self, params: Tree) -> Any:
        names, found, spec = named_leaves(params)
        readings = self.leaves.check(names, found)
        self.leaves.check_layouts(names, found)
        state = {
            name: tree_unflatten(
                [
                    first_state(self.leaves.rule, name, x, r)
                    for x, r in zip(found, readings, strict=True)
                ],
                spec,
            )
            for name in self.leaves.rule.state
        }
        return self.kind(steps=first_step(params), **state)

    def update(
        self, grads: Tree, state: Any, params: Tree | None = None, /, **given: Scalar
    ) -> tuple[Tree, Any]:
        names, found, spec = named_leaves(needed(params))
        readings = self.leaves.check(names, found)
        old = {name: spec.flatten_up_to(getattr(state, name)) for name in self.leaves.rule.state}
        moved, new = self.leaves.step(
            readings,
            [local(x) for x in found],
            _shards(spec.flatten_up_to(grads), found),
            [{name: local(old[name][n]) for name in old} for n in range(len(found))],
            values_at(self.hyper, state.steps, given),
        )
        updates = [None if u is None else like(x, u) for x, u in zip(found, moved, strict=True)]
        trees = {
            name: tree_unflatten(
                [_settled(was, one[name]) for was, one in zip(old[name], new, strict=True)], spec
            )
            for name in old
        }
        return tree_unflatten(updates, spec), self.kind(steps=state.steps + 1, **trees)


def _shards(grads: Sequence[Tensor | None], params: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients as this rank's shards, placed like the parameters."""
    return [None if g is None else local(aligned(g, x)) for g, x in zip(grads, params, strict=True)]


def _settled(old: Tensor, new: Tensor) -> Tensor:
    """New state with the shape, dtype and placements of the old."""
    shard = local(old)
    return like(old, new.reshape(shard.shape).to(shard.dtype))


def first_state(rule: MatrixRule, name: str, parameter: Tensor, reading: Reading) -> Tensor:
    """A parameter's state before the first step, with its placements."""
    kind = rule.state[name]
    asked = state_dtype(name, rule.momentum_dtype, rule.variance_dtype)
    if kind == "factor":
        return first_factor(parameter, reading, rule.parts(tuple(parameter.shape), reading))
    return zeros_for(parameter, kind, reading, dtype=asked)


def zeros_for(
    parameter: Tensor, kind: str, reading: Reading, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Zero state of a parameter, with its placements.

    Args:
        parameter: the parameter.
        kind: "param", of its shape; or "row", one value per row.
        reading: how it is read as matrices.
        dtype: by default the parameter's for "param", fp32 at least for "row".
    """
    if kind == "param":
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
    keep = 1 if reading.flatten else parameter.ndim - 1
    shard = local(parameter)
    sizes = [n if dim < keep else 1 for dim, n in enumerate(shard.shape)]
    whole = [n if dim < keep else 1 for dim, n in enumerate(parameter.shape)]
    wide = torch.promote_types(shard.dtype, torch.float32) if dtype is None else dtype
    return like(parameter, torch.zeros(sizes, dtype=wide, device=shard.device), whole)


# ---------------------------------------------------------------------------------------------
# Functions of one's own


@dataclass(frozen=True)
class _FunctionRule(MatrixRule):
    """Leaves go out, the function's values come back; no state, no step."""

    name: ClassVar[str] = "function"
    state: ClassVar[dict[str, str]] = {}
    scalars: ClassVar[tuple[str, ...]] = ()

    def emit(
        self, grads: list[Tensor], state: State, hyper: Hyper, frames: Sequence[Frame]
    ) -> Emission:
        shards = [x.reshape(frame.sent) for x, frame in zip(grads, frames, strict=True)]
        return Emission(shards, [()] * len(shards), None, {})

    def absorb(
        self,
        params: list[Tensor],
        results: list[Tensor],
        sides: list[tuple[Tensor, ...]],
        emission: Emission,
        hyper: Hyper,
        frames: Sequence[Frame],
    ) -> tuple[list[Tensor], State]:
        return [y.reshape(x.shape).to(x.dtype) for x, y in zip(params, results, strict=True)], {}


def on_whole_matrices(
    function: Callable[[Tensor], Tensor],
    *,
    plan: Plan | None = None,
    flatten: bool | None = None,
    readings: Readings | None = None,
) -> Callable[[Tree], Tree]:
    """Make a function of matrices one of pytrees, on whole matrices whatever their sharding.

    Args:
        function: [n, R, C] → [n, R, C], on n matrices of one shape at a time. It must treat
            each on its own: which ones come together is not defined.
        plan: of the leaves' parameters, ``ortho_func.plan(params)``; then leaves are DTensors
            placed as these, and every rank must call the result alike. Without a plan leaves are
            whole.
        flatten: without a plan, what leaves of three or more dims are: False, stacks of
            matrices; True, one matrix of dim 0 by all others.
        readings: without a plan, the same by name or pattern, or as a function of name and leaf.

    Returns:
        A function of a pytree to one of the same structure, dtypes and placements. None stays
        None. It is pure; without a plan `function` is differentiated and mapped through.

    Raises:
        ValueError: when called, on leaves that cannot be read as matrices, or are not the plan's.

    Examples:
        >>> from ortho_func import orthogonalize
        >>> unit = on_whole_matrices(orthogonalize)
        >>> tree = unit({"a": torch.eye(3), "b": [torch.ones(1, 4), None]})
        >>> tree["b"]
        [tensor([[0.5000, 0.5000, 0.5000, 0.5000]]), None]
    """
    leaves = Leaves.of(_FunctionRule(orthogonalizer=function), flatten, readings, plan)

    def mapped(tree: Tree) -> Tree:
        names, found, spec = named_leaves(tree)
        shards = [None if x is None else local(x) for x in found]
        here = [leaves.stand_in(n) if x is None else x for n, x in enumerate(shards)]
        done, _ = leaves.step(leaves.check(names, found), here, shards, [{}] * len(here), {})
        results = [None if y is None else like(x, y) for x, y in zip(found, done, strict=True)]
        return tree_unflatten(results, spec)

    return mapped
