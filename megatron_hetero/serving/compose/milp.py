"""The composition as one mixed integer programme in rates, solved by HiGHS.

arXiv 2502.00722 bisects the time of a batch and asks a knapsack at each; in rates the problem is
linear in the answer and needs no bisection: with r_cw the rate of class w on replicas of offer c
and y_c their number, `sum_w r_cw / h_cw <= y_c`.  Added to it: phases (a request that is prefilled
here and decoded there flows between the two), the wires that carry these flows, machines that are
rented whole, offers that exclude each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, inf, isfinite
from typing import Any

from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.serving.compose.problem import Composing, Composition

_LEAST_RATE = 1e-9
"""Fraction of the demand below which a rate is rounding error."""


def serve_most(problem: Composing, gap: float = 1e-4, time_limit_s: float = inf) -> Composition:
    """Find the replicas that serve the largest multiple of the demand.

    Args:
        problem: its budget and its machines are the limits.
        gap: relative distance from the bound at which the search may stop.
        time_limit_s: after which the best so far is taken; infinite for the same answer everywhere.
    Raises:
        InfeasiblePlanError: nothing can serve a class, or nothing fits the budget.
    """
    problem.check()
    smaller = problem.without_dominated()
    found = _MilpProblem(smaller, is_cost=False).solve(gap, time_limit_s)
    if found is None or found.scale <= 0:
        raise InfeasiblePlanError(
            f"{problem.budget_per_hour:g} an hour buys no set of replicas that serves every class; "
            "raise the budget, or leave out the class that needs the dearest machines"
        )
    return found


def serve_cheapest(problem: Composing, gap: float = 1e-4, time_limit_s: float = inf) -> Composition:
    """Find the cheapest replicas that serve the demand.

    Raises:
        InfeasiblePlanError: the machines cannot serve the demand; the message says how much of it
            they can.
    """
    problem.check()
    smaller = problem.without_dominated()
    found = _MilpProblem(smaller, is_cost=True).solve(gap, time_limit_s)
    if found is None:
        most = _MilpProblem(smaller, is_cost=False).solve(max(gap, 1e-2), time_limit_s)
        part = 0.0 if most is None else most.scale
        raise InfeasiblePlanError(
            f"these machines serve {part:.3g} times the workload's rates at most, within the "
            "deadlines and the budget; lower the rates, or add machines"
        )
    return found


def serve_with(problem: Composing, counts: Mapping[str, int]) -> Composition | None:
    """Return what given replicas serve most, and how; None if they are too many for the machines,
    or leave a class out.

    Args:
        problem: rates, machines and wires.
        counts: replicas of each offer, by name.
    """
    kept = tuple(offer for offer in problem.offers if offer.name in counts)
    smaller = replace(problem, offers=kept)
    try:
        smaller.check()
    except InfeasiblePlanError:
        return None
    programme = _MilpProblem(smaller, is_cost=False)
    # Counts are fixed by equal bounds, and the programme finds the rates alone.
    for column, offer in zip(programme.count, kept, strict=True):
        if counts[offer.name] > programme.upper[column]:
            return None
        programme.lower[column] = programme.upper[column] = float(counts[offer.name])
    return programme.solve(0.0, inf)


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


class _MilpProblem:
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

    def solve(self, gap: float, time_limit_s: float) -> Composition | None:
        """Solve for whole numbers, then again for exact rates with these numbers."""
        options: dict[str, Any] = {"mip_rel_gap": gap}
        if isfinite(time_limit_s):
            options["time_limit"] = time_limit_s
        found = self._solve(self.lower, self.upper, options)
        if found is None:
            return None
        values, bound = found
        # The first answer may be off whole numbers by the solver's tolerance.
        lower, upper = list(self.lower), list(self.upper)
        # Whole numbers are fixed, so the second programme is linear and exact in the rates.
        for column, is_integer in enumerate(self.is_integer):
            if is_integer:
                lower[column] = upper[column] = float(round(values[column]))
        exact = self._solve(lower, upper, {})
        if exact is not None:
            values = exact[0]
        return self._composition(values, bound)

    def _solve(
        self, lower: Sequence[float], upper: Sequence[float], options: dict[str, Any]
    ) -> tuple[list[float], float] | None:
        """Return the values of the columns, and the bound of the objective; None if there is no
        answer."""
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        # `milp` minimises, so the scale has a negative factor.
        objective = np.zeros(self._size)
        if self.is_cost:
            for column, price in self._prices():
                objective[column] += price
        else:
            objective[self.scale] = -1.0
        rows = self.rows
        shape = (len(rows.lower), self._size)
        matrix = csr_array((rows.values, (rows.rows, rows.columns)), shape=shape)
        solved = milp(
            objective,
            integrality=np.array(self.is_integer, dtype=int),
            bounds=Bounds(lower, upper),
            constraints=LinearConstraint(matrix, rows.lower, rows.upper),
            options=options,
        )
        if solved.x is None:
            return None
        # Without integer columns there is no dual bound, and the answer is the bound.
        bound = solved.mip_dual_bound if solved.mip_dual_bound is not None else solved.fun
        return [float(x) for x in solved.x], float(bound)

    def _composition(self, values: Sequence[float], bound: float) -> Composition:
        p = self.problem
        least = [_LEAST_RATE * max(demanded, 1e-300) for demanded in p.demand]
        counts: dict[str, int] = {}
        rates: dict[str, tuple[float, ...]] = {}
        taken: dict[str, float] = {}
        tied = {phase for pair in p.equal_counts for phase in pair}
        for i, offer in enumerate(p.offers):
            served = tuple(
                _rate(values, self.rate.get((i, w)), least[w]) for w in range(len(p.demand))
            )
            time = sum(r / h for r, h in zip(served, offer.rates, strict=True) if r)
            # No more copies than the served requests need, unless their number is tied.
            count = round(values[self.count[i]])
            if offer.phase not in tied:
                count = min(count, ceil(time / p.utilization * (1 - 1e-9)))
            if count:
                counts[offer.name], rates[offer.name] = count, served
                taken[offer.name] = time / count
        machines = {name: round(values[column]) for name, column in self.machine.items()}
        # Machines that no counted replica stands on are given back.
        machines = {name: self._needed(name, counts, n) for name, n in machines.items()}
        flows = {
            (a, b, w): values[column]
            for (_, a, b, w), column in self.flow.items()
            if values[column] > least[w]
        }
        offers = {offer.name: offer for offer in p.offers}
        cost = sum(n * offers[name].price_per_hour for name, n in counts.items())
        cost += sum(machines[m.name] * m.price_per_hour for m in p.machines)
        scale = values[self.scale]
        # The bound of the solver may miss its own answer by rounding.
        limit = min(cost, bound) if self.is_cost else max(scale, -bound)
        return Composition(
            counts, rates, flows, machines, scale, cost, limit, self.is_cost, taken
        )  # fmt: skip

    def _needed(self, machine: str, counts: dict[str, int], most: int) -> int:
        """Count the machines that the replicas stand on."""
        p = self.problem
        offers = {offer.name: offer for offer in p.offers}
        needed = 0
        for resource in p.resources:
            if resource.machine == machine:
                used = sum(
                    n * offers[name].uses.get(resource.name, 0) for name, n in counts.items()
                )
                needed = max(needed, -(-used // resource.per_machine))
        return min(needed, most)


def _rate(values: Sequence[float], column: int | None, least: float) -> float:
    value = 0.0 if column is None else values[column]
    return value if value > least else 0.0
