"""What people do without a planner: equal layers at one width, on all GPUs or on the fast ones.

Megatron's defaults and the job's own flags: its micro-batch size, ranks in the default order, as
many layers on every stage, whole experts where they are dealt out; recompute as the job has it, and
of all layers where nothing fits so.  Of the widths and depths that fit the fastest is taken, which
takes somebody some trials: those with the lowest bounds are priced as any plan is.  The fast GPUs
are those of nearly the shortest layer: an A100 with 40 GB is as fast as an A100 with 80 GB to
somebody who sorts cards by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import itemgetter
from typing import cast

import numpy as np

from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cost.choices import expert_groups
from megatron_hetero.cost.model import CostModel
from megatron_hetero.model.blocks import divides_experts
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.problem import Problem, equal_units
from megatron_hetero.planner.shapes.kinds import kinds_of
from megatron_hetero.planner.stock.case import StockCase
from megatron_hetero.planner.stock.forms import groups_fit_grid
from megatron_hetero.planner.stock.grids import StockGrid, StockRanks, grids_of
from megatron_hetero.planner.stock.orders import by_machine
from megatron_hetero.planner.stock.plan import priced_step_s, stock_plan
from megatron_hetero.planner.stock.prices import StockPrices
from megatron_hetero.planner.stock.settings import StockRecompute, StockSettings
from megatron_hetero.planner.units import Unit
from megatron_hetero.rounding import at_most, below

_MOST_CASES = 40
"""Widths and depths bounded, the lowest quick bounds first."""
_FEW_GPUS = 64
_MOST_PRICED, _MOST_PRICED_OF_MANY = 16, 3
"""Plans priced for a row, the lowest bounds first: on few GPUs, whose steps are priced quickly, and
on many."""
_ALIKE = 1.1
"""Cards are as fast as the fastest whose layer takes at most so many times as long: A100 of both
memory sizes are 2 to 4 % apart, H100 and H200 3 to 5 %."""


@dataclass(frozen=True)
class ByHand:
    """A plan that somebody would write by hand, and its step as `schedule.estimate` prices it."""

    name: str
    plan: Plan
    step_time_s: float


def plans_by_hand(problem: Problem) -> tuple[ByHand, ...]:
    """Return the plan on all GPUs, and where some cards are slower the plan without these cards.
    Plans that do not fit are left out; none is returned if speed is not the whole objective."""
    if "by hand" not in problem.known:
        problem.known["by hand"] = tuple(_plans_by_hand(problem))
    return cast(tuple[ByHand, ...], problem.known["by hand"])


def _plans_by_hand(problem: Problem) -> Iterator[ByHand]:
    # A plan by hand aims at speed alone, and is compared under the project's own prices.
    if problem.make_costs is not CostModel or problem.objective.may_want_fewer(problem.cluster):
        return
    nodes = by_machine(problem.nodes, lambda node: node)
    choices: list[tuple[str, Sequence[Node]]] = [("by hand: equal layers, all GPUs", nodes)]
    if len(fast := _without_slower(problem)) < len(nodes):
        choices.append(("by hand: without the slower cards", fast))
    for name, chosen in choices:
        best = _best(problem, chosen)
        if best is not None:
            yield ByHand(name, *best)


def _without_slower(problem: Problem) -> tuple[Node, ...]:
    """Return the nodes whose GPU takes nearly the least time for one of the job's layers."""
    precision, rows = problem.workload.training.precision, problem.workload.model.vocab_size
    layer_s: dict[str, float] = {}
    for node in problem.nodes:
        # The peak of the data sheet is not asked: an L40S has a higher one than an A100.
        layer_s[node.gpu_type.name] = problem.costs.pieces(node, 1, rows).layer.total_s
    types = {node.gpu_type.name: node.gpu_type for node in problem.nodes}
    # A card without this precision counts as slow, unless none has it.
    able = {name for name, gpu in types.items() if gpu.peak_flops[precision] is not None}
    rivals = able or set(types)
    most_s = _ALIKE * min(layer_s[name] for name in rivals)
    fast = {name for name in rivals if at_most(layer_s[name], most_s)}
    nodes = (node for node in problem.nodes if node.gpu_type.name in fast)
    return by_machine(nodes, lambda node: node)


