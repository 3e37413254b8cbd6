"""Schedules of odd polynomials that drive singular values to one.

A schedule is a list of steps. A step ``(a, b, c)`` maps every singular value ``s`` to
``a*s + b*s**3 + c*s**5``; a step ``(a, b)`` stops at the cube, a step ``(a, b, c, d, e)`` adds
``d*s**7 + e*s**9``. Singular vectors stay, so the composition of the steps approximates the polar
factor. Plain arithmetic, no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

Step = tuple[float, ...]
Scale = Literal["frobenius", "schatten8", "aol"]
_SCALES: tuple[Scale, ...] = ("frobenius", "schatten8", "aol")

# Where Newton-Schulz ends up once converged: the quintic with p(1)=1, p'(1)=p''(1)=0
# (Higham, Functions of Matrices, 2008, section 8.3).
NEWTON_SCHULZ_QUINTIC: Step = (15 / 8, -10 / 8, 3 / 8)
NEWTON_SCHULZ_CUBIC: Step = (3 / 2, -1 / 2)

# How far above its bound of one a singular value may lie after almost-orthogonal scaling in
# bfloat16: the scale is a square root of a sum of entries, each within 2**-8 of its value.
_AOL_TOP = 1.01


@dataclass(frozen=True)
class Schedule:
    """A named list of odd polynomial steps with its source.

    A step is ``(a, b)`` for ``a*x + b*x**3``, ``(a, b, c)`` with ``c*x**5`` added, or
    ``(a, b, c, d, e)`` up to ``x**9``. ``scale`` says which upper bound of the largest singular
    value the matrix is divided by first: ``"frobenius"``, or ``"schatten8"`` for the tighter bound
    that the first step yields anyway. ``"aol"`` divides each row of the short side by a number of
    its own instead (see `newton_schulz`), which changes the polar factor.
    ``tail`` holds the steps that follow when more are asked for than ``steps`` has; the last known
    step then repeats. ``shortest`` is the fewest steps it may be cut to; ``None`` forbids a cut.

    Raises ``ValueError`` for no steps, a step that isn't two, three or five finite numbers, another
    scale, or steps that almost-orthogonal scaling would make turn a sign or blow up.

    >>> Schedule("cubic", ((1.5, -0.5),) * 2, source="Newton-Schulz")(0.5)
    0.8687744140625
    """

    name: str
    steps: tuple[Step, ...]
    scale: Scale = "frobenius"
    source: str = "given by the caller"
    tail: tuple[Step, ...] = ()
    shortest: int | None = None

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError(f"schedule {self.name!r}: expected at least one step, got none")
        for step in (*self.steps, *self.tail):
            if len(step) not in (2, 3, 5) or not all(math.isfinite(v) for v in step):
                raise ValueError(
                    f"schedule {self.name!r}: each step must be two, three or five finite numbers "
                    f"(a, b), (a, b, c) or (a, b, c, d, e), got {step!r}"
                )
        if self.scale not in _SCALES:
            raise ValueError(
                f"schedule {self.name!r}: scale must be one of {', '.join(map(repr, _SCALES))}, "
                f"got {self.scale!r}"
            )
        if self.scale == "aol":
            self._check_aol()

    def _check_aol(self) -> None:
        """Almost-orthogonal scaling brings values up to one and, rounded, a little above."""
        for k in range(1, 401):
            start = _AOL_TOP * k / 400
            if not 0 < self(start) < 1.5:
                raise ValueError(
                    f"schedule {self.name!r}: not safe with scale 'aol', which leaves singular "
                    f"values up to {_AOL_TOP}: its steps send {start:.3f} to {self(start):.3f}. "
                    "Take 'turbo_muon', or stretch the steps as minimax_schedule's safety does."
                )

    def __call__(self, x: float) -> float:
        """The value that a starting singular value ``x`` ends at."""
        for step in self.steps:
            x = _value(step, x)
        return x


def _value(step: Step, x: float) -> float:
    total = 0.0
    for coefficient in reversed(step):
        total = coefficient + x * x * total
    return x * total


def _slope(step: Step, x: float) -> float:
    total = 0.0
    for k in reversed(range(len(step))):
        total = (2 * k + 1) * step[k] + x * x * total
    return total


# Keller Jordan, Muon, 2024: https://kellerjordan.github.io/posts/muon/
_JORDAN: Step = (3.4445, -4.7750, 2.0315)

# You Jiacheng's per-step coefficients, as used by the modded-nanogpt medium track:
# https://leloykun.github.io/ponder/muon-opt-coeffs/
_YOU: tuple[Step, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Amsel, Persson, Musco, Gower: The Polar Express, arXiv 2505.16932, algorithm 1: greedy minimax
# steps for the interval [1e-3, 1]. The paper applies the safety factor to all but the last.
_POLAR_EXPRESS_SAFETY = 1.01
_POLAR_EXPRESS: tuple[Step, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
# Number of leading steps that Muon implementations use by default.
_POLAR_EXPRESS_LENGTH = 5

# Grishina, Smirnov, Rakhuba: CANS, arXiv 2506.10935v2, appendix J (degree 5, four iterations,
# delta = 0.3). The published steps meet the ends of their intervals exactly; in bfloat16 a singular
# value rounded above one would end at 8, so each is stretched as Polar Express does.
_CANS_SAFETY = 1.01
_CANS: tuple[Step, ...] = (
    (8.420293602126344, -24.910491192120688, 18.472094206318726),
    (4.101228661246281, -3.0518555467946813, 0.5741241025302702),
    (3.6809819251109155, -2.75396502307162, 0.5401902781108926),
    (2.7280916801566666, -2.0315492757300913, 0.45866431681858805),
)


def _with_safety(step: Step, safety: float) -> Step:
    """p(x / safety) as a step."""
    return tuple(value / safety ** (2 * k + 1) for k, value in enumerate(step))


def _solve(rows: list[list[float]]) -> list[float]:
    """Solve a small augmented linear system by elimination with row pivoting."""
    n = len(rows)
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for k in range(i + 1, n):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    solution = [0.0] * n
    for i in reversed(range(n)):
        known = sum(rows[i][k] * solution[k] for k in range(i + 1, n))
        solution[i] = (rows[i][n] - known) / rows[i][i]
    return solution


def _newton_schulz_step(terms: int, centre: float) -> Step:
    """The odd polynomial that is 1 at ``centre`` with ``terms - 1`` vanishing derivatives.

    With ``y = 1 - x**2`` it is the truncated series of ``x * (1 - y)**(-1/2)``.
    """
    step = [0.0] * terms
    for k in range(terms):
        weight = math.comb(2 * k, k) / 4**k
        for j in range(k + 1):
            step[j] += weight * math.comb(k, j) * (-1) ** j
    return _with_safety(tuple(step), centre)


def _chebyshev_points(lower: float, upper: float, intervals: int) -> list[float]:
    middle, half = (lower + upper) / 2, (upper - lower) / 2
    return [middle - half * math.cos(math.pi * k / intervals) for k in range(intervals + 1)]


def _extrema(step: Step, lower: float, upper: float) -> list[float]:
    """The interior extrema of a step, by bisection of its slope."""
    grid = _chebyshev_points(lower, upper, 400)
    found = []
    for left, right in pairwise(grid):
        sign = _slope(step, left)
        if sign * _slope(step, right) >= 0:
            continue
        for _ in range(60):
            middle = (left + right) / 2
            if sign * _slope(step, middle) > 0:
                left = middle
            else:
                right = middle
        found.append((left + right) / 2)
    return found


def _minimax_step(terms: int, lower: float, upper: float) -> Step:
    """The odd polynomial of ``terms`` terms nearest to 1 on [lower, upper], by Remez exchange."""
    # There the error is below float64's resolution and the equations below are singular.
    if ((upper - lower) / (upper + lower)) ** terms < 1e-12:
        return _newton_schulz_step(terms, (lower + upper) / 2)
    points = _chebyshev_points(lower, upper, terms)
    error = math.inf
    step: Step = ()
    for _ in range(50):
        rows = [
            [*(x ** (2 * k + 1) for k in range(terms)), (-1.0) ** i, 1.0]
            for i, x in enumerate(points)
        ]
        *found, level = _solve(rows)
        step = tuple(found)
        inner = _extrema(step, lower, upper)
        if abs(abs(level) - error) <= 1e-15 or len(inner) != terms - 1:
            break
        error = abs(level)
        points = [lower, *inner, upper]
    return step


def minimax_schedule(
    steps: int,
    lower_bound: float,
    *,
    safety: float = 1.01,
    cushion: float = 0.05,
    degrees: Sequence[int] | None = None,
) -> Schedule:
    """Greedy minimax composition of odd polynomials for singular values in [lower_bound, 1].

    Step k is ``argmin_p max_{x in [l_k, u_k]} |1 - p(x)|``, and ``[l_{k+1}, u_{k+1}]`` is its image
    of ``[l_k, u_k]``; among compositions of these degrees none has a smaller error on
    [lower_bound, 1] (arXiv 2505.16932, theorem 3.1). Two departures keep it safe in bfloat16 (same
    paper, section 3.4): ``safety`` stretches every step but the last to ``p(x / safety)``, so that
    values rounded above the bound stay bounded; ``cushion`` keeps ``l_k >= cushion * u_k`` in the
    fit and centres the image on one again, so that no step sends a large value so near to zero
    that rounding could turn its sign. ``degrees`` gives each step's degree, 3, 5 or 9; all 5 if
    None.

    Raises ``ValueError`` if ``steps < 1``, ``lower_bound`` is outside (0, 1), ``safety < 1``,
    ``cushion`` is outside [0, 1), or ``degrees`` isn't ``steps`` times 3, 5 or 9.

    >>> [round(v, 3) for v in minimax_schedule(1, 0.5).steps[0]]
    [2.671, -3.285, 1.639]
    """
    degrees = (5,) * steps if degrees is None else tuple(degrees)
    _check_minimax_arguments(steps, lower_bound, safety, cushion, degrees)
    lower, upper = lower_bound, 1.0
    made: list[Step] = []
    for degree in degrees:
        fitted = max(lower, cushion * upper)
        step = _minimax_step((degree + 1) // 2, fitted, upper)
        # On the fitted interval the image is [m, 2 - m]; a value below it may end lower still.
        low, high = _value(step, lower), 2 - _value(step, fitted)
        centre = 2 / (low + high)
        made.append(tuple(v * centre for v in step))
        lower, upper = low * centre, high * centre
    stretched = [_with_safety(step, safety) for step in made[:-1]]
    return Schedule(
        name=f"minimax({steps}, {lower_bound:g})",
        steps=(*stretched, made[-1]),
        scale="schatten8",
        source="generated: greedy minimax, arXiv 2505.16932",
        tail=(NEWTON_SCHULZ_QUINTIC,),
    )


def _check_minimax_arguments(
    steps: int, lower_bound: float, safety: float, cushion: float, degrees: tuple[int, ...]
) -> None:
    if steps < 1:
        raise ValueError(f"minimax_schedule: steps must be at least 1, got {steps}")
    if not 0 < lower_bound < 1:
        raise ValueError(f"minimax_schedule: lower_bound must be in (0, 1), got {lower_bound}")
    if not safety >= 1:
        raise ValueError(f"minimax_schedule: safety must be at least 1, got {safety}")
    if not 0 <= cushion < 1:
        raise ValueError(f"minimax_schedule: cushion must be in [0, 1), got {cushion}")
    if len(degrees) != steps or any(degree not in (3, 5, 9) for degree in degrees):
        raise ValueError(
            f"minimax_schedule: degrees must be {steps} numbers, each 3, 5 or 9, got {degrees}"
        )


# The default family, per number of steps: minimax_schedule with these arguments, rounded to ten
# digits. Bounds, degrees and cushions come from the search in benchmarks/numerics.py: the smallest
# errors that leave bfloat16 safe. Steps of degree nine come late, where the interval is narrow.
MINIMAX_ARGUMENTS: dict[int, tuple[float, float, tuple[int, ...]]] = {
    # steps: (lower bound, cushion, degrees)
    1: (0.2, 0.0, (5,)),
    2: (0.05, 0.0, (5, 9)),
    3: (0.0106, 0.024, (5, 9, 9)),
    4: (0.005, 0.05, (5, 5, 5, 9)),
    5: (0.0015, 0.05, (5, 5, 5, 5, 9)),
}
_MINIMAX: dict[int, tuple[Step, ...]] = {
    1: ((4.238780397, -8.700097001, 5.681343271),),
    2: (
        (6.685520077, -17.81126977, 12.6195413),
        (3.377275825, -6.223626899, 5.770640144, -2.331320957, 0.3360038363),
    ),
    3: (
        (7.891899047, -22.03043064, 15.83495138),
        (5.559568096, -12.67065006, 10.78964645, -3.62789705, 0.4164492732),
        (2.953904088, -4.854895479, 4.519258174, -1.945944531, 0.3088465287),
    ),
    4: (
        (7.872585778, -20.97379822, 14.86023828),
        (3.786437943, -2.625241806, 0.4840573105),
        (3.194363106, -2.348326936, 0.4778638753),
        (2.918783668, -4.740978395, 4.411144365, -1.911278323, 0.3064749037),
    ),
    5: (
        (7.98366637, -21.26973427, 15.06991324),
        (3.943247171, -2.658413363, 0.4766285204),
        (3.741343926, -2.616385476, 0.4865918496),
        (3.052015151, -2.242339568, 0.4661334379),
        (2.789817556, -4.323522017, 4.008602093, -1.77958896, 0.2975827541),
    ),
}
_MINIMAX_LENGTH = 4

# Cubics alone, whose steps need no square of the Gram matrix: minimax_schedule with these
# arguments, rounded to ten digits. Seven are as good as four of the default family; on a square
# matrix they take as many operations as five quintics, on others more (docs/numerics.md).
CUBIC_ARGUMENTS: tuple[int, float, float] = (7, 0.005, 0.05)  # steps, lower bound, cushion
_CUBIC: tuple[Step, ...] = (
    (4.95204936, -4.612327244),
    (2.460246612, -0.5874660605),
    (2.393611091, -0.5936621536),
    (2.220560347, -0.5847847468),
    (1.908046419, -0.5432796551),
    (1.611647507, -0.5028911426),
    (1.51071081, -0.5015292263),
)


def _minimax(steps: int) -> Schedule:
    """The library's own schedule for a number of steps."""
    return Schedule(
        "minimax",
        _MINIMAX[min(steps, max(_MINIMAX))],
        scale="schatten8",
        source="generated: greedy minimax, arXiv 2505.16932",
        tail=(NEWTON_SCHULZ_QUINTIC,),
    )


