"""Groups of ranks, nested in each other, and the kinds with equal prices.

A group is a run of the job's ranks.  Any two are nested or apart, so that ranks take part in few of
them (about log2 of their number), and process groups can be made once and kept.  Groups of one kind
have the same prices and divide into groups of the same kinds: a deal needs to know how many of each
kind it uses, never which.

Each rank holds the whole model.  In a job on a plan the replicas of the plan stand for the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_hetero.sequences.price.group_price import GroupPrice, longest_sequence, undominated

type Nest = int | tuple[Nest, ...]
"""A rank, or groups of ranks one after the other that together are a group."""

type PricesOf = Callable[[tuple[int, ...]], tuple[Hashable, tuple[GroupPrice, ...]]]
"""From the ranks of a group to what it is called where it is priced alike, and its prices."""

_COMPARED_LENGTHS = 64


@dataclass(frozen=True)
class GroupKind:
    """Groups that are priced alike: the options by which each can train sequences, and the kinds
    that it divides into (number of the kind -> how many)."""

    size: int
    prices: tuple[GroupPrice, ...]
    parts: Mapping[int, int]


@dataclass(frozen=True)
class TreeGroup:
    """One group: ranks `first` to `stop - 1`, of kind `kind`; `parts` are numbers of groups."""

    first: int
    stop: int
    kind: int
    parts: tuple[int, ...]


@dataclass(frozen=True)
class GroupTree:
    """All groups of a job.  `kinds` and `groups` begin with the whole job; parts come later.

    `other_stages`: of each rank that is a pipeline, which has the prices of its slowest stage, the
    seconds of its other stages and its boundaries over those; empty where no rank is one.
    """

    kinds: tuple[GroupKind, ...]
    groups: tuple[TreeGroup, ...]
    other_stages: tuple[float, ...] = ()

    @property
    def most_other_stages(self) -> float:
        """Return the largest of `other_stages`, by which whole steps are priced."""
        return max(self.other_stages, default=0.0)

    @property
    def num_ranks(self) -> int:
        """Count the ranks of the job."""
        return self.groups[0].stop - self.groups[0].first

    @cached_property
    def options(self) -> tuple[tuple[int, GroupPrice], ...]:
        """Return every (kind, price), kinds in order: what a sequence can be given to."""
        return tuple((k, price) for k, kind in enumerate(self.kinds) for price in kind.prices)

    @cached_property
    def longest_sequence(self) -> int:
        """Return the longest sequence that any group can hold, in tokens."""
        return max((longest_sequence(price) for _, price in self.options), default=0)

    def has_room(self, counts: Sequence[int]) -> bool:
        """Return whether there are as many groups of each kind as `counts` says, no two with a rank
        in common."""
        # Kinds come from the whole to its parts, so that a kind's count is known when it is its
        # turn.
        free = [1] + [0] * (len(self.kinds) - 1)
        for number, kind in enumerate(self.kinds):
            # What is not used is divided, into groups of smaller kinds.
            divided = free[number] - counts[number]
            if divided < 0:
                return False
            for part, count in kind.parts.items():
                free[part] += divided * count
        return True

    def placed(self, counts: Sequence[int]) -> dict[int, list[int]] | None:
        """Find groups: as many of each kind as `counts` says, no two with a rank in common.

        Groups of one kind divide alike, so the first ones of each kind are as good as any.

        Returns:
            Numbers of groups for each kind that is used; None where there are not so many.
        """
        left = list(counts)
        free: dict[int, list[int]] = {0: [0]}
        found: dict[int, list[int]] = {}
        for number in range(len(self.kinds)):
            # The first groups by rank, so that equal counts always have equal places.
            here = sorted(free.pop(number, []), key=lambda g: self.groups[g].first)
            if left[number] > len(here):
                return None
            if left[number]:
                found[number] = here[: left[number]]
            # What is not used is divided, and gives its parts to kinds further down.
            for group in here[left[number] :]:
                for part in self.groups[group].parts:
                    free.setdefault(self.groups[part].kind, []).append(part)
        return found


def step_seconds(seconds: Sequence[float], other_stages: float) -> float:
    """Return the seconds of micro-batches in a row through a pipeline.

    The step is over when the slowest stage has done all and the longest micro-batch has passed
    through the others too.  That is exact in a flow shop of equal stages (Pinedo, Scheduling,
    section 6.1, proportionate flow shops), and at most some percent too long for 1F1B of
    micro-batches that are sorted by length.

    Args:
        seconds: of each micro-batch on the slowest stage.
        other_stages: of the pipeline, as in `GroupTree`.
    """
    return sum(seconds) + other_stages * max(seconds, default=0.0)


def nested(parts: Sequence[Nest]) -> Nest:
    """Nest a row of groups by halves, the first half with a power of two groups."""
    if len(parts) == 1:
        return parts[0]
    # The largest power of two below the number of parts.
    first = 1 << ((len(parts) - 1).bit_length() - 1)
    return nested(parts[:first]), nested(parts[first:])


def ranks_of(nest: Nest) -> tuple[int, ...]:
    """Return the ranks of a group, in order."""
    if isinstance(nest, int):
        return (nest,)
    return tuple(rank for part in nest for rank in ranks_of(part))


def make_tree(nest: Nest, prices_of: PricesOf) -> GroupTree:
    """Number all groups of a nest and find groups of equal kind.

    Args:
        nest: whose ranks are 0 to n - 1, in order.
        prices_of: called once for each group.
    Raises:
        ValueError: the ranks are not in a row.
    """
    if ranks_of(nest) != tuple(range(len(ranks_of(nest)))):
        raise ValueError("the ranks of a nest are 0, 1, 2 .. in this order")
    kinds: dict[Hashable, int] = {}
    made: list[tuple[int, tuple[GroupPrice, ...], Counter[int]]] = []
    groups: list[TreeGroup] = []

    # Number the parts before the whole; groups of equal name and parts are of one kind.
    def visit(part: Nest) -> int:
        inner = () if isinstance(part, int) else tuple(visit(p) for p in part)
        ranks = ranks_of(part)
        name, prices = prices_of(ranks)
        of_parts = tuple(groups[i].kind for i in inner)
        key = (name, of_parts)
        if key not in kinds:
            kinds[key] = len(made)
            made.append((len(ranks), _useful(prices), Counter(of_parts)))
        groups.append(TreeGroup(ranks[0], ranks[-1] + 1, kinds[key], inner))
        return len(groups) - 1

    visit(nest)
    # Parts were numbered before what they are parts of: turned round, the whole is first.
    last_kind, last_group = len(made) - 1, len(groups) - 1
    return GroupTree(
        tuple(
            GroupKind(size, prices, {last_kind - k: count for k, count in parts.items()})
            for size, prices, parts in reversed(made)
        ),
        tuple(
            TreeGroup(g.first, g.stop, last_kind - g.kind, tuple(last_group - p for p in g.parts))
            for g in reversed(groups)
        ),
    )


def _useful(prices: tuple[GroupPrice, ...]) -> tuple[GroupPrice, ...]:
    """Leave out prices without room for any sequence, and prices never better than another price of
    the group."""
    held = [(price, longest_sequence(price)) for price in prices]
    usable = [price for price, longest in held if longest > 0]
    if len(usable) < 2:
        return tuple(usable)
    most = max(longest for _, longest in held)
    # Compared at lengths evenly spaced by ratio, the longest that fits among them.
    lengths = np.unique(np.geomspace(1, most, _COMPARED_LENGTHS).round())
    return undominated(usable, lengths)
