"""Options that several algorithms share, in every combination, against the naive formulas."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from layouts import WHOLE, exact, expected, relative_error, train, whole_tensors
from torch import nn

import ortho_func

SHAPES = {"wide": (3, 8), "tall": (9, 2), "square": (5, 5), "row": (1, 6)}
ADJUST = (None, "original", "match_rms_adamw", "spectral_norm", "none")
LOOKS_AHEAD = ("muon", "normuon")
CASES = [
    (algorithm, {"cautious": cautious, "adjust_lr_fn": adjust, **ahead})
    for algorithm, cautious, adjust in product(WHOLE, (False, True), ADJUST)
    for ahead in (({"nesterov": True}, {"nesterov": False}) if algorithm in LOOKS_AHEAD else ({},))
]


def both(algorithm: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    seed = torch.seed() % 2**31
    tensors = {name: x.double() for name, x in whole_tensors(SHAPES, seed).items()}
    gradients: list[dict[str, Any]] = [
        {name: x.double() for name, x in whole_tensors(SHAPES, seed + 1 + n).items()}
        for n in range(3)
    ]
    hyper = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.8, **options}
    parameters = {name: nn.Parameter(x.clone()) for name, x in tensors.items()}
    train(parameters, gradients, algorithm, **exact(algorithm), **hyper)
    right = expected(tensors, gradients, algorithm, **hyper)
    return {name: p.detach() for name, p in parameters.items()}, right


def far_apart(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return max(relative_error(one[name], other[name]) for name in SHAPES) > 1e-3


@pytest.mark.parametrize(("algorithm", "options"), CASES)
def test_every_pair_is_the_formula(algorithm: str, options: dict[str, Any]) -> None:
    if algorithm == "dion" and options["adjust_lr_fn"] is None:
        options = {**options, "adjust_lr_fn": "spectral_norm"}  # its own default
    found, right = both(algorithm, **options)
    # Masks, and Dion's Q, are fp32.
    assert max(relative_error(found[name], right[name]) for name in SHAPES) < 2e-6


@pytest.mark.parametrize("algorithm", list(WHOLE))
def test_options_are_not_ignored(algorithm: str) -> None:
    """A formula that never changes with an option would agree with itself."""
    torch.manual_seed(0)
    tensors = whole_tensors(SHAPES, 7)
    gradients: list[dict[str, Any]] = [whole_tensors(SHAPES, 8 + n) for n in range(3)]
    hyper = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.8}
    plain = expected(tensors, gradients, algorithm, **hyper)
    for option in ({"cautious": True}, {"adjust_lr_fn": "match_rms_adamw"}, {"nesterov": False}):
        if "nesterov" in option and algorithm not in LOOKS_AHEAD:
            continue
        assert far_apart(plain, expected(tensors, gradients, algorithm, **hyper, **option)), option


@pytest.mark.parametrize("algorithm", ["normuon", "dion3"])
@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_epsilon_is_added_to_the_root(algorithm: str, eps: float) -> None:
    found, right = both(algorithm, eps=eps)
    assert max(relative_error(found[name], right[name]) for name in SHAPES) < 2e-6


def test_normuon_is_the_papers_with_its_scale() -> None:
    """Algorithm 1 of arXiv 2510.05491, which sets the norm to 0.2·√(mn) and does not look ahead."""
    torch.manual_seed(3)
    x = torch.randn(4, 6, dtype=torch.float64)
    grads = [torch.randn_like(x) for _ in range(3)]
    p = nn.Parameter(x.clone())
    options = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.9, "beta2": 0.8}
    optimizer = ortho_func.NorMuon(
        [p], nesterov=False, adjust_lr_fn="match_rms_adamw", orthogonalizer="svd", **options
    )
    m, v = torch.zeros_like(x), torch.zeros(4, 1, dtype=torch.float64)
    for g in grads:
        p.grad = g
        optimizer.step()
        m = 0.9 * m + 0.1 * g
        u, _, vt = torch.linalg.svd(m, full_matrices=False)
        o = u @ vt
        v = 0.8 * v + 0.2 * (o * o).mean(dim=1, keepdim=True)
        o = o / (v.sqrt() + 1e-7)
        x = x - 0.1 * 0.3 * x - 0.1 * 0.2 * (4 * 6) ** 0.5 / o.norm() * o
    torch.testing.assert_close(p.detach(), x, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [ortho_func.Dion2, ortho_func.Dion3])
def test_nesterov_has_no_meaning_where_the_formula_has_none(kind: Callable[..., Any]) -> None:
    results = []
    for nesterov in (False, True):
        torch.manual_seed(1)
        p = nn.Parameter(torch.randn(4, 6))
        optimizer = kind([p], lr=0.1, nesterov=nesterov)
        p.grad = torch.randn(4, 6)
        optimizer.step()
        results.append(p.detach().clone())
    assert torch.equal(*results)