_NAMED: dict[str, Schedule] = {
    "jordan": Schedule(
        "jordan",
        (_JORDAN,) * 5,
        source="https://kellerjordan.github.io/posts/muon/",
        shortest=1,
    ),
    "you": Schedule(
        "you",
        _YOU,
        source="https://leloykun.github.io/ponder/muon-opt-coeffs/",
        shortest=1,
    ),
    "polar_express": Schedule(
        "polar_express",
        tuple(
            _with_safety(s, _POLAR_EXPRESS_SAFETY) for s in _POLAR_EXPRESS[:_POLAR_EXPRESS_LENGTH]
        ),
        source="arXiv 2505.16932, algorithm 1",
        tail=(
            *(
                _with_safety(s, _POLAR_EXPRESS_SAFETY)
                for s in _POLAR_EXPRESS[_POLAR_EXPRESS_LENGTH:]
            ),
            NEWTON_SCHULZ_QUINTIC,
        ),
    ),
    "cans": Schedule(
        "cans",
        tuple(_with_safety(s, _CANS_SAFETY) for s in _CANS),
        source="arXiv 2506.10935v2, appendix J, with a safety factor of 1.01",
        tail=(NEWTON_SCHULZ_QUINTIC,),
    ),
    "cubic": Schedule(
        "cubic",
        _CUBIC,
        scale="schatten8",
        source="generated: greedy minimax, arXiv 2505.16932",
        tail=(NEWTON_SCHULZ_CUBIC,),
        shortest=6,
    ),
    # Boissin, Massena, Mamalet, Serrurier: Turbo-Muon, arXiv 2512.04632: almost-orthogonal scaling
    # (Prach, Lampert, arXiv 2208.03160) in place of the norm and of You's first step.
    "turbo_muon": Schedule(
        "turbo_muon",
        _YOU[1:],
        scale="aol",
        source="arXiv 2512.04632",
        shortest=1,
    ),
}

