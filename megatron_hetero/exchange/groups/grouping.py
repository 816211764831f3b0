"""Reduce-scatters from groups of holders: who adds what in which round.

A group first reduces within each of its members, so that each has the member's sum somewhere; then
the members reduce among each other.  Each range leaves a member once, on its way to its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, batched
from math import ceil

import numpy as np

from megatron_hetero.exchange.plan import ExchangePlan, Ints, Owned, Purpose, plan_of


@dataclass(frozen=True)
class Grouping:
    """Holders and groups of holders, which reduce among themselves.

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
    sums: list[RangeSums] = []
    # Sums stay arrays up to the plan's table: one for each owner and round.
    final = reduce_scatter(size, group, sums.append, owners)
    given = final.owned() if owners is None else tuple(owners)
    none = np.empty((0, 5), np.int64)
    table = np.concatenate([none, *(found.rows() for found in sums)])
    return plan_of(name, purpose, len(holders_of(group)), size, table, given)


@dataclass(frozen=True, eq=False)
class RangeSums:
    """Ranges added up by the receivers in a round from several senders.

    Attributes:
        round: of the exchange.
        senders: [sender, range]; those of a range send at once.
        receivers: [range].
        starts, stops: [range], elements.
    """

    round: int
    senders: Ints
    receivers: Ints
    starts: Ints
    stops: Ints

    def rows(self) -> Ints:
        """Return the transfers: [transfer, (round, source, destination, start, stop)]."""
        made = np.empty((*self.senders.shape, 5), np.int64)
        columns = (self.round, self.senders, self.receivers, self.starts, self.stops)
        for number, column in enumerate(columns):
            made[..., number] = column
        return made.reshape(-1, 5)


@dataclass(frozen=True, eq=False)
class Ownership:
    """A buffer cut into pieces, and who has the sum of each.

    Attributes:
        edges: [piece + 1], elements, rising.
        holders: [piece].
    """

    edges: Ints
    holders: Ints

    def at(self, elements: Ints) -> Ints:
        """Return who has each of some elements."""
        return self.holders[np.searchsorted(self.edges, elements, "right") - 1]

    def owned(self) -> tuple[Owned, ...]:
        """Return the pieces, neighbours of one holder joined."""
        is_new = np.append(True, self.holders[1:] != self.holders[:-1])
        starts = self.edges[:-1][is_new]
        stops = np.append(starts[1:], self.edges[-1])
        rows = zip(starts.tolist(), stops.tolist(), self.holders[is_new].tolist(), strict=True)
        return tuple(Owned(*row) for row in rows)


def reduce_scatter(
    size: int,
    group: Grouping | int,
    add: Callable[[RangeSums], None],
    owners: Sequence[Owned] | None = None,
) -> Ownership:
    """Make the rounds of a reduce-scatter; return who has the sums then.

    Args:
        size: elements of the buffer, > 0.
        group: of all its holders.
        add: called with all that is added, piece by piece.
        owners: of all elements, where they are given; else the shares say.
    """
    given = None
    if owners is not None:
        # Empty parts would make two edges equal, and `Ownership.at` needs rising ones.
        parts = sorted(owned for owned in owners if owned.stop > owned.start)
        edges = [part.start for part in parts] + [size]
        given = Ownership(np.array(edges, np.int64), np.array([part.holder for part in parts]))
    return _reduced(size, group, add, given)[0]


def _reduced(
    size: int, group: Grouping | int, add: Callable[[RangeSums], None], given: Ownership | None
) -> tuple[Ownership, int]:
    """Make the rounds of a group; return who has its sums then, and the rounds taken."""
    # A single holder has its own buffer already.
    if isinstance(group, int):
        return Ownership(np.array([0, size]), np.array([group])), 0
    inside = [_reduced(size, member, add, given) for member in group.members]
    # Members reduce within themselves at the same time; the slowest sets the first round here.
    num, first = len(inside), max(rounds for _, rounds in inside)
    if num == 1:
        return inside[0]
    # Cut wherever any member's owners change: a piece has one owner in each member then.
    known = [division.edges for division, _ in inside]
    edges = np.unique(np.concatenate(known if given is None else [*known, given.edges]))
    starts, widths = edges[:-1], np.diff(edges)
    # [member, piece]: the holder with the member's sum of the piece.
    having = np.stack([division.at(starts) for division, _ in inside])
    cuts = _cuts(group, starts, widths, given)
    at_once = 1 if group.is_ring else group.num_senders or num
    # [range] of this owner's parts of all pieces; empty parts leave the list.
    for owner in range(num):
        low, high = starts + cuts[owner], starts + cuts[owner + 1]
        has_any = high > low
        low, high, own = low[has_any], high[has_any], having[:, has_any]
        # The order starts after the owner, so that senders of one round differ between owners.
        away = [(owner + step) % num for step in range(1, num)]
        for at, senders in enumerate(batched(away, at_once)):
            # A ring hands the sum to the next member; the last of them is the owner.
            there = own[(senders[0] + 1) % num if group.is_ring else owner]
            add(RangeSums(first + at, own[list(senders)], there, low, high))
    # [piece, member] flattened: pieces in order, and in each piece the members' parts in order.
    kept = np.diff(cuts, axis=0).T.ravel() > 0
    low = (starts + cuts[:-1]).T.ravel()[kept]
    rounds = first + ceil((num - 1) / at_once)
    return Ownership(np.append(low, size), having.T.ravel()[kept]), rounds


def _cuts(group: Grouping, starts: Ints, widths: Ints, given: Ownership | None) -> Ints:
    """Cut pieces between members: [member + 1, piece], from 0 to the width.

    A piece whose owner is given and in one of the members is that member's alone.
    """
    parts = np.array([0.0, *accumulate(group.shares)])
    # Rounded edges of neighbours are equal, so that parts neither overlap nor leave a gap.
    cuts: Ints = np.rint(parts[:, None] / parts[-1] * widths).astype(np.int64)
    if given is None:
        return cuts
    member_of = {h: i for i, member in enumerate(group.members) for h in holders_of(member)}
    # -1 is an owner outside this group, whose piece is cut by shares.
    owner = np.array([member_of.get(holder, -1) for holder in given.at(starts).tolist()])
    # The edge jumps from 0 to the whole width at the owner: all other members get nothing.
    whole = np.where(np.arange(len(parts))[:, None] > owner, widths, 0)
    cuts[:, owner >= 0] = whole[:, owner >= 0]
    return cuts
