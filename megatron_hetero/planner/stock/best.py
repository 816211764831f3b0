"""The best step of stock Megatron so far, from simulations of divisions of cases.

A long step is not simulated whole: after its first micro-batches each further one takes as long as
the one before, so two short steps tell how long the whole one takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite

import numpy as np

from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.stock.case import StockCase
from megatron_hetero.planner.stock.divisions import MAX_DIVISIONS, moves
from megatron_hetero.planner.stock.limits import StockLimits
from megatron_hetero.planner.stock.plan import priced_step_s, stock_plan
from megatron_hetero.rounding import below
from megatron_hetero.schedule.simulator.step import simulate_plan

Division = tuple[int, ...]
"""Layers of each virtual stage."""


@dataclass(frozen=True)
class StockResult:
    """The best plan, and how it was found."""

    plan: Plan
    step_time_s: float
    """Simulated as stock Megatron runs it; where that takes too long, as two short steps tell, and
    where these do too, as `priced_step_s` has it."""
    is_exact: bool
    """True if no plan of the space is faster, within the tolerance of the limits."""
    num_bounded: int
    """Divisions of layers that were priced by the bound."""
    num_simulated: int
    others: tuple[Plan, ...] = ()
    """The best plans of other grids (replicas, stages, width), best first."""
    is_simulated: bool = True
    """False if only two short steps were simulated."""


_FEW_MICRO_BATCHES = 4
"""Two short steps have two and three times so many at least, and as many as stages: those of the
first filling wait for other paths than later ones."""


class StockBest:
    """The best plan so far, and the simulations so far.

    Args:
        problem: whose cluster simulates.
        limits: of the simulations.
    """

    def __init__(self, problem: Problem, limits: StockLimits) -> None:
        self._problem, self._limits = problem, limits
        self.step_s = inf
        """Seconds of the best simulated step."""
        self.num_simulated = 0
        self.num_bounded = 0
        """Divisions priced by the bound while layers move."""
        self._num_messages = self._num_short = 0
        self._plan: Plan | None = None
        self._winner: tuple[StockCase, Division] | None = None
        self._of_shapes: dict[tuple[int, int, int], tuple[float, Plan]] = {}
        # A step too long to simulate whole, with what two short ones tell; one with its bound.
        self._unsimulated: tuple[float, StockCase, Division] | None = None
        self._bounded: tuple[float, StockCase, Division] | None = None

    @property
    def found_any(self) -> bool:
        """Return whether anything fits so far."""
        return self._plan is not None or bool(self._unsimulated or self._bounded)

    @property
    def is_spent(self) -> bool:
        """Return whether no more steps may be simulated."""
        return self.num_simulated >= self._limits.num_simulated

    def may_win(self, bound_s: float) -> bool:
        """Return whether a step with such a bound may be better by more than the tolerance."""
        # What could not be simulated holds its bound as the best so far: the work is spent.
        held = (one[0] for one in (self._unsimulated, self._bounded) if one is not None)
        best_s = min((self.step_s, *held))
        return below(bound_s, best_s * (1 - self._limits.tolerance))

    def try_division(self, case: StockCase, division: Division, bound_s: float) -> float | None:
        """Simulate a division, or two short steps of it, and return the seconds of its step; None
        where these have too many messages as well, so that the bound stands for the step."""
        number, limits = case.num_micro_batches, self._limits
        whole = _num_messages(case, number)
        if self._num_messages + whole <= limits.num_messages:
            self._num_messages += whole
            return self._simulate(case, division)
        # Megatron's interleaved stages take micro-batches in groups of the depth.
        depth = case.grid.num_stages
        few = depth * -(-_FEW_MICRO_BATCHES // depth)
        sizes = 2 * few, 3 * few
        # A step of few micro-batches is no longer than two short ones.
        is_short = number <= sum(sizes)
        messages = whole if is_short else _num_messages(case, sum(sizes))
        if self._num_short + messages > limits.num_short_messages:
            if self._bounded is None or bound_s < self._bounded[0]:
                self._bounded = bound_s, case, division
            return None
        self._num_short += messages
        if is_short:
            return self._simulate(case, division)
        self.num_simulated += 1
        start_s, end_s = (self._step_s(_planned(case, division, size)) for size in sizes)
        each_s = (end_s - start_s) / (sizes[1] - sizes[0])
        # Without room for it, two short steps are endless, and their difference is no number.
        step_s = end_s + (number - sizes[1]) * each_s if isfinite(end_s) else inf
        if isfinite(step_s) and (self._unsimulated is None or step_s < self._unsimulated[0]):
            self._unsimulated = step_s, case, division
        return step_s

    def climb(self) -> None:
        """Move a layer of the best to another chunk, where it is interleaved, or if no move helps
        two layers, while the step gets shorter."""
        if self._winner is None or self._winner[0].settings.num_chunks == 1:
            return
        case, division = self._winner
        better: Division | None = division
        while better is not None and not self.is_spent:
            division, better = better, None
            # Every move that betters the step counts; the last one is the best.
            for moved in moves(division):
                if self._betters(case, moved):
                    better = moved
            if better is None:
                better = self._first_of_two_moves(case, division)

    def result(self, is_exact: bool, num_bounded: int) -> StockResult | None:
        """Return the best plan; None where nothing fits.

        Args:
            is_exact: no limit of the search was met.
            num_bounded: divisions that the search priced.
        """
        best, step_s, is_priced = self._plan, self.step_s, True
        if self._unsimulated is not None and (best is None or self._unsimulated[0] < step_s):
            step_s, case, division = self._unsimulated
            best, is_priced = _planned(case, division), False
        # A bound is no step: what it is the bound of may be far slower than all that was simulated.
        if self._bounded is not None and (best is None or self._bounded[0] < step_s):
            bounded = _planned(*self._bounded[1:])
            if (priced_s := priced_step_s(self._problem, bounded)) < step_s:
                best, step_s, is_priced = bounded, priced_s, True
        if best is None:
            return None
        validate_plan(best, self._problem.cluster)
        own = _shape(best)
        others = [entry for shape, entry in self._of_shapes.items() if shape != own]
        return StockResult(
            best,
            step_s,
            is_exact,
            num_bounded + self.num_bounded,
            self.num_simulated,
            tuple(plan for _, plan in sorted(others, key=lambda entry: entry[0])),
            is_priced,
        )

    def _first_of_two_moves(self, case: StockCase, division: Division) -> Division | None:
        """Return a better division two moves away, in the order of the bound."""
        # Pairs of moves grow with the fourth power of the virtual stages.
        if (len(division) * (len(division) - 1)) ** 2 > MAX_DIVISIONS:
            return None
        found: list[Division] = sorted(
            {two for one in moves(division) for two in moves(one)} - {division}
        )
        if not found:
            return None
        bounds_s = case.least_times_s(np.array(found))
        self.num_bounded += len(found)
        # In the order of the bound, which ends the search where it passes the best step.
        for index in map(int, np.argsort(bounds_s, kind="stable")):
            if not below(bounds_s[index], self.step_s) or self.is_spent:
                return None
            if self._betters(case, found[index]):
                return found[index]
        return None

    def _betters(self, case: StockCase, division: Division) -> bool:
        """Simulate the division, and return whether the step is now the best."""
        before_s = self.step_s
        self._simulate(case, division)
        return self.step_s < before_s

    def _simulate(self, case: StockCase, division: Division) -> float:
        self.num_simulated += 1
        plan = _planned(case, division)
        step_s = self._step_s(plan)
        if isfinite(step_s) and self.keep(plan, step_s):
            self._winner = case, division
        return step_s

    def keep(self, plan: Plan, step_s: float) -> bool:
        """Keep a plan that is the best of its shape; return whether it is the best of all."""
        shape = _shape(plan)
        if shape not in self._of_shapes or step_s < self._of_shapes[shape][0]:
            self._of_shapes[shape] = step_s, plan
        is_best = below(step_s, self.step_s)
        if is_best:
            self.step_s, self._plan = step_s, plan
        return is_best

    def _step_s(self, plan: Plan) -> float:
        """Simulate a step; infinite where it does not fit."""
        problem = self._problem
        waits = problem.workload.training.stock_waits
        step = simulate_plan(plan, problem.cluster, profile=problem.costs.profile, is_stock=waits)
        # The simulation has the real peaks of memory, which the bound may miss.
        if any(peak > s.capacity_bytes for s in step.timelines for peak in s.device_peak_bytes):
            return inf
        return step.step_time_s


def _planned(
    case: StockCase, division: Division, num_micro_batches: int | None = None
) -> Plan:
    stages = case.stages_of(np.array([division]))
    num_recomputed = int(case.layers_to_recompute(stages)[0])
    return stock_plan(case, division, num_recomputed, num_micro_batches)


def _num_messages(case: StockCase, num_micro_batches: int) -> int:
    """Count the messages of a step of so many micro-batches, and its passes: what a simulation
    takes time for."""
    stages = case.grid.num_stages * case.settings.num_chunks
    # Forward and backward, for each virtual stage, micro-batch and replica.
    return 2 * stages * num_micro_batches * case.grid.num_replicas


def _shape(plan: Plan) -> tuple[int, int, int]:
    stages = plan.replicas[0].stages
    return len(plan.replicas), len(stages), stages[0].shape.tensor_parallel
