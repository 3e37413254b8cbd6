"""State dicts of other optimizers, made those of the optimizers here.

Both functions take what ``state_dict()`` or ``get_optimizer_state_dict`` returned (parameters by
number, or by name) and return as much: for ``load_state_dict`` of an optimizer with the same
parameters in the same groups, or for ``set_optimizer_state_dict``. Nothing is written; tensors that
need no arithmetic are shared. Options that the other optimizer has no word for stay as they are set
here, and so does the orthogonalizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["from_dion", "from_torch"]

Group = Mapping[str, Any]
State = Mapping[str, Any]

# Keys of a group that are nobody's options, and are kept.
_KEPT = ("params", "param_names", "initial_lr", "lr", "weight_decay")


def from_torch(*state_dicts: Mapping[str, Any]) -> dict[str, Any]:
    """The state of ``torch.optim.Muon`` and ``AdamW``, as that of one optimizer here.

    Momenta and averages are the same tensors by the same names. A parameter without state (torch
    makes it at the first step that has a gradient) is one that has had no step.

    Args:
        state_dicts: of the optimizers that trained the model, in the order of the groups here;
            several become one, whose groups are all of theirs.

    Returns:
        A state dict. Its groups say ``algorithm`` and what the old ones did about lr, weight_decay,
        momentum, nesterov, adjust_lr_fn, betas and eps. For torch's very steps build the optimizer
        with ``orthogonalizer="jordan"``, where coefficients and number of steps were torch's own.

    Raises:
        ValueError: for groups of another optimizer, and for what AdamW does not do here: amsgrad,
            maximize, or decay that is not decoupled.

    Examples:
        >>> from ortho_func import Muon
        >>> layer = torch.nn.Linear(8, 4)
        >>> old = torch.optim.Muon([layer.weight]), torch.optim.AdamW([layer.bias])
        >>> new = Muon([{"params": [layer.weight]}, {"params": [layer.bias], "algorithm": "adamw"}])
        >>> new.load_state_dict(from_torch(*(optimizer.state_dict() for optimizer in old)))
    """
    return _joined([_converted(one, _torch_reader) for one in state_dicts])


def from_dion(state_dict: Mapping[str, Any], *, square_left: bool = False) -> dict[str, Any]:
    """The state of an optimizer of microsoft/dion, as that of its namesake here.

    Momentum, of Muon and NorMuon times 1 − μ: there M ← μM + G, here M ← μM + (1 − μ)G, and both
    orthogonalize. NorMuon's and Dion3's variance; of a flattened convolution the mean over what
    are columns here. Dion's Q: as it is where it has a row for each column of the matrix; where it
    has one for each row (there the shorter side, or the one that is not sharded, decides), MᵀQ with
    columns of norm 1, the same power iteration half a step on.

    Args:
        state_dict: of dion's Muon, NorMuon, Dion2, Dion3 (NorDion2) or Dion, with AdamW and Lion.
        square_left: whether Q of a square matrix has a row for each of its rows, as with an outer
            mesh that shards rows, or an inner one that shards columns.

    Returns:
        A state dict. Its groups carry over every option that has a namesake here.

    Raises:
        ValueError: for an algorithm, or state, that is none of theirs.

    Examples:
        >>> from ortho_func import Muon
        >>> layer = torch.nn.Linear(8, 4, bias=False)
        >>> group = {"params": [0], "algorithm": "muon", "lr": 0.02, "mu": 0.9}
        >>> old = {"state": {0: {"momentum": torch.ones(4, 8)}}, "param_groups": [group]}
        >>> new = Muon(layer.parameters())
        >>> new.load_state_dict(from_dion(old))
        >>> new.state[layer.weight]["momentum_buffer"][0, :2]
        tensor([0.1000, 0.1000])
        >>> new.param_groups[0]["momentum"]
        0.9
    """

    def reader(group: Group) -> _Reader:
        algorithm = group.get("algorithm")
        if algorithm not in _DION_READERS:
            known = ", ".join(sorted(_DION_READERS))
            raise ValueError(
                f"a group of dion's says algorithm, one of {known}, got {algorithm!r}."
            )
        return _DION_READERS[algorithm](group, square_left)

    return _converted(state_dict, reader)


# ---------------------------------------------------------------------------------------------
# State dicts


@dataclass(frozen=True)
class _Reader:
    """What a group becomes: options here, and how to read the state of its parameters."""

    options: Mapping[str, Any]
    state: Callable[[State], dict[str, Any]]


def _converted(state_dict: Mapping[str, Any], reader: Callable[[Group], _Reader]) -> dict[str, Any]:
    state: dict[Any, dict[str, Any] | None] = {}  # None: no step yet
    groups = []
    for group in state_dict["param_groups"]:
        read = reader(group)
        kept = {name: group[name] for name in _KEPT if name in group}
        groups.append({**kept, **read.options})
        for key in group["params"]:
            old = state_dict["state"].get(key)
            try:
                state[key] = read.state(old) if old else None
            except KeyError as error:
                algorithm = read.options["algorithm"]
                raise ValueError(f"state of {key} has no {error}, as {algorithm} has it.") from None
    return {"state": state, "param_groups": groups}


def _joined(state_dicts: list[dict[str, Any]]) -> dict[str, Any]:
    """Several state dicts as one; parameters by number are numbered through."""
    state: dict[Any, Any] = {}
    groups = []
    count = 0
    for one in state_dicts:
        numbered = all(
            isinstance(key, int) for group in one["param_groups"] for key in group["params"]
        )
        first = count if numbered else 0
        state.update({(key + first if numbered else key): s for key, s in one["state"].items()})
        for group in one["param_groups"]:
            params = [key + first if numbered else key for key in group["params"]]
            groups.append({**group, "params": params})
            count += len(params)
    return {"state": state, "param_groups": groups}


def _renamed(group: Group, names: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """The options that a group has, under their names here."""
    return ((new, group[old]) for old, new in names.items() if old in group)


# ---------------------------------------------------------------------------------------------
# torch.optim


def _torch_reader(group: Group) -> _Reader:
    if "ns_coefficients" in group:
        return _torch_muon(group)
    if "amsgrad" in group and "betas" in group:
        return _torch_adamw(group)
    raise ValueError(
        f"a group with {', '.join(sorted(set(group) - set(_KEPT)))} is neither of "
        "torch.optim.Muon nor of torch.optim.AdamW."
    )


def _torch_muon(group: Group) -> _Reader:
    names = ("momentum", "nesterov", "adjust_lr_fn")
    options = {"algorithm": "muon", **{name: group[name] for name in names}}
    return _Reader(options, lambda state: {"momentum_buffer": state["momentum_buffer"]})


def _torch_adamw(group: Group) -> _Reader:
    coupled = group["weight_decay"] and not group.get("decoupled_weight_decay", True)
    wrong = [name for name in ("amsgrad", "maximize") if group.get(name)]
    wrong += ["weight_decay that is not decoupled"] if coupled else []
    if wrong:
        raise ValueError(f"AdamW here knows no {' and no '.join(wrong)}.")
    options = {"algorithm": "adamw", "betas": tuple(group["betas"]), "adam_eps": group["eps"]}
    return _Reader(options, _averages("step", "exp_avg", "exp_avg_sq"))


def _averages(step: str, first: str, second: str) -> Callable[[State], dict[str, Any]]:
    """AdamW's state by its names elsewhere."""

    def read(state: State) -> dict[str, Any]:
        count = torch.as_tensor(state[step], dtype=torch.float32)
        return {"step": count, "exp_avg": state[first], "exp_avg_sq": state[second]}

    return read


