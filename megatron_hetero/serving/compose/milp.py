"""The composition as one mixed integer programme in rates, solved by HiGHS.

arXiv 2502.00722 bisects the time of a batch and asks a knapsack at each; in rates the problem is
linear in the answer and needs no bisection: with r_cw the rate of class w on replicas of offer c
and y_c their number, `sum_w r_cw / h_cw <= y_c`.  Added to it: phases (a request that is prefilled
here and decoded there flows between the two), the wires that carry these flows, machines that are
rented whole, offers that exclude each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, inf, isfinite
from typing import Any

from megatron_hetero.errors import InfeasiblePlanError, UsageError
from megatron_hetero.serving.compose.milp_rows import MilpRows
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
        UsageError: a class is too rare for the programme.
    """
    problem.check()
    smaller = problem.without_dominated()
    found = _MilpProblem(smaller, is_cost=False).solve(gap, time_limit_s)
    if found is None or found.scale <= 0:
        if not isfinite(problem.budget_per_hour):
            raise InfeasiblePlanError(
                "these machines have no room for replicas of all phases that the classes need; "
                "give the classes later deadlines, or add machines"
            )
        raise InfeasiblePlanError(
            f"{problem.budget_per_hour:g} an hour buys no set of replicas that serves every class; "
            "raise the budget, or leave out the class that needs the dearest machines"
        )
    _refuse_lost(problem, found)
    return found


def serve_cheapest(problem: Composing, gap: float = 1e-4, time_limit_s: float = inf) -> Composition:
    """Find the cheapest replicas that serve the demand.

    Raises:
        InfeasiblePlanError: the machines cannot serve the demand; the message says how much of it
            they can.
        UsageError: a class is too rare for the programme.
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
    _refuse_lost(problem, found)
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


def _refuse_lost(problem: Composing, found: Composition) -> None:
    """Refuse a class so rare that the solver's tolerance takes it for served by nothing."""
    for number, name in enumerate(problem.class_names):
        if problem.demand[number] > 0 and not any(r[number] for r in found.rates.values()):
            raise UsageError(
                f'class "{name}": {problem.demand[number]:.3g} requests a second are less than the '
                "programme tells from none; give a rate of 0.0001 or more (of a trace: a higher "
                "speed), or leave the class out"
            )


class _MilpProblem(MilpRows):
    """A problem as a programme, with its solution."""

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
