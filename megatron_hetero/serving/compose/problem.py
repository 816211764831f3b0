"""What there is to choose from: replicas that could run, machines that could be rented, requests.

Rates are requests per second.  A request takes one route: a sequence of phases, each of them on one
replica that offers the phase ("both" alone, or "prefill" and then "decode").  A replica's time is
divided among classes: it serves rate r of a class in the part r / h of its time, where h is the
rate of that class alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from megatron_hetero.errors import InfeasiblePlanError, UsageError

ROUTES = (("both",), ("prefill", "decode"))
"""Routes of a request through engines: one replica does all, or prefill and decode are apart."""


@dataclass(frozen=True)
class Rentable:
    """Machines of one kind.  `price_per_hour` is that of each one in use."""

    name: str
    available: int
    price_per_hour: float = 0.0


@dataclass(frozen=True)
class Resource:
    """Places for replicas on each machine of a kind, such as GPUs."""

    name: str
    machine: str
    per_machine: int


@dataclass(frozen=True)
class Wire:
    """Bandwidth shared by all traffic between the `pairs` of places."""

    name: str
    pairs: frozenset[tuple[str, str]]
    bytes_per_s: float


@dataclass(frozen=True)
class Offer:
    """A replica that may run, any number of times.

    Attributes:
        name: unique.
        phase: of a request that the replica does.
        place: where the replica stands, for traffic between phases.
        rates: requests per second of each class alone; 0 where the replica cannot serve the class.
        uses: amounts of resources that one replica takes.
        price_per_hour: beside that of machines.
        carries: bytes that a request of each class sends between two places while the replica
            serves it, for each pair of places.
    """

    name: str
    phase: str
    place: str
    rates: tuple[float, ...]
    uses: Mapping[str, int]
    price_per_hour: float = 0.0
    carries: tuple[tuple[tuple[str, str], tuple[float, ...]], ...] = ()

    def carried(self, wire: Wire) -> tuple[float, ...]:
        """Return the bytes that a request of each class sends over a wire."""
        # Over a wire go all hops between its pairs of places.
        mine = [sizes for pair, sizes in self.carries if pair in wire.pairs]
        return tuple(map(sum, zip(*mine, strict=True))) if mine else (0.0,) * len(self.rates)


@dataclass(frozen=True)
class Composing:
    """A problem of composition.

    Attributes:
        demand: requests per second of each class; only their ratios count for a throughput.
        hand_over_bytes: of a request of each class between the phases of a route.
        conflicts: pairs of offers that may not run side by side.
        equal_counts: pairs of phases that have equally many replicas.
        utilization: part of a replica's time that may be taken.
        whole_classes: the router sends each class to replicas of one offer.
    """

    offers: tuple[Offer, ...]
    machines: tuple[Rentable, ...]
    resources: tuple[Resource, ...]
    demand: tuple[float, ...]
    class_names: tuple[str, ...]
    routes: tuple[tuple[str, ...], ...] = ROUTES
    hand_over_bytes: tuple[float, ...] = ()
    wires: tuple[Wire, ...] = ()
    conflicts: tuple[tuple[str, str], ...] = ()
    equal_counts: tuple[tuple[str, str], ...] = ()
    budget_per_hour: float = inf
    utilization: float = 1.0
    whole_classes: bool = False

    @cached_property
    def route_of(self) -> dict[str, int]:
        """Map each phase to its route."""
        return {phase: i for i, route in enumerate(self.routes) for phase in route}

    def of_phase(self, phase: str) -> list[int]:
        """Return the places in `offers` of those of a phase."""
        return [i for i, offer in enumerate(self.offers) if offer.phase == phase]

    def check(self) -> None:
        """Refuse a class that no route can serve.

        Raises:
            InfeasiblePlanError: names the classes and the phase that is missing.
            UsageError: a budget that is no amount of money.
        """
        if not self.budget_per_hour > 0:
            raise UsageError(f"a budget of {self.budget_per_hour} an hour buys nothing")
        # The first phase of each route that no offer serves; a class needs a route without one.
        lost = []
        for number, name in enumerate(self.class_names):
            lacking = [
                next(
                    (p for p in route if not any(
                        self.offers[i].rates[number] > 0 for i in self.of_phase(p)
                    )), None,
                )
                for route in self.routes
            ]  # fmt: skip
            if all(lacking):
                lost.append(f'class "{name}" (no replica for {" or ".join(map(str, lacking))})')
        if lost:
            raise InfeasiblePlanError(
                f"no replica on these GPUs can serve {', '.join(lost)}: its requests do not fit "
                "the memory beside the weights, or its deadlines are below the time of a request "
                "that is alone; give it a later deadline, shorter requests, or larger GPUs"
            )

    def without_dominated(self) -> Composing:
        """Return the problem without dominated offers.

        One offer makes another needless where some number of it takes no more of anything, costs
        no more and serves each class at least as fast.  Offers in conflicts, and those of phases
        whose numbers must be equal, stay.
        """
        # Conflicts and equal numbers could make use of an offer that is worse by itself.
        held = {name for pair in self.conflicts for name in pair}
        tied = {phase for pair in self.equal_counts for phase in pair}
        kept: list[Offer] = []
        # Only replicas of one phase in one place can stand in for each other.
        groups: dict[tuple[str, str], list[Offer]] = {}
        for offer in self.offers:
            groups.setdefault((offer.phase, offer.place), []).append(offer)
        for group in groups.values():
            useful = [o for o in group if any(o.rates)]
            for offer in useful:
                stays = offer.name in held or offer.phase in tied
                if stays or not any(_dominates(b, offer) for b in useful if b is not offer):
                    kept.append(offer)
        # The order of the offers stays, as it decides between equal answers.
        order = {offer.name: place for place, offer in enumerate(self.offers)}
        return replace(self, offers=tuple(sorted(kept, key=lambda o: order[o.name])))


def _dominates(better: Offer, worse: Offer) -> bool:
    """Tell if copies of one offer in the room and for the price of another serve as much."""
    copies = min(
        (worse.uses.get(name, 0) // amount for name, amount in better.uses.items() if amount),
        default=1,
    )
    if better.price_per_hour > 0:
        copies = min(copies, int(worse.price_per_hour / better.price_per_hour * (1 + 1e-12)))
    if copies < 1:
        return False
    if any(copies * b < w for b, w in zip(better.rates, worse.rates, strict=True)):
        return False
    if better.carries and dict(better.carries) != dict(worse.carries):
        return False
    alike = (
        copies == 1
        and better.rates == worse.rates
        and dict(better.uses) == dict(worse.uses)
        and better.price_per_hour == worse.price_per_hour
    )
    return not alike or better.name < worse.name  # of equal ones the first name stays


@dataclass(frozen=True)
class Composition:
    """An answer: which replicas run, and what each serves.

    Attributes:
        counts: replicas of each offer, by name; none that serve nothing.
        rates: requests per second, by offer and class.
        flows: requests per second handed over, by sending place, receiving place and class.
        machines: machines in use, by name.
        scale: served rates over demanded ones, the same for every class.
        cost_per_hour: of machines and replicas.
        bound: no answer has a larger scale (a lower cost).
        is_cost: whether the cost was minimised.
    """

    counts: Mapping[str, int]
    rates: Mapping[str, tuple[float, ...]]
    flows: Mapping[tuple[str, str, int], float]
    machines: Mapping[str, int]
    scale: float
    cost_per_hour: float
    bound: float
    is_cost: bool = False
    utilization: Mapping[str, float] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Return how far the answer can be from the best, relative to the answer."""
        value = self.cost_per_hour if self.is_cost else self.scale
        return abs(self.bound - value) / value if value else 0.0


