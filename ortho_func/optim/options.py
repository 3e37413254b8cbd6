"""What a parameter group may say, checked once, at construction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ortho_func.algorithms.dion import DionRule
from ortho_func.algorithms.dion2 import Dion2Rule
from ortho_func.algorithms.dion3 import Dion3Rule
from ortho_func.algorithms.elementwise import AdamWRule, ElementRule, LionRule
from ortho_func.algorithms.muon import MuonRule
from ortho_func.algorithms.nonfinite import check_nonfinite
from ortho_func.algorithms.normuon import NorMuonRule
from ortho_func.algorithms.rule import MatrixRule, check_state_dtypes
from ortho_func.algorithms.writes import check_writes
from ortho_func.geometry import Reading
from ortho_func.primitives.orthogonalize import get_orthogonalizer
from ortho_func.primitives.scaling import lr_scale

__all__ = [
    "ALGORITHMS",
    "DEFAULTS",
    "check_group",
    "check_settings",
    "reading_of",
    "rule_of",
    "static_key",
]

MATRIX_ALGORITHMS: dict[str, type[MatrixRule]] = {
    "muon": MuonRule,
    "normuon": NorMuonRule,
    "dion2": Dion2Rule,
    "dion3": Dion3Rule,
    "dion": DionRule,
}
ELEMENT_ALGORITHMS: dict[str, type[ElementRule]] = {"adamw": AdamWRule, "lion": LionRule}
ALGORITHMS = (*MATRIX_ALGORITHMS, *ELEMENT_ALGORITHMS)


# What a group says if neither it nor the optimizer says otherwise: every group has every option,
# so that it may name any algorithm.
DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "beta2": 0.95,
    "fraction": 0.25,
    "selection": "local",
    "rank_fraction": 0.25,
    "adjust_lr_fn": None,
    "orthogonalizer": "auto",
    "ns_steps": None,
    "eps": 1e-7,
    "cautious": False,
    "nonfinite": "propagate",
    "betas": (0.9, 0.95),
    "adam_eps": 1e-8,
    "flatten": None,
    "split_sizes": None,
    "num_heads": None,
    "wire_dtype": torch.bfloat16,
    "compute_dtype": torch.bfloat16,
    "momentum_dtype": None,
    "variance_dtype": None,
    "bf16_writes": "nearest",
}

# name -> (lowest, whether it may be reached, highest, whether it may be reached)
_RANGES: dict[str, tuple[float, bool, float, bool]] = {
    "lr": (0.0, True, math.inf, False),
    "weight_decay": (0.0, True, math.inf, False),
    "momentum": (0.0, True, 1.0, False),
    "beta2": (0.0, True, 1.0, False),
    "eps": (0.0, True, math.inf, False),
    "adam_eps": (0.0, True, math.inf, False),
    "fraction": (0.0, False, 1.0, True),
    "rank_fraction": (0.0, False, 1.0, True),
}
_TENSORS = ("lr", "weight_decay", "momentum", "beta2")
_FLAGS = ("nesterov", "cautious")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise `TypeError` for what is wrong with the options that all groups share."""
    if not isinstance(settings["reduce_gradients"], bool):
        asked = settings["reduce_gradients"]
        raise TypeError(f"reduce_gradients must be True or False, got {asked!r}.")
    if not isinstance(settings.get("metrics", False), bool):
        raise TypeError(f"metrics must be True or False, got {settings['metrics']!r}.")
    if settings["reduce_gradients"] and settings.get("metrics", False):
        raise ValueError(
            "metrics=True compares updates with gradients, and with reduce_gradients=True no rank "
            "has the average: choose one of them."
        )
    if not isinstance(settings["compile"], (bool, dict)):
        raise TypeError(
            "compile must be True, False or a dict of options of torch.compile, got "
            f"{settings['compile']!r}."
        )
    if settings["bucket_bytes"] is not None:
        _check_count("bucket_bytes", settings["bucket_bytes"])


def check_group(group: Mapping[str, Any], names: list[str]) -> None:
    """Raise `ValueError` or `TypeError` for what a group says wrongly, naming the parameter."""
    algorithm = group["algorithm"]
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}.")
    for name, bounds in _RANGES.items():
        if name in group:
            _check_number(name, group[name], bounds)
    for name in _FLAGS:
        if not isinstance(group.get(name, False), bool):
            raise TypeError(f"{name} must be True or False, got {group[name]!r}.")
    if not isinstance(group["betas"], (tuple, list)) or len(group["betas"]) != 2:
        raise ValueError(f"betas must be two numbers, got {group['betas']!r}.")
    for beta in group["betas"]:
        _check_number("betas", beta, _RANGES["beta2"])
    check_state_dtypes(group.get("momentum_dtype"), group.get("variance_dtype"))
    check_nonfinite(group.get("nonfinite", "propagate"))  # not there in an older checkpoint
    check_writes(group.get("bf16_writes", "nearest"))
    if algorithm in MATRIX_ALGORITHMS:
        _check_matrix_options(group)
    seen: dict[int, str] = {}
    for name, parameter in zip(names, group["params"], strict=True):
        _check_parameter(name, parameter)
        if id(parameter) in seen:
            raise ValueError(
                f"{name} is the same parameter as {seen[id(parameter)]}: list it once."
            )
        seen[id(parameter)] = name


