"""A fixed part of the fuzz: the rest is `make fuzz`."""

from __future__ import annotations

from typing import Any

import fuzz
import pytest
import reference
import torch

# Among them the seeds that found faults.
SEEDS = [*range(8), 9, 12, 15, 29, 36, 40, 44, 57, 63, 80, 95, 110, 120, 130, 144, 150,
         # options that came later
         242, 244, 247, 255, 271, 273]  # fmt: skip


EVERY: dict[str, set[Any]] = {
    "hops": {"one", "two"},
    "balance": {"cost", "uniform"},
    "wire": {"auto", "dense", "exact"},
    "wire_dtype": {torch.float32, torch.float64},
    "reduce_gradients": {None, True},
}
EVERY_GROUP: dict[str, set[Any]] = {
    "nonfinite": {None, "skip"},
    "momentum_dtype": {None, torch.float32, torch.bfloat16},
    "nesterov": {None, True, False},
    "cautious": {True, False},
    "weight_decay": {0.0, 0.2},
    "flatten": {None, True, False},
    "num_heads": {None, 2, 3, 6},
}


@pytest.mark.parametrize("seed", SEEDS)
def test_equals_one_process(pool: Any, seed: int) -> None:
    wrong = fuzz.run(pool, seed)
    assert wrong is None, wrong


def test_seeds_draw_all_there_is() -> None:
    cases = [fuzz.draw(seed) for seed in range(500)]
    assert cases[:20] == [fuzz.draw(seed) for seed in range(20)]
    weights = [weight for case in cases for weight in case.weights]
    assert {case.world for case in cases} == {1, 2, 3, 4, 5, 6, 8}
    kinds = {realm.kind for case in cases for realm in case.realms}
    assert kinds == {"fsdp", "hsdp", "tp", "ddp", "placed", "part", "axis"}
    assert {group.algorithm for case in cases for group in case.groups} == set(fuzz.NAIVE)
    assert {len(weight.shape) for weight in weights} == {1, 2, 3, 4}
    assert {weight.dtype for weight in weights} == set(fuzz.TOLERANCE)
    assert {way for weight in weights for way in weight.missing} == {"none", "some", "all"}
    assert {weight.frozen for weight in weights} == {False, True}
    assert max(len(case.weights) for case in cases) == 30
    assert any(case.options["compile"] for case in cases)
    for name, values in EVERY.items():
        assert {case.options.get(name) for case in cases} == values, name
    for name, values in EVERY_GROUP.items():
        found = {{**g.hyper, **g.own, **g.extra}.get(name) for case in cases for g in case.groups}
        assert found >= values, name
    divided = {w.shape[0] % case.world == 0 for case in cases for w in case.weights}
    assert divided == {False, True}


def test_a_wrong_step_is_noticed(pool: Any, monkeypatch: Any) -> None:
    """In one line that says how to see it again."""
    seed = next(
        seed
        for seed in range(100)
        if (case := fuzz.draw(seed)).world == 2
        and any(
            group.algorithm == "muon"
            and any(w.dtype == torch.float64 and "all" not in w.missing and not w.frozen
                    for w in group.weights)
            for group in case.groups
        )
    )  # fmt: skip

    def halved(*args: Any, **options: Any) -> Any:
        return reference.muon(*args, **{**options, "lr": 0.5 * options["lr"]})

    assert fuzz.run(pool, seed) is None
    monkeypatch.setitem(fuzz.NAIVE, "muon", halved)
    wrong = fuzz.run(pool, seed)
    assert wrong is not None
    assert wrong.startswith(f"python tests/fuzz.py --seed {seed}  # g")
    assert "\n" not in wrong


def raise_on_one(rank: int, world: int, seed: int) -> None:
    if rank == 1:
        raise ValueError("two lines\nof text")
    torch.distributed.barrier()


def test_an_error_is_one_line_too(pool: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(fuzz, "train", raise_on_one)
    seed = next(seed for seed in range(100) if fuzz.draw(seed).world == 2)
    found = fuzz.run(pool, seed, timeout=20)
    assert found == (
        f"python tests/fuzz.py --seed {seed}  # rank 1: builtins.ValueError: two lines of text"
    )