#: The names that `schedule` takes; ``"minimax"`` is made for any number of steps.
SCHEDULE_NAMES: tuple[str, ...] = ("minimax", *_NAMED)


def schedule(spec: str | Schedule | Sequence[Step], steps: int | None = None) -> Schedule:
    """The schedule of exactly ``steps`` steps that a name, `Schedule` or list of steps stands for.

    ``steps=None`` keeps the schedule's own length. More steps than listed continue with its tail
    and then repeat the last step. Fewer are cut off only where the schedule allows it: most
    overshoot in their early steps on purpose, and a cut would leave singular values near two.

    Raises ``ValueError`` for an unknown name, ``steps < 1``, or a cut that isn't allowed.

    >>> schedule("jordan", 2).steps
    ((3.4445, -4.775, 2.0315), (3.4445, -4.775, 2.0315))
    >>> len(schedule("polar_express").steps), len(schedule("polar_express", 10).steps)
    (5, 10)
    """
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if isinstance(spec, Schedule):
        found = spec
    elif not isinstance(spec, str):
        found = Schedule("custom", tuple(tuple(step) for step in spec))
    elif spec == "minimax":
        found = _minimax(_MINIMAX_LENGTH if steps is None else steps)
    elif spec in _NAMED:
        found = _NAMED[spec]
    else:
        raise ValueError(
            f"unknown schedule {spec!r}: expected one of {', '.join(SCHEDULE_NAMES)}, a Schedule, "
            "or a sequence of steps (a, b, c)"
        )
    return _resized(found, len(found.steps) if steps is None else steps)


def _resized(found: Schedule, steps: int) -> Schedule:
    if steps == len(found.steps):
        return found
    if steps < len(found.steps) and (found.shortest is None or steps < found.shortest):
        raise ValueError(
            f"schedule {found.name!r} has {len(found.steps)} steps and can't be cut to {steps}: "
            "its early steps overshoot. Use 'minimax', which is made for any number of steps, or "
            f"minimax_schedule({steps}, lower_bound)."
        )
    known = (*found.steps, *found.tail)
    longer = (*known, *(known[-1:] * (steps - len(known))))
    return replace(found, steps=longer[:steps], tail=longer[steps:])