def _check_number(name: str, value: Any, bounds: tuple[float, bool, float, bool]) -> None:
    if isinstance(value, Tensor):
        if name not in _TENSORS:
            raise TypeError(f"{name} is static and must be a number, got a tensor.")
        if value.numel() != 1:
            raise ValueError(f"{name} as a tensor must have one element, got {value.numel()}.")
        if value.dtype == torch.bool or value.dtype.is_complex:
            raise TypeError(f"{name} as a tensor must be real, got {value.dtype}.")
        return
    number = value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        try:  # numpy scalars are numbers too
            number = float(value) if not isinstance(value, (bool, str)) else math.nan
        except (TypeError, ValueError):
            number = math.nan
        if math.isnan(number):
            raise TypeError(f"{name} must be a number, got {value!r}.")
    low, low_in, high, high_in = bounds
    above = number >= low if low_in else number > low
    below = number <= high if high_in else number < high
    if not (above and below):
        left, right = "[" if low_in else "(", "]" if high_in else ")"
        raise ValueError(f"{name} must lie in {left}{low}, {high}{right}, got {value}.")


def _check_count(name: str, value: Any) -> None:
    """A whole number, as such: True and 2.0 are none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}.")


def _check_reading(group: Mapping[str, Any]) -> None:
    if group["flatten"] is not None and not isinstance(group["flatten"], bool):
        raise TypeError(f"flatten must be True, False or None, got {group['flatten']!r}.")
    if group["num_heads"] is not None:
        _check_count("num_heads", group["num_heads"])
    sizes = group["split_sizes"]
    if sizes is None:
        return
    if not isinstance(sizes, (tuple, list)):
        raise TypeError(f"split_sizes must be a tuple of whole numbers, got {sizes!r}.")
    for size in sizes:
        _check_count("each of split_sizes", size)


def _check_matrix_options(group: Mapping[str, Any]) -> None:
    _check_reading(group)
    if group["ns_steps"] is not None:
        _check_count("ns_steps", group["ns_steps"])
    lr_scale(1, 1, group["adjust_lr_fn"])
    for name in ("wire_dtype", "compute_dtype"):
        if group[name] not in _DTYPES:
            allowed = ", ".join(str(dtype) for dtype in _DTYPES)
            raise ValueError(f"{name} must be one of {allowed}, got {group[name]!r}.")
    if group["algorithm"] in ("dion2", "dion3") and group["selection"] not in ("local", "global"):
        raise ValueError(f"selection must be 'local' or 'global', got {group['selection']!r}.")
    get_orthogonalizer(
        group["orthogonalizer"], steps=group["ns_steps"], compute_dtype=group["compute_dtype"]
    )


def _check_parameter(name: str, parameter: Tensor) -> None:
    what = f"{name} of shape {tuple(parameter.shape)}"
    if not parameter.dtype.is_floating_point:
        raise ValueError(
            f"{what} has dtype {parameter.dtype}: only real floating parameters train."
        )
    if parameter.layout != torch.strided:
        raise ValueError(f"{what} is sparse: sparse parameters are not supported.")
    if parameter.is_meta:
        raise ValueError(
            f"{what} is on the meta device: materialize the model (to_empty and initialize) "
            "before building the optimizer."
        )


def rule_of(group: Mapping[str, Any]) -> MatrixRule:
    """The rule of a matrix group."""
    kind = MATRIX_ALGORITHMS[group["algorithm"]]
    orthogonalizer = get_orthogonalizer(
        group["orthogonalizer"], steps=group["ns_steps"], compute_dtype=group["compute_dtype"]
    )
    wanted = {name: group[name] for name in kind.__dataclass_fields__ if name in group}
    wanted["orthogonalizer"] = orthogonalizer
    for name in ("fraction", "rank_fraction"):
        if name in wanted:
            wanted[name] = float(wanted[name])
    return kind(**wanted)


def element_rule_of(group: Mapping[str, Any]) -> ElementRule:
    """The rule of a group that holds no matrices."""
    kind = ELEMENT_ALGORITHMS[group["algorithm"]]
    first, second = group["betas"]
    return kind(
        (float(first), float(second)),
        float(group["adam_eps"]),
        group["cautious"],
        group.get("momentum_dtype"),
        group.get("variance_dtype"),
        group.get("nonfinite", "propagate"),
    )


def reading_of(group: Mapping[str, Any]) -> Reading:
    """How the parameters of a group are read as matrices."""
    splits = group["split_sizes"]
    return Reading(group["flatten"], None if splits is None else tuple(splits), group["num_heads"])


def static_key(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of a group is built into the step: a change means building it again."""
    names = (
        "algorithm", "nesterov", "cautious", "adjust_lr_fn", "orthogonalizer", "ns_steps", "eps",
        "wire_dtype", "compute_dtype", "nonfinite", "flatten", "split_sizes", "num_heads",
        "fraction", "selection", "rank_fraction", "betas", "adam_eps", "momentum_dtype",
        "variance_dtype", "bf16_writes",
    )  # fmt: skip
    found = tuple(group.get(name) for name in names)
    return tuple(tuple(value) if isinstance(value, list) else value for value in found)
