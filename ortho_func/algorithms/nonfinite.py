"""Leaving out what of a step is not finite: whole matrices, or elements of what is no matrix.

The owner sees a matrix whole: if anything in it is not finite, what it sends back is NaN all over,
and so every rank that holds a part of it learns so, from the exchange that there is anyway.
Element-wise algorithms exchange nothing, and there each element is on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ortho_func.algorithms.rule import Frame, State, Step
from ortho_func.primitives.scaling import Descent

__all__ = [
    "check_nonfinite",
    "finite_elements",
    "finite_or_nan",
    "finite_step",
    "skipped_rows",
    "without",
]

Sided = tuple[Tensor, tuple[Tensor, ...]]


def check_nonfinite(value: object) -> None:
    """Raise `ValueError` for what is no value of the option."""
    if value not in ("propagate", "skip"):
        raise ValueError(f"nonfinite must be 'propagate' or 'skip', got {value!r}.")


def finite_elements(tensors: Sequence[Tensor]) -> Tensor:
    """Where tensors of one shape are all finite.

    Examples:
        >>> finite_elements([torch.tensor([1.0, torch.inf]), torch.tensor([0.0, 0.0])])
        tensor([ True, False])
    """
    first, *rest = (tensor.isfinite() for tensor in tensors)
    for one in rest:
        first = first & one
    return first


def finite_or_nan(function: Callable[[Tensor], Sided], x: Tensor) -> Sided:
    """A function of matrices [n, R, C], and what else it returns; NaN for those not finite.

    Examples:
        >>> x = torch.tensor([[[1.0, 2.0]], [[1.0, torch.inf]]])
        >>> finite_or_nan(lambda x: (-x, ()), x)[0].flatten(1)
        tensor([[-1., -2.],
                [nan, nan]])
    """
    bad = ~x.isfinite().all(dim=-1).all(dim=-1)
    main, sides = function(torch.where(bad[:, None, None], 0, x))
    told = tuple(torch.where(bad[:, None], torch.nan, side) for side in sides)
    return torch.where(bad[:, None, None], torch.nan, main), told


def finite_step(
    step: Step,
    new: State,
    params: Sequence[Tensor],
    results: Sequence[Tensor],
    frames: Sequence[Frame],
    old: State,
) -> tuple[list[Tensor], State]:
    """A rule's step and new state, but nothing and the old state where results came home as NaN.

    Args:
        step: what `absorb` returned; of a rule of two trips, that of the second.
        new: all state that the step changes, by name.
        params: shards, or the parts of them that the step is about.
        results: what came home for each.
        frames: how the rule sees each.
        old: the state before the step.
    """
    skipped = [
        skipped_rows(result, frame.shape, frame.held is not None)
        for result, frame in zip(results, frames, strict=True)
    ]
    updates = step.updates(list(params)) if isinstance(step, Descent) else step
    nothing = [torch.zeros_like(update) for update in updates]
    state = {name: without(skipped, values, old[name]) for name, values in new.items()}
    return without(skipped, updates, nothing), state


def skipped_rows(result: Tensor, shape: tuple[int, int, int], factor: bool) -> Tensor:
    """Which rows of a shard [stack, rows, cols] are of matrices to skip: [stack, rows, 1].

    Where a part of the shard travelled, the rest of it is of the same matrix. A factor's rows are
    not the matrix's: then a 0-d False, and all that follows from the factor is NaN.
    """
    if factor:
        return result.new_zeros((), dtype=torch.bool)
    gone = result.isnan()
    if tuple(result.shape) == tuple(shape):
        gone = gone.any(dim=-1, keepdim=True)
    else:
        gone = gone.flatten(1).any(dim=1)[:, None, None]
    return gone.expand(shape[0], shape[1], 1)


def without(
    skipped: Sequence[Tensor], values: Sequence[Tensor], instead: Sequence[Tensor]
) -> list[Tensor]:
    """The values, but others where they are NaN or of skipped rows.

    Values have one element for each of a shard, or for each of its rows.
    """
    found = []
    for gone, value, other in zip(skipped, values, instead, strict=True):
        here = value.isnan()
        if gone.ndim:
            stack, rows = gone.shape[:2]
            cols = value.numel() // max(1, stack * rows)
            here = here | gone.expand(stack, rows, cols).reshape(value.shape)
        found.append(torch.where(here, other.reshape(value.shape).to(value.dtype), value))
    return found
