"""The stateful shell: a ``torch.optim.Optimizer`` around the pure step.

All in-place writes of the library are here (and in functions whose names end in ``_``).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ortho_func.algorithms.elementwise import ElementRule
from ortho_func.algorithms.legs import Leg, plan_for
from ortho_func.algorithms.matrixwise import first_state
from ortho_func.algorithms.program import Program, bind, matrix_step, meter_of, one_device
from ortho_func.algorithms.rule import state_dtype
from ortho_func.algorithms.writes import advance_
from ortho_func.geometry import (
    aligned,
    check_process_group,
    group_over,
    layout_of,
    local,
    ranks_in,
    ranks_of,
    takes_part,
    this_rank,
    work_device,
)
from ortho_func.optim.agreement import Ranks, agree, facts_about, plain
from ortho_func.optim.inplace import InPlace, Record
from ortho_func.optim.kept import Kept, gradients_of
from ortho_func.optim.options import (
    DEFAULTS,
    ELEMENT_ALGORITHMS,
    check_group,
    check_settings,
    element_rule_of,
    reading_of,
    rule_of,
    static_key,
)
from ortho_func.optim.reduction import Chunk, alone, chunks
from ortho_func.optim.watching import Watch, labels
from ortho_func.optim.writing import Shard, masked_step_, remember_writes, shard_of, step_
from ortho_func.plan import (
    Balance,
    Hops,
    ParamSpec,
    Plan,
    TeamSize,
    Wire,
    default_bucket_bytes,
    places_of,
)

__all__ = ["OrthogonalOptimizer"]

# Set in code, not by a checkpoint: callables and dtypes are saved as text, and never loaded.
_AS_TEXT = ("orthogonalizer", "wire_dtype", "compute_dtype", "momentum_dtype", "variance_dtype")
_SCALARS = ("lr", "weight_decay", "momentum", "beta2")
# What all ranks must say alike; the scalars may change at any time and are not compared.
_AGREED = tuple(name for name in ("algorithm", *DEFAULTS) if name not in _SCALARS)


@dataclass(frozen=True, eq=False)
class _Elementwise:
    """A group without matrices: its number, its parameters, and its rule."""

    group: int
    params: list[Tensor]
    rule: ElementRule
    chunks: tuple[Chunk, ...]
    shards: tuple[Shard, ...]


@dataclass(frozen=True, eq=False)
class _Draft:
    """What this rank would do, before it has heard the others."""

    matrices: list[Tensor]
    group_of: list[int]
    elementwise: list[_Elementwise]
    specs: list[ParamSpec]
    legs: tuple[Leg, ...]


@dataclass(frozen=True, eq=False)
class _Built:
    """Everything that is computed once from the groups."""

    key: tuple[Any, ...]
    params: list[Tensor]  # all groups'
    program: Program | None
    matrices: list[Tensor]  # parameters of the program, in the plan's order
    group_of: list[int]
    elementwise: list[_Elementwise]
    traced: Callable[..., None] | None
    watch: Watch | None = None

    @cached_property
    def everything(self) -> list[Tensor]:
        """All parameters, those of the program first."""
        return [*self.matrices, *(p for group in self.elementwise for p in group.params)]


class OrthogonalOptimizer(torch.optim.Optimizer):
    """What the matrix optimizers share. Use `Muon`, `NorMuon` or `Dion2`."""

    def __init__(
        self,
        params: Any,
        algorithm: str,
        *,
        process_group: Any = None,
        bucket_bytes: int | None = None,
        wire: Wire = "auto",
        balance: Balance = "cost",
        hops: Hops = "auto",
        team_size: TeamSize = 1,
        reduce_gradients: bool = False,
        metrics: bool = False,
        compile: bool | dict[str, Any] = False,  # noqa: A002 - torch's word for it
        **given: Any,
    ) -> None:
        unknown = set(given) - set(DEFAULTS)
        if unknown:
            raise TypeError(f"unknown options: {', '.join(sorted(unknown))}.")
        self._settings: dict[str, Any] = {
            "bucket_bytes": bucket_bytes,
            "wire": wire,
            "balance": balance,
            "hops": hops,
            "team_size": team_size,
            "reduce_gradients": reduce_gradients,
            "metrics": metrics,
            "compile": compile,
        }
        check_process_group(process_group)
        self._process_group = process_group
        self._built: _Built | None = None
        self._kept: Kept | None = None
        self._ready = False
        defaults = {"algorithm": algorithm, **DEFAULTS, **given}
        # Not among torch's defaults: there OneCycleLR would cycle them instead of the momentum.
        self._settings["betas"] = defaults.pop("betas")
        try:
            super().__init__(params, defaults)
        except Exception as error:  # such as an empty list, on this rank alone
            self.param_groups = []
            agree(self._sides(), {}, self._common(), error)
            raise
        self._ready = True
        self._build()

    # -- construction -----------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; the step is planned again, so all ranks must do it alike."""
        super().add_param_group(param_group)
        self.param_groups[-1].setdefault("betas", self._settings["betas"])
        if not self._ready:
            return
        try:
            self._build()
        except Exception:
            self.param_groups.pop()
            raise

    def _names(self, number: int) -> list[str]:
        group = self.param_groups[number]
        found = group.get("param_names")
        count = len(group["params"])
        return list(found) if found else [f"parameter {i} of group {number}" for i in range(count)]

    def _key(self) -> tuple[Any, ...]:
        return tuple(static_key(group) for group in self.param_groups)

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _other_params(self) -> bool:
        """Whether the groups hold other parameters than those that the step was built of.

        A wrapper that shards a model after its optimizer was built puts the shards there.
        """
        assert self._built is not None
        old, new = self._built.params, self._params()
        return len(old) != len(new) or not all(map(operator.is_, old, new))

    def _build(self) -> None:
        """Plan the step, agree on it with the other ranks, make state, compile if asked to."""
        draft, fault = None, None
        try:
            draft = self._draft()
        except Exception as error:  # not alone: the other ranks wait for this one
            fault = error
        handles = agree(self._sides(), self._facts(), self._common(), fault)
        assert draft is not None
        self._make_state()
        program = self._bind(draft, handles) if draft.legs else None
        built = _Built(
            self._key(), self._params(), program, draft.matrices, draft.group_of,
            draft.elementwise, None, watch=self._watch(program, draft.matrices),
        )  # fmt: skip
        self._built = replace(built, traced=_compiled(built, self._settings["compile"]))
        self._kept = None

    def _draft(self) -> _Draft:
        """Check the groups and plan the step; no communication."""
        check_settings(self._settings)
        for number, group in enumerate(self.param_groups):
            check_group(group, self._names(number))
        specs: list[ParamSpec] = []
        matrices: list[Tensor] = []
        group_of: list[int] = []
        elementwise: list[_Elementwise] = []
        chosen: list[int] = []
        for number, group in enumerate(self.param_groups):
            present = self._present(number)
            if group["algorithm"] in ELEMENT_ALGORITHMS:
                params = [p for _, p in present]
                rule = element_rule_of(group)
                shards = tuple(shard_of(p) for p in params)
                elementwise.append(_Elementwise(number, params, rule, self._chunks(params), shards))
                continue
            chosen.append(number)
            reading = reading_of(group)
            for name, p in present:
                layout = layout_of(p, process_group=self._process_group, name=name)
                if self._reduces:
                    layout = layout.averaged()
                specs.append(ParamSpec(name, layout, reading, len(chosen) - 1, p.dtype))
                matrices.append(p)
                group_of.append(number)
        if not specs:
            return _Draft(matrices, group_of, elementwise, [], ())
        groups = [self.param_groups[number] for number in chosen]
        legs = plan_for(
            specs,
            [rule_of(group) for group in groups],
            [group["wire_dtype"] for group in groups],
            bucket_bytes=self._bucket_bytes(one_device([work_device(p) for p in matrices])),
            wire=self._settings["wire"],
            balance=self._settings["balance"],
            hops=self._hops(),
            team_size=self._settings.get("team_size", 1),  # not there in an older pickle
        )
        legs = tuple(
            replace(leg, hyper_of=tuple(chosen[number] for number in leg.hyper_of)) for leg in legs
        )
        return _Draft(matrices, group_of, elementwise, specs, legs)

    @property
    def _reduces(self) -> bool:
        return bool(self._settings.get("reduce_gradients", False))

    def _chunks(self, params: Sequence[Tensor]) -> tuple[Chunk, ...]:
        """What is averaged together of element-wise parameters, or of their like."""
        if not self._reduces or not params:
            return alone(len(params))
        bound = self._bucket_bytes(local(params[0]).device)
        return chunks(params, self._process_group, bucket_bytes=bound)

    def _gradients(self, params: Sequence[Tensor]) -> list[Tensor | None]:
        """This rank's part of the gradients; of replicas that differ, a missing one is zero."""
        missing = torch.zeros_like if self._reduces else lambda _: None
        return [missing(local(p)) if p.grad is None else _gradient(p) for p in params]

    def _moves(self, parameter: Tensor) -> bool:
        """Whether a step changes it: another replica may have the gradient that is missing here."""
        return parameter.grad is not None or (self._reduces and parameter.requires_grad)

    def _hops(self) -> Hops:
        asked: Hops = self._settings.get("hops", "auto")  # not there in an older pickle
        return asked

    def _bucket_bytes(self, device: torch.device) -> int:
        asked: int | None = self._settings["bucket_bytes"]
        return default_bucket_bytes(device) if asked is None else asked

    def _present(self, number: int) -> list[tuple[str, Tensor]]:
        """A group's parameters by name, without those on meshes that exclude this rank."""
        named = zip(self._names(number), self.param_groups[number]["params"], strict=True)
        return [(name, p) for name, p in named if takes_part(p)]

    def _sides(self) -> dict[Ranks, Callable[[], Any]]:
        """The sets of ranks over which this rank shares parameters, and how to get their groups."""
        tensors: dict[Ranks, list[Tensor]] = {}
        if self._process_group is not None:
            tensors[ranks_in(self._process_group)] = []
        for number in range(len(self.param_groups)):
            for _, p in self._present(number):
                tensors.setdefault(ranks_of(p, self._process_group), []).append(p)
        return {
            ranks: partial(group_over, found, self._process_group)
            for ranks, found in tensors.items()
            if len(ranks) > 1
        }

    def _facts(self) -> dict[Ranks, list[str]]:
        """What the ranks must agree on, by the set of ranks that a parameter lies over."""
        facts: dict[Ranks, list[str]] = {}
        for number, group in enumerate(self.param_groups):
            options = {name: group.get(name) for name in _AGREED}
            for name, p in self._present(number):
                found = facts.setdefault(ranks_of(p, self._process_group), [])
                found.extend(facts_about(name, p, options))
        return facts

    def _common(self) -> list[str]:
        """What all ranks must agree on, whatever they hold."""
        return [f"{key}={value}" for key, value in self._settings.items() if key != "compile"]

    def _bind(self, draft: _Draft, handles: dict[Ranks, Any]) -> Program:
        found = [handles.get(ranks_of(p, self._process_group)) for p in draft.matrices]
        return bind(
            draft.legs,
            draft.specs,
            rank=this_rank(),
            places=places_of(draft.matrices, draft.specs, found, self._hops()),
            work_devices=[work_device(p) for p in draft.matrices],
        )

    def _watch(self, program: Program | None, matrices: list[Tensor]) -> Watch | None:
        if program is None or not self._settings.get("metrics", False):
            return None
        names = labels(self.param_groups, matrices)
        return Watch.of(meter_of(program, names, rank=this_rank()))

    def _make_state(self) -> None:
        """State exists from the start, with the parameters' placements; what is there stays."""
        here = {id(p) for p in self._params()}
        for gone in [p for p in self.state if id(p) not in here]:
            del self.state[gone]
        number = 0
        for group in self.param_groups:
            for p in group["params"]:
                remember_writes(self.state[p], group.get("bf16_writes", "nearest"), p, number)
                number += 1
                for name, make in _first_states(group).items():
                    if name not in self.state[p]:
                        self.state[p][name] = make(p)
                    asked = _asked_dtype(group, name)
                    if asked not in (None, self.state[p][name].dtype):  # changed since
                        self.state[p][name] = self.state[p][name].to(asked)

    @property
    def plan(self) -> Plan | None:
        """The plan of the matrix groups, None without any; print ``opt.plan.describe()``."""
        assert self._built is not None
        return None if self._built.program is None else self._built.program.plan

    # -- the step ---------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Every rank of the parameters' mesh must call it.

        Args:
            closure: re-evaluates the model and returns the loss, as in ``torch.optim``.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        built = self._built
        assert built is not None
        if not torch.compiler.is_compiling() and (built.key != self._key() or self._other_params()):
            self._build()
            built = self._built
            assert built is not None
        if built.traced is not None and not torch.compiler.is_compiling():
            self._step_compiled(built)
        elif torch.compiler.is_compiling():
            self._step_eager(built, Record([]))
        else:
            self._step_recorded(built)
        advance_([self.state[p] for p in built.params])
        return loss

    def _hypers(self) -> list[dict[str, Any]]:
        """By group, what may change from step to step: numbers or 0-d tensors."""
        return [
            {name: _scalar(group[name]) for name in _SCALARS if name in group}
            for group in self.param_groups
        ]

    def _local_state(self, params: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        found = []
        for p in params:
            state = self.state[p]
            if not all(type(t) is Tensor for t in state.values()):
                state = {name: local(t) for name, t in state.items() if isinstance(t, Tensor)}
            found.append(state)
        return found

    def _step_recorded(self, built: _Built) -> None:
        """A step; if it fails, its error says what of it is written."""
        record = Record([] if built.program is None else [p.name for p in built.program.params])
        try:
            self._step_eager(built, record)
        except Exception as error:
            error.add_note(record.told())
            raise

    def _step_eager(self, built: _Built, record: Record) -> None:
        hypers = self._hypers()

        def elementwise() -> None:
            record.others = "written in part"
            for group in built.elementwise:
                for chunk in group.chunks:
                    params = chunk.pick(group.params)
                    found = self._gradients(params)
                    if chunk.over > 1:  # then none is missing
                        found = [*chunk.average([g for g in found if g is not None])]
                    triples = zip(params, found, chunk.pick(group.shards), strict=True)
                    active = [(p, g, s) for p, g, s in triples if g is not None and self._moves(p)]
                    step_(
                        group.rule,
                        [local(p) for p, _, _ in active],
                        [g for _, g, _ in active],
                        self._local_state([p for p, _, _ in active]),
                        hypers[group.group],
                        [s for _, _, s in active],
                    )
            record.others = "written"

        if built.program is None:
            elementwise()
            return
        gauges = None if built.watch is None else built.watch.begin()
        matrix_step(
            built.program,
            [local(p) for p in built.matrices],
            [
                g if self._moves(p) else None
                for p, g in zip(built.matrices, self._gradients(built.matrices), strict=True)
            ],
            self._local_state(built.matrices),
            hypers,
            record,
            meanwhile=elementwise,
            gauges=gauges,
        )
        if built.watch is not None and gauges is not None:
            built.watch.end_(gauges)

    def _step_compiled(self, built: _Built) -> None:
        assert built.traced is not None
        count = len(built.matrices)
        if self._kept is None or not self._kept.holds(self.state):
            self._kept = Kept(built.everything, self.state)
        kept = self._kept
        device = kept.params[0].device if kept.params else torch.device("cpu")
        found = gradients_of(built.everything)
        there = [g is not None for g in found]
        moving = [self._moves(p) for p in built.everything] if self._reduces else there
        grads = [
            torch.zeros_like(p) if g is None else g
            for g, p in zip(found, kept.params, strict=True)
        ] if not all(there) else found  # fmt: skip
        hypers = self._hypers()
        built.traced(
            kept.params[:count],
            grads[:count],
            kept.state[:count],
            kept.params[count:],
            grads[count:],
            kept.state[count:],
            kept.present(moving, device),
            list(_scalar_tensor(hypers, device).unbind()),
            [tuple(hyper) for hyper in hypers],
        )

    def metrics(self) -> dict[str, Tensor]:
        """What the last step did to each matrix, by "gauge/name": 0-d tensors on the device.

        U is the update before lr and decay, X ← (1 − lr·λ)X − lr·U, G the raw gradient, M the
        momentum after the step. Values are those of whole matrices, the same on every rank.

        - ``update_rms``: ‖U‖_F/√(RC);
        - ``update_max_sv`` and ``update_min_sv``: estimates of U's extreme singular values, see
          `ortho_func.extreme_singular_values`; of Dion2 and Dion3 those of the slices that were
          selected, of Dion those of its rank; NaN where a team of ranks owns a matrix;
        - ``momentum_norm``: ‖M‖_F;
        - ``gradient_cosine``: ⟨G, U⟩/(‖G‖_F‖U‖_F), positive downhill.

        A matrix without a gradient in the last step, or before a first one, has NaN. Of a parameter
        with several matrices the name ends in "/0", "/1", …; parameters given without names are
        called "group.number". Asking reads nothing back from the device.

        Raises:
            ValueError: if the optimizer was not built with ``metrics=True``.

        Examples:
            >>> from ortho_func import Muon
            >>> layer = torch.nn.Linear(8, 4, bias=False)
            >>> opt = Muon(layer.named_parameters(), metrics=True)
            >>> layer(torch.randn(2, 8)).square().mean().backward()
            >>> opt.step()
            >>> sorted(opt.metrics())[0]
            'gradient_cosine/weight'
        """
        if not self._settings.get("metrics", False):
            raise ValueError("there are no metrics: build the optimizer with metrics=True.")
        assert self._built is not None
        return {} if self._built.watch is None else self._built.watch.report()

    # -- state ------------------------------------------------------------------------------

    @torch.no_grad()
    def average_state_(self) -> None:
        """With ``reduce_gradients=True``, make state equal on all replicas before saving it.

        Until then a replica's momentum is that of its own gradients, whose average over replicas
        is the momentum of the formula. Averaging changes no later step but by rounding. Every
        rank of the process group, or of the mesh, must call it.
        """
        assert self._built is not None
        matrices = self._built.matrices
        for chunk in self._chunks(matrices):
            momenta = [local(self.state[p]["momentum_buffer"]) for p in chunk.pick(matrices)]
            torch._foreach_copy_(momenta, chunk.average(momenta))

    def state_dict(self) -> dict[str, Any]:
        """As in ``torch.optim``; tensors among the hyperparameters are saved as numbers."""
        if self._built is not None and self._other_params():
            self._make_state()
        saved = super().state_dict()
        for group in saved["param_groups"]:
            for name in _AS_TEXT:
                if name in group:
                    group[name] = plain(group[name])
            for name in _SCALARS:
                if isinstance(group.get(name), Tensor):
                    group[name] = float(group[name])
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in ``torch.optim``; state keeps the dtype and the storage that it has here.

        An option that a saved group lacks stays as it is here. State of a parameter that needs
        no gradient may be absent, as ``set_state_dict`` leaves it out; it stays as well. None
        instead of a parameter's state is that of one that has had no step: it begins anew.

        Raises:
            ValueError: state lacks something or has another shape; then nothing was changed.
        """
        if self._built is not None and self._other_params():
            self._make_state()
        self._check_state(state_dict)
        before = {p: dict(self.state[p]) for p in self._params()}
        kept = [dict(group) for group in self.param_groups]
        filled = dict(state_dict)
        filled["state"] = {key: one for key, one in state_dict["state"].items() if one is not None}
        if len(state_dict["param_groups"]) == len(kept):
            filled["param_groups"] = [
                {**mine, **saved, **{name: mine[name] for name in _AS_TEXT if name in mine}}
                for mine, saved in zip(kept, state_dict["param_groups"], strict=True)
            ]
        super().load_state_dict(filled)
        self._restore_scalars(kept)
        self._restore_state(before, state_dict)
        if self._built is None or self._built.key != self._key():
            self._build()

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        """State that lacks something would leave it as it is here: an error instead."""
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            return  # torch's own error says so
        for number, group in enumerate(groups):
            params = self.param_groups[number]["params"]
            for index, name, p in zip(group["params"], self._names(number), params, strict=False):
                raw = state_dict["state"].get(index, {} if p.requires_grad else None)
                if raw is None:
                    continue
                for key, mine in self.state[p].items():
                    if not isinstance(mine, Tensor):
                        continue
                    shape = tuple(torch.as_tensor(raw[key]).shape) if key in raw else None
                    if shape != tuple(mine.shape):
                        found = "nothing" if shape is None else f"one of shape {shape}"
                        raise ValueError(
                            f"the state to load has no {key} of shape {tuple(mine.shape)} for "
                            f"{name}, but {found}: it is of another model, algorithm or version. "
                            "Load it with the optimizer that saved it."
                        )

    def _restore_scalars(self, kept: list[dict[str, Any]]) -> None:
        """A hyperparameter that is a tensor here stays that tensor, with the loaded value."""
        for mine, group in zip(kept, self.param_groups, strict=True):
            for name in _SCALARS:
                if isinstance(mine.get(name), Tensor) and name in group:
                    mine[name].fill_(float(group[name]))
                    group[name] = mine[name]

    def _restore_state(
        self, before: dict[Tensor, dict[str, Any]], state_dict: dict[str, Any]
    ) -> None:
        order = [index for group in state_dict["param_groups"] for index in group["params"]]
        groups = [group for group in self.param_groups for _ in group["params"]]
        for index, p, group in zip(order, self._params(), groups, strict=True):
            raw = state_dict["state"].get(index, {})
            if raw is None:
                raw = {name: make(p) for name, make in _first_states(group).items()}
            for name, mine in before[p].items():
                if not isinstance(mine, Tensor):
                    continue
                if name in raw:
                    with torch.no_grad():
                        mine.copy_(torch.as_tensor(raw[name]))
                self.state[p][name] = mine

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle; the plan is computed again (a process group is not pickled)."""
        super().__setstate__(state)
        self.__dict__.setdefault("_process_group", None)
        self.__dict__.setdefault("_built", None)
        self.__dict__.setdefault("_kept", None)
        self.__dict__.setdefault("_ready", True)
        if self._built is None and "_settings" in self.__dict__:
            self._build()


def _first_states(group: dict[str, Any]) -> dict[str, Callable[[Tensor], Tensor]]:
    """By name, how to make the state of a group's parameters before the first step."""
    if group["algorithm"] in ELEMENT_ALGORITHMS:
        state = element_rule_of(group).state
        return {n: partial(_zeros, kind, _asked_dtype(group, n)) for n, kind in state.items()}
    rule, reading = rule_of(group), reading_of(group)
    return {name: partial(first_state, rule, name, reading=reading) for name in rule.state}


def _asked_dtype(group: dict[str, Any], name: str) -> torch.dtype | None:
    return state_dtype(name, group.get("momentum_dtype"), group.get("variance_dtype"))


def _zeros(kind: str, dtype: torch.dtype | None, parameter: Tensor) -> Tensor:
    if kind == "scalar":
        return torch.zeros((), dtype=torch.float32, device=local(parameter).device)
    return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)


