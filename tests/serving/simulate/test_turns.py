"""The simulated router takes turns as the router of `route` does."""

from __future__ import annotations

import random

from megatron_hetero.serving.route.weights import ReplicaTurns, RoutedReplica
from megatron_hetero.serving.simulate.router import Router


def test_turns_are_those_of_the_router_over_http() -> None:
    rng = random.Random(5)
    for _ in range(50):
        number, kinds = rng.randint(1, 5), [f"k{i}" for i in range(rng.randint(1, 3))]
        weights = [[float(rng.choice((1, 2, 3, 7))) for _ in kinds] for _ in range(number)]
        targets = [
            RoutedReplica(str(i), "", dict(zip(kinds, row, strict=True)))
            for i, row in enumerate(weights)
        ]
        turns, router = ReplicaTurns(targets), Router(weights, "turns", 0)
        for _ in range(40):
            kind = rng.randrange(len(kinds))
            chosen = turns.next(kinds[kind])
            assert chosen is not None
            assert router.choose(kind, ()) == int(chosen.name)
