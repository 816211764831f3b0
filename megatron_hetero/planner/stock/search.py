"""The best plan for stock Megatron, over everything that flags can say.

The space: every grid of equal replicas on every order of nodes and any number of their GPUs, every
context-parallel size, every way to deal experts out (`planner.stock.forms`), every micro-batch
size, recompute (none, selective, all layers, as few by blocks as fit), interleaved stages in chunks
as even as can be, and every division of the layers among stages
(`--pipeline-model-parallel-layout`).  A best that is interleaved may then move layers between
chunks as long as that helps.  What is not in the space: tensor-parallel groups over two nodes,
stages without a layer, recompute by blocks with interleaved stages, uniform recompute of several
layers at a time.

What is minimised is the simulated step (`schedule.simulator.step`), as stock Megatron runs it.
Bounds come first, from the cheapest on: of a form of groups on any grid (`StockRates.pace_s`), of a
grid (`StockRates.least_s`), of each division of its layers (`StockCase.least_times_s`, which leaves
shared paths out).  What has the lowest is looked at more closely, until none is below the best
simulated step: nothing else is ever worked out.  So the answer is the minimum of the space, unless
a limit of work was met, which the result says.  Sends of interleaved stages are bounded as if they
never made their stage wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np

from megatron_hetero.cost.choices import dispatchers, expert_groups
from megatron_hetero.cost.model import CostModel
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.restrictions.mixture import in_one_precision
from megatron_hetero.planner.stock.case import Divisions, StockCase
from megatron_hetero.planner.stock.divisions import (
    in_even_chunks,
    moves,
    num_stage_divisions,
    stage_divisions,
)
from megatron_hetero.planner.stock.forms import (
    forms,
    groups_fit_grid,
)
from megatron_hetero.planner.stock.grids import (
    MAX_ORDERS,
    StockGrid,
    StockRanks,
    grids_of,
    stock_ranks,
)
from megatron_hetero.planner.stock.plan import stock_plan
from megatron_hetero.planner.stock.rates import GroupForm, StockRates
from megatron_hetero.rounding import at_most, below
from megatron_hetero.schedule.simulator.step import simulate_plan

MAX_DIVISIONS = 200_000
"""Divisions up to which all divisions of a case are priced. Beyond, `_FEW_DIVISIONS` are priced,
with the fastest slowest stage."""
_FEW_DIVISIONS = 5_000
_FEW_CLIMBS = 3
"""Interleaved cases whose layers move between chunks where few steps are simulated."""
_BATCH = 4096
Division = tuple[int, ...]
"""Layers of each virtual stage."""


@dataclass(frozen=True)
class StockResult:
    """The best plan, and how it was found."""

    plan: Plan
    step_time_s: float
    """Simulated as stock Megatron runs it; where that takes too long, its bound."""
    is_exact: bool
    """True if no plan of the space is faster, within the tolerance of the limits."""
    num_bounded: int
    """Divisions of layers that were priced by the bound."""
    num_simulated: int
    others: tuple[Plan, ...] = ()
    """The best plans of other grids (replicas, stages, width), best first."""
    is_simulated: bool = True


@dataclass(frozen=True)
class StockLimits:
    """Limits of work, after which the search ends with the best found."""

    num_orders: int = MAX_ORDERS
    """Orders of nodes and amounts, as `stock_ranks`."""
    num_grids: int = 200_000
    """Grids that are bounded."""
    num_cases: int = 50_000
    """Grids with bounded divisions, counted for each number of chunks."""
    num_made: int = 1_000_000
    """Grids bounded with links."""
    num_bounded: int = 2_000_000
    num_simulated: int = 2_000
    num_messages: int = 10**9
    """Messages of all simulated steps."""
    most_chunks: int = 4
    tolerance: float = 0.0
    """Part of the best step by which the result may be slower."""
    climbs: bool = True
    """True if layers of interleaved stages move between chunks."""
    few_divisions: int = _FEW_DIVISIONS
    is_short: bool = False
    """True where so few steps are simulated that interleaved cases wait for the others, and those
    that divide sequences are left out where something fits without."""


BESIDE_A_PLAN = StockLimits(
    num_orders=100,
    num_grids=3_000,
    num_cases=32,
    num_made=600,
    num_bounded=20_000,
    num_simulated=3,
    num_messages=6_000,
    tolerance=0.002,
    climbs=False,
    few_divisions=300,
    is_short=True,
)
"""About a second, on a thousand GPUs a few."""
_FEW_GPUS = 8


def limits_beside_a_plan(num_gpus: int) -> StockLimits:
    """Return the limits of a search for a plan to be compared with.

    Steps of few GPUs are simulated quickly, and bounds of interleaved stages are far from their
    steps: for few GPUs more steps are simulated, which gives better plans.
    """
    if num_gpus > _FEW_GPUS:
        return BESIDE_A_PLAN
    return replace(BESIDE_A_PLAN, num_simulated=12, is_short=False)


def stock_beside_a_plan(problem: Problem) -> StockResult | None:
    """Return `best_stock_plan` within limits, for a plan to be compared with; None too where speed
    is not all that counts, and under prices other than the project's own."""
    has_goal = problem.objective.may_want_fewer(problem.cluster)
    if has_goal or problem.make_costs is not CostModel:
        return None
    return best_stock_plan(problem, limits_beside_a_plan(len(problem.cluster.devices)))