def _gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if type(gradient) is Tensor and gradient.layout is torch.strided:
        return gradient
    return local(aligned(gradient, parameter))


def _scalar(value: Any) -> Any:
    return value.reshape(()) if isinstance(value, Tensor) else value


def _scalar_tensor(hypers: list[dict[str, Any]], device: torch.device) -> Tensor:
    """All hyperparameters that may change, as one tensor."""
    values = [value for hyper in hypers for value in hyper.values()]
    if any(isinstance(value, Tensor) for value in values):
        parts = [torch.as_tensor(value, dtype=torch.float32, device=device) for value in values]
        return torch.stack([part.reshape(()) for part in parts])
    return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)


def _compiled(built: _Built, how: bool | dict[str, Any]) -> Callable[..., None] | None:
    """The whole step as one function for ``torch.compile``: lists of tensors in, writes out."""
    if not how:
        return None
    program, groups, watch = built.program, built.elementwise, built.watch
    count = len(built.matrices)

    def whole_step(
        params: list[Tensor],
        grads: list[Tensor],
        state: list[dict[str, Tensor]],
        others: list[Tensor],
        other_grads: list[Tensor],
        other_state: list[dict[str, Tensor]],
        present: list[Tensor] | Tensor,
        values: list[Tensor],
        names: list[tuple[str, ...]],
    ) -> None:
        hypers, at = [], 0
        for keys in names:
            hypers.append({key: values[at + n] for n, key in enumerate(keys)})
            at += len(keys)

        def elementwise() -> None:
            first = 0
            for group in groups:
                last = first + len(group.params)
                for chunk in group.chunks:
                    masked_step_(
                        group.rule,
                        chunk.pick(others[first:last]),
                        chunk.average(chunk.pick(other_grads[first:last])),
                        chunk.pick(other_state[first:last]),
                        hypers[group.group],
                        chunk.pick(group.shards),
                        present,
                        chunk.pick(range(count + first, count + last)),
                    )
                first = last

        if program is None:
            elementwise()
            return
        gauges = None if watch is None else watch.begin()
        matrix_step(
            program, params, grads, state, hypers, InPlace(),
            present=present, meanwhile=elementwise, gauges=gauges,
        )  # fmt: skip
        if watch is not None and gauges is not None:
            watch.end_(gauges)

    # Code of its own: torch counts recompilations by code object, over all optimizers otherwise.
    whole_step.__code__ = whole_step.__code__.replace()
    options = {"fullgraph": True, "dynamic": False, **_compiler_options(how)}
    return torch.compile(whole_step, **options)


def _compiler_options(how: bool | dict[str, Any]) -> dict[str, Any]:
    """What ``torch.compile`` is given; by default Inductor keeps the order of the program.

    Its pass for peak memory moves each wait up to its exchange, and then nothing overlaps. What
    never changes is not looked at in every step.
    """
    given = dict(how) if isinstance(how, dict) else {}
    if given.get("backend", "inductor") != "inductor":
        if given.get("mode") is None:
            given["options"] = {"guard_filter_fn": _may_change, **(given.get("options") or {})}
    else:
        mode = given.pop("mode", None)
        preset = torch._inductor.list_mode_options(mode) if mode else {}
        options = {**preset, **(given.get("options") or {})}
        default = {"reorder_for_peak_memory": False, "guard_filter_fn": _may_change}
        given["options"] = {**default, **options}
    return given


# What the compiled step closes over: the plan bound to this process, of frozen values.
_STATIC = re.compile(r"(program|groups|count)\b(?!.*orthogonalizer)")


def _may_change(guards: Sequence[Any]) -> list[bool]:
    """Of the compiler's guards, those that are not on the plan, which has many values a matrix.

    An orthogonalizer may be a callable with anything around it.
    """
    return [_STATIC.match(guard.name) is None for guard in guards]
