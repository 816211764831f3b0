"""How much of a buffer each member of a group owns, where their uplinks differ."""

from __future__ import annotations

from collections.abc import Sequence


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
