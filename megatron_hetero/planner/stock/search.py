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
Bounds come first, from the cheapest on: of a form of groups on any grid (`StockRates.pace_s`), on
each grid with the least exchange of gradients (`GridBounds.paces_s`), of a grid with its links as
if layers could be cut (`StockCase.quick_s`) and of whole layers that fit (`StockCase.least_s`), of
each division of its layers (`StockCase.least_times_s`, which leaves shared paths out), with the
least exchange and with its own.  What has the lowest is looked at more closely, until none is below
the best simulated step: nothing else is ever worked out.  So the answer is the minimum of the
space, unless a limit of work was met, which the result says.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import count
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from megatron_hetero.collector import no_collector
from megatron_hetero.cost.choices import dispatchers, expert_groups
from megatron_hetero.cost.model import CostModel
from megatron_hetero.model.blocks import divides_experts
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.restrictions.mixture import in_one_precision
from megatron_hetero.planner.stock.best import StockBest, StockResult
from megatron_hetero.planner.stock.by_hand import plans_by_hand
from megatron_hetero.planner.stock.case import StockCase
from megatron_hetero.planner.stock.divisions import Divisions, climbed, divisions_in_time
from megatron_hetero.planner.stock.forms import forms, kinds_of_recompute, numbers_of_chunks
from megatron_hetero.planner.stock.grid_bounds import GridBounds
from megatron_hetero.planner.stock.grids import StockGrid, StockRanks
from megatron_hetero.planner.stock.items import (
    FormItem,
    FormsItem,
    GridItem,
    GridsItem,
    Item,
    ReadyItem,
    in_order,
)
from megatron_hetero.planner.stock.limits import StockLimits, limits_beside_a_plan
from megatron_hetero.planner.stock.orders import stock_ranks
from megatron_hetero.planner.stock.prices import StockPrices
from megatron_hetero.planner.stock.rates import GroupForm, StockRates

_BATCH = 4096
_MOST_CLIMBED = 0.93
"""What moves of layers between chunks may leave of a bound."""


def stock_beside_a_plan(problem: Problem, every: bool = False) -> StockResult | None:
    """Return `best_stock_plan` for a plan to be compared with; None too where speed is not all that
    counts, and under prices other than the project's own.

    Args:
        every: without limits of work, which takes minutes on many GPUs.
    """
    has_goal = problem.objective.may_want_fewer(problem.cluster)
    if has_goal or problem.make_costs is not CostModel:
        return None
    limits = None if every else limits_beside_a_plan(len(problem.cluster.devices))
    return best_stock_plan(problem, limits)


@no_collector()
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
    return _StockSearch(problem, limits or StockLimits()).run()


