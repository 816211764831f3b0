"""Reduce-scatters from groups of holders: who adds what in which round.

A group first reduces within each of its members, so that each has the member's sum somewhere; then
the members reduce among each other.  Each range leaves a member once, on its way to its owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil

from megatron_hetero.exchange.plan import ExchangePlan, Owned, Purpose, plan_of

_Row = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Grouping:
    """Holders and groups of holders that reduce among each other.

    Attributes:
        members: holders, or groups.
        shares: of every range, the parts whose owners are in each member; their sum is 1.
        num_senders: members that send to one owner in a round; 0: all of them.
        is_ring: each range goes from member to member instead, and ends with its owner.
    """

    members: tuple[Grouping | int, ...]
    shares: tuple[float, ...]
    num_senders: int = 0
    is_ring: bool = False


def even(members: Sequence[Grouping | int], *, is_ring: bool = False) -> Grouping:
    """Return a group whose members own equal parts."""
    return Grouping(tuple(members), (1 / len(members),) * len(members), is_ring=is_ring)


def holders_of(group: Grouping | int) -> tuple[int, ...]:
    """Return all holders of a group, in its order."""
    if isinstance(group, int):
        return (group,)
    return tuple(holder for member in group.members for holder in holders_of(member))


def grouped_plan(
    name: str,
    purpose: Purpose,
    size: int,
    group: Grouping | int,
    owners: Sequence[Owned] | None = None,
) -> ExchangePlan:
    """Make the plan of a group.

    Args:
        name: for people.
        purpose: all-reduce, reduce-scatter or all-gather.
        size: elements of the buffer, > 0.
        group: of all its holders, numbered from 0 on.
        owners: of all elements, where they are given; else the shares say.
    """
    made = _Reducing(size, owners)
    found, _ = made.reduce(group)
    final = _joined(found) if owners is None else tuple(owners)
    return plan_of(name, purpose, len(holders_of(group)), size, made.rows, final)


class _Reducing:
    """The rows of a reduce-scatter under construction."""

    def __init__(self, size: int, owners: Sequence[Owned] | None) -> None:
        self._size = size
        self._given = owners
        self.rows: list[_Row] = []

    def reduce(self, group: Grouping | int) -> tuple[list[Owned], int]:
        """Add the rows of a group; return who has its sums then, and the rounds taken."""
        if isinstance(group, int):
            return [Owned(0, self._size, group)], 0
        inside = [self.reduce(member) for member in group.members]
        first = max(rounds for _, rounds in inside)
        num = len(group.members)
        if num == 1:
            return inside[0]
        member_of = {h: i for i, m in enumerate(group.members) for h in holders_of(m)}
        parts = list(accumulate(group.shares))
        found: list[Owned] = []
        for start, stop, having in self._pieces([maps for maps, _ in inside]):
            given = self._given_owner(start, member_of)
            if given is None:
                cuts = [0, *(round(part / parts[-1] * (stop - start)) for part in parts)]
            else:
                cuts = [0] * (given + 1) + [stop - start] * (num - given)
            for owner in range(num):
                low, high = start + cuts[owner], start + cuts[owner + 1]
                if low == high:
                    continue
                found.append(Owned(low, high, having[owner]))
                for step in range(1, num):
                    if group.is_ring:
                        here, there = (owner + step) % num, (owner + step + 1) % num
                        at = first + step - 1
                    else:
                        here, there = (owner + step) % num, owner
                        at = first + (step - 1) // (group.num_senders or num)
                    self.rows.append((at, having[here], having[there], low, high))
        if group.is_ring:
            return found, first + num - 1
        return found, first + ceil((num - 1) / (group.num_senders or num))

    def _given_owner(self, start: int, member_of: dict[int, int]) -> int | None:
        """Return the member that has the given owner of a piece, if any member has."""
        if self._given is None:
            return None
        for owned in self._given:
            if owned.start <= start < owned.stop:
                return member_of.get(owned.holder)
        return None

    def _pieces(self, maps: Sequence[Sequence[Owned]]) -> list[tuple[int, int, list[int]]]:
        """Cut the buffer where any member changes hands, or a given owner: (start, stop, [member]
        -> who has its sum)."""
        cuts = {0, self._size} | {owned.start for own in maps for owned in own}
        if self._given is not None:
            cuts |= {owned.start for owned in self._given}
        ordered = sorted(cuts)
        at = [0] * len(maps)
        pieces = []
        for start, stop in pairwise(ordered):
            for i, own in enumerate(maps):
                while own[at[i]].stop <= start:
                    at[i] += 1
            pieces.append((start, stop, [own[at[i]].holder for i, own in enumerate(maps)]))
        return pieces


def _joined(owned: Sequence[Owned]) -> tuple[Owned, ...]:
    """Join neighbours of one owner."""
    found: list[Owned] = []
    for part in owned:
        if found and found[-1].holder == part.holder and found[-1].stop == part.start:
            found[-1] = Owned(found[-1].start, part.stop, part.holder)
        else:
            found.append(part)
    return tuple(found)
