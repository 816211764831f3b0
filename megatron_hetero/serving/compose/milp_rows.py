"""The columns and rows of the mixed integer programme in rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite

from megatron_hetero.serving.compose.problem import Composing


@dataclass
class _TripletRows:
    """Rows of a programme, as triplets."""

    values: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def add(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        """Add a row: bounds of a sum of (column, factor)."""
        for column, value in terms:
            self.values.append(value)
            self.rows.append(len(self.lower))
            self.columns.append(column)
        self.lower.append(lower)
        self.upper.append(upper)


class MilpRows:
    """Columns and rows of a problem.

    Columns: replicas of each offer, machines of each kind, rates by (offer, class), requests by
    (route, class), flows by (route, sender, receiver, class), the scale, which offers are used.
    """

    def __init__(self, problem: Composing, is_cost: bool) -> None:
        self.problem, self.is_cost = problem, is_cost
        self._size = 0
        self.is_integer: list[bool] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.rows = _TripletRows()
        p = problem
        available = {m.name: m.available for m in p.machines}
        # [offer]: bounds of the counts keep the integer programme small.
        self.most = [self._most_copies(i, available) for i in range(len(p.offers))]
        self.count = [self._column(True, 0, most) for most in self.most]
        self.machine = {m.name: self._column(True, 0, m.available) for m in p.machines}
        # A rate has a column only where the offer serves the class and fits the machines.
        self.rate = {
            (i, w): self._column(False, 0, inf)
            for i, offer in enumerate(p.offers)
            for w, h in enumerate(offer.rates)
            if h > 0 and p.demand[w] > 0 and self.most[i]
        }
        classes = range(len(p.demand))
        self.request = {
            (r, w): self._column(False, 0, inf) for r in range(len(p.routes)) for w in classes
        }
        # The cheapest fleet serves the demand once; the other goal leaves the multiple open.
        self.scale = self._column(False, 1.0 if is_cost else 0.0, 1.0 if is_cost else inf)
        self.flow: dict[tuple[int, str, str, int], int] = {}
        self._add_time_and_places()
        self._add_routes()
        self._add_flows()
        self._add_choices()

    def _column(self, is_integer: bool, lower: float, upper: float) -> int:
        self.is_integer.append(is_integer)
        self.lower.append(lower)
        self.upper.append(upper)
        self._size += 1
        return self._size - 1

    def _most_copies(self, i: int, available: dict[str, int]) -> int:
        """Count the replicas of an offer that fit on all machines."""
        p = self.problem
        fits = [
            r.per_machine * available[r.machine] // p.offers[i].uses[r.name]
            for r in p.resources
            if p.offers[i].uses.get(r.name, 0)
        ]
        return min(fits, default=1)

    def _add_time_and_places(self) -> None:
        p = self.problem
        # Time: a class takes its rate over the rate alone; all take the part that may be used.
        for i, offer in enumerate(p.offers):
            terms = [
                (self.rate[i, w], 1 / h) for w, h in enumerate(offer.rates) if (i, w) in self.rate
            ]
            self.rows.add([*terms, (self.count[i], -p.utilization)], -inf, 0.0)
        # Places: what replicas take of a resource, no more than the machines in use have.
        for resource in p.resources:
            used = [
                (self.count[i], float(offer.uses[resource.name]))
                for i, offer in enumerate(p.offers)
                if offer.uses.get(resource.name, 0)
            ]
            held = (self.machine[resource.machine], -float(resource.per_machine))
            self.rows.add([*used, held], -inf, 0.0)
        if isfinite(p.budget_per_hour):
            self.rows.add(self._prices(), -inf, p.budget_per_hour)

    def _prices(self) -> list[tuple[int, float]]:
        p = self.problem
        prices = [(self.count[i], offer.price_per_hour) for i, offer in enumerate(p.offers)]
        return prices + [(self.machine[m.name], m.price_per_hour) for m in p.machines]

    def _add_routes(self) -> None:
        """Add: each class comes by its routes, and passes each phase of the route that it takes."""
        p = self.problem
        for w, demanded in enumerate(p.demand):
            taken = [(self.request[r, w], 1.0) for r in range(len(p.routes))]
            # What the routes bring of a class is the demand, times the scale.
            self.rows.add([*taken, (self.scale, -demanded)], 0.0, 0.0)
            # Every phase of a route serves what the route brings.
            for phase, route in p.route_of.items():
                served = [
                    (self.rate[i, w], 1.0) for i in p.of_phase(phase) if (i, w) in self.rate
                ]  # fmt: skip
                self.rows.add([*served, (self.request[route, w], -1.0)], 0.0, 0.0)

    def _add_flows(self) -> None:
        """Add the traffic between places from phase to phase, limited by wires."""
        p = self.problem
        if not p.wires:
            return
        for number, route in enumerate(p.routes):
            for before, after in pairwise(route):
                for w in range(len(p.demand)):
                    self._add_flows_of(number, before, after, w)
        for wire in p.wires:
            # Seconds of the wire in each second: by hand-overs between phases, then by pipelines.
            moved = [
                (column, p.hand_over_bytes[w] / wire.bytes_per_s)
                for (_, sender, receiver, w), column in self.flow.items()
                if (sender, receiver) in wire.pairs
            ]
            for i, offer in enumerate(p.offers):
                sizes = offer.carried(wire)
                moved += [
                    (self.rate[i, w], size / wire.bytes_per_s)
                    for w, size in enumerate(sizes)
                    if size and (i, w) in self.rate
                ]
            if moved:
                self.rows.add(moved, -inf, 1.0)

    def _add_flows_of(self, route: int, before: str, after: str, w: int) -> None:
        p = self.problem
        # Place -> columns of the rates there, for the phase before and the phase after.
        sides: list[dict[str, list[int]]] = [{}, {}]
        for side, phase in zip(sides, (before, after), strict=True):
            for i in p.of_phase(phase):
                if (i, w) in self.rate:
                    side.setdefault(p.offers[i].place, []).append(self.rate[i, w])
        senders, receivers = sides
        # (sender, receiver) -> requests per second handed over.
        columns = {
            (a, b): self._column(False, 0, inf) for a in sorted(senders) for b in sorted(receivers)
        }
        # What a place sends is what its replicas serve, and so with what a place receives.
        for a, rates in senders.items():
            sent = [(columns[a, b], 1.0) for b in receivers]
            self.rows.add([*sent, *((r, -1.0) for r in rates)], 0.0, 0.0)
        for b, rates in receivers.items():
            taken = [(columns[a, b], 1.0) for a in senders]
            self.rows.add([*taken, *((r, -1.0) for r in rates)], 0.0, 0.0)
        self.flow |= {(route, a, b, w): column for (a, b), column in columns.items()}

    def _add_choices(self) -> None:
        """Add the conflicts between offers, the equal numbers, and the classes that stay whole."""
        p = self.problem
        place = {offer.name: i for i, offer in enumerate(p.offers)}
        pairs = [(place[a], place[b]) for a, b in p.conflicts if a in place and b in place]
        used: dict[int, int] = {}
        for i in sorted({i for pair in pairs for i in pair}):
            # 1 if the offer runs at all: its count is at most its most copies times this.
            used[i] = self._column(True, 0, 1)
            self.rows.add([(self.count[i], 1.0), (used[i], -float(self.most[i]))], -inf, 0.0)
        for a, b in pairs:
            self.rows.add([(used[a], 1.0), (used[b], 1.0)], -inf, 1.0)
        for one, other in p.equal_counts:
            terms = [(self.count[i], 1.0) for i in p.of_phase(one)]
            terms += [(self.count[i], -1.0) for i in p.of_phase(other)]
            self.rows.add(terms, 0.0, 0.0)
        if p.whole_classes:
            self._keep_classes_whole()

    def _keep_classes_whole(self) -> None:
        p = self.problem
        for w in range(len(p.demand)):
            chosen = []
            # 1 if the offer takes requests of the class, in the order of the rates.
            for (i, number), rate in self.rate.items():
                if number != w:
                    continue
                takes = self._column(True, 0, 1)
                chosen.append((takes, 1.0))
                # A rate is at most what all copies of the offer serve.
                most = self.most[i] * p.offers[i].rates[w]
                self.rows.add([(rate, 1.0), (takes, -most)], -inf, 0.0)
            # No more offers than phases on the longest route; in each phase, one.
            self.rows.add(chosen, 0.0, float(max(len(route) for route in p.routes)))
            for phase in p.route_of:
                of_phase = set(p.of_phase(phase))
                mine = [i for (i, number) in self.rate if number == w]
                terms = [c for i, c in zip(mine, chosen, strict=True) if i in of_phase]
                if terms:
                    self.rows.add(terms, 0.0, 1.0)
