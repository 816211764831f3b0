"""Shares of a sequence for members that are not alike.

With two symmetric chunks for each member causal attention costs it about as much as its tokens
times the mean number of keys, and the rest as much as its tokens: both grow with its tokens.  The
time of the slowest is least where n_r = min(cap_r, lambda / (e_r + q_r p)), sum n_r = S (section 5
of HexiSeq's setting, arXiv 2605.07569; p = S / 2 where attention is causal).  Shares therefore
change with the length where attention and products run at unlike speeds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hetero.errors import InfeasiblePlanError, PlanFormatError
from megatron_hetero.sequences.price.group_price import Floats


def pairs_per_token(lengths: Floats, window: int | None = None) -> Floats:
    """Return the keys that a query of each sequence meets, on average.

    Args:
        lengths: shape [sequence], tokens.
        window: keys that a query sees at most, itself among them; None is all before it.
    """
    if window is None:
        return np.asarray(lengths / 2)
    seen = np.minimum(lengths, window)
    return np.asarray(seen - seen * seen / (2 * np.maximum(lengths, 1)))


def balanced_shares(costs: Floats, caps: Floats, lengths: Floats) -> Floats:
    """Divide each sequence to minimize the time of the slowest member.

    Args:
        costs: seconds of each member for a token, shape [member, sequence].
        caps: tokens that each member can hold, shape [member, sequence].
        lengths: tokens, shape [sequence].
    Returns:
        Tokens, shape [member, sequence], not rounded; not a number where the members together
        cannot hold a sequence.
    """
    # Members in the order in which they are full as lambda grows.
    full_at = costs * caps
    order = np.argsort(full_at, axis=0, kind="stable")
    costs, caps, full_at = (np.take_along_axis(a, order, axis=0) for a in (costs, caps, full_at))
    # Tokens a second of this member and all that are full later.
    speed = (1 / costs)[::-1].cumsum(axis=0)[::-1]
    # Tokens that the members before hold when they are full.
    held = np.concatenate([np.zeros((1, caps.shape[1])), caps.cumsum(axis=0)[:-1]])
    # With the first i members full, the rest share what is left at one lambda.
    level = np.maximum(lengths[None, :] - held, 0.0) / speed
    is_enough = level <= full_at * (1 + 1e-12)
    # The first member that is not full at the level decides lambda.
    first = np.argmax(is_enough, axis=0)
    chosen = np.take_along_axis(level, first[None, :], axis=0)
    shares = np.minimum(caps, chosen / costs)
    # Full members alone do not hold the sequence.
    shares[:, ~is_enough.any(axis=0)] = np.nan
    # Back into the order in which members came.
    found = np.empty_like(shares)
    np.put_along_axis(found, order, shares, axis=0)
    return found


def whole_shares(shares: Sequence[float], length: int, caps: Sequence[float]) -> tuple[int, ...]:
    """Round the shares of a sequence to whole tokens: each is cut, and what is left goes to members
    with room, the largest remainders first.

    Args:
        shares: of each member, which sum to `length`.
        length: tokens of the sequence.
        caps: tokens that each member can hold.
    Raises:
        PlanFormatError: the shares do not add up to the length.
        InfeasiblePlanError: no member has room for what is left.
    """
    # Shares must add up to the sequence.
    if abs(sum(shares) - length) > 1e-6 * length + 1e-6:
        raise PlanFormatError(
            f"shares {', '.join(f'{s:g}' for s in shares)} add up to {sum(shares):g}, and the "
            f"sequence has {length} tokens"
        )
    # Cut to whole tokens, then hand out the rest by remainder, as far as memory goes.
    # The tolerance keeps a share of 2.9999999 from losing a token.
    whole = [int(s + 1e-9) for s in shares]
    order = sorted(range(len(whole)), key=lambda r: (whole[r] - shares[r], r))
    left = length - sum(whole)
    while left > 0:
        before = left
        for r in order:
            if left > 0 and whole[r] + 1 <= caps[r] + 1e-9:
                whole[r] += 1
                left -= 1
        if left == before:
            raise InfeasiblePlanError(
                f"{left} tokens of a sequence of {length} have no room: members hold "
                f"{', '.join(f'{c:.0f}' for c in caps)}"
            )
    return tuple(whole)
