"""Schedules: published tables, the generator that makes ours, and how lengths are asked for."""

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortho_func.coefficients import (
    CUBIC_ARGUMENTS,
    MINIMAX_ARGUMENTS,
    SCHEDULE_NAMES,
    Schedule,
    minimax_schedule,
    schedule,
)

# The Polar Express as published (arXiv 2505.16932, algorithm 1), before its safety factor.
PUBLISHED = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
)
# What the paper's code keeps as the least quotient of a fitted interval's ends.
PUBLISHED_CUSHION = 0.02407327424182761


def values(made: Schedule, low: float = 0.0, high: float = 1.0, count: int = 2001) -> list[float]:
    return [made(low + (high - low) * i / (count - 1)) for i in range(count)]


def test_generator_reproduces_the_published_polar_express() -> None:
    made = minimax_schedule(6, 1e-3, safety=1.0, cushion=PUBLISHED_CUSHION)
    for step, published in zip(made.steps, PUBLISHED, strict=True):
        assert step == pytest.approx(published, rel=1e-12)


def test_polar_express_values() -> None:
    made = schedule("polar_express")
    starts = (1, 0.7071, 0.5, 0.1, 0.01, 0.001)
    expected = (1.027, 0.927, 0.933, 0.874, 1.066, 0.846)
    # The expected values come from coefficients rounded to four digits.
    assert [made(x) for x in starts] == pytest.approx(expected, abs=3e-3)
    assert min(values(made, 1e-3)) == pytest.approx(0.846, abs=1e-3)
    assert max(values(made, 1e-3)) == pytest.approx(1.124, abs=1e-3)


def test_polar_express_ends_on_the_newton_schulz_quintic() -> None:
    last = (1.875, -1.25, 0.375)
    steps = schedule("polar_express", 10).steps
    assert steps[7:] == (last,) * 3
    stretched = [v / 1.01 ** (2 * k + 1) for k, v in enumerate(last)]
    assert steps[6] == pytest.approx(stretched, rel=1e-5)


def test_jordan_values() -> None:
    starts = (1, 0.5**0.5, 0.5, 0.1, 0.01, 1e-3, 1e-4, 0)
    expected = (0.69644, 1.10811, 0.76544, 0.71212, 0.69892, 0.47054, 0.04847, 0)
    made = schedule("jordan")
    assert [made(x) for x in starts] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("steps", MINIMAX_ARGUMENTS)
def test_default_family_is_what_the_generator_makes(steps: int) -> None:
    lower, cushion, degrees = MINIMAX_ARGUMENTS[steps]
    made = minimax_schedule(steps, lower, cushion=cushion, degrees=degrees)
    for listed, generated in zip(schedule("minimax", steps).steps, made.steps, strict=True):
        assert listed == pytest.approx(generated, rel=1e-9)


def test_cubics_are_what_the_generator_makes() -> None:
    steps, lower, cushion = CUBIC_ARGUMENTS
    made = minimax_schedule(steps, lower, cushion=cushion, degrees=[3] * steps)
    for listed, generated in zip(schedule("cubic").steps, made.steps, strict=True):
        assert listed == pytest.approx(generated, rel=1e-9)
    assert schedule("cubic", 9).steps[7:] == ((1.5, -0.5),) * 2
    assert least_quotient(schedule("cubic")) > 0.15


def test_turbo_muon_is_you_without_the_first_step_and_safe_above_one() -> None:
    made = schedule("turbo_muon")
    assert made.steps == schedule("you").steps[1:]
    assert made.scale == "aol"
    assert max(values(made, 0, 1.05)) < 1.15
    assert min(values(made, 0, 1.05)[1:]) > 0


@pytest.mark.parametrize("steps", [((1.5, -1.4875),), ((2.4, -1.4875), (3.0, -0.1)), ((4.0, 1.0),)])
def test_steps_that_almost_orthogonal_scaling_would_break_are_refused(steps: Any) -> None:
    """The first is above zero up to one, and below zero just above it."""
    Schedule("mine", steps)
    with pytest.raises(ValueError, match="not safe with scale 'aol'"):
        Schedule("mine", steps, scale="aol")


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_no_schedule_leaves_zero_to_one_or_turns_a_sign(name: str) -> None:
    got = values(schedule(name))
    assert got[0] == 0
    assert min(got[1:]) > 0
    assert max(got) < 1.3


@pytest.mark.parametrize("steps", range(1, 12))
def test_every_length_of_the_default_family_is_safe(steps: int) -> None:
    made = schedule("minimax", steps)
    assert len(made.steps) == steps
    assert min(values(made)[1:]) > 0
    assert max(values(made)) < 1.23
    # Rounding may leave a value 1% above the bound.
    assert 0.75 < made(1.01) < 1.3


def least_quotient(made: Schedule) -> float:
    """Least p(x)/x of any step p on what reaches it: how far rounding is from turning a sign."""
    top, least = 1.0, math.inf
    for step in made.steps:
        one = Schedule("one step", (step,))
        points = [top * (i + 1) / 2000 for i in range(2000)]
        ends = [one(x) for x in points]
        least = min(least, *(end / x for end, x in zip(ends, points, strict=True)))
        top = max(ends)
    return least


