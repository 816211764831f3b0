"""The exchanges of libraries by which `probe` separates the terms of a link."""

from __future__ import annotations

from megatron_hetero.exchange.groups.grouping import Grouping, even, grouped_plan
from megatron_hetero.exchange.plan import ExchangePlan, Purpose


def ring(size: int, num_holders: int, purpose: Purpose = "all_reduce") -> ExchangePlan:
    """Make a ring in the order of the holders: on a tree, from left to right, it crosses each
    uplink once in each direction, which no other order beats."""
    return grouped_plan("ring", purpose, size, even(range(num_holders), is_ring=True))


def parameter_servers(size: int, num_holders: int, purpose: Purpose = "all_reduce") -> ExchangePlan:
    """Make co-located parameter servers: every holder sends every other one the part that that one
    owns, at once."""
    return grouped_plan("parameter servers", purpose, size, even(range(num_holders)))


def halving_doubling(size: int, num_holders: int, purpose: Purpose = "all_reduce") -> ExchangePlan:
    """Make recursive halving and doubling (Thakur et al. 2005): neighbours exchange halves, then
    pairs of pairs.  Holders beyond a power of two give theirs to a neighbour first."""
    beyond = num_holders - (1 << (num_holders.bit_length() - 1))
    members: list[Grouping | int] = []
    holder = 0
    while holder < num_holders:
        # The first `beyond` pairs reduce to one holder, which leaves a power of two of members.
        if len(members) < beyond:
            members.append(Grouping((holder, holder + 1), (1.0, 0.0)))
            holder += 1
        else:
            members.append(holder)
        holder += 1
    # Each pass joins neighbours, so that halves travel the shortest way.
    while len(members) > 1:
        members = [even(members[i : i + 2]) for i in range(0, len(members), 2)]
    return grouped_plan("halving and doubling", purpose, size, members[0])
