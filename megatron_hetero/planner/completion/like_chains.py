"""Chains that are completed alike: of equal groups over equal hops."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import combinations, pairwise

from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.units import Chain, Unit


@dataclass(slots=True)
class Like:
    """What a chain has in common with chains that are completed alike.

    Attributes:
        places: a number for each stage, equal for like groups at the same end, or at none.
        widths: of all stages.
        more_holders: context-parallel ranks of each stage beyond the fewest that a stage has; empty
            where all have as many.
        shape: a number, equal for chains that are completed alike.
    """

    places: tuple[int, ...]
    widths: frozenset[int]
    more_holders: tuple[int, ...]
    shape: int


class LikeChains:
    """Compares chains of one problem; remembers what it compared."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._group: dict[Unit, int] = {}
        self._groups: dict[Hashable, int] = {}
        self._likes: dict[int, tuple[Chain, Like]] = {}
        """By the identity of chains, which structures share: quicker than by the names in them."""
        self._by_value: dict[Chain, Like] = {}
        self._by_shape: dict[tuple[int, ...], Like] = {}

    def group(self, unit: Unit) -> int:
        """Return equal for groups of equal times and memory."""
        found = self._group.get(unit)
        if found is None:
            like = self.problem.likeness
            nodes = [node for node, _ in unit.parts]
            hops = [like.hop(a, b) for a, b in combinations(nodes, 2)]
            # A group over several nodes also depends on the links among them.
            key = tuple(map(like.node, nodes)), unit.form, tuple(hops)
            found = self._group[unit] = self._groups.setdefault(key, len(self._groups))
        return found

    def of(self, chain: Chain) -> Like:
        """Return what the chain has in common with chains that are completed alike."""
        known = self._likes.get(id(chain))
        if known is not None:
            return known[1]
        # An equal chain may have been made anew.
        like = self._by_value.get(chain)
        if like is None:
            like = self._by_value[chain] = self._compared(chain)
        self._likes[id(chain)] = chain, like
        return like

    def _compared(self, chain: Chain) -> Like:
        hop = self.problem.likeness.hop
        groups = [self.group(unit) for unit in chain]
        hops = [
            hop(node, other)
            for a, b in pairwise(chain)
            for node, _ in a.parts
            for other, _ in b.parts
        ]
        # A number that is no group, between the groups and the hops.
        shape = (*groups, -2, *hops)
        like = self._by_shape.get(shape)
        if like is None:
            # Beside the group: 1 is the first stage, 2 the last, 3 the only one.
            last = len(chain) - 1
            ends = [(i == 0) + 2 * (i == last) for i in range(len(chain))]
            places = tuple([4 * group + end for group, end in zip(groups, ends, strict=True)])
            widths = frozenset([unit.width for unit in chain])
            ranks = [unit.context_parallel for unit in chain]
            more = tuple([n - min(ranks) for n in ranks]) if len(set(ranks)) > 1 else ()
            like = self._by_shape[shape] = Like(places, widths, more, len(self._by_shape))
        return like
