"""A fleet's story for a page: a simulated minute of its replicas, and what other deadlines cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.serving.fleet.forecast import simulate
from megatron_hetero.serving.fleet.offers import Fleet, make_fleet
from megatron_hetero.serving.fleet.pools import has_prices
from megatron_hetero.serving.fleet.search import FoundFleet, search_fleet
from megatron_hetero.serving.simulate.queue import ReplicaQueue

MINUTE_S = 60.0
NUM_PARTS = 240
FACTORS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
"""Multiples of the workload's deadlines, of which each gets a plan."""


@dataclass(frozen=True)
class FleetStory:
    """What a page shows beside a plan.

    Attributes:
        load: multiple of the workload's rates in the minute.
        under_way: by replica, the most requests that wait or run there in each part of the minute.
        costs: (multiple of the deadlines, price of an hour of the cheapest fleet; None where no
            fleet keeps the deadlines); empty without prices or without deadlines.
    """

    load: float
    under_way: tuple[tuple[int, ...], ...]
    costs: tuple[tuple[float, float | None], ...]


def story_of(fleet: Fleet, found: FoundFleet, budget_per_hour: float, seed: int) -> FleetStory:
    """Simulate a minute of a fleet, and plan for other deadlines.

    Args:
        fleet: the choices.
        found: the fleet.
        budget_per_hour: limit of machines and GPUs.
        seed: of simulated arrivals.
    """
    load = found.load or 1.0
    number = sum(found.composition.counts.values())
    parts = [[0] * NUM_PARTS for _ in range(number)]

    def observe(now: float, queues: Sequence[ReplicaQueue]) -> None:
        # The last part of the minute that an event lies in; later events are left out.
        place = int(now / MINUTE_S * NUM_PARTS)
        if place < NUM_PARTS:
            for levels, queue in zip(parts, queues, strict=True):
                levels[place] = max(levels[place], queue.num_outstanding)

    simulate(fleet, found.composition, load, MINUTE_S, seed, observe=observe)
    return FleetStory(load, tuple(map(tuple, parts)), _costs(fleet, budget_per_hour, seed))


def _costs(
    fleet: Fleet, budget_per_hour: float, seed: int
) -> tuple[tuple[float, float | None], ...]:
    """Price the cheapest fleet for multiples of the deadlines."""
    limits = [d for c in fleet.mix.classes for d in (c.first_token_s, c.between_tokens_s)]
    if not has_prices(fleet.cluster) or not any(map(isfinite, limits)):
        return ()
    return tuple((factor, _cost(fleet, factor, budget_per_hour, seed)) for factor in FACTORS)


def _cost(fleet: Fleet, factor: float, budget_per_hour: float, seed: int) -> float | None:
    classes = tuple(
        replace(
            kind,
            first_token_s=factor * kind.first_token_s,
            between_tokens_s=factor * kind.between_tokens_s,
        )
        for kind in fleet.mix.classes
    )
    mix = replace(fleet.mix, classes=classes)
    try:
        # Deadlines decide which shapes are choices at all.
        other = make_fleet(fleet.cluster, fleet.served, fleet.engine, mix)
        return search_fleet(other, "cost", budget_per_hour, seed=seed).composition.cost_per_hour
    except InfeasiblePlanError:
        return None
