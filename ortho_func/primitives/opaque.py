"""Lists of CPU tensors as one node of a compiled step each, run by eager's multi-tensor kernels.

Inductor makes C++ of element-wise work, tensor by tensor, and the C++ compiler then takes minutes
over a model's parameters. On the CPU eager's kernels are as quick, so a compiled step calls them:
the graph has one node for a list, and there is nothing to generate. Elsewhere inductor fuses.

Every function is told of each tensor whether it has a gradient: `present` are all 0-d answers of
a step as one bool tensor, `numbers` which of them the lists are about. To read them is no
synchronization: they lie on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from ortho_func.primitives import foreach
from ortho_func.primitives.momentum import ema_, nesterov
from ortho_func.primitives.scaling import Descent, descend_

__all__ = ["LIBRARY", "copy_where_", "descend_where_", "join", "look_ahead_where_", "opaque"]

LIBRARY = torch.library.Library("ortho_func", "FRAGMENT")


def opaque(*lists: Sequence[Tensor]) -> bool:
    """Whether these are lists for the functions here: on the CPU, compiled, without autograd."""
    if not torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    return all(x.device.type == "cpu" for tensors in lists for x in tensors)


def there(present: Tensor, numbers: Sequence[int]) -> list[bool]:
    """Of each of these numbers, whether it has a gradient."""
    answers = present.tolist()
    return [answers[number] for number in numbers]


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operator of the library for the CPU, and what it returns when traced."""
    name = LIBRARY.define(schema)
    LIBRARY.impl(name, run, "CPU")
    torch.library.register_fake(f"ortho_func::{name}", fake, lib=LIBRARY)


# The momentum and what is sent.


def look_ahead_where_(
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    present: Tensor,
    numbers: Sequence[int],
    *,
    beta: Tensor,
    ahead: bool,
) -> list[Tensor]:
    """M ← βM + (1 − β)G in place; returns (1 − β)G + βM, or M, and zeros without a gradient."""
    given = (list(momenta), list(grads), present, list(numbers), beta)
    torch.ops.ortho_func.average_where_(*given)
    # Two operators: one that writes may not return a list.
    found: list[Tensor] = torch.ops.ortho_func.ahead_where(*given, ahead)
    return found


def _average_where_(
    momenta: list[Tensor], grads: list[Tensor], present: Tensor, numbers: list[int], beta: Tensor
) -> None:
    here = there(present, numbers)
    ema_(list(compress(momenta, here)), list(compress(grads, here)), float(beta))


def _ahead_where(
    momenta: list[Tensor],
    grads: list[Tensor],
    present: Tensor,
    numbers: list[int],
    beta: Tensor,
    ahead: bool,
) -> list[Tensor]:
    here = there(present, numbers)
    active = list(compress(momenta, here))
    if ahead:
        sent = nesterov(active, list(compress(grads, here)), float(beta))
    else:
        sent = [m.clone() for m in active]  # an operator may not return what it was given
    found = iter(sent)
    nothing = (
        _fake_ahead_where(momenta, grads, present, numbers, beta, ahead) if not all(here) else []
    )
    return [next(found) if known else nothing[n].zero_() for n, known in enumerate(here)]


def _fake_ahead_where(
    momenta: list[Tensor],
    grads: list[Tensor],
    present: Tensor,
    numbers: list[int],
    beta: Tensor,
    ahead: bool,
) -> list[Tensor]:
    dtypes = [
        torch.promote_types(m.dtype, g.dtype) if ahead else m.dtype
        for m, g in zip(momenta, grads, strict=True)
    ]
    like = grads if ahead else momenta
    return [torch.empty_like(x, dtype=dtype) for x, dtype in zip(like, dtypes, strict=True)]


_ARGUMENTS = "Tensor[] grads, Tensor present, int[] numbers, Tensor beta"
define(
    f"average_where_(Tensor(a!)[] momenta, {_ARGUMENTS}) -> ()", _average_where_, lambda *_: None
)
define(
    f"ahead_where(Tensor[] momenta, {_ARGUMENTS}, bool ahead) -> Tensor[]",
    _ahead_where,
    _fake_ahead_where,
)


# The step.


def descend_where_(
    params: Sequence[Tensor], descent: Descent, present: Tensor, numbers: Sequence[int]
) -> None:
    """`descend_` where there is a gradient; lr and weight decay are tensors, scales numbers."""
    torch.ops.ortho_func.descend_where_(
        list(params),
        list(descent.directions),
        present,
        list(numbers),
        descent.lr,
        descent.weight_decay,
        list(descent.scales),
        descent.cautious,
    )


def _descend_where_(
    params: list[Tensor],
    directions: list[Tensor],
    present: Tensor,
    numbers: list[int],
    lr: Tensor,
    weight_decay: Tensor,
    scales: list[float],
    cautious: bool,
) -> None:
    here = there(present, numbers)
    active = list(compress(params, here))
    along, far = list(compress(directions, here)), list(compress(scales, here))
    if active:
        descend_(active, Descent(along, float(lr), float(weight_decay), list(far), cautious))


define(
    "descend_where_(Tensor(a!)[] params, Tensor[] directions, Tensor present, int[] numbers, "
    "Tensor lr, Tensor weight_decay, float[] scales, bool cautious) -> ()",
    _descend_where_,
    lambda *_: None,
)


# Copies.


def copy_where_(
    old: Sequence[Tensor], new: Sequence[Tensor], present: Tensor, numbers: Sequence[int]
) -> None:
    """Write each source into its target where there is a gradient."""
    torch.ops.ortho_func.copy_where_(list(old), list(new), present, list(numbers))


def _copy_where_(old: list[Tensor], new: list[Tensor], present: Tensor, numbers: list[int]) -> None:
    here = there(present, numbers)
    if any(here):
        foreach.copy_(list(compress(old, here)), list(compress(new, here)))


define(
    "copy_where_(Tensor(a!)[] old, Tensor[] new, Tensor present, int[] numbers) -> ()",
    _copy_where_,
    lambda *_: None,
)


def join(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """All parts flat in one new buffer, cast on the way."""
    found: Tensor = torch.ops.ortho_func.join(list(parts), dtype)
    return found


def _join(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    sizes = [part.numel() for part in parts]
    buffer = torch.empty(sum(sizes), dtype=dtype)
    views = [flat.view(part.shape) for flat, part in zip(buffer.split(sizes), parts, strict=True)]
    foreach.copy_(views, parts)
    return buffer


def _fake_join(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return parts[0].new_empty(sum(part.numel() for part in parts), dtype=dtype)


define("join(Tensor[] parts, ScalarType dtype) -> Tensor", _join, _fake_join)
