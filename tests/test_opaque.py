"""The operators that stand for lists in a compiled step: what they promise the compiler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ortho_func.algorithms import elementwise

OPS = torch.ops.ortho_func
SHAPES = ((2, 3), (4,), (0, 3), (2, 3))
RULES = list(elementwise.RULES.values())


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


PRESENT = torch.tensor([True, True, False, True, False])
ABOUT = (PRESENT, [1, 4, 0, 3])  # the second has no gradient
HALF = torch.tensor(0.5)
NAMES = {
    "average": (OPS.average_where_, (tensors(), tensors(), *ABOUT, HALF)),
    "narrow": (OPS.average_where_, (tensors(torch.bfloat16), tensors(), *ABOUT, HALF)),
    "ahead": (OPS.ahead_where, (tensors(torch.bfloat16), tensors(), *ABOUT, HALF, True)),
    "not ahead": (OPS.ahead_where, (tensors(), tensors(), *ABOUT, HALF, False)),
    "descend": (
        OPS.descend_where_, (tensors(), tensors(), *ABOUT, HALF, HALF, [1.0, 2.0, 3.0, 1.0], True)
    ),
    "copy": (OPS.copy_where_, (tensors(torch.bfloat16), tensors(), *ABOUT)),
    "join": (OPS.join, (tensors(), torch.bfloat16)),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_operator(name: str) -> None:
    """Its schema says what it writes, and its traced form returns what it returns."""
    operator, arguments = NAMES[name]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator.default, arguments, test_utils=checks)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_elementwise(rule: type[elementwise.ElementRule]) -> None:
    params, grads = tensors(), tensors()
    state = [
        torch.zeros(()) if kind == "scalar" else torch.zeros_like(p)
        for kind in rule.state.values()
        for p in params
    ]
    before = [x.clone() for x in (*params, *state)]
    arguments = (
        rule.name, params, grads, state, *ABOUT, HALF, HALF, [0.9, 0.95], 1e-8, False,
        "propagate",
    )  # fmt: skip
    torch.library.opcheck(
        OPS.elementwise_where_.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
    for old, new in zip(before, (*params, *state), strict=True):
        old.copy_(new)  # the checks may have written
    OPS.elementwise_where_(*arguments)
    changed = [not torch.equal(x, y) for x, y in zip(before, (*params, *state), strict=True)]
    assert changed[: len(SHAPES)] == [True, False, False, True]  # absent, empty
    assert not any(changed[1 :: len(SHAPES)])