def faults(problem: Composing, found: Composition, tolerance: float = 1e-6) -> list[str]:
    """List the rules of the problem that an answer breaks, in words; for tests and tools."""
    wrong: list[str] = []
    by_name = {offer.name: offer for offer in problem.offers}
    for name, count in found.counts.items():
        offer = by_name[name]
        taken = sum(r / h for r, h in zip(found.rates[name], offer.rates, strict=True) if r)
        if taken > problem.utilization * count * (1 + tolerance) + tolerance:
            wrong.append(f"{name}: {taken} of {count} replicas' time")
    for resource in problem.resources:
        used = sum(n * by_name[o].uses.get(resource.name, 0) for o, n in found.counts.items())
        if used > resource.per_machine * found.machines.get(resource.machine, 0):
            wrong.append(f"{resource.name}: {used} used")
    for number, demanded in enumerate(problem.demand):
        served = sum(
            _sum_of(found, by_name, route[0], number) for route in problem.routes
        )  # fmt: skip
        if abs(served - found.scale * demanded) > tolerance * (1 + abs(served)):
            wrong.append(f"{problem.class_names[number]}: {served} served")
        for route in problem.routes:
            through = [_sum_of(found, by_name, phase, number) for phase in route]
            if max(through) - min(through) > tolerance * (1 + max(through)):
                wrong.append(f"{problem.class_names[number]}: phases {through}")
    return wrong + _shared_faults(problem, found, by_name, tolerance)


def _shared_faults(
    problem: Composing, found: Composition, by_name: Mapping[str, Offer], tolerance: float
) -> list[str]:
    wrong = [f"{a} beside {b}" for a, b in problem.conflicts if {a, b} <= set(found.counts)]
    for one, other in problem.equal_counts:
        numbers = [
            sum(n for o, n in found.counts.items() if by_name[o].phase == p) for p in (one, other)
        ]
        if numbers[0] != numbers[1]:
            wrong.append(f"{numbers} replicas of {one} and {other}")
    for wire in problem.wires:
        moved = sum(
            rate * problem.hand_over_bytes[number]
            for (sender, receiver, number), rate in found.flows.items()
            if (sender, receiver) in wire.pairs
        )
        moved += sum(
            rate * size
            for name in found.counts
            for rate, size in zip(found.rates[name], by_name[name].carried(wire), strict=True)
        )
        if moved > wire.bytes_per_s * (1 + tolerance):
            wrong.append(f"{wire.name}: {moved} bytes/s")
    if found.cost_per_hour > problem.budget_per_hour * (1 + tolerance):
        wrong.append(f"{found.cost_per_hour} an hour")
    return wrong


def _sum_of(
    found: Composition, by_name: Mapping[str, Offer], phase: str, number: int
) -> float:  # fmt: skip
    names: Sequence[str] = [name for name in found.counts if by_name[name].phase == phase]
    return sum(found.rates[name][number] for name in names)
