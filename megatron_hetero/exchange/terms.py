"""GenModel's terms of an exchange among equal holders on one switch.

GenModel (arXiv 2409.04202) prices a plan at `A alpha + B beta + C gamma + D delta + max(w - w_t, 0)
B eps`: rounds, bytes on the critical link, additions and memory accesses of a device, senders to
one receiver above its threshold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_hetero.exchange.plan import ExchangePlan, Floats, Ints


@dataclass(frozen=True)
class TermCounts:
    """GenModel's A, and B, C and D as multiples of the buffer; and the most senders to one holder
    at once."""

    num_rounds: int
    sent: float
    added: float
    accessed: float
    num_senders: int


def term_counts(plan: ExchangePlan) -> TermCounts:
    """Count the terms of a plan among equal holders on one switch."""
    rounds, sources, destinations, start, stop, reduces = plan.expanded().table.T
    num, width = plan.num_holders, (stop - start).astype(np.float64)
    num_rounds = plan.num_rounds_in_all

    def most(places: Ints, values: Floats) -> float:
        # A round takes as long as its busiest holder; rounds follow each other.
        of_round = np.bincount(rounds * num + places, values, num_rounds * num)
        return float(of_round.reshape(num_rounds, num).max(axis=1).sum()) / plan.size

    adds = width * reduces
    # Pieces of one range and round are added in one pass, which reads and writes once.
    _, first = np.unique((rounds * num + destinations) * (plan.size + 1) + start, return_index=True)
    once = np.zeros(len(width))
    once[first] = 2 * adds[first]
    # Distinct (round, receiver, sender): two messages of one sender do not collide.
    pairs = np.unique(np.stack([rounds, destinations, sources], axis=1), axis=0)
    senders = np.bincount(pairs[:, 0] * num + pairs[:, 1])
    return TermCounts(
        num_rounds,
        most(sources, width),
        most(destinations, adds),
        most(destinations, adds + once),
        int(senders.max(initial=0)),
    )
