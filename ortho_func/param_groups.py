"""Which parameter of a model gets which algorithm.

Rules are ordered and the first that matches wins. The rules that come last fit the models people
train: matrices inside a network to the matrix algorithm, everything else to AdamW.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any, NamedTuple, TextIO

from torch import Tensor, nn

from ortho_func.geometry import Reading
from ortho_func.optim.options import ALGORITHMS, ELEMENT_ALGORITHMS, MATRIX_ALGORITHMS
from ortho_func.primitives.scaling import lr_scale

__all__ = ["Candidate", "ParamGroups", "Rule", "param_groups"]

# What wrappers put into the names of parameters.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
HEADS = ("lm_head", "head", "heads", "output", "classifier", "score", "fc", "unembed", "embed_out")
FUSED = ("qkv", "qkv_proj", "c_attn", "in_proj", "in_proj_weight", "wqkv", "Wqkv", "to_qkv")
INTERLEAVED = ("query_key_value",)  # GPT-NeoX, BLOOM, Falcon: q, k and v alternate head by head
SINGLE = ("q_proj", "k_proj", "v_proj", "wq", "wk", "wv", "query", "key", "value")
ROUTERS = ("router", "gate", "gate_network", "shared_expert_gate")


@dataclass(frozen=True)
class Candidate:
    """One parameter as a rule sees it.

    `name` is without what wrappers add, `names` are all by which the model knows the parameter
    (more than one if it is tied), `module` is what holds it, `parent` what holds that.
    """

    name: str
    names: tuple[str, ...]
    parameter: Tensor
    module: nn.Module
    parent: nn.Module | None
    modules: tuple[nn.Module, ...]  # of all names
    config: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole parameter's shape."""
        return tuple(self.parameter.shape)

    @property
    def owner(self) -> str:
        """The last part of the name that says what the module is."""
        parts = self.name.split(".")
        return parts[-2] if len(parts) > 1 and parts[-1] in ("weight", "bias") else parts[-1]

    def fact(self, *names: str) -> int | None:
        """The first of these that the model's config has."""
        for name in names:
            value = getattr(self.config, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None


Match = str | type | tuple[type, ...] | Callable[[Candidate], bool]
Options = Mapping[str, Any] | Callable[[Candidate], Mapping[str, Any]] | None


class Rule(NamedTuple):
    """What to do with the parameters that match.

    Attributes:
        name: what `ParamGroups.explain` says.
        match: a pattern of the name with ``*``; a type, or types, of the module that holds the
            parameter; or a function of a `Candidate`.
        options: of the parameter group, such as ``{"algorithm": "adamw", "lr": 0.01}``; or a
            function of the `Candidate` to them. None leaves the parameter out of the optimizer.
        note: what `explain` adds.
    """

    name: str
    match: Match
    options: Options
    note: str = ""

    def matches(self, one: Candidate) -> bool:
        """Whether the rule is for this parameter."""
        if isinstance(self.match, str):
            return any(fnmatchcase(name, self.match) for name in one.names)
        if isinstance(self.match, (type, tuple)):
            return any(isinstance(module, self.match) for module in one.modules)
        return self.match(one)

    def group(self, one: Candidate) -> Mapping[str, Any] | None:
        """The options for this parameter."""
        return self.options(one) if callable(self.options) else self.options


@dataclass(frozen=True)
class Choice:
    """What was decided about one parameter."""

    name: str
    shape: tuple[int, ...]
    rule: str
    options: Mapping[str, Any] | None
    note: str

    @property
    def matrices(self) -> str:
        """How many matrices of which shapes, or a dash."""
        if self.options is None or self.options["algorithm"] in ELEMENT_ALGORITHMS:
            return "–"
        reading = _reading(self.options)
        stack, rows, cols = reading.dims(self.shape)
        counts: dict[int, int] = {}
        for _, size in reading.blocks(rows):
            counts[size] = counts.get(size, 0) + stack
        return ", ".join(f"{n} x {size} x {cols}" for size, n in counts.items())

    @property
    def scale(self) -> str:
        """The factors on lr of these matrices, or a dash."""
        if self.options is None or self.options["algorithm"] in ELEMENT_ALGORITHMS:
            return "–"
        reading = _reading(self.options)
        _, rows, cols = reading.dims(self.shape)
        adjust = self.options.get("adjust_lr_fn")
        if adjust is None:
            adjust = MATRIX_ALGORITHMS[self.options["algorithm"]].default_adjust
        sizes = dict.fromkeys(size for _, size in reading.blocks(rows))
        return ", ".join(f"{lr_scale(size, cols, adjust):.3g}" for size in sizes)


def _reading(options: Mapping[str, Any]) -> Reading:
    return Reading(options.get("flatten"), options.get("split_sizes"), options.get("num_heads"))


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups, and what was decided about every parameter of the model."""

    def __init__(self, choices: Sequence[Choice], parameters: Sequence[Tensor]) -> None:
        groups: dict[str, dict[str, Any]] = {}
        for choice, parameter in zip(choices, parameters, strict=True):
            if choice.options is not None:
                key = repr(sorted(choice.options.items(), key=lambda item: item[0]))
                group = groups.setdefault(key, {**choice.options, "params": []})
                group["params"].append((choice.name, parameter))
        super().__init__(groups.values())
        self.choices = tuple(choices)

    def explain(self, file: TextIO | None = None) -> None:
        """Print a table of all parameters: rule, algorithm, matrices, scale of lr.

        On a terminal with ``rich`` installed it fits the width; else it is plain text.
        """
        header = ("parameter", "shape", "rule", "algorithm", "matrices", "lr x", "note")
        rows = [
            (
                choice.name,
                " x ".join(map(str, choice.shape)),
                choice.rule,
                "left out" if choice.options is None else str(choice.options["algorithm"]),
                choice.matrices,
                choice.scale,
                choice.note,
            )
            for choice in self.choices
        ]
        _print_table(header, rows, sys.stdout if file is None else file)


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO) -> None:
    if file.isatty() and find_spec("rich") is not None:
        from rich.console import Console
        from rich.table import Table

        table = Table(*header)
        for row in rows:
            table.add_row(*row)
        Console(file=file).print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip(), file=file)


def param_groups(
    model: nn.Module,
    *,
    algorithm: str = "normuon",
    lr: float | Tensor = 0.02,
    weight_decay: float | Tensor = 0.1,
    other: str = "adamw",
    other_lr: float | Tensor = 3e-3,
    other_weight_decay: float | Tensor = 0.0,
    rules: Sequence[Rule] = (),
    by_head: bool = False,
    config: Any = None,
    **options: Any,
) -> ParamGroups:
    """Parameter groups of a model: which parameter gets which algorithm.

    Hidden matrices get `algorithm`: convolutions flattened, stacks of three dims as experts,
    fused q, k and v as blocks of their own where the config, or three equal parts, say how.
    Embeddings, output heads (tied or not), positional tables, norms, biases, routers and gates of
    one row get `other`, of which only embeddings, heads and routers are decayed.

    Args:
        model: before or after ``fully_shard``, on any device, wrapped by ``torch.compile``, DDP
            or activation checkpointing.
        algorithm: "muon", "normuon", "dion2", "dion3" or "dion".
        lr: of the matrices.
        weight_decay: of the matrices.
        other: "adamw" or "lion".
        other_lr: of all that is no hidden matrix.
        other_weight_decay: of embeddings, heads and routers.
        rules: tried before the built-in ones, in order.
        by_head: make every head of q, k and v a matrix of its own, where the config says how
            wide a head is.
        config: where ``num_attention_heads``, ``num_key_value_heads``, ``head_dim`` and their
            like are looked up; ``model.config`` unless given.
        options: of the matrix groups, such as ``momentum`` or ``adjust_lr_fn``.

    Returns:
        A list of groups for any of the optimizers, with names; `ParamGroups.explain` prints
        every parameter and why. A parameter that does not require a gradient is in no group.

    Raises:
        ValueError: for an unknown algorithm, or options of a rule that do not fit a parameter.
        TypeError: for something that is no module.

    Examples:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8), nn.LayerNorm(8))
        >>> for group in param_groups(model, lr=0.02):
        ...     print(group["algorithm"], [name for name, _ in group["params"]])
        adamw ['0.weight', '1.bias', '2.weight', '2.bias']
        normuon ['1.weight']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"param_groups takes a module, got {type(model).__name__}.")
    for name, known in ((algorithm, MATRIX_ALGORITHMS), (other, ELEMENT_ALGORITHMS)):
        if name not in known:
            raise ValueError(f"algorithm must be one of {', '.join(known)}, got {name!r}.")
    matrix = {"algorithm": algorithm, "lr": lr, "weight_decay": weight_decay, **options}
    rest = {"algorithm": other, "lr": other_lr, "weight_decay": 0.0}
    built_in = _BuiltIn(matrix, rest, {**rest, "weight_decay": other_weight_decay}, by_head)
    ordered = (*rules, *built_in.rules())
    choices, parameters = [], []
    for one in _candidates(model, config):
        choices.append(_choose(one, ordered))
        parameters.append(one.parameter)
    return ParamGroups(choices, parameters)


