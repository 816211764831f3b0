"""The search for a fleet: the programme's answers, judged and improved by simulation.

The programme knows rates, and no waiting.  Its answers for several parts of a replica's time, and
for each way that requests may take (whole, or in two phases), are candidates; the simulator says
which of them keeps its deadlines, and to what load.  From the best one, single replicas change
their phase or are swapped for others while that helps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite

from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.serving.compose.milp import serve_cheapest, serve_most, serve_with
from megatron_hetero.serving.compose.problem import ROUTES, Composition
from megatron_hetero.serving.fleet.forecast import JudgedRun, judge, simulate
from megatron_hetero.serving.fleet.offers import Fleet
from megatron_hetero.serving.fleet.plan import Goal

# Parts of a replica's time to plan for: the less, the shorter are queues.
_UTILIZATIONS = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
# Routes to try: all, those through one replica alone, those with phases apart alone.
_WAYS = (ROUTES, ROUTES[:1], ROUTES[1:])
# Each move costs a bisection of simulations.
_MOST_MOVES = 6
_LOAD_STEPS = 5


@dataclass(frozen=True)
class FoundFleet:
    """Composition of a fleet with its simulated run.

    Attributes:
        load: multiple of the workload's rates at which it was simulated; the largest that keeps
            the deadlines, where goodput is the goal.
        at_full_time: the programme's answer with all of each replica's time, whose bound counts.
    """

    composition: Composition
    at_full_time: Composition
    run: JudgedRun
    load: float
    utilization: float


def search_fleet(
    fleet: Fleet, goal: Goal, budget_per_hour: float = inf, gap: float = 5e-3, seed: int = 0
) -> FoundFleet:
    """Find the fleet for a goal.

    Args:
        fleet: what it may be made of.
        goal: "throughput": most requests in the workload's mix, in rates alone; "goodput": most of
            them with deadlines kept in simulation; "cost": cheapest that keeps the deadlines at
            the workload's rates.
        budget_per_hour: limit of machines and GPUs.
        gap: at which the programme may stop.
        seed: of simulated arrivals.
    Raises:
        InfeasiblePlanError: no fleet serves every class, or none keeps the deadlines.
    """
    if goal == "cost":
        return _cheapest(fleet, budget_per_hour, gap, seed)
    whole = serve_most(fleet.composing(budget_per_hour), gap)
    if goal == "throughput":
        # At the rates that it was made for every queue is full; a little below they are not.
        load = 0.9 * whole.scale
        return FoundFleet(whole, whole, judge(fleet, whole, load, seed), load, 1.0)
    # Both routes together may be best in rates and still lose to one of them in queues.
    found: list[FoundFleet] = []
    for routes in _WAYS:
        try:
            made = serve_most(fleet.composing(budget_per_hour, routes=routes), gap)
        except InfeasiblePlanError:
            continue
        found.append(_goodput(fleet, made, whole, seed))
    best = max(found, key=lambda judged: judged.load)
    if best.load > 0:
        found.append(_improved(fleet, best, budget_per_hour, seed))
    return _settled(fleet, found, whole, seed)


def _settled(
    fleet: Fleet, found: list[FoundFleet], whole: Composition, seed: int
) -> FoundFleet:  # fmt: skip
    """Return the fleet with the largest load in settled runs, which brief ones are not sure to
    tell.

    Raises:
        InfeasiblePlanError: no fleet keeps the deadlines at any load.
    """
    best: FoundFleet | None = None
    # The best in brief runs first: a settled run finds no larger load.
    for judged in sorted(found, key=lambda judged: -judged.load):
        if judged.load > (best.load if best else 0.0):
            made = judged.composition
            settled = _goodput(fleet, made, whole, seed, judged.load, is_settled=True)
            if settled.load > (best.load if best else 0.0):
                best = settled
    if best is None:
        raise InfeasiblePlanError(_no_deadlines(fleet))
    return best


def _cheapest(fleet: Fleet, budget_per_hour: float, gap: float, seed: int) -> FoundFleet:
    whole = serve_cheapest(fleet.composing(budget_per_hour), gap)
    best: FoundFleet | None = None
    last: JudgedRun | None = None
    # The fullest use first: it is the cheapest, and the first that holds is taken.
    for utilization in (1.0, *_UTILIZATIONS):
        for routes in _WAYS:
            problem = fleet.composing(budget_per_hour, utilization, routes)
            try:
                made = serve_cheapest(problem, gap)
            except InfeasiblePlanError:
                continue
            # A dearer fleet need not be simulated.
            if best is not None and made.cost_per_hour >= best.composition.cost_per_hour:
                continue
            last = judge(fleet, made, seed=seed)
            if last.holds(fleet.mix.attainment):
                best = FoundFleet(made, whole, last, 1.0, utilization)
        if best is not None:
            return best
    kept = f"{last.outcome.overall.attainment:.0%}" if last else "none"
    raise InfeasiblePlanError(
        f"no fleet of these machines keeps the deadlines for {fleet.mix.attainment:.0%} of every "
        "class at the workload's rates, and keeps up with these (the last one tried: deadlines of "
        f"{kept} of all); give later deadlines, lower rates or a larger budget, or add machines"
    )


def _goodput(
    fleet: Fleet,
    made: Composition,
    whole: Composition,
    seed: int,
    most: float | None = None,
    is_settled: bool = False,
) -> FoundFleet:
    """Find the largest load at which a fleet meets all deadlines, by bisection, from `most` (None:
    its scale) down; in brief runs, or in settled ones."""
    # Between a load that holds (0 at first) and one that does not.
    low, high = 0.0, made.scale if most is None else most
    best: JudgedRun | None = None
    load = high
    for _ in range(_LOAD_STEPS):
        if is_settled:
            run = judge(fleet, made, load, seed)
        else:
            run = JudgedRun(*simulate(fleet, made, load, seed=seed), None)
        if run.holds(fleet.mix.attainment):
            low, best = load, run
        else:
            high = load
        # Closer is finer than the simulation itself.
        if high - low < 0.02 * made.scale:
            break
        load = (low + high) / 2
    # No load held: the outcome of the lightest one tried says by how much.
    if best is None:
        best = JudgedRun(*simulate(fleet, made, load, seed=seed), None)
    return FoundFleet(made, whole, best, low, 1.0)


def _improved(fleet: Fleet, start: FoundFleet, budget_per_hour: float, seed: int) -> FoundFleet:
    """Change one replica at a time, while the simulated load grows."""
    best, tried = start, 0
    # Fleets that were judged, so that moves do not lead back.
    seen = {_key(start.composition)}
    problem = fleet.composing(budget_per_hour)
    goes_on = True
    while goes_on and tried < _MOST_MOVES:
        goes_on = False
        for counts in _neighbours(fleet, best.composition):
            key = tuple(sorted(counts.items()))
            if key in seen or tried >= _MOST_MOVES:
                continue
            seen.add(key)
            made = serve_with(problem, counts)
            # Rates bound what simulation can find.
            if made is None or made.scale <= best.load:
                continue
            tried += 1
            judged = _goodput(fleet, made, best.at_full_time, seed)
            # Less is noise of the simulation.
            if judged.load > best.load * 1.005:
                best, goes_on = judged, True
                break
    return best


def _neighbours(fleet: Fleet, found: Composition) -> Iterator[dict[str, int]]:
    """Yield the fleets in which a single replica has another phase on the same GPUs."""
    by_shape: dict[str, list[str]] = {}
    for name, offered in fleet.offered.items():
        by_shape.setdefault(offered.shape.name, []).append(name)
    for name in sorted(found.counts):
        for other in by_shape[fleet.offered[name].shape.name]:
            if other != name:
                counts = dict(found.counts)
                # One replica fewer of this offer, one more of the other.
                counts[name] -= 1
                counts[other] = counts.get(other, 0) + 1
                yield {key: n for key, n in counts.items() if n}


def _key(found: Composition) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(found.counts.items()))


def _no_deadlines(fleet: Fleet) -> str:
    limits = [
        f'"{c.name}" first token in {c.first_token_s:g} s, others every {c.between_tokens_s:g} s'
        for c in fleet.mix.classes
        if isfinite(c.first_token_s) or isfinite(c.between_tokens_s)
    ]
    return (
        f"no load is so light that {fleet.mix.attainment:.0%} of every class keeps its deadlines "
        f"({'; '.join(limits)}); give later ones"
    )
