"""Orthogonalizing matrices of which this rank has a share: a range of the long side.

All that a step of the iteration needs of the others is the Gram matrix of the short side, which
is the sum of the shares' own. So a computation is a chain of `Partial`s: something to be summed
over the team, and what is done with the sum.

Shape suffixes: B batch, R rows, C columns, M the short side of the whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ortho_func.primitives.iterations import (
    gram_of,
    nonzero,
    power_of_two,
    segment_of,
    step_of,
    wide_dtype,
)
from ortho_func.primitives.momentum import Scalar
from ortho_func.primitives.normalization import mean_squares, row_scales, scaled_rows
from ortho_func.primitives.orthogonalize import Iteration
from ortho_func.primitives.roots import sqrt

__all__ = ["Partial", "followed_by", "normalize_rows_in_team", "orthogonalize_in_team", "rounds"]


class Partial(NamedTuple):
    """A term of a sum, ``scale² · value``, and what comes after: another, or the result.

    `then` takes the sum, relative to a common scale squared, and that scale.
    """

    value: Tensor  # [B, ...]
    scale: Tensor  # [B], powers of two
    then: Callable[[Tensor, Tensor], Any]


def followed_by(one: Any, function: Callable[[Any], Any]) -> Any:
    """A chain with a function after its result, which may go on with another chain."""
    if isinstance(one, Partial):
        then = one.then
        return one._replace(then=lambda x, scale: followed_by(then(x, scale), function))
    return function(one)


def rounds(iteration: Iteration) -> int:
    """How many sums `orthogonalize_in_team` takes."""
    return len(iteration.schedule.steps) if iteration.cuts is None else 1 + len(iteration.cuts)


def orthogonalize_in_team(x_BRC: Tensor, iteration: Iteration, *, tall: bool) -> Partial:
    """Shares of matrices to shares of their polar factors, by the steps of the iteration.

    Args:
        x_BRC: shares of columns, or of rows where the whole matrices are `tall`.
        iteration: as for whole matrices; the result is the same but for the order of sums.
        tall: whether the whole matrices have more rows than columns.

    Examples:
        >>> from ortho_func.primitives.orthogonalize import Orthogonalizer
        >>> x = torch.randn(1, 4, 6, dtype=torch.float64)
        >>> whole = Orthogonalizer("newton_schulz", compute_dtype=torch.float64)
        >>> parts = [
        ...     orthogonalize_in_team(part, whole.iteration(4, 6), tall=False)
        ...     for part in x.split(3, dim=2)
        ... ]
        >>> while isinstance(parts[0], Partial):
        ...     top = torch.stack([part.scale for part in parts]).amax(0)
        ...     weighed = [part.value * (part.scale / top) ** 2 for part in parts]
        ...     parts = [part.then(sum(weighed), top) for part in parts]
        >>> torch.allclose(torch.cat(parts, dim=2), whole(x))
        True
    """
    schedule, cuts, asked = iteration
    double = x_BRC.dtype == torch.float64
    dtype = asked or (torch.float64 if double else torch.bfloat16)
    source = x_BRC if double else x_BRC.to(dtype)
    own = power_of_two(source)
    prepared = (source / own).to(dtype)
    dtype = prepared.dtype if cuts is None else wide_dtype(dtype)
    prepared = prepared.to(dtype)
    count = len(schedule.steps)
    edges = range(count + 1) if cuts is None else (0, *cuts, count)
    spans = list(pairwise(edges))

    def stage(number: int, y_BRC: Tensor, gram_BMM: Tensor) -> Any:
        start, stop = spans[number]
        if cuts is None:
            y_BRC = step_of(schedule, start, y_BRC, tall, gram_BMM)
        else:
            y_BRC = segment_of(schedule, start, stop, y_BRC, tall, gram_BMM)
        if stop == count:
            return y_BRC.to(x_BRC.dtype)
        one = torch.ones_like(own[:, 0, 0])
        gram_BMM = gram_of(y_BRC, tall)
        return Partial(gram_BMM, one, lambda total, _: stage(number + 1, y_BRC, total.to(dtype)))

    def first(gram_BMM: Tensor, top_B: Tensor) -> Any:
        y_BRC = prepared * (own / top_B[:, None, None]).to(dtype)
        if schedule.scale == "frobenius":
            trace = gram_BMM.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
            y_BRC = (y_BRC / nonzero(sqrt(trace))).to(dtype)
            gram_BMM = gram_BMM / nonzero(trace)
        return stage(0, y_BRC, gram_BMM.to(dtype))

    return Partial(gram_of(prepared, tall), own[:, 0, 0], first)


def normalize_rows_in_team(
    o_BRC: Tensor,
    variance_BR: Tensor,
    *,
    beta2: Scalar,
    eps: float,
    tall: bool,
    cols: int,
) -> Partial:
    """`normalize_rows` of shares: of columns, with all of V; or of rows, with theirs.

    Args:
        o_BRC: shares of the orthogonalized matrices.
        variance_BR: V of their rows, fp32.
        beta2: decay of V.
        eps: added to √V.
        tall: whether the shares are of rows.
        cols: of whole matrices.

    Source: NorMuon, arXiv 2510.05491, Algorithm 1.
    """
    mean_BR = mean_squares(o_BRC)
    one = torch.ones_like(mean_BR[:, 0])
    if tall:
        variance_BR, inverse_BR = row_scales(mean_BR, variance_BR, beta2=beta2, eps=eps)
        sums = (mean_BR.sum(-1), (mean_BR * inverse_BR.square()).sum(-1))

        def scaled(total_B2: Tensor, _: Tensor) -> Any:
            before, after = total_B2[:, :1], total_B2[:, 1:]
            return scaled_rows(o_BRC, mean_BR, inverse_BR, before, after), variance_BR

        return Partial(torch.stack(sums, dim=-1), one, scaled)

    def normalized(mean_BR: Tensor, _: Tensor) -> Any:
        new_BR, inverse_BR = row_scales(mean_BR, variance_BR, beta2=beta2, eps=eps)
        before = mean_BR.sum(dim=-1, keepdim=True)
        after = (mean_BR * inverse_BR.square()).sum(dim=-1, keepdim=True)
        return scaled_rows(o_BRC, mean_BR, inverse_BR, before, after), new_BR

    return Partial(mean_BR * (o_BRC.shape[-1] / cols), one, normalized)