def _best(problem: Problem, nodes: Sequence[Node]) -> tuple[Plan, float] | None:
    training = problem.workload.training
    own: StockRecompute = training.recompute
    # Full recompute is the second try, for where nothing fits otherwise.
    kinds: tuple[StockRecompute, ...] = (own,) if own == "full" else (own, "full")
    num_gpus = sum(len(problem.gpus[node.name]) for node in nodes)
    groups = (None, *expert_groups(problem.costs, 1, num_gpus))
    most = _MOST_PRICED if num_gpus <= _FEW_GPUS else _MOST_PRICED_OF_MANY
    for recompute in kinds:
        bounded: list[_Bounded] = []
        for own_groups in groups:
            settings = StockSettings(
                training.micro_batch_size, recompute, 1, own_groups, training.token_dispatcher
            )
            bounded += _lowest_bounds(problem, nodes, settings, most)
        # What fits without more recompute is taken, as somebody by hand would.
        if (best := _fastest(problem, sorted(bounded, key=_first)[:most])) is not None:
            return best
    return None


_Bounded = tuple[float, StockCase, tuple[int, ...]]
"""Least seconds of a step, its case and the layers of its stages."""


def _lowest_bounds(
    problem: Problem, nodes: Sequence[Node], settings: StockSettings, most: int
) -> list[_Bounded]:
    """Return so many widths and depths that fit and have the lowest bounds, lowest first."""
    prices, grids = StockPrices(problem), _grids(problem, nodes, settings)
    cases = [StockCase(problem, grid, settings, prices) for grid in grids]
    ranked = sorted((case.quick_s(), number) for number, case in enumerate(cases))
    found: list[_Bounded] = []
    for quick_s, number in ranked[:_MOST_CASES]:
        # No later one has a lower bound than its quick one.
        if len(found) >= most and not below(quick_s, found[most - 1][0]):
            break
        case, num_stages = cases[number], cases[number].grid.num_stages
        division = (problem.num_layers // num_stages,) * num_stages
        (bound_s,) = case.least_times_s(np.array([division]))
        if isfinite(bound_s):
            found.append((float(bound_s), case, division))
            found.sort(key=_first)
    return found[:most]


_first = itemgetter(0)


def _fastest(problem: Problem, bounded: Sequence[_Bounded]) -> tuple[Plan, float] | None:
    """Return the fastest plan and its step; None where none fits.

    Args:
        bounded: in the order of their bounds, which leave out queues on shared paths and what
            overlaps with passes.
    """
    best: tuple[Plan, float] | None = None
    for bound_s, case, division in bounded:
        if best is not None and not below(bound_s, best[1]):
            break
        plan = stock_plan(case, division, 0)
        step_s = priced_step_s(problem, plan)
        if isfinite(step_s) and (best is None or below(step_s, best[1])):
            best = plan, step_s
    return best


def _grids(problem: Problem, nodes: Sequence[Node], settings: StockSettings) -> Iterator[StockGrid]:
    """Yield the grids of equal layers on all GPUs of some nodes."""
    of_kind = {
        node.name: number for number, kind in enumerate(kinds_of(problem)) for node in kind.nodes
    }
    batch = problem.workload.training.global_batch_size
    widths = set.intersection(*(set(problem.widths[node.name]) for node in nodes))
    as_they_lie, model = settings.expert_groups is None, problem.workload.model
    for width in sorted(widths):
        if as_they_lie and not divides_experts(model, width):
            continue
        units: list[Unit] = []
        for node in nodes:
            # A node whose GPUs the width does not divide rules the width out.
            if len(problem.gpus[node.name]) % width:
                break
            units += equal_units(problem, node, width)
        else:
            numbers = tuple(of_kind.get(unit.node, 0) for unit in units)
            ranks = StockRanks(tuple(units), numbers)
            for grid in grids_of(problem, ranks, 1):
                # Megatron's default order of ranks, the same layers on every stage, the batch in
                # equal parts.
                sequences, rest = divmod(batch, grid.num_replicas)
                is_even = problem.num_layers % grid.num_stages == 0
                if grid.rank_order == "tp-dp-pp" and is_even and not rest:
                    fits = groups_fit_grid(grid, settings.expert_groups)
                    if fits and sequences % settings.micro_batch_size == 0:
                        yield grid
