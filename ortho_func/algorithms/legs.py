"""A step's round trips: most rules take one, a rule with a successor takes two.

A *leg* is one round trip: a plan of what travels in it, and by this plan's parameters, which
parameter of the caller each is, or which part of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ortho_func.algorithms.rule import MatrixRule
from ortho_func.algorithms.teams import check_team_size, shares_of, team_sizes
from ortho_func.factors import Part, left_spec, right_spec
from ortho_func.plan import Balance, Hops, ParamSpec, Plan, TeamSize, Wire, build_plan, local_cut
from ortho_func.shares import Cut

__all__ = ["Leg", "Subject", "plan_for"]


@dataclass(frozen=True)
class Subject:
    """What one parameter of a leg's plan is about.

    `param` is the caller's parameter; `part` a part of its row blocks, None for all as they are;
    `order` counts the parts or shares of one parameter, `before` is the number of the same part
    in the leg before. `cut` is how a parameter is shared, of which the plan's parameter is a share.
    """

    param: int
    part: Part | None = None
    order: int = 0
    before: int = -1
    cut: Cut | None = None


@dataclass(frozen=True)
class Leg:
    """One round trip: `rules` and `hyper_of` by the plan's groups, `subjects` by its parameters."""

    plan: Plan
    rules: tuple[MatrixRule, ...]
    hyper_of: tuple[int, ...]
    subjects: tuple[Subject, ...]


@dataclass
class _Drafted:
    """A leg being collected."""

    specs: list[ParamSpec] = field(default_factory=list)
    subjects: list[Subject] = field(default_factory=list)
    groups: dict[tuple[int, MatrixRule], int] = field(default_factory=dict)

    def add(self, spec: ParamSpec, rule: MatrixRule, subject: Subject) -> int:
        """Add a parameter; returns its number."""
        number = self.groups.setdefault((spec.group, rule), len(self.groups))
        self.specs.append(replace(spec, group=number, dtype=rule.emitted(spec.dtype)))
        self.subjects.append(subject)
        return len(self.specs) - 1

    def leg(
        self,
        wires: Sequence[torch.dtype],
        bucket_bytes: int,
        wire: Wire,
        balance: Balance,
        hops: Hops,
    ) -> Leg:
        travels = [rule.travel(wire_dtype=wires[group]) for group, rule in self.groups]
        if any(subject.part is not None for subject in self.subjects):
            hops = "one"  # a factor's replicas are not its parameter's, whose groups there are
        made = build_plan(
            tuple(self.specs),
            tuple(travels),
            bucket_bytes=bucket_bytes,
            wire=wire,
            balance=balance,
            hops=hops,
        )
        rules = tuple(rule for _, rule in self.groups)
        return Leg(made, rules, tuple(group for group, _ in self.groups), tuple(self.subjects))


def plan_for(
    specs: Sequence[ParamSpec],
    rules: Sequence[MatrixRule],
    wires: Sequence[torch.dtype],
    *,
    bucket_bytes: int,
    wire: Wire = "auto",
    balance: Balance = "cost",
    hops: Hops = "auto",
    team_size: TeamSize = 1,
) -> tuple[Leg, ...]:
    """Plan the parameters of some groups, splitting a group where its rule depends on the cut.

    Args:
        specs: the parameters; `group` counts `rules`.
        rules: by group.
        wires: by group, the dtype on the wire.
        bucket_bytes: as in `ortho_func.plan`.
        wire: likewise.
        balance: likewise.
        hops: likewise; factors take one.
        team_size: likewise; what sends factors or a selection has one owner.

    Returns:
        The round trips in order: one, or two where a rule has a successor.
    """
    first, second = _Drafted(), _Drafted()
    check_team_size(team_size, balance)
    for spec in specs:
        spec.reading.check(spec.layout.shape, spec.name)
    sizes = team_sizes(specs, rules, team_size)
    for number, (spec, size) in enumerate(zip(specs, sizes, strict=True)):
        rule = rules[spec.group].for_cut(local_cut(spec.layout, spec.reading))
        if size > 1:
            for order, (share, teamed, cut) in enumerate(shares_of(number, spec, rule, size)):
                first.add(share, teamed, Subject(number, order=order, cut=cut))
            continue
        if rule.then is None:
            first.add(spec, rule, Subject(number))
            continue
        for order, part in enumerate(rule.parts(spec.layout.shape, spec.reading)):
            before = first.add(left_spec(spec, part), rule, Subject(number, part, order))
            subject = Subject(number, part, order, before)
            second.add(right_spec(spec, part), rule.then, subject)
    drafts = [first, second] if second.specs else [first]
    return tuple(draft.leg(wires, bucket_bytes, wire, balance, hops) for draft in drafts)
