"""Options of a stage not needed by any least chain, left out of the table of chains.

Another option takes no more of the cluster, and no more time at any place of a chain.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_hetero.bounds.chains.stages import ChainStageOptions, Floats, Ints


def needed_options(
    options: ChainStageOptions, steps: Ints, fewest_sequences: int, cut_s: float
) -> tuple[ChainStageOptions, Ints]:
    """Return options that chains of `fewest_sequences` or more may need, and the options' rows of
    `steps`.

    A stage of n sequences takes n rate + update by itself and t on the way of others; it is
    replaced by another of as many layers if that makes neither longer, boundaries on both sides
    included, nor takes more along any axis.

    Args:
        steps: what a stage of each kind takes along the axes of the table, [kind, axis].
        cut_s: chains that take longer do not count.
    """
    # Options that take longer than any chain that counts are possible for none.
    own_s, time_s = _own_s(options, fewest_sequences), options.time_s.copy()
    late = own_s + options.sync_s[:, :, None, :] > cut_s
    time_s[late] = np.inf
    # What replacing one kind by another adds at the boundaries.
    # [kind, other] both: `kind` stands where `other` did.
    excess_s, far_rate_s = _crossings(options)
    num = len(options.width)
    kept = list(range(num))
    # Drop a kind if another one that is no larger is no worse for all layers.
    for other in range(num):
        for kind in kept:
            smaller = bool((steps[kind] <= steps[other]).all())
            if kind == other or not smaller or not np.isfinite(excess_s[kind, other]):
                continue
            extra_s = excess_s[kind, other]
            # Worse somewhere: on the way of others, in rate, by itself, or in its exchange.
            with np.errstate(invalid="ignore"):
                worse = ~late[other] & (
                    (options.time_s[kind] + extra_s > options.time_s[other])
                    | (options.rate_s[kind] > options.rate_s[other])
                    | (own_s[kind] + extra_s > own_s[other])
                    | _is_later(options, own_s, kind, other)
                )
                # Links that are busier than before may set the pace themselves.
                if far_rate_s[kind, other]:
                    busy_s = fewest_sequences * far_rate_s[kind, other]
                    worse |= ~late[other] & (
                        busy_s + options.time_s[kind] + extra_s
                        > fewest_sequences * options.rate_s[other]
                    )
            if not worse.any():
                kept.remove(other)
                break
    # Leave out kinds with which nothing is possible.
    kept = [kind for kind in kept if np.isfinite(time_s[kind]).any()]
    rows = np.array(kept, np.int64)
    few = replace(
        options,
        gpu_class=options.gpu_class[rows],
        width=options.width[rows],
        time_s=time_s[rows],
        rate_s=np.where(np.isinf(time_s[rows]), np.inf, options.rate_s[rows]),
        update_s=options.update_s[rows],
        sync_s=options.sync_s[rows],
        trip_s=options.trip_s[np.ix_(rows, rows)],
        send_rate_s=options.send_rate_s[np.ix_(rows, rows)],
    )
    return few, steps[rows]


def _own_s(options: ChainStageOptions, num_sequences: int) -> Floats:
    found: Floats = num_sequences * options.rate_s + options.update_s[:, :, None, :]
    return found


def _is_later(options: ChainStageOptions, own_s: Floats, kind: int, other: int) -> Floats:
    """Return whether the exchange may cut off a stage of `kind` but not a stage of `other`."""
    later: Floats = own_s[kind] + options.sync_s[kind][:, None] > (
        own_s[other] + options.sync_s[other][:, None]
    )
    return later


def _crossings(options: ChainStageOptions) -> tuple[Floats, Floats]:
    """Return two arrays [kind, other] for stages of `kind` in the place of `other`: the most
    seconds added to the boundaries there and back; and the longest seconds per sequence of links
    that are then busy longer."""
    num = len(options.width)
    excess_s, far_rate_s = np.zeros((num, num)), np.zeros((num, num))
    # Boundaries on both sides: sending to each kind behind, and receiving from each kind in front.
    for trip_s, send_rate_s in (
        (options.trip_s, options.send_rate_s),
        (options.trip_s.T, options.send_rate_s.T),
    ):
        # [kind, other, neighbour]: neighbours that a stage of `other` may have.
        possible = np.isfinite(trip_s)[None]
        with np.errstate(invalid="ignore"):
            more_s = np.where(possible, trip_s[:, None] - trip_s[None], 0.0)
        # The worst of them counts, if it makes the boundary longer.
        excess_s += more_s.max(axis=2, initial=0.0)
        longer = possible & (send_rate_s[:, None] > send_rate_s[None])
        busy_s = np.where(longer, send_rate_s[:, None], 0.0)
        far_rate_s = np.maximum(far_rate_s, busy_s.max(axis=2, initial=0.0))
    return excess_s, far_rate_s
