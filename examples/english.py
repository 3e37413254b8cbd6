"""Real English text that every CPython carries: the help topics of ``pydoc``.

The topics quote each other at length, so repeated paragraphs are dropped first: else the
validation text would be in the training text too.
"""

import math
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import Tensor

PARAGRAPHS_PER_CHUNK = 20  # neighbours stay together, so that a validation window reads as text
CHUNKS_PER_VALIDATION = 10  # every tenth chunk is held out


def load() -> tuple[Tensor, Tensor]:
    """Training and validation text as uint8 vectors; the split never changes."""
    paragraphs = list(dict.fromkeys("\n\n".join(topics[k] for k in sorted(topics)).split("\n\n")))
    parts: tuple[list[str], list[str]] = ([], [])
    for i, paragraph in enumerate(paragraphs):
        held_out = i // PARAGRAPHS_PER_CHUNK % CHUNKS_PER_VALIDATION == CHUNKS_PER_VALIDATION - 1
        parts[held_out].append(paragraph)
    training, validation = (as_bytes("\n\n".join(part)) for part in parts)
    return training, validation


def as_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def as_text(tokens: Tensor) -> str:
    return bytes(tokens.tolist()).decode(errors="replace")


def unigram_entropy(text: Tensor) -> float:
    """Nats per byte of the best model that knows only how often each byte occurs."""
    return -sum(n / len(text) * math.log(n / len(text)) for n in Counter(text.tolist()).values())


def random_windows(text: Tensor, *, size: int, time: int, seed: int) -> Tensor:
    """[size, time + 1] bytes from random places, a pure function of the seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - time, (size,), generator=generator)
    return torch.stack([text[start : start + time + 1] for start in starts]).long()


def windows(text: Tensor, *, time: int) -> Tensor:
    """[N, time + 1]: the whole text (less its end) in windows that overlap by one byte."""
    return text.unfold(0, time + 1, time).long()
