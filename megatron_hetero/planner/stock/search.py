"""The best plan that stock Megatron can run, of all that its flags can say.

The space: every grid of equal replicas on every order of nodes and any number of their GPUs, every
micro-batch size, recompute (none, selective, all layers, as few by blocks as fit), interleaved
stages in chunks as even as can be, and every division of the layers among stages
(`--pipeline-model-parallel-layout`).  The best, if it is interleaved, then moves layers between
chunks as long as that helps.  What is not in the space: context parallelism, tensor-parallel groups
over two nodes, stages without a layer, recompute by blocks with interleaved stages, uniform
recompute of several layers at a time.

What is minimised is the simulated step (`schedule.simulator.step`), as stock Megatron runs it.  A
case (`stock_case`) prices all of its divisions at once by a bound that leaves shared paths out;
divisions are simulated from the lowest bound on, until no bound is below the best.  So the answer
is the minimum of the space, unless a limit of work was met, which the result says.  Sends of
interleaved stages are simulated as if they never made their stage wait, in favour of stock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.work.compute import uses_flash_attention
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.restrictions.mixture import in_one_precision
from megatron_hetero.planner.stock.case import (
    Divisions,
    StockCase,
    StockRecompute,
    StockSettings,
)
from megatron_hetero.planner.stock.divisions import (
    in_even_chunks,
    moves,
    num_stage_divisions,
    stage_divisions,
)
from megatron_hetero.planner.stock.grids import StockGrid, stock_grids
from megatron_hetero.planner.stock.plan import stock_plan
from megatron_hetero.rounding import at_most, below
from megatron_hetero.schedule.simulator.step import simulate_plan

MAX_DIVISIONS = 200_000
"""Divisions of one case that are all priced; of more, `_FEW_DIVISIONS` with the fastest slowest
stage."""
_FEW_DIVISIONS = 5_000
_FEW_IN_VAIN = 8
"""Simulations that do not better the best, after which a case has to wait for the others."""
_BATCH = 4096
Division = tuple[int, ...]
"""Layers of each virtual stage."""


@dataclass(frozen=True)
class StockResult:
    """The best plan, and how it was found."""

    plan: Plan
    step_time_s: float
    """Simulated as stock Megatron runs it."""
    is_exact: bool
    """Whether no plan of the space is faster."""
    num_bounded: int
    """Divisions of layers that were priced by the bound."""
    num_simulated: int
    others: tuple[Plan, ...] = ()
    """The best plans of other grids (replicas, stages, width), best first."""


@dataclass(frozen=True)
class StockLimits:
    """Work that ends the search early."""

    num_cases: int = 100_000
    num_bounded: int = 10_000_000
    num_simulated: int = 5_000
    most_chunks: int = 4


BESIDE_A_PLAN = StockLimits(num_cases=2_000, num_bounded=100_000, num_simulated=100)
"""A second or two."""
MAX_GPUS_BESIDE_A_PLAN = 12


def is_quick(problem: Problem) -> bool:
    """Return whether all that stock flags can say is looked through in seconds."""
    return problem.num_gpus <= MAX_GPUS_BESIDE_A_PLAN


def stock_beside_a_plan(problem: Problem) -> StockResult | None:
    """Return `best_stock_plan` within limits, for a plan to be compared with; None too for
    clusters that are too large for it, where speed is not all that counts, and under prices
    other than the project's own."""
    has_goal = problem.objective.may_want_fewer(problem.cluster)
    if not is_quick(problem) or has_goal or problem.make_costs is not CostModel:
        return None
    return best_stock_plan(problem, BESIDE_A_PLAN)


def best_stock_plan(problem: Problem, limits: StockLimits | None = None) -> StockResult | None:
    """Return the fastest plan of stock Megatron that fits, in one precision; None if none does."""
    training = problem.workload.training
    if training.mixes_precisions:
        workload = replace(problem.workload, training=in_one_precision(training))
        profile, objective = problem.costs.profile, problem.objective
        problem = make_problem(problem.cluster, workload, profile, objective=objective)
        if not problem.nodes:
            return None
    grids, is_complete = stock_grids(problem)
    search = _StockSearch(problem, limits or StockLimits(), is_complete)
    search.run(sorted(grids, key=lambda grid: -grid.num_gpus))
    return search.result()