# ---------------------------------------------------------------------------------------------
# microsoft/dion. Its dion/megabatch_base.py and dion/dion.py say what state there is.

_ADJUST = {None: "none", "spectral_norm": "spectral_norm", "rms_norm": "match_rms_adamw"}
_MATRIX_OPTIONS = {
    "mu": "momentum", "ef_decay": "momentum", "muon_beta2": "beta2", "nesterov": "nesterov",
    "cautious_wd": "cautious", "flatten": "flatten", "split_sizes": "split_sizes",
    "num_heads": "num_heads", "fraction": "fraction", "selection_scope": "selection",
    "rank_fraction": "rank_fraction",
}  # fmt: skip
_NORMUON_EPS = 1e-8  # what dion/normuon.py adds to √V


def _dion_matrix(algorithm: str, group: Group) -> dict[str, Any]:
    options = {"algorithm": algorithm, **dict(_renamed(group, _MATRIX_OPTIONS))}
    if "adjust_lr" in group:
        options["adjust_lr_fn"] = _ADJUST[group["adjust_lr"]]
    return options


def _dion_muon(group: Group, square_left: bool) -> _Reader:
    rest = 1 - float(group["mu"])
    options = _dion_matrix("muon", group)
    return _Reader(options, lambda state: {"momentum_buffer": state["momentum"] * rest})


