"""A composition of a fleet, simulated."""

from __future__ import annotations

from megatron_hetero.serving.compose.problem import Composition
from megatron_hetero.serving.fleet.offers import Fleet
from megatron_hetero.serving.fleet.plan import ClassForecast, FleetForecast
from megatron_hetero.serving.fleet.pools import link_between
from megatron_hetero.serving.simulate.outcome import ClassOutcome, FleetOutcome
from megatron_hetero.serving.simulate.queue import ReplicaQueue
from megatron_hetero.serving.simulate.router import Policy
from megatron_hetero.serving.simulate.run import FleetRun, Observer, SimulatedReplica
from megatron_hetero.serving.simulate.transfer import Transfers

LEAST_REQUESTS, MOST_REQUESTS = 500, 1200
LEAST_SECONDS = 20.0
"""Requests and seconds of arrivals to simulate: queues take the time of some requests to fill."""


def simulate(
    fleet: Fleet,
    found: Composition,
    load: float = 1.0,
    seconds: float | None = None,
    seed: int = 0,
    policy: Policy = "least-load",
    observe: Observer | None = None,
) -> tuple[FleetOutcome, float]:
    """Serve some seconds of the workload; return what came of it, and the seconds.

    Args:
        fleet: prices and classes.
        found: how many replicas of each offer run, and what each serves.
        load: multiple of the workload's rates.
        seconds: of arrivals; None: as many as bring 500 requests, or 20.
        seed: of arrivals and lengths.
        policy: of the router.
        observe: sees the replicas at each event.
    """
    # Requests per second at this load.
    rate = load * sum(fleet.mix.demand)
    # At least 500 requests, and some 20 s unless these would bring more than 1200.
    usual_s = max(LEAST_REQUESTS / rate, min(LEAST_SECONDS, MOST_REQUESTS / rate))
    span_s = seconds or usual_s
    requests = fleet.mix.arrivals(span_s, seed, load)
    run = FleetRun(
        simulated_replicas(fleet, found),
        fleet.mix,
        _transfers(fleet),
        fleet.served.kv_bytes_per_token,
        policy,
        seed,
        found.flows,
    )
    return run.run(requests, observe), span_s


def simulated_replicas(fleet: Fleet, found: Composition) -> list[SimulatedReplica]:
    """Return fresh replicas, in the order of `placed_replicas`."""
    replicas = []
    # Tokens that all prompts of a class begin with, by class.
    shared = [round(c.input_tokens.mean * c.shared_prefix) for c in fleet.mix.classes]
    for name in sorted(found.counts):
        offered, count = fleet.offered[name], found.counts[name]
        # A pipeline has a batch under way on each stage.
        num_lanes = len(offered.shape.pipeline.stages)
        for _ in range(count):
            queue = ReplicaQueue(
                offered.rates.price,
                offered.rates.kv_tokens,
                fleet.engine.block_tokens,
                fleet.engine.max_batched_tokens,
                fleet.engine.max_sequences * num_lanes,
                num_lanes,
                offered.phase == "prefill",
                shared,
            )
            # Copies of an offer get equal parts of its rates.
            rates = tuple(rate / count for rate in found.rates[name])
            replicas.append(SimulatedReplica(queue, offered.phase, offered.shape.place, rates))
    return replicas


def forecast_of(outcome: FleetOutcome, load: float, seconds: float, seed: int) -> FleetForecast:
    """Return the part of an outcome that a plan keeps."""
    return FleetForecast(
        load, seconds, seed, outcome.tokens_per_s, outcome.overall.attainment,
        outcome.num_preemptions, tuple(map(_class, outcome.classes)),
    )  # fmt: skip


def _class(part: ClassOutcome) -> ClassForecast:
    first, between = part.first_token_s, part.between_tokens_s
    return ClassForecast(
        part.name, part.num_requests, first.p50, first.p99, between.p50, between.p99,
        part.attainment,
    )  # fmt: skip


def _transfers(fleet: Fleet) -> Transfers:
    links = {}
    for one in fleet.pools:
        for other in fleet.pools:
            # Inside the only machine of a pool its own link carries the hand-over.
            link = link_between(fleet.cluster, one, other) or one.link
            links[one.name, other.name] = link
    return Transfers(fleet.wires, links)