class _StockSearch:
    """What was found so far, and the work so far."""

    def __init__(self, problem: Problem, limits: StockLimits, is_exact: bool) -> None:
        self._problem, self._limits = problem, limits
        self._is_exact = is_exact
        self._num_bounded = self._num_simulated = 0
        self._best_s = float("inf")
        self._best: Plan | None = None
        self._best_of: dict[tuple[int, int, int], tuple[float, Plan]] = {}

    def run(self, grids: Sequence[StockGrid]) -> None:
        """One chunk a stage first: what they reach spares most interleaved cases."""
        self._search(self._cases(grids, [1]))
        winner = self._search(self._cases(grids, range(2, self._limits.most_chunks + 1)))
        if winner is not None:
            self._climb(*winner)

    def result(self) -> StockResult | None:
        """Return what was found."""
        if self._best is None:
            return None
        validate_plan(self._best, self._problem.cluster)
        own = _shape(self._best)
        others = [entry for shape, entry in self._best_of.items() if shape != own]
        return StockResult(
            self._best,
            self._best_s,
            self._is_exact,
            self._num_bounded,
            self._num_simulated,
            tuple(plan for _, plan in sorted(others, key=lambda entry: entry[0])),
        )

    def _cases(self, grids: Sequence[StockGrid], chunks: Iterable[int]) -> list[StockCase]:
        training = self._problem.workload.training
        found = []
        for grid, num_chunks in product(grids, chunks):
            sequences, rest = divmod(training.global_batch_size, len(grid.chains))
            for size in range(1, sequences + 1) if not rest else ():
                if sequences % size == 0 and self._can_interleave(
                    grid, num_chunks, sequences // size
                ):
                    for recompute in self._kinds_of_recompute(num_chunks):
                        settings = StockSettings(size, recompute, num_chunks)
                        found.append(StockCase(self._problem, grid, settings))
            if len(found) > self._limits.num_cases:
                self._is_exact = False
                break
        return found

    def _kinds_of_recompute(self, num_chunks: int) -> tuple[StockRecompute, ...]:
        """Return kinds of recompute: selective spares what flash attention does not keep anyway."""
        training = self._problem.workload.training
        flash = all(uses_flash_attention(training, node.gpu_type) for node in self._problem.nodes)
        plain: tuple[StockRecompute, ...] = ("as needed",) if num_chunks == 1 else ("none", "full")
        return plain if flash else (*plain, "selective")

    def _can_interleave(self, grid: StockGrid, num_chunks: int, num_micro_batches: int) -> bool:
        """Check as Megatron demands of micro-batches and layers."""
        num_stages = grid.num_stages
        if num_stages * num_chunks > self._problem.num_layers:
            return False
        return num_chunks == 1 or (num_stages > 1 and num_micro_batches % num_stages == 0)

    def _search(self, cases: Iterable[StockCase]) -> tuple[StockCase, Division] | None:
        """Return the case and the division that became the best, if any did."""
        winner = None
        ranked = sorted(
            ((case.quick_s(), number, case) for number, case in enumerate(cases)),
            key=lambda entry: entry[:2],
        )
        cut = []
        for quick_s, _, case in ranked:
            if not below(quick_s, self._best_s) or self._is_spent():
                break
            is_cut = self._num_divisions(case, self._best_s) > MAX_DIVISIONS
            found, is_done = self._search_case(case, _FEW_IN_VAIN)
            winner = found or winner
            if is_cut or not is_done:
                cut.append((quick_s, case))
        # With a best plan to beat fewer divisions are left of what was cut.
        for quick_s, case in cut:
            if below(quick_s, self._best_s) and not self._is_spent():
                if self._num_divisions(case, self._best_s) > MAX_DIVISIONS:
                    self._is_exact = False
                winner = self._search_case(case)[0] or winner
        return winner

    def _search_case(
        self, case: StockCase, most_in_vain: int | None = None
    ) -> tuple[tuple[StockCase, Division] | None, bool]:
        """Return what became the best, and whether nothing was left to simulate."""
        winner, num_in_vain = None, 0
        for division in self._promising(case):
            if num_in_vain == most_in_vain:
                return winner, False
            if self._simulate(case, division):
                winner, num_in_vain = (case, division), 0
            else:
                num_in_vain += 1
        return winner, True

    def _promising(self, case: StockCase) -> Iterator[Division]:
        """Yield divisions whose bound is below the best, the lowest bound first."""
        divisions = self._divisions(case)
        if not len(divisions):
            return
        batches = range(0, len(divisions), _BATCH)
        bounds_s = np.concatenate([case.least_times_s(divisions[b : b + _BATCH]) for b in batches])
        self._num_bounded += len(divisions)
        for index in np.argsort(bounds_s, kind="stable"):
            if not below(bounds_s[index], self._best_s) or self._is_spent():
                return
            yield tuple(divisions[index].tolist())

    def _num_divisions(self, case: StockCase, below_s: float) -> int:
        return num_stage_divisions(self._problem.num_layers, case.stage_layers(below_s))

    def _divisions(self, case: StockCase) -> Divisions:
        """Return all that could beat the best so far; of too many those with the fastest slowest
        stage."""
        below_s = self._best_s
        if self._num_divisions(case, below_s) > MAX_DIVISIONS:
            low_s = case.pace_s()
            high_s = low_s
            while high_s < below_s and self._num_divisions(case, high_s) <= _FEW_DIVISIONS:
                high_s *= 2
            high_s = min(high_s, below_s)
            while not at_most(high_s, low_s):
                middle_s = (low_s + high_s) / 2
                few = self._num_divisions(case, middle_s) <= _FEW_DIVISIONS
                low_s, high_s = (middle_s, high_s) if few else (low_s, middle_s)
            below_s = low_s
        stages = stage_divisions(self._problem.num_layers, case.stage_layers(below_s))
        return in_even_chunks(stages, case.settings.num_chunks)

    def _climb(self, case: StockCase, division: Division) -> None:
        """Move one layer to another chunk, or where that does not help two, as long as that
        helps."""
        better: Division | None = division
        while better is not None and not self._is_spent():
            division, better = better, None
            for moved in moves(division):
                if self._simulate(case, moved):
                    better = moved
            if better is None:
                better = self._first_of_two_moves(case, division)

    def _first_of_two_moves(self, case: StockCase, division: Division) -> Division | None:
        """Return a better division two moves away, in the order of the bound."""
        if (len(division) * (len(division) - 1)) ** 2 > MAX_DIVISIONS:
            return None
        found: list[Division] = sorted(
            {two for one in moves(division) for two in moves(one)} - {division}
        )
        if not found:
            return None
        bounds_s = case.least_times_s(np.array(found))
        self._num_bounded += len(found)
        for index in map(int, np.argsort(bounds_s, kind="stable")):
            if not below(bounds_s[index], self._best_s) or self._is_spent():
                return None
            if self._simulate(case, found[index]):
                return found[index]
        return None

    def _simulate(self, case: StockCase, division: Division) -> bool:
        """Return whether it is the best."""
        self._num_simulated += 1
        stages = case.stages_of(np.array([division]))
        recomputed = int(case.layers_to_recompute(stages)[0])
        plan = stock_plan(case, division, recomputed)
        problem = self._problem
        waits = problem.workload.training.stock_waits
        step = simulate_plan(plan, problem.cluster, profile=problem.costs.profile, is_stock=waits)
        if any(peak > s.capacity_bytes for s in step.timelines for peak in s.device_peak_bytes):
            return False
        shape = _shape(plan)
        if shape not in self._best_of or step.step_time_s < self._best_of[shape][0]:
            self._best_of[shape] = step.step_time_s, plan
        if not below(step.step_time_s, self._best_s):
            return False
        self._best_s, self._best = step.step_time_s, plan
        return True

    def _is_spent(self) -> bool:
        limits = self._limits
        spent = self._num_bounded > limits.num_bounded or self._num_simulated > limits.num_simulated
        self._is_exact = self._is_exact and not spent
        return spent


def _shape(plan: Plan) -> tuple[int, int, int]:
    stages = plan.replicas[0].stages
    return len(plan.replicas), len(stages), stages[0].shape.tensor_parallel