def best_stock_plan(problem: Problem, limits: StockLimits | None = None) -> StockResult | None:
    """Return the fastest fitting plan for stock Megatron, in a single precision; None if there is
    none."""
    training = problem.workload.training
    if training.mixes_precisions:
        workload = replace(problem.workload, training=in_one_precision(training))
        profile, objective = problem.costs.profile, problem.objective
        problem = make_problem(problem.cluster, workload, profile, objective=objective)
        if not problem.nodes:
            return None
    search = _StockSearch(problem, limits or StockLimits())
    search.run()
    return search.result()


@dataclass(frozen=True)
class _Grid:
    grid: StockGrid
    form: GroupForm


@dataclass(frozen=True)
class _Ready:
    """Divisions of a case, the lowest bound first."""

    case: StockCase
    divisions: Divisions
    bounds_s: np.ndarray
    place: int = 0


@dataclass(frozen=True)
class _Form:
    ranks: StockRanks
    form: GroupForm


_Item = tuple[StockRanks, GroupForm] | _Form | _Grid | StockCase | _Ready


class _StockSearch:
    """What was found so far, and the work so far."""

    def __init__(self, problem: Problem, limits: StockLimits) -> None:
        self._problem, self._limits = problem, limits
        self._ranks, self._is_exact = stock_ranks(problem, limits.num_orders)
        self._rates = StockRates(problem, self._ranks)
        self._num_grids = self._num_made = self._num_bounded = 0
        self._num_cases = [0, 0]  # of one chunk a stage, and of several
        self._num_simulated = self._num_messages = 0
        self._best_s = float("inf")
        self._best: Plan | None = None
        self._winner: tuple[StockCase, Division] | None = None
        self._best_of: dict[tuple[int, int, int], tuple[float, Plan]] = {}
        self._unsimulated: tuple[float, StockCase, Division] | None = None
        self._fits_undivided = False
        self._dropped: list[tuple[float, int, _Item]] = []
        self._deferred: list[tuple[float, _Ready]] = []
        self._queue: list[tuple[float, int, _Item]] = []
        self._number = count()
        # Grids that were looked at: equal content and settings are one case.
        self._seen: set[tuple[object, ...]] = set()

    def run(self) -> None:
        """Look at what has the lowest bound, until none is below the best step."""
        # Forms first: their bound holds on every grid of the ranks.
        for ranks in self._ranks:
            for form in forms(self._problem, ranks):
                self._push(self._rates.dealt_pace_s(ranks, form), (ranks, form))
        self._look_at_all()
        while self._dropped and not (self._deferred or self._found_any()):
            # Nothing fits of what was looked at: on to the forms that were left.
            self._queue, self._dropped = self._dropped, []
            heapify(self._queue)
            self._num_grids = self._num_made = 0
            self._look_at_all()
        # Interleaved cases that were put off come last.
        self._simulate_deferred()
        # Only interleaved stages have chunks between which layers may move.
        if self._winner is not None and self._limits.climbs:
            case, division = self._winner
            if case.settings.num_chunks > 1:
                self._climb(case, division)

    def _found_any(self) -> bool:
        return self._best is not None or self._unsimulated is not None

    def _look_at_all(self) -> None:
        """Look at what has the lowest bound, until none may win or the work is spent."""
        while self._queue:
            bound_s, number, item = heappop(self._queue)
            # The queue rises, so that nothing behind may win either.
            if not self._may_win(bound_s):
                break
            if self._is_spent():
                # Of what is left, only cases with bounded divisions can still be simulated.
                self._is_exact = False
                self._defer(bound_s, item)
                for own_s, _, other in self._queue:
                    self._defer(own_s, other)
                break
            # Too many grids already: forms are kept for the case that nothing fits.
            if isinstance(item, tuple | _Form) and self._num_grids >= self._limits.num_grids:
                self._is_exact = False
                self._dropped.append((bound_s, number, item))
            elif isinstance(item, _Ready) and self._is_deferred(item):
                self._defer(bound_s, item)
            else:
                self._look_at(item)

    def _climbed(self, item: _Ready) -> tuple[float, _Ready]:
        """Return a case with layers moved between chunks as long as that lowers the bound."""
        division, bound_s = item.divisions[item.place], float(item.bounds_s[item.place])
        while True:
            # A layer moved from one chunk to another, all such moves bounded at once.
            moved = np.array(list(moves(division.tolist())), dtype=np.int64)
            if not len(moved):
                break
            bounds_s = item.case.least_times_s(moved)
            self._num_bounded += len(moved)
            best = int(np.argmin(bounds_s))
            if not below(float(bounds_s[best]), bound_s):
                break
            division, bound_s = moved[best], float(bounds_s[best])
        return bound_s, _Ready(item.case, division[None], np.array([bound_s]))

    def _is_deferred(self, item: _Ready) -> bool:
        """Return whether a case waits for the end: the bound of interleaved stages is far from the
        step, and would use up a small limit of simulations."""
        return item.case.settings.num_chunks > 1 and self._limits.is_short

    def _defer(self, bound_s: float, item: _Item) -> None:
        if isinstance(item, _Ready):
            self._deferred.append((bound_s, item))

    def _simulate_deferred(self) -> None:
        """Simulate the best deferred case of each kind, then cases that may be the best if the
        ratio of step to bound stays the same."""
        if self._limits.is_short:
            # The best interleaved cases also come with layers moved between their chunks.
            chunked = [e for e in self._deferred if e[1].case.settings.num_chunks > 1]
            chunked.sort(key=lambda entry: entry[0])
            self._deferred += [self._climbed(item) for _, item in chunked[:_FEW_CLIMBS]]
        # Is interleaved -> step over bound of the last such case that was simulated.
        ratios: dict[bool, float] = {}
        while self._deferred and self._num_simulated < self._limits.num_simulated:
            ranked = sorted(
                (ratios.get(item.case.settings.num_chunks > 1, 1.0) * bound_s, number)
                for number, (bound_s, item) in enumerate(self._deferred)
            )
            about_s, number = ranked[0]
            if not self._may_win(about_s):
                break
            bound_s, item = self._deferred.pop(number)
            step_s = self._next_division(item, follows=False)
            if step_s is not None:
                ratios[item.case.settings.num_chunks > 1] = step_s / bound_s
        # A case that was not simulated may still be the best.
        if any(self._may_win(bound_s) for bound_s, _ in self._deferred):
            self._is_exact = False

    def result(self) -> StockResult | None:
        """Return what was found."""
        best, step_s = self._best, self._best_s
        if best is None and self._unsimulated is None:
            return None
        # A step too long to simulate stands with its bound.
        if self._unsimulated is not None and (best is None or self._unsimulated[0] < step_s):
            step_s, case, division = self._unsimulated
            best = self._plan(case, division)
        assert best is not None
        validate_plan(best, self._problem.cluster)
        own = _shape(best)
        others = [entry for shape, entry in self._best_of.items() if shape != own]
        return StockResult(
            best,
            step_s,
            self._is_exact,
            self._num_bounded,
            self._num_simulated,
            tuple(plan for _, plan in sorted(others, key=lambda entry: entry[0])),
            best is self._best,
        )

    def _may_win(self, bound_s: float) -> bool:
        best_s = self._best_s
        if self._unsimulated is not None:
            # What could not be simulated holds its bound as the best so far.
            best_s = min(best_s, self._unsimulated[0])
        return below(bound_s, best_s * (1 - self._limits.tolerance))

    def _push(self, bound_s: float, item: _Item) -> None:
        if self._may_win(bound_s):
            heappush(self._queue, (bound_s, next(self._number), item))

    def _look_at(self, item: _Item) -> None:
        match item:
            case _Ready():
                self._next_division(item)
            case StockCase():
                self._price(item)
            case _Grid():
                self._make_cases(item)
            case _Form():
                self._make_grids(item.ranks, item.form)
            case (ranks, form):
                # Experts as they lie, and each way to deal them out.
                num_gpus, costs = len(ranks.units) * ranks.width, self._problem.costs
                for groups in (None, *expert_groups(costs, ranks.width, num_gpus)):
                    own = replace(form, settings=replace(form.settings, expert_groups=groups))
                    self._push(self._rates.pace_s(ranks, own), _Form(ranks, own))

    def _make_grids(self, ranks: StockRanks, form: GroupForm) -> None:
        batch = self._problem.workload.training.global_batch_size
        for grid in grids_of(self._problem, ranks, form.context_parallel):
            sequences, rest = divmod(batch, grid.num_replicas)
            size = form.settings.micro_batch_size
            # Each replica has whole micro-batches, and each group of experts is complete.
            if rest or sequences % size or not groups_fit_grid(grid, form.settings.expert_groups):
                continue
            for chunks in range(1, self._limits.most_chunks + 1):
                if not self._can_interleave(grid, form, chunks, sequences // size):
                    continue
                own = replace(form, settings=replace(form.settings, num_chunks=chunks))
                self._num_grids += 1
                self._push(self._rates.least_s(grid, own), _Grid(grid, own))

    def _can_interleave(self, grid: StockGrid, form: GroupForm, chunks: int, number: int) -> bool:
        """Check as Megatron demands of micro-batches and layers; recompute by blocks is not for
        interleaved stages, and all or nothing not for others."""
        num_stages = grid.num_stages
        # Every chunk has a layer.
        if num_stages * chunks > self._problem.num_layers:
            return False
        if chunks == 1:
            return form.settings.recompute in ("as needed", "selective")
        is_plain = form.settings.recompute != "as needed"
        return is_plain and num_stages > 1 and number % num_stages == 0

    def _make_cases(self, item: _Grid) -> None:
        # Memory alone rules the grid out.
        if not self._rates.fits(item.grid, item.form):
            return
        if self._limits.is_short and self._fits_undivided and _is_chunked_and_divided(item):
            self._is_exact = False
            return
        form, grid = item.form, item.grid
        # Like grids differ only in the names of their nodes.
        key = grid.width, grid.context_parallel, grid.num_stages, grid.content, form.settings
        if key in self._seen:
            return
        self._seen.add(key)
        groups, own = form.settings.expert_groups, self._problem.workload.training.token_dispatcher
        # Within one rank no token travels, so that the dispatcher does not matter.
        is_alone = groups is None or groups[0] == 1
        for dispatcher in (own,) if is_alone else dispatchers(self._problem.costs):
            settings = replace(form.settings, dispatcher=dispatcher)
            case = StockCase(self._problem, grid, settings)
            self._num_made += 1
            self._push(case.quick_s(), case)

    def _price(self, case: StockCase) -> None:
        """Bound the divisions of a case that could beat the best so far."""
        is_chunked = case.settings.num_chunks > 1
        # Interleaved cases have a limit of their own.
        if self._num_cases[is_chunked] >= self._limits.num_cases:
            self._is_exact = False
            return
        divisions = self._divisions(case)
        if not len(divisions):
            return
        batches = range(0, len(divisions), _BATCH)
        bounds_s = np.concatenate([case.least_times_s(divisions[b : b + _BATCH]) for b in batches])
        self._num_bounded += len(divisions)
        # Lowest bound first, as `_Ready` has them.
        order = np.argsort(bounds_s, kind="stable")
        bounds_s = bounds_s[order]
        if np.isfinite(bounds_s[0]):
            self._num_cases[is_chunked] += 1
            self._fits_undivided |= case.grid.context_parallel == 1
            self._push(float(bounds_s[0]), _Ready(case, divisions[order], bounds_s))

    def _next_division(self, item: _Ready, *, follows: bool = True) -> float | None:
        """Simulate the division with the lowest bound; the next one may follow."""
        division = tuple(item.divisions[item.place].tolist())
        bound_s = float(item.bounds_s[item.place])
        # A step of too many messages is not simulated: its bound stands for it.
        if self._is_too_long(item.case):
            if self._unsimulated is None or bound_s < self._unsimulated[0]:
                self._unsimulated = bound_s, item.case, division
            self._is_exact = False
            return None
        step_s = self._simulate(item.case, division)
        if not follows:
            return step_s
        # The next division waits in the queue with its own bound.
        following = item.place + 1
        if following < len(item.divisions) and np.isfinite(item.bounds_s[following]):
            self._push(float(item.bounds_s[following]), replace(item, place=following))
        return step_s

    def _is_too_long(self, case: StockCase) -> bool:
        """Return whether the messages of the case's step exceed the remaining limit."""
        messages = _num_messages(case)
        return self._num_messages + messages > self._limits.num_messages

    def _divisions(self, case: StockCase) -> Divisions:
        """Return all that could beat the best so far; of too many those with the fastest slowest
        stage."""
        below_s, num_layers = self._best_s, self._problem.num_layers
        few, most = self._limits.few_divisions, MAX_DIVISIONS
        if self._limits.few_divisions < _FEW_DIVISIONS:
            most = few

        def number(limit_s: float) -> int:
            return num_stage_divisions(num_layers, case.stage_layers(limit_s))

        # Too many to price: first a limit with few divisions, then bisection up to it.
        if number(below_s) > most:
            low_s = case.pace_s()
            high_s = low_s
            while high_s < below_s and number(high_s) <= few:
                high_s *= 1.5
            high_s = min(high_s, below_s)
            while not at_most(high_s, low_s * 1.001):
                middle_s = (low_s + high_s) / 2
                is_few = number(middle_s) <= few
                low_s, high_s = (middle_s, high_s) if is_few else (low_s, middle_s)
            below_s = low_s if number(low_s) else high_s
            self._is_exact = False
        stages = stage_divisions(num_layers, case.stage_layers(below_s))
        return in_even_chunks(stages[: 4 * most], case.settings.num_chunks)

    def _climb(self, case: StockCase, division: Division) -> None:
        """Move a layer to another chunk, or if no move helps two layers, while the step gets
        shorter."""
        better: Division | None = division
        while better is not None and not self._is_spent():
            division, better = better, None
            # Every move that betters the step counts; the last one is the best.
            for moved in moves(division):
                if self._betters(case, moved):
                    better = moved
            if better is None:
                better = self._first_of_two_moves(case, division)

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
        self._num_bounded += len(found)
        # In the order of the bound, which ends the search where it passes the best step.
        for index in map(int, np.argsort(bounds_s, kind="stable")):
            if not below(bounds_s[index], self._best_s) or self._is_spent():
                return None
            if self._betters(case, found[index]):
                return found[index]
        return None

    def _plan(self, case: StockCase, division: Division) -> Plan:
        stages = case.stages_of(np.array([division]))
        return stock_plan(case, division, int(case.layers_to_recompute(stages)[0]))

    def _betters(self, case: StockCase, division: Division) -> bool:
        """Simulate the division, and return whether the step is now the best."""
        before_s = self._best_s
        self._simulate(case, division)
        return self._best_s < before_s

    def _simulate(self, case: StockCase, division: Division) -> float | None:
        """Return the seconds of the step; None where it does not fit."""
        self._num_simulated += 1
        self._num_messages += _num_messages(case)
        plan, problem = self._plan(case, division), self._problem
        waits = problem.workload.training.stock_waits
        step = simulate_plan(plan, problem.cluster, profile=problem.costs.profile, is_stock=waits)
        # The simulation has the real peaks of memory, which the bound may miss.
        if any(peak > s.capacity_bytes for s in step.timelines for peak in s.device_peak_bytes):
            return None
        shape = _shape(plan)
        if shape not in self._best_of or step.step_time_s < self._best_of[shape][0]:
            self._best_of[shape] = step.step_time_s, plan
        if below(step.step_time_s, self._best_s):
            self._best_s, self._best, self._winner = step.step_time_s, plan, (case, division)
        return step.step_time_s

    def _is_spent(self) -> bool:
        limits = self._limits
        return (
            self._num_bounded > limits.num_bounded
            or self._num_simulated >= limits.num_simulated
            or min(self._num_cases) >= limits.num_cases
            or self._num_made >= limits.num_made
        )


def _is_chunked_and_divided(item: _Grid) -> bool:
    return item.form.settings.num_chunks > 1 and item.grid.context_parallel > 1


def _num_messages(case: StockCase) -> int:
    """Count the messages of a step, and its passes: what a simulation takes time for."""
    stages = case.grid.num_stages * case.settings.num_chunks
    # Forward and backward, for each virtual stage, micro-batch and replica.
    return 2 * stages * case.num_micro_batches * case.grid.num_replicas


def _shape(plan: Plan) -> tuple[int, int, int]:
    stages = plan.replicas[0].stages
    return len(plan.replicas), len(stages), stages[0].shape.tensor_parallel
