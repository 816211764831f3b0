"""A composition of a fleet, simulated: briefly, and until its batches are full."""

from __future__ import annotations

from dataclasses import dataclass

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
"""Requests and seconds of arrivals of a brief run."""
_SETTLED_STAYS, _LEAST_STAYS = 4.0, 2.0
"""Arrivals of a settled run, in the mean time that a request takes with full batches; and those
that suffice to tell from the second half if the fleet keeps up."""
_MOST_SETTLED = 8_000
"""Requests of a settled run."""
LEAST_KEPT_UP = 0.9
"""First tokens for each arrival in the second half, below which a fleet falls behind: above is
chance.  Ends would tell less, as answers last the longer the more requests are under way."""


@dataclass(frozen=True)
class JudgedRun:
    """A simulated run, as far as it tells if a fleet keeps up.

    Attributes:
        seconds: of arrivals.
        kept_up: first tokens for each request that came in the second half; None where the run was
            too short to tell, and of a trace, whose bursts may be there.
    """

    outcome: FleetOutcome
    seconds: float
    kept_up: float | None

    def holds(self, attainment: float) -> bool:
        """Tell if every class keeps its deadlines, and the fleet does not fall behind."""
        keeps_up = self.kept_up is None or self.kept_up >= LEAST_KEPT_UP
        return keeps_up and self.outcome.holds(attainment)


def judge(fleet: Fleet, found: Composition, load: float = 1.0, seed: int = 0) -> JudgedRun:
    """Simulate a fleet until its batches are full: a brief run ends where they begin to be.

    A fleet that misses its deadlines in a brief run is not simulated for longer.

    Args:
        fleet: prices and classes.
        found: how many replicas of each offer run, and what each serves.
        load: multiple of the workload's rates.
        seed: of arrivals and lengths.
    """
    outcome, seconds = simulate(fleet, found, load, seed=seed)
    stay_s = _mean_stay_s(fleet, found)
    rate = load * sum(fleet.mix.demand)
    settled_s = min(_SETTLED_STAYS * stay_s, _MOST_SETTLED / rate)
    if seconds < settled_s and outcome.holds(fleet.mix.attainment):
        outcome, seconds = simulate(fleet, found, load, settled_s, seed)
    is_told = not fleet.mix.trace and seconds >= _LEAST_STAYS * stay_s
    return JudgedRun(outcome, seconds, outcome.kept_up if is_told else None)


def _mean_stay_s(fleet: Fleet, found: Composition) -> float:
    """Return the mean time of a request, with the batches of the plan."""
    total = 0.0
    for name, rates in found.rates.items():
        offered = fleet.offered[name]
        for kind, rate, served in zip(fleet.mix.classes, rates, offered.by_class, strict=True):
            later = max(0.0, kind.output_tokens.mean - 1) if offered.phase != "prefill" else 0.0
            # Prefill apart is a part of a request that also decodes elsewhere.
            total += rate * ((offered.phase != "decode") * served.first_token_s)
            total += rate * later * served.between_tokens_s
    return total / (found.scale * sum(fleet.mix.demand))


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
        lambda tokens: fleet.served.hand_over_bytes(tokens, fleet.engine.block_tokens),
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
                offered.rates.pool,
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


def forecast_of(run: JudgedRun, load: float, seed: int) -> FleetForecast:
    """Return the part of a run that a plan keeps."""
    outcome = run.outcome
    return FleetForecast(
        load, run.seconds, seed, outcome.tokens_per_s, outcome.overall.attainment,
        outcome.num_preemptions, tuple(map(_class, outcome.classes)), run.kept_up,
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
