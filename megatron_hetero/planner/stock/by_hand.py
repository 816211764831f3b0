"""What people do without a planner: equal layers at one width, on all GPUs or on the fast ones.

Megatron's defaults and the job's own flags: its micro-batch size, ranks in the default order, as
many layers on every stage, whole experts where they are dealt out; recompute as the job has it, and
of all layers where nothing fits so.  Of the widths and depths that fit the fastest is taken, which
takes somebody some trials.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hetero.cluster.spec import Node
from megatron_hetero.cost.choices import expert_groups
from megatron_hetero.cost.model import CostModel
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.problem import Problem, Unit, equal_units
from megatron_hetero.planner.shapes.kinds import kinds_of
from megatron_hetero.planner.stock.case import StockCase
from megatron_hetero.planner.stock.forms import groups_fit_grid
from megatron_hetero.planner.stock.grids import StockGrid, StockRanks, grids_of
from megatron_hetero.planner.stock.plan import stock_plan
from megatron_hetero.planner.stock.rates import GroupForm, StockRates
from megatron_hetero.planner.stock.settings import StockRecompute, StockSettings
from megatron_hetero.rounding import below

_MOST_CASES = 40
"""Widths and depths priced, the lowest bounds first."""


@dataclass(frozen=True)
class ByHand:
    """A plan that somebody would write by hand, and the step without queues on shared paths."""

    name: str
    plan: Plan
    step_time_s: float


def plans_by_hand(problem: Problem) -> tuple[ByHand, ...]:
    """Return the plan on all GPUs, and for several types of GPUs the plan without the slower cards.
    Plans that do not fit are left out; none is returned if speed is not the whole objective."""
    # A plan by hand aims at speed alone, and is compared under the project's own prices.
    if problem.make_costs is not CostModel or problem.objective.may_want_fewer(problem.cluster):
        return ()
    nodes = list(problem.nodes)
    types = {node.gpu_type.name for node in nodes}
    choices: list[tuple[str, Sequence[Node]]] = [("by hand: equal layers, all GPUs", nodes)]
    if len(types) > 1:
        fast = _without_slower(problem)
        choices.append(("by hand: without the slower cards", fast))
    found = []
    for name, chosen in choices:
        best = _best(problem, chosen)
        if best is not None:
            found.append(ByHand(name, *best))
    return tuple(found)


def _without_slower(problem: Problem) -> list[Node]:
    """Return the nodes of the type whose GPU takes the least time for one of the job's layers."""
    precision, rows = problem.workload.training.precision, problem.workload.model.vocab_size
    each: dict[str, tuple[bool, float, str]] = {}
    for node in problem.nodes:
        gpu = node.gpu_type
        # The peak of the data sheet is not asked: an L40S has a higher one than an A100.
        layer_s = problem.costs.pieces(node, 1, rows).layer.total_s
        # A card without this precision counts as the slowest.
        each[gpu.name] = (gpu.peak_flops[precision] is None, layer_s, gpu.name)
    fastest = min(each, key=lambda name: each[name])
    return [node for node in problem.nodes if node.gpu_type.name == fastest]


def _best(problem: Problem, nodes: Sequence[Node]) -> tuple[Plan, float] | None:
    training = problem.workload.training
    own: StockRecompute = training.recompute
    # Full recompute is the second try, for where nothing fits otherwise.
    kinds: tuple[StockRecompute, ...] = (own,) if own == "full" else (own, "full")
    num_gpus = sum(len(problem.gpus[node.name]) for node in nodes)
    groups = (None, *expert_groups(problem.costs, 1, num_gpus))
    for recompute in kinds:
        found = []
        for own_groups in groups:
            settings = StockSettings(
                training.micro_batch_size, recompute, 1, own_groups, training.token_dispatcher
            )
            if (best := _fastest(problem, nodes, settings)) is not None:
                found.append(best)
        if found:
            # What fits without more recompute is taken, as somebody by hand would.
            return min(found, key=lambda entry: entry[1])
    return None


def _fastest(
    problem: Problem, nodes: Sequence[Node], settings: StockSettings
) -> tuple[Plan, float] | None:
    grids = list(_grids(problem, nodes, settings))
    rates = StockRates(problem, [grid.ranks for grid in grids])
    ranked = sorted(
        (rates.least_s(grid, GroupForm(grid.width, 1, settings)), number)
        for number, grid in enumerate(grids)
    )
    best_s, best = float("inf"), None
    # From the lowest bound on, until no bound is below the best step.
    for bound_s, number in ranked[:_MOST_CASES]:
        if not below(bound_s, best_s):
            break
        grid = grids[number]
        each = problem.num_layers // grid.num_stages
        case = StockCase(problem, grid, settings)
        (step_s,) = case.least_times_s(np.full((1, grid.num_stages), each))
        if below(float(step_s), best_s):
            best_s, best = float(step_s), (case, (each,) * grid.num_stages)
    if best is None:
        return None
    return stock_plan(*best, 0), best_s


def _grids(problem: Problem, nodes: Sequence[Node], settings: StockSettings) -> Iterator[StockGrid]:
    """Yield the grids of equal layers on all GPUs of some nodes."""
    of_kind = {
        node.name: number for number, kind in enumerate(kinds_of(problem)) for node in kind.nodes
    }
    batch = problem.workload.training.global_batch_size
    widths = set.intersection(*(set(problem.widths[node.name]) for node in nodes))
    for width in sorted(widths):
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
