"""The matrix algorithms as transforms: ``muon(lr=0.02)`` is a pair of pure functions.

Each builds the rule that the optimizer of the same name runs, so both give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from ortho_func.algorithms.dion import DionRule
from ortho_func.algorithms.dion2 import Dion2Rule
from ortho_func.algorithms.dion3 import Dion3Rule
from ortho_func.algorithms.matrixwise import Leaves, matrix_transform
from ortho_func.algorithms.muon import MuonRule
from ortho_func.algorithms.nonfinite import check_nonfinite
from ortho_func.algorithms.normuon import NorMuonRule
from ortho_func.algorithms.rule import MatrixRule, check_state_dtypes
from ortho_func.algorithms.transform import (
    Hyperparameter,
    Transform,
    Tree,
    check_epsilon,
    check_flags,
    check_fractions,
)
from ortho_func.plan import Plan
from ortho_func.primitives.orthogonalize import get_orthogonalizer
from ortho_func.primitives.scaling import lr_scale
from ortho_func.trees import Readings

__all__ = [
    "Dion2State",
    "Dion3State",
    "DionState",
    "MuonState",
    "NorMuonState",
    "dion",
    "dion2",
    "dion3",
    "muon",
    "normuon",
]


class MatrixOptions(TypedDict, total=False):
    """What every matrix algorithm takes besides its own arguments; see `muon`."""

    adjust_lr_fn: str | None
    orthogonalizer: str | Callable[[Tensor], Tensor]
    ns_steps: int | None
    cautious: bool
    compute_dtype: torch.dtype | None
    momentum_dtype: torch.dtype | None
    variance_dtype: torch.dtype | None
    nonfinite: str
    flatten: bool | None
    readings: Readings | None
    plan: Plan | None


class MuonState(NamedTuple):
    """State of `muon`."""

    steps: Tensor  # steps done, 0-d int64
    momentum_buffer: Tree  # M, like the parameters


class NorMuonState(NamedTuple):
    """State of `normuon`."""

    steps: Tensor  # steps done, 0-d int64
    momentum_buffer: Tree  # M, like the parameters
    row_variance: Tree  # V, one value per row of each matrix, fp32 at least


class Dion2State(NamedTuple):
    """State of `dion2`."""

    steps: Tensor  # steps done, 0-d int64
    momentum_buffer: Tree  # M, like the parameters


class Dion3State(NamedTuple):
    """State of `dion3`."""

    steps: Tensor  # steps done, 0-d int64
    momentum_buffer: Tree  # M, like the parameters
    row_variance: Tree  # V, one value per row of each matrix, fp32 at least


class DionState(NamedTuple):
    """State of `dion`."""

    steps: Tensor  # steps done, 0-d int64
    momentum_buffer: Tree  # M, like the parameters
    right_factor: Tree  # Q, columns by rank for each matrix, fp32 at least


def muon(
    lr: Hyperparameter = 1e-3,
    weight_decay: Hyperparameter = 0.1,
    *,
    momentum: Hyperparameter = 0.95,
    nesterov: bool = True,
    **options: Unpack[MatrixOptions],
) -> Transform:
    """Muon, orthogonalized momentum, as a transform.

    M ← μM + (1 − μ)G;  B = (1 − μ)G + μM (Nesterov) or M;  U = −lr·s·orth(B) − lr·λ·X

    Args:
        lr: a number, a 0-d tensor, or a schedule: a function of the number of steps done (0-d
            int64) to a number or 0-d tensor. So are weight_decay and momentum; all three are
            also keywords of `update`.
        weight_decay: λ, decoupled.
        momentum: μ.
        nesterov: look ahead by one step.
        options:
            ``adjust_lr_fn``: s of an R×C matrix: "original" (None) √max(1, R/C),
            "match_rms_adamw" 0.2·√max(R, C), "spectral_norm" √(R/C), "none" 1.
            ``orthogonalizer``: a name that `orthogonalize` knows, or a function
            [n, R, C] → [n, R, C]. ``ns_steps``: iterations; None takes as many as the schedule
            has. ``cautious``: decay only where update and parameter agree in sign.
            ``compute_dtype``: dtype in which matrices are orthogonalized; None is bfloat16, and
            float64 for float64. ``momentum_dtype``: dtype of M, None is the parameter's.
            ``variance_dtype``: dtype of V where there is one, None is float32 at least. Sums are
            computed in float32 at least and rounded once.
            ``nonfinite``: what becomes of a matrix in whose gradient or momentum something is
            not finite: "propagate", it becomes NaN; "skip", it sits the step out, update (0)
            and state, on all ranks alike.
            ``flatten``: what parameters of three or more dims are: False, stacks of matrices
            over their leading dims; True, one matrix of dim 0 by all others. ``readings``: a
            `Reading` by name or pattern (``"*.conv"``), or a function of name and tensor.
            ``plan``: ``ortho_func.plan(params)`` for parameters that are DTensors; every rank
            then calls `update` alike. Readings are the plan's.

    Returns:
        A `Transform`; its state is a `MuonState`. Updates are fp32 at least. Without a plan it
        can be mapped, differentiated and traced; with one it can be traced.

    Raises:
        ValueError: at construction, for a number out of range or an unknown name; at `init`, for
            parameters that cannot be read as matrices or are not the plan's.
        TypeError: for a hyperparameter that is no number, tensor or function.

    Source: Jordan 2024, https://kellerjordan.github.io/posts/muon/; s and λ from arXiv
    2502.16982.

    Examples:
        >>> from ortho_func import apply_updates
        >>> tx = muon(lr=0.5, weight_decay=0.0, orthogonalizer="svd")
        >>> params = {"w": torch.zeros(2, 2)}
        >>> state = tx.init(params)
        >>> updates, state = tx.update({"w": torch.diag(torch.tensor([3.0, -7.0]))}, state, params)
        >>> apply_updates(params, updates)["w"]
        tensor([[-0.5000,  0.0000],
                [ 0.0000,  0.5000]])
    """
    hyper = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
    return _of_rule(MuonRule, MuonState, hyper, options, nesterov=nesterov)


def normuon(
    lr: Hyperparameter = 1e-3,
    weight_decay: Hyperparameter = 0.1,
    *,
    momentum: Hyperparameter = 0.95,
    beta2: Hyperparameter = 0.95,
    nesterov: bool = True,
    eps: float = 1e-7,
    **options: Unpack[MatrixOptions],
) -> Transform:
    """NorMuon, Muon with rows normalized by their running mean square, as a transform.

    O = orth(B);  V ← β₂V + (1 − β₂)mean_C(O²);  Ô = O/(√V + ε), of O's norm;
    U = −lr·s·Ô − lr·λ·X

    Args:
        lr: as in `muon`.
        weight_decay: as in `muon`.
        momentum: as in `muon`.
        beta2: decay of V; a number, a 0-d tensor or a schedule.
        nesterov: as in `muon`.
        eps: added to √V.
        options: as in `muon`.

    Returns:
        A `Transform`; its state is a `NorMuonState`.

    Raises:
        ValueError: as `muon` does.

    Source: arXiv 2510.05491, Algorithm 1.

    Examples:
        >>> state = normuon(lr=0.02).init({"w": torch.zeros(4, 8)})
        >>> state.row_variance["w"].shape
        torch.Size([4, 1])
    """
    hyper = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "beta2": beta2}
    return _of_rule(NorMuonRule, NorMuonState, hyper, options, nesterov=nesterov, eps=eps)


def dion2(
    lr: Hyperparameter = 1e-3,
    weight_decay: Hyperparameter = 0.1,
    *,
    momentum: Hyperparameter = 0.95,
    fraction: float = 0.25,
    selection: str = "local",
    **options: Unpack[MatrixOptions],
) -> Transform:
    """Dion2, a fraction of each matrix's slices a step, as a transform.

    M ← M + G;  K = the ⌈αn⌉ slices of the shorter side with largest L1 norm;
    U = −lr·s·orth(M_K) on K − lr·λ·X;  M_K ← μM_K

    Args:
        lr: as in `muon`.
        weight_decay: as in `muon`.
        momentum: μ, of the slices that were selected.
        fraction: α, in (0, 1].
        selection: "global" or "local": with a plan, each shard may choose slices of its own, as
            the optimizer `Dion2` says. Without a plan both are the same.
        options: as in `muon`.

    Returns:
        A `Transform`; its state is a `Dion2State`. Which slices are selected is not
        differentiated through; all else is.

    Raises:
        ValueError: as `muon` does.

    Source: arXiv 2512.16928.

    Examples:
        >>> tx = dion2(lr=0.1, weight_decay=0.0, fraction=0.5)
        >>> params = {"w": torch.zeros(4, 8)}
        >>> updates, _ = tx.update({"w": torch.randn(4, 8)}, tx.init(params), params)
        >>> int(updates["w"].any(dim=1).sum())
        2
    """
    hyper = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
    fixed = _selection(fraction, selection)
    return _of_rule(Dion2Rule, Dion2State, hyper, options, **fixed)


def dion3(
    lr: Hyperparameter = 1e-3,
    weight_decay: Hyperparameter = 0.1,
    *,
    momentum: Hyperparameter = 0.95,
    beta2: Hyperparameter = 0.95,
    fraction: float = 0.25,
    selection: str = "local",
    eps: float = 1e-7,
    **options: Unpack[MatrixOptions],
) -> Transform:
    """Dion3 (NorDion2), Dion2 with the selected rows normalized as in NorMuon, as a transform.

    M ← M + G;  K = the ⌈αR⌉ rows with largest L1 norm;  O = orth(M_K);
    V_K ← β₂V_K + (1 − β₂)mean_C(O²);  Ô = O/(√V_K + ε), of O's norm;
    U = −lr·s·Ô on K − lr·λ·X;  M_K ← μM_K

    Args:
        lr: as in `muon`.
        weight_decay: as in `muon`.
        momentum: as in `dion2`.
        beta2: as in `normuon`.
        fraction: as in `dion2`; rows are selected whatever the shape.
        selection: as in `dion2`.
        eps: as in `normuon`.
        options: as in `muon`.

    Returns:
        A `Transform`; its state is a `Dion3State`.

    Raises:
        ValueError: as `muon` does.

    Source: arXiv 2512.16928 and arXiv 2510.05491.

    Examples:
        >>> dion3(lr=0.02).init([torch.zeros(4, 8)])._fields
        ('steps', 'momentum_buffer', 'row_variance')
    """
    hyper = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "beta2": beta2}
    fixed = _selection(fraction, selection)
    return _of_rule(Dion3Rule, Dion3State, hyper, options, eps=eps, **fixed)


def dion(
    lr: Hyperparameter = 1e-3,
    weight_decay: Hyperparameter = 0.1,
    *,
    momentum: Hyperparameter = 0.95,
    rank_fraction: float = 0.25,
    **options: Unpack[MatrixOptions],
) -> Transform:
    """Dion, an orthonormal update of low rank with error feedback, as a transform.

    B = M + G;  P = orthonormal basis of BQ;  W = BᵀP;  M ← B − (1 − μ)PWᵀ;
    Q ← W with columns of norm 1;  U = −lr·√(R/C)·PQᵀ − lr·λ·X

    Args:
        lr: as in `muon`.
        weight_decay: as in `muon`.
        momentum: μ.
        rank_fraction: r over the shorter side of a matrix, in (0, 1].
        options: as in `muon`, but for ``orthogonalizer``, ``ns_steps`` and ``compute_dtype``;
            ``adjust_lr_fn=None`` is "spectral_norm" here.

    Returns:
        A `Transform`; its state is a `DionState`.

    Raises:
        ValueError: as `muon` does.
        TypeError: for an option that Dion has no use for.

    Source: arXiv 2504.05295, Algorithms 1 and 2.

    Examples:
        >>> tx = dion(lr=0.1, weight_decay=0.0, rank_fraction=0.5)
        >>> params = {"w": torch.zeros(4, 8)}
        >>> updates, state = tx.update({"w": torch.randn(4, 8)}, tx.init(params), params)
        >>> int(torch.linalg.matrix_rank(updates["w"])), state.right_factor["w"].shape
        (2, torch.Size([8, 2]))
    """
    for name in ("orthogonalizer", "ns_steps", "compute_dtype"):
        if name in options:
            raise TypeError(f"dion takes no {name}: its update is orthonormal by a QR.")
    check_fractions(rank_fraction=rank_fraction)
    hyper = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
    return _of_rule(DionRule, DionState, hyper, options, rank_fraction=float(rank_fraction))


def _selection(fraction: float, selection: str) -> dict[str, Any]:
    check_fractions(fraction=fraction)
    if selection not in ("local", "global"):
        raise ValueError(f"selection must be 'local' or 'global', got {selection!r}.")
    return {"fraction": float(fraction), "selection": selection}


def _of_rule(
    rule: type[MatrixRule],
    kind: Callable[..., Any],
    hyper: dict[str, Hyperparameter],
    options: MatrixOptions,
    **fixed: Any,
) -> Transform:
    check_flags(nesterov=fixed.get("nesterov", False), cautious=options.get("cautious", False))
    check_epsilon(fixed.get("eps", 0.0))
    orthogonalizer = get_orthogonalizer(
        options.get("orthogonalizer", "auto"),
        steps=options.get("ns_steps"),
        compute_dtype=options.get("compute_dtype"),
    )
    adjust = options.get("adjust_lr_fn")
    lr_scale(1, 1, adjust)
    dtypes: dict[str, Any] = {
        "momentum_dtype": options.get("momentum_dtype"),
        "variance_dtype": options.get("variance_dtype"),
    }
    check_state_dtypes(**dtypes)
    nonfinite = options.get("nonfinite", "propagate")
    check_nonfinite(nonfinite)
    made = rule(
        adjust_lr_fn=adjust,
        cautious=options.get("cautious", False),
        orthogonalizer=orthogonalizer,
        nonfinite=nonfinite,
        **dtypes,
        **fixed,
    )
    leaves = Leaves.of(made, options.get("flatten"), options.get("readings"), options.get("plan"))
    return matrix_transform(kind, hyper, leaves)