class _StockSearch:
    """What waits to be looked at, and the work so far."""

    def __init__(self, problem: Problem, limits: StockLimits) -> None:
        self._problem, self._limits = problem, limits
        self._ranks, self._is_exact = stock_ranks(problem, limits.num_orders)
        self._rates = StockRates(problem, self._ranks)
        self._bounds = GridBounds(problem, self._rates)
        self._prices = StockPrices(problem)
        self._dispatchers = dispatchers(problem.costs)
        self._best = StockBest(problem, limits)
        self._num_grids = self._num_made = self._num_bounded = self._num_climbs = 0
        self._num_cases = [0, 0]  # Of one chunk a stage, and of several.
        # By what a step likely takes: its bound, until simulations of a case tell more.
        self._dropped: list[tuple[float, int, float, Item]] = []
        self._queue: list[tuple[float, int, float, Item]] = []
        self._number = count()
        # Grids that were looked at: equal content and settings are one case.
        self._seen: set[tuple[object, ...]] = set()

    def run(self) -> StockResult | None:
        """Look at what is likely the fastest, until no bound is below the best step."""
        # Within few steps, what the bounds rank first may be slower than what people do by hand.
        for by_hand in plans_by_hand(self._problem):
            self._best.keep(by_hand.plan, by_hand.step_time_s)
        # Forms first: their bound holds on every grid of the ranks.
        recomputes = kinds_of_recompute(self._problem)
        of_sizes: dict[tuple[int, int], list[GroupForm]] = {}
        of_kinds: dict[tuple[object, ...], FormsItem] = {}
        for ranks in self._ranks:
            # Of equally many GPUs the forms are the same, of the same kinds their bounds as well.
            size, kinds = (ranks.width, len(ranks.units)), (ranks.width, ranks.kind_counts)
            if kinds not in of_kinds:
                own = of_sizes.get(size) or list(forms(self._problem, ranks, recomputes))
                of_sizes[size] = own
                bounds_s = np.array([self._rates.dealt_pace_s(ranks, form) for form in own])
                of_kinds[kinds] = FormsItem(*in_order(bounds_s), ranks, own)
            self._push_in_turn(replace(of_kinds[kinds], ranks=ranks))
        self._look_at_all()
        while self._dropped and not self._best.found_any:
            # Nothing fits of what was looked at: on to the forms and grids that were left.
            self._queue, self._dropped = self._dropped, []
            heapify(self._queue)
            self._num_grids = self._num_made = self._num_bounded = 0
            self._num_cases = [0, 0]
            self._look_at_all()
        # Only interleaved stages have chunks between which layers may move.
        if self._limits.climbs:
            self._best.climb()
        return self._best.result(self._is_exact, self._num_bounded)

    def _look_at_all(self) -> None:
        """Look at what is likely the fastest, until none may win or no step may be simulated."""
        while self._queue:
            likely_s, number, bound_s, item = heappop(self._queue)
            if not self._best.may_win(bound_s):
                continue
            if self._best.is_spent:
                self._is_exact = False
                break
            # Of a kind of which enough was looked at, what is left is kept for the case that
            # nothing fits.
            if self._has_enough(item):
                self._is_exact = False
                if not self._best.found_any:
                    self._dropped.append((likely_s, number, bound_s, item))
            else:
                self._look_at(item)

    def _has_enough(self, item: Item) -> bool:
        limits = self._limits
        match item:
            case ReadyItem():
                return False
            case StockCase():
                # Interleaved cases have a limit of their own.
                is_interleaved = item.settings.num_chunks > 1
                most = limits.num_cases // 2 if is_interleaved else limits.num_cases
                number = self._num_cases[is_interleaved]
                return number >= most or self._num_bounded > limits.num_bounded
            case GridItem():
                return self._num_made >= limits.num_made
            case _:
                return self._num_grids >= limits.num_grids

    def _push(self, bound_s: float, item: Item, slowdown: float = 1.0) -> None:
        if self._best.may_win(bound_s):
            entry = bound_s * slowdown, next(self._number), bound_s, item
            heappush(self._queue, entry)

    def _look_at(self, item: Item) -> None:
        match item:
            case ReadyItem(is_quick=True):
                # Like the links before, a case's own exchange is priced when it comes to it.
                self._push_ready(item.case, item.divisions, is_quick=False)
            case ReadyItem():
                self._next_division(item)
            case StockCase():
                self._price(item)
            case GridItem():
                self._make_cases(item)
            case GridsItem():
                self._push_in_turn(item.following())
                self._make_grid(item.grids[item.next], item.form)
            case FormItem():
                self._lay(item.ranks, item.form)
            case FormsItem():
                self._push_in_turn(item.following())
                self._deal(item.ranks, item.forms[item.next])

    def _deal(self, ranks: StockRanks, form: GroupForm) -> None:
        """Bound a form with experts as they lie, and with each way to deal them out."""
        num_gpus, costs = len(ranks.units) * ranks.width, self._problem.costs
        as_they_lie = [None] if divides_experts(costs.workload.model, ranks.width) else []
        for groups in (*as_they_lie, *expert_groups(costs, ranks.width, num_gpus)):
            own = replace(form, settings=replace(form.settings, expert_groups=groups))
            self._push(self._rates.pace_s(ranks, own), FormItem(ranks, own))

    def _lay(self, ranks: StockRanks, form: GroupForm) -> None:
        """Bound a form on each of its grids."""
        grids, bounds_s = self._bounds.paces_s(ranks, form, form.settings.least_chunks)
        self._push_in_turn(GridsItem(*in_order(bounds_s), form, grids))

    def _push_in_turn(self, item: FormsItem | GridsItem) -> None:
        """Put what is left of several in the queue, if anything is."""
        if item.place < len(item.order):
            self._push(float(item.bounds_s[item.place]), item)

    def _make_grid(self, grid: StockGrid, form: GroupForm) -> None:
        """Bound a grid with the links of its stages, under each dispatcher that may be best."""
        chunks = numbers_of_chunks(self._problem, grid, form, self._limits.most_chunks)
        # Like grids differ only in the names of their nodes.
        key = grid.width, grid.context_parallel, grid.num_stages, grid.content, form.settings
        if not chunks or key in self._seen:
            return
        self._seen.add(key)
        settings = replace(form.settings, num_chunks=chunks[0])
        for own in self._prices.quickest(grid, settings, self._dispatchers):
            made = StockCase(self._problem, grid, own, self._prices)
            self._num_grids += 1
            self._push(made.quick_s(chunks[-1]), GridItem(made, chunks))

    def _make_cases(self, item: GridItem) -> None:
        self._num_made += 1
        first, own = item.case, item.case.settings
        # Stages in one piece keep the fewest micro-batches: what does not fit so never does.
        if own.num_chunks > 1 and not isfinite(self._with_chunks(first, 1).least_s()):
            return
        for chunks in item.chunks:
            case = first if chunks == own.num_chunks else self._with_chunks(first, chunks)
            self._push(max(case.quick_s(), case.least_s()), case)

    def _with_chunks(self, case: StockCase, num_chunks: int) -> StockCase:
        settings = replace(case.settings, num_chunks=num_chunks)
        return StockCase(self._problem, case.grid, settings, self._prices)

    def _price(self, case: StockCase) -> None:
        """Bound the divisions of a case that could beat the best so far."""
        divisions, is_complete = divisions_in_time(
            case, self._best.step_s, self._limits.few_divisions
        )
        self._is_exact &= is_complete
        if not len(divisions):
            return
        self._num_bounded += len(divisions)
        ready = self._push_ready(case, divisions, is_quick=True)
        if ready is not None:
            self._num_cases[case.settings.num_chunks > 1] += 1
            self._climb(case, ready.divisions[0], float(ready.bounds_s[0]))

    def _push_ready(
        self, case: StockCase, divisions: Divisions, is_quick: bool
    ) -> ReadyItem | None:
        """Bound divisions and put them in the queue; None where none fits."""
        batches = (divisions[b : b + _BATCH] for b in range(0, len(divisions), _BATCH))
        bounds_s = np.concatenate([case.least_times_s(own, is_quick) for own in batches])
        # Lowest bound first, as `ReadyItem` has them.
        order = np.argsort(bounds_s, kind="stable")
        if not np.isfinite(bounds_s[order[0]]):
            return None
        ready = ReadyItem(case, divisions[order], bounds_s[order], is_quick)
        self._push(float(ready.bounds_s[0]), ready)
        return ready

    def _climb(self, case: StockCase, division: np.ndarray, start_s: float) -> None:
        """Move layers between the chunks of an interleaved case while that lowers the bound."""
        # Chunks as even as can be are seldom the best; moves have won up to 6 % more.
        is_near = self._best.may_win(start_s * _MOST_CLIMBED)
        if case.settings.num_chunks == 1 or not is_near:
            return
        if self._num_climbs >= self._limits.num_climbs:
            return
        self._num_climbs += 1

        def bounds_s(divisions: Divisions) -> NDArray[np.float64]:
            self._num_bounded += len(divisions)
            return case.least_times_s(divisions, is_quick=True)

        best, best_s = climbed(division, start_s, bounds_s)
        if best_s < start_s:
            self._push(best_s, ReadyItem(case, best[None], np.array([best_s]), is_quick=True))

    def _next_division(self, item: ReadyItem) -> None:
        """Simulate the division with the lowest bound; the next one may follow."""
        division, bound_s = item.divisions[item.place].tolist(), float(item.bounds_s[item.place])
        step_s = self._best.try_division(item.case, tuple(division), bound_s)
        if step_s is None:
            self._is_exact = False
            return
        # The next division waits in the queue, likely as much slower than its bound as this one:
        # messages that wait for each other delay all divisions of a case.
        following = item.place + 1
        if following < len(item.divisions) and np.isfinite(item.bounds_s[following]):
            next_item = replace(item, place=following)
            self._push(float(item.bounds_s[following]), next_item, step_s / bound_s)
