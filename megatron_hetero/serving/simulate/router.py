"""Routers: which replica gets a request."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from megatron_hetero.serving.simulate.queue import ReplicaQueue

Policy = Literal["weights", "turns", "least-load", "one-queue"]
"""weights: at random by the plan's weights.  turns: one after the other by them, as the router of
`route` does (smooth weighted round robin).  least-load: fewest requests for its weight, as
gateways that look at their engines do.  one-queue: a request waits at the router until a replica
has nothing to do."""


class Router:
    """A router of some replicas by class.

    Args:
        weights: of each replica, by class.
        policy: how it chooses.
        seed: of chance.
    """

    def __init__(self, weights: Sequence[Sequence[float]], policy: Policy, seed: int) -> None:
        self._weights, self.policy = weights, policy
        self._rng = random.Random(seed)
        self._credits: dict[tuple[int, int], float] = {}

    def choose(self, class_index: int, queues: Sequence[ReplicaQueue]) -> int | None:
        """Return which of the replicas gets a request; None where it has to wait here.

        Raises:
            LookupError: no replica serves the class.
        """
        weights = [by_class[class_index] for by_class in self._weights]
        able = [i for i, weight in enumerate(weights) if weight > 0]
        if not able:
            raise LookupError(f"no replica serves class {class_index}")
        if self.policy == "weights":
            return self._rng.choices(able, [weights[i] for i in able])[0]
        # Each earns its weight; the replica with most credit serves, and pays the sum.
        if self.policy == "turns":
            for i in able:
                credit = self._credits.get((class_index, i), 0.0)
                self._credits[class_index, i] = credit + weights[i]
            best = max(able, key=lambda i: self._credits[class_index, i])
            self._credits[class_index, best] -= sum(weights)
            return best
        if self.policy == "one-queue":
            idle = [i for i in able if not queues[i].num_outstanding]
            return idle[0] if idle else None
        # One more request for each weight: the replica that would be least loaded.
        return min(able, key=lambda i: ((queues[i].num_outstanding + 1) / weights[i], i))