def _dion_normuon(group: Group, square_left: bool) -> _Reader:
    rest = 1 - float(group["mu"])

    def read(state: State) -> dict[str, Any]:
        variance = _row_variance(state["variance_neuron"], group)
        return {"momentum_buffer": state["momentum"] * rest, "row_variance": variance}

    return _Reader({**_dion_matrix("normuon", group), "eps": _NORMUON_EPS}, read)


def _dion_dion2(group: Group, square_left: bool) -> _Reader:
    options = _dion_matrix("dion2", group)
    return _Reader(options, lambda state: {"momentum_buffer": state["momentum"]})


def _dion_dion3(group: Group, square_left: bool) -> _Reader:
    def read(state: State) -> dict[str, Any]:
        variance = _row_variance(state["variance_neuron"], group)
        return {"momentum_buffer": state["momentum"], "row_variance": variance}

    return _Reader({**_dion_matrix("dion3", group), "eps": _NORMUON_EPS}, read)


def _dion_dion(group: Group, square_left: bool) -> _Reader:
    def read(state: State) -> dict[str, Any]:
        momentum, factor = state["momentum"], state["Q"]
        return {
            "momentum_buffer": momentum,
            "right_factor": _right_factor(momentum, factor, square_left),
        }

    return _Reader({**_dion_matrix("dion", group), "adjust_lr_fn": "spectral_norm"}, read)


def _dion_adamw(group: Group, square_left: bool) -> _Reader:
    def read(state: State) -> dict[str, Any]:
        # per parameter in newer versions, before that the group's
        counted = {"step": group.get("step"), **state}
        step = "step_dev" if "step_dev" in state else "step"
        return _averages(step, "momentum", "variance")(counted)

    return _Reader(_dion_elements("adamw", group), read)


def _dion_lion(group: Group, square_left: bool) -> _Reader:
    options = _dion_elements("lion", group)
    return _Reader(options, lambda state: {"momentum_buffer": state["momentum"]})


def _dion_elements(algorithm: str, group: Group) -> dict[str, Any]:
    options = {"algorithm": algorithm, "betas": (group["beta1"], group["beta2"])}
    options.update(_renamed(group, {"epsilon": "adam_eps", "cautious_wd": "cautious"}))
    return options


_DION_READERS: dict[str, Callable[[Group, bool], _Reader]] = {
    "muon": _dion_muon,
    "normuon": _dion_normuon,
    "dion2": _dion_dion2,
    "nordion2": _dion_dion3,
    "dion3": _dion_dion3,
    "dion": _dion_dion,
    "adamw": _dion_adamw,
    "lion": _dion_lion,
}


def _row_variance(variance: Tensor, group: Group) -> Tensor:
    """One value a row: there, of a flattened parameter too, the mean over the last dim only."""
    if group.get("flatten") and variance.ndim > 2:
        return variance.float().mean(dim=tuple(range(1, variance.ndim)), keepdim=True)
    return variance


def _right_factor(momentum: Tensor, factor: Tensor, square_left: bool) -> Tensor:
    """Q with a row for each column of the matrix."""
    rows, cols = momentum.shape
    if factor.shape[0] == cols and not (rows == cols and square_left):
        return factor
    wide = torch.promote_types(momentum.dtype, torch.float32)
    product = momentum.to(wide).mT @ factor.to(wide)
    norms = torch.linalg.vector_norm(product, dim=0, keepdim=True)
    return product / torch.where(norms > 0, norms, torch.ones_like(norms))