@pytest.mark.parametrize("steps", range(2, 6))
def test_the_cushion_keeps_signs_out_of_reach_of_rounding(steps: int) -> None:
    # A first step's largest term is some 16 at the minimum: bfloat16 rounds it to within 1/16.
    assert least_quotient(schedule("minimax", steps)) > 0.2
    lower, cushion, degrees = MINIMAX_ARGUMENTS[steps]
    if cushion:
        assert least_quotient(minimax_schedule(steps, lower, cushion=0, degrees=degrees)) < 0.12


def test_more_steps_of_the_default_family_are_better() -> None:
    errors = [max(1 - made for made in values(schedule("minimax", k), 0.01)) for k in range(1, 9)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from([3, 5, 9]), min_size=1, max_size=5),
    st.floats(1e-4, 0.9),
)
def test_greedy_minimax_equioscillates(degrees: list[int], lower: float) -> None:
    made = minimax_schedule(len(degrees), lower, safety=1.0, cushion=0.0, degrees=degrees)
    got = values(made, lower, 1.0, 4001)
    error = 1 - made(lower)
    assert 0 <= error + 1e-9 < 1 + 1e-9
    assert min(got) == pytest.approx(1 - error, abs=1e-6)
    assert max(got) <= 1 + error + 1e-6
    # No other polynomial of the first step's degree does better than the fit.
    worst = max(abs(1 - v) for v in values(minimax_schedule(1, lower, cushion=0.0), lower))
    step = minimax_schedule(1, lower, cushion=0.0).steps[0]
    for _ in range(5):
        other = tuple(v * (1 + random.uniform(-0.02, 0.02)) for v in step)
        assert max(abs(1 - v) for v in values(Schedule("other", (other,)), lower)) >= worst - 1e-9


def test_narrow_interval_gives_newton_schulz() -> None:
    quintic = minimax_schedule(1, 0.99999, cushion=0.0).steps[0]
    assert quintic == pytest.approx((1.875, -1.25, 0.375), rel=1e-3)
    cubic = minimax_schedule(1, 0.99999, cushion=0.0, degrees=[3]).steps[0]
    assert cubic == pytest.approx((1.5, -0.5), rel=1e-3)
    nonic = minimax_schedule(1, 0.9999, cushion=0.0, degrees=[9]).steps[0]
    expected = [v / 128 for v in (315, -420, 378, -180, 35)]
    assert nonic == pytest.approx(expected, rel=1e-2)


def test_lengths() -> None:
    assert len(schedule("jordan").steps) == len(schedule("you").steps) == 5
    assert len(schedule("minimax").steps) == 4
    jordan = schedule("jordan").steps[0]
    assert schedule("jordan", 7).steps == (jordan,) * 7
    assert schedule("you", 2).steps == schedule("you").steps[:2]
    assert schedule("you", 7).steps[4:] == schedule("you").steps[4:] * 3
    assert schedule([jordan], 3).steps == (jordan,) * 3
    assert schedule(schedule("polar_express"), 8) == schedule("polar_express", 8)
    assert schedule(schedule("jordan", 3), 5) == schedule("jordan")


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize("steps", range(1, 7))
def test_a_cut_is_safe_or_refused(name: str, steps: int) -> None:
    cut = Schedule("cut", schedule(name, 7).steps[:steps])
    if name == "minimax" or max(values(cut)) < 1.3:
        made = schedule(name, steps)
        assert len(made.steps) == steps
        assert max(values(made)) < 1.3
    else:
        with pytest.raises(ValueError, match="minimax"):
            schedule(name, steps)


def test_every_schedule_names_its_source() -> None:
    for name in SCHEDULE_NAMES:
        assert "http" in schedule(name).source or "arXiv" in schedule(name).source


def test_schedules_are_values() -> None:
    assert schedule("you") == schedule("you")
    assert len({schedule(name) for name in SCHEDULE_NAMES}) == len(SCHEDULE_NAMES)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedule("jordann"), "polar_express"),
        (lambda: schedule("jordan", 0), "at least 1"),
        (lambda: schedule([]), "at least one step"),
        (lambda: schedule([(1.0,)]), "two, three or five"),
        (lambda: schedule([(1.0, math.nan, 0.0)]), "finite"),
        (lambda: Schedule("x", ((1.0, 0.0, 0.0),), scale="spectral"), "schatten8"),  # type: ignore[arg-type]
        (lambda: minimax_schedule(0, 0.1), "steps"),
        (lambda: minimax_schedule(2, 1.0), "lower_bound"),
        (lambda: minimax_schedule(2, 0.1, safety=0.9), "safety"),
        (lambda: minimax_schedule(2, 0.1, cushion=1.0), "cushion"),
        (lambda: minimax_schedule(2, 0.1, degrees=[5]), "degrees"),
        (lambda: minimax_schedule(1, 0.1, degrees=[7]), "degrees"),
    ],
)
def test_errors_say_what_to_do(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()
