"""The matrices of published models, by name: shapes only, from their configurations.

Embeddings, output heads, norms, biases and routers are left out: another algorithm trains them.
Weights are [out, in] as in ``torch.nn.Linear``; experts are stacks [experts, out, in].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortho_func.geometry import Reading

__all__ = ["MODELS", "Model", "Weight", "find_model"]

SPLITS = ("column", "row", "none")
STACKED = Reading(flatten=False)


@dataclass(frozen=True)
class Weight:
    """One weight of a model: its name, its shape, and how tensor parallelism splits it.

    `split` is "column" (the output dim), "row" (the input dim) or "none".
    """

    name: str
    shape: tuple[int, ...]
    split: str = "column"
    reading: Reading = STACKED

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"{self.name}: split must be one of {SPLITS}, got {self.split!r}.")
        if any(extent < 1 for extent in self.shape):
            raise ValueError(f"{self.name} has shape {self.shape}: extents must be positive.")
        self.reading.check(self.shape, self.name)

    @property
    def is_stack(self) -> bool:
        """Whether the weight is a stack of matrices over dim 0, as experts are."""
        return len(self.shape) == 3 and not self.reading.flatten


@dataclass(frozen=True)
class Model:
    """A named list of weights, in the order of the model's layers."""

    name: str
    weights: tuple[Weight, ...]
    source: str = ""


def _layers(count: int, block: Sequence[Weight], first: int = 0) -> tuple[Weight, ...]:
    """`count` layers of equal weights, numbered from `first`."""
    return tuple(
        Weight(f"layers.{number}.{weight.name}", weight.shape, weight.split, weight.reading)
        for number in range(first, first + count)
        for weight in block
    )


def _attention(hidden: int, query: int, key: int) -> list[Weight]:
    """Projections with `query` and `key` rows: heads times their width."""
    return [
        Weight("attention.q", (query, hidden)),
        Weight("attention.k", (key, hidden)),
        Weight("attention.v", (key, hidden)),
        Weight("attention.o", (hidden, query), "row"),
    ]


def _gated(hidden: int, inner: int, *, name: str, stack: tuple[int, ...] = ()) -> list[Weight]:
    """The three weights of a gated feed-forward layer, or of a stack of them."""
    return [
        Weight(f"{name}.gate", (*stack, inner, hidden)),
        Weight(f"{name}.up", (*stack, inner, hidden)),
        Weight(f"{name}.down", (*stack, hidden, inner), "row"),
    ]


def _gpt2_small() -> Model:
    block = [
        Weight("attention.qkv", (2304, 768)),
        Weight("attention.o", (768, 768), "row"),
        Weight("mlp.up", (3072, 768)),
        Weight("mlp.down", (768, 3072), "row"),
    ]
    return Model("gpt2-small", _layers(12, block), "https://huggingface.co/openai-community/gpt2")


def _llama3_8b() -> Model:
    block = _attention(4096, 4096, 1024) + _gated(4096, 14336, name="mlp")
    source = "https://huggingface.co/meta-llama/Meta-Llama-3-8B"
    return Model("llama3-8b", _layers(32, block), source)


def _llama3_70b() -> Model:
    block = _attention(8192, 8192, 1024) + _gated(8192, 28672, name="mlp")
    source = "https://huggingface.co/meta-llama/Meta-Llama-3-70B"
    return Model("llama3-70b", _layers(80, block), source)


def _qwen3_30b_a3b() -> Model:
    block = _attention(2048, 4096, 512) + _gated(2048, 768, name="experts", stack=(128,))
    source = "https://huggingface.co/Qwen/Qwen3-30B-A3B"
    return Model("qwen3-30b-a3b", _layers(48, block), source)


def _deepseek_v3() -> Model:
    hidden, heads = 7168, 128
    attention = [  # multi-head latent attention: heads of 128 + 64 (rotary), values of 128
        Weight("attention.q_a", (1536, hidden), "none"),
        Weight("attention.q_b", (heads * (128 + 64), 1536)),
        Weight("attention.kv_a", (512 + 64, hidden), "none"),
        Weight("attention.kv_b", (heads * (128 + 128), 512)),
        Weight("attention.o", (hidden, heads * 128), "row"),
    ]
    dense = attention + _gated(hidden, 18432, name="mlp")
    sparse = [
        *attention,
        *_gated(hidden, 2048, name="shared_expert"),
        *_gated(hidden, 2048, name="experts", stack=(256,)),
    ]
    weights = _layers(3, dense) + _layers(58, sparse, first=3)
    return Model("deepseek-v3", weights, "https://huggingface.co/deepseek-ai/DeepSeek-V3")


