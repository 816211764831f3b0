"""The places in a replica that moves look at."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.units import Chain, Structure, Unit

Change = Callable[[Chain], Structure | None]
"""The replicas in the place of a replica; None if the change is impossible."""
PairChange = Callable[[Chain, Chain], Structure | None]
"""The replicas that take the place of two, at most two; None where it cannot be made."""


@dataclass(frozen=True)
class ReplicaPlaces:
    """A replica in place of all equal replicas, and the stages worth a look."""

    problem: Problem
    chain: Chain

    @cached_property
    def gaps(self) -> list[int]:
        """Places between stages, and at both ends, that are not inside a run of equal groups; of
        those between groups that are alike over links that are alike, the first and the last."""
        like, chain = self.problem.likeness, self.chain
        firsts: dict[Hashable, int] = {}
        lasts: dict[Hashable, int] = {}
        for t, (one, other) in enumerate(pairwise(chain), 1):
            # Inside a run of equal groups, every place gives the same structure.
            if not are_equal(one, other):
                sides = like.node(one.node), one.form, like.node(other.node), other.form
                kind = *sides, like.hop(one.node, other.node)
                firsts.setdefault(kind, t)
                lasts[kind] = t
        return sorted({0, *firsts.values(), *lasts.values(), len(chain)})

    @cached_property
    def ends(self) -> list[int]:
        """Stages beside these places."""
        return sorted({*self.gaps[:-1], *[gap - 1 for gap in self.gaps[1:]]})


def are_equal(one: Unit, other: Unit) -> bool:
    """Return whether two groups have the same form on the same single node."""
    return (one.node, one.form) == (other.node, other.form) and not (one.beyond or other.beyond)
