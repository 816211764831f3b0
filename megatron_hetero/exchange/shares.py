"""How much of a buffer each member of a group owns, where their uplinks differ."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from megatron_hetero.exchange.tree import LinkTree


def balanced_shares(capacities: Sequence[float]) -> tuple[float, ...]:
    """Divide ownership so that all uplinks take equally long, as far as any can.

    A member that owns s of the buffer sends the rest once and its own to all others: 1 + (n - 2) s
    buffers, and receives as many.  A member too slow for more than its 1 owns nothing.

    Args:
        capacities: bandwidth of each member, > 0.
    Returns:
        Parts, with the sum 1.

    >>> balanced_shares([4.0, 4.0, 4.0, 1.0])[3]
    0.0
    """
    # Two members exchange halves in proportion.
    num = len(capacities)
    if num <= 2:
        return tuple(capacity / sum(capacities) for capacity in capacities)
    # Indices of the members that own anything, the slowest last.
    fast = sorted(range(num), key=lambda i: -capacities[i])
    # Drop the slowest while it could not even send its one buffer in time.
    while True:
        # sum of (time * capacity - 1) / (n - 2) over those that own anything is 1
        time = (num - 2 + len(fast)) / sum(capacities[i] for i in fast)
        if time * capacities[fast[-1]] >= 1:
            break
        fast.pop()
    # What is left of each member's time beyond that buffer is its own part.
    found = [0.0] * num
    for i in fast:
        found[i] = (time * capacities[i] - 1) / (num - 2)
    total = sum(found)
    return tuple(share / total for share in found)


class Capacities:
    """Bandwidths at which the branches of a tree exchange with the rest: at most their uplinks',
    and their children's together."""

    def __init__(self, tree: LinkTree) -> None:
        self._tree = tree

    @cached_property
    def of_branch(self) -> tuple[float, ...]:
        """Return [branch] -> bytes per second."""
        tree = self._tree
        below = dict(tree.inner())
        found = [0.0] * len(tree.branches)
        # Preorder numbers put children after their parents, so that the reverse visits children
        # first.
        for number in reversed(range(len(tree.branches))):
            # Edges 2 b and 2 b + 1 are the ways up and down; the slower one limits an exchange.
            speeds = tree.bytes_per_s[2 * number : 2 * number + 2]
            found[number] = float(min(speeds))
            if number in below:
                together = sum(found[child] for child in below[number])
                found[number] = min(found[number], together)
        return tuple(found)