#: Models by name. Each source's config.json holds the numbers. DeepSeek-V3 comes without its
#: layer for multi-token prediction.
MODELS: dict[str, Callable[[], Model]] = {
    "gpt2-small": _gpt2_small,
    "llama3-8b": _llama3_8b,
    "llama3-70b": _llama3_70b,
    "qwen3-30b-a3b": _qwen3_30b_a3b,
    "deepseek-v3": _deepseek_v3,
}


def find_model(text: str) -> Model:
    """A model by name, from a file of shapes, or from shapes as text.

    A text file has one weight a line: name, shape and, where wanted, a count and "column", "row"
    or "none". A JSON file maps a name to a shape, or to an object with "shape" and any of
    "count", "split", "flatten", "split_sizes" and "num_heads". Shapes as text are separated by
    commas: ``"32*4096x4096,64*14336x4096"``.

    Raises:
        ValueError: for what is neither, or says what cannot be read.

    Examples:
        >>> [weight.shape for weight in find_model("2*18x2304,128x768x2048").weights]
        [(18, 2304), (18, 2304), (128, 768, 2048)]
    """
    if text in MODELS:
        return MODELS[text]()
    path = Path(text)
    if path.is_file():
        weights = _from_json(path) if path.suffix == ".json" else _from_lines(path)
        return _checked(Model(path.stem, tuple(weights)), text)
    if not text[:1].isdigit():
        names = ", ".join(MODELS)
        raise ValueError(
            f"{text!r} is no model ({names}), no file, and no list of shapes such as "
            "'32*4096x4096,64*14336x4096'."
        )
    weights = []
    for number, item in enumerate(text.split(",")):
        count, _, shape = item.rpartition("*")
        weights += _repeated(f"weight{number}", _shape(shape), _count(count or "1"))
    return _checked(Model("shapes", tuple(weights)), text)


def _checked(model: Model, text: str) -> Model:
    if not model.weights:
        raise ValueError(f"{text!r} names no weights.")
    return model


def _from_lines(path: Path) -> list[Weight]:
    weights = []
    for line in path.read_text().splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        split = words.pop() if words[-1] in SPLITS else "column"
        if len(words) not in (2, 3):
            raise ValueError(f"{path.name}: expected 'name shape [count] [split]', got {line!r}.")
        count = _count(words[2]) if len(words) == 3 else 1
        weights += _repeated(words[0], _shape(words[1]), count, split)
    return weights


def _from_json(path: Path) -> list[Weight]:
    weights = []
    found: dict[str, Any] = json.loads(path.read_text())
    for name, said in found.items():
        given = dict(said) if isinstance(said, dict) else {"shape": said}
        shape, count = tuple(given.pop("shape", ())), int(given.pop("count", 1))
        split = given.pop("split", "column")
        unknown = set(given) - {"flatten", "split_sizes", "num_heads"}
        if unknown:
            raise ValueError(f"{path.name}: {name} has unknown keys {sorted(unknown)}.")
        if given.get("split_sizes") is not None:
            given["split_sizes"] = tuple(given["split_sizes"])
        reading = Reading(**{"flatten": False, **given})
        weights += _repeated(name, shape, count, split, reading)
    return weights


def _repeated(
    name: str,
    shape: tuple[int, ...],
    count: int,
    split: str = "column",
    reading: Reading = STACKED,
) -> list[Weight]:
    if count == 1:
        return [Weight(name, shape, split, reading)]
    return [Weight(f"{name}.{number}", shape, split, reading) for number in range(count)]


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(extent) for extent in text.lower().split("x"))
    except ValueError:
        raise ValueError(f"{text!r} is no shape such as 4096x4096.") from None


def _count(text: str) -> int:
    if not text.isdigit() or text == "0":
        raise ValueError(f"{text!r} is no count of weights.")
    return int(text)