def _choose(one: Candidate, rules: Sequence[Rule]) -> Choice:
    if not one.parameter.requires_grad:
        return Choice(one.name, one.shape, "frozen", None, "requires no gradient")
    rule = next(rule for rule in rules if rule.matches(one))
    found = rule.group(one)
    note = rule.note
    if found is not None:
        given = dict(found)
        note = given.pop("note", note)
        if given.setdefault("algorithm", "adamw") not in ALGORITHMS:
            raise ValueError(
                f"rule {rule.name!r}: algorithm must be one of {', '.join(ALGORITHMS)}, got "
                f"{given['algorithm']!r}."
            )
        if given["algorithm"] in MATRIX_ALGORITHMS:
            _reading(given).check(one.shape, one.name)
        found = given
    if len(one.names) > 1:
        note = f"{note}; " if note else ""
        note += "tied to " + ", ".join(name for name in one.names if name != one.name)
    return Choice(one.name, one.shape, rule.name, found, note)


def _clean(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def _candidates(model: nn.Module, config: Any) -> Iterator[Candidate]:
    """Every parameter once, with all its names."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    for key, found in names.items():
        modules = [model.get_submodule(name.rpartition(".")[0]) for name in found]
        yield Candidate(
            _clean(found[0]),
            tuple(map(_clean, found)),
            parameters[key],
            modules[0],
            _parent(model, found[0]),
            tuple(modules),
            _config(model) if config is None else config,
        )


def _parent(model: nn.Module, name: str) -> nn.Module | None:
    path = name.rpartition(".")[0]
    return model.get_submodule(path.rpartition(".")[0]) if path else None


def _config(model: nn.Module) -> Any:
    """The config of the model, or of what a wrapper holds."""
    for inner in ("", "_orig_mod", "module"):
        held = getattr(model, inner, None) if inner else model
        if held is not None and getattr(held, "config", None) is not None:
            return held.config
    return None


# ---------------------------------------------------------------------------------------------
# The built-in rules


@dataclass(frozen=True)
class _BuiltIn:
    matrix: Mapping[str, Any]
    plain: Mapping[str, Any]  # what is not decayed
    decayed: Mapping[str, Any]
    by_head: bool

    def rules(self) -> tuple[Rule, ...]:
        """In order; the last one matches everything."""
        return (
            Rule("embedding", _is_embedding, self.decayed),
            Rule("positional table or token", _is_table, self.plain),
            Rule("norm", _is_norm, self.plain),
            Rule("vector", lambda one: len(one.shape) < 2, self.plain),
            Rule("output head", _is_head, self.decayed),
            Rule("router", _is_router, self.decayed),
            Rule("gate of one row or column", _is_thin, self.plain),
            Rule("depthwise convolution", _is_depthwise, self.plain, "one row a filter"),
            Rule("convolution", _is_convolution, {**self.matrix, "flatten": True}),
            Rule("fused q, k, v", _is_fused, self.fused),
            Rule("q, k or v", self.is_split_by_head, self.heads),
            Rule("stack of matrices", lambda one: len(one.shape) > 2, self.stack),
            Rule("matrix", lambda one: True, self.matrix),
        )

    def is_split_by_head(self, one: Candidate) -> bool:
        """Whether a projection of heads, asked to be split, can be."""
        return self.by_head and one.owner in SINGLE and _heads_in(one, one.shape[0]) is not None

    def heads(self, one: Candidate) -> dict[str, Any]:
        """Every head a matrix."""
        return {**self.matrix, "num_heads": _heads_in(one, one.shape[0])}

    def stack(self, one: Candidate) -> dict[str, Any]:
        """A matrix for each index of the leading dims."""
        return {**self.matrix, "flatten": False}

    def fused(self, one: Candidate) -> dict[str, Any]:
        """q, k and v as row blocks, if that is how they lie."""
        rows = one.shape[0]
        if _is_transposed(one):
            return {**self.matrix, "note": "stored as (in, out): q, k, v together"}
        if one.owner in INTERLEAVED:
            return {**self.matrix, "note": "q, k, v alternate by head: together"}
        heads = _heads_in(one, rows)
        if self.by_head and heads is not None:
            return {**self.matrix, "num_heads": heads}
        sizes = _qkv_sizes(one, rows)
        if sizes is None:
            return {**self.matrix, "note": "no config says how q, k, v lie: together"}
        return {**self.matrix, "split_sizes": sizes}


def _head_width(one: Candidate) -> int | None:
    width = one.fact("head_dim", "d_head", "attention_head_size")
    if width is not None:
        return width
    hidden = one.fact("hidden_size", "n_embd", "dim", "d_model", "embed_dim")
    heads = one.fact("num_attention_heads", "n_head", "n_heads", "num_heads")
    return hidden // heads if hidden and heads else None


def _heads_in(one: Candidate, rows: int) -> int | None:
    """How many heads these rows are, if the config says how wide one is."""
    width = _head_width(one)
    if width is None or rows % width or rows == width:
        return None
    return rows // width


def _qkv_sizes(one: Candidate, rows: int) -> tuple[int, int, int] | None:
    width = _head_width(one)
    heads = one.fact("num_attention_heads", "n_head", "n_heads", "num_heads")
    if width is not None and heads is not None:
        keys = one.fact("num_key_value_heads", "n_kv_heads", "num_kv_heads") or heads
        if rows == (heads + 2 * keys) * width:
            return heads * width, keys * width, keys * width
    if rows == 3 * one.shape[1]:
        return rows // 3, rows // 3, rows // 3
    return None


def _class_name(module: nn.Module) -> str:
    return type(module).__name__


def _is_transposed(one: Candidate) -> bool:
    """Conv1D of GPT-2 in transformers."""
    return _class_name(one.module).endswith("Conv1D") and not isinstance(one.module, nn.Conv1d)


def _is_embedding(one: Candidate) -> bool:
    if any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in one.modules):
        return True
    # an image's patches, or a table under another class: what comes before the first block
    outside = not any(part.isdigit() for part in one.name.split("."))
    return outside and len(one.shape) >= 2 and "embed" in one.name.lower()


def _is_table(one: Candidate) -> bool:
    last = one.name.split(".")[-1].lower()
    return last.endswith(("_token", "position_bias_table")) or last.startswith("pos")


def _is_norm(one: Candidate) -> bool:
    return "norm" in _class_name(one.module).lower()


def _is_head(one: Candidate) -> bool:
    """A projection outside of all blocks that is called one, or is the last of the model."""
    outside = not any(part.isdigit() for part in one.name.split(".")[:-2])
    return outside and len(one.shape) == 2 and (one.owner in HEADS or _ends_head(one))


def _ends_head(one: Candidate) -> bool:
    """Whether it is the last projection of a sequence that is called a head."""
    parts = one.name.split(".")
    if len(parts) < 3 or not one.owner.isdigit() or parts[-3] not in HEADS or one.parent is None:
        return False
    behind = [
        child for name, child in one.parent.named_children()
        if name.isdigit() and int(name) > int(one.owner)
    ]  # fmt: skip
    return not any(p.ndim > 1 for child in behind for p in child.parameters())


def _is_router(one: Candidate) -> bool:
    if one.owner == "router" or one.name.split(".")[-2:-1] == ["router"]:
        return True
    beside = [name for name, _ in one.parent.named_children()] if one.parent is not None else []
    return one.owner in ROUTERS and any("expert" in name for name in beside)


def _is_thin(one: Candidate) -> bool:
    return len(one.shape) == 2 and min(one.shape) == 1


def _is_convolution(one: Candidate) -> bool:
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    kinds_transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    return isinstance(one.module, kinds + kinds_transposed) and len(one.shape) > 2


def _is_depthwise(one: Candidate) -> bool:
    return _is_convolution(one) and one.shape[1] == 1


def _is_fused(one: Candidate) -> bool:
    return len(one.shape) == 2 and one.owner in (*FUSED, *INTERLEAVED)
