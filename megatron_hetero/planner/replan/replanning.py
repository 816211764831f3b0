"""Planning again after the cluster changed: the plan near the old one, the best one, and what it
costs to move to each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.movement import Movement
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import UsageError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.communication.libraries import kept_to_plan
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.advise.idle import idle_reasons
from megatron_hetero.planner.answer.planned import plan_of
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.evaluate.scoreboard import Progress, Scoreboard
from megatron_hetero.planner.found import infeasible_or_limits
from megatron_hetero.planner.loop import SearchLimits
from megatron_hetero.planner.moves.fine import fine_moves
from megatron_hetero.planner.objective import THROUGHPUT, Objective
from megatron_hetero.planner.portfolio import search, strategies_of
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.replan.continuations import LEFT_IDLE, Continuation, Continuations
from megatron_hetero.planner.replan.repair import MAX_TRIED, near_placements, old_replicas
from megatron_hetero.planner.stock_strategy import STOCK
from megatron_hetero.planner.structure_search import StructureSearch

Prefer = Literal["near", "best", "pays"]

_NEAR = "replan"
_DEFAULT_STEPS = 1000.0
"""Default number of steps by which a move must pay off, for the climb."""
_NUM_SHOWN = 4


@dataclass(frozen=True)
class Replanned:
    """One way to go on.

    `pays_after_steps`: from so many further steps on, this plan has made up for moving more than
    the plan before it in the list does; None for the first, and where a time is not known.
    """

    plan: Plan
    layout: str
    step_time_s: float
    movement: Movement
    pays_after_steps: int | None


@dataclass(frozen=True)
class Replanning:
    """`ways` begin with the plan that moves least and end with the fastest; each is faster than all
    that move less.  `chosen` is the index of the one to take."""

    ways: tuple[Replanned, ...]
    chosen: int
    interrupted: bool = False


def replan(
    old: Plan,
    cluster: Cluster,
    workload: Workload | None = None,
    *,
    profile: Profile | None = None,
    progress: Progress | None = None,
    strategy: str = "auto",
    objective: Objective = THROUGHPUT,
    store_bytes_per_s: float | None = None,
    prefer: Prefer = "pays",
) -> Replanning:
    """Return ways to go on with an old plan's training on a changed cluster.

    Args:
        workload: what goes on; by default that of the old plan.
        objective: its limits hold for every way; its number of steps is what is left to do.
        store_bytes_per_s: what one node reads of a checkpoint store; None if what is missing is
            fetched from the GPUs that have it.
        prefer: which way to choose: the one that moves least, the fastest, or the one that ends
            first (the fastest where the number of steps is not known).
    Raises:
        UsageError: the old plan names no devices or no model, or another model.
        InfeasiblePlanError: as `plan_cluster`.
    """
    # The old plan must say what it trains, and where.
    workload = workload or old.workload
    if workload is None or old.workload is None:
        raise UsageError("the old plan does not say which model it is for; plan anew without it")
    if workload.model != old.workload.model:
        raise UsageError(
            "the old plan is for another model, so nothing of it can stay; plan anew without it, "
            "or leave --model away to go on with the old plan's"
        )
    if not all(stage.devices for replica in old.replicas for stage in replica.stages):
        raise UsageError("the old plan names no devices (it was made of a layout); plan without it")
    if strategy == STOCK:
        raise UsageError(
            f"--strategy {STOCK} finds one plan and none near it; use --near with --stock, which "
            "keeps to plans of stock Megatron"
        )
    # Search as for a new plan, and near the old one.
    kept = kept_to_plan(cluster, old)
    problem = make_problem(kept, workload, profile, objective=objective)
    ways = Continuations(problem, old, store_bytes_per_s)
    board = search(problem, progress, strategies_of(strategy))
    if not board.interrupted:
        _Near(ways).search(board)
    # Every candidate is a way, with what it would move.
    for candidate in board.ranking_of_all:
        ways.add(candidate)
    rescorer = Rescorer(board)
    if (best := rescorer.best()) is not None:
        ways.add(best)
    ways.add_kept()
    # Ways that no other beats in both step and movement.
    front = ways.front(rescorer)
    if not front:
        raise infeasible_or_limits(problem, board)
    shown = _shown(front, objective.num_steps or _DEFAULT_STEPS)
    chosen = _chosen(shown, prefer, objective.num_steps)
    found = tuple(
        Replanned(
            plan := _plan_of(problem, board, way),
            format_layout(plan.layout),
            way.step_time_s,
            way.movement,
            None if index == 0 else _pays_after(shown[index - 1], way),
        )
        for index, way in enumerate(shown)
    )
    return Replanning(found, chosen, board.interrupted)


class _Near:
    """Scores placements near the old plan, and climbs from the nearest by layers and micro-batches,
    while moving pays off within the remaining steps."""

    name = _NEAR

    def __init__(self, ways: Continuations) -> None:
        self.ways = ways

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        ways, problem = self.ways, board.problem
        near = Scoreboard(problem)
        # A board of its own: placements near the old plan do not disturb the search.
        found = []
        # Plans that keep the old replicas as far as they live.
        for placement in near_placements(problem, old_replicas(problem, ways.old, ways.alive)):
            candidate = near.score_with_counts(placement, self.name, whole=True)
            if candidate is not None and (way := ways.add(candidate)) is not None:
                found.append(way)
        # With recompute and micro-batch sizes of their own, those too that lack memory without.
        StructureSearch(SearchLimits(moves=False)).search(near)
        for candidate in near.ranking_of_all:
            ways.add(replace(candidate, strategy=self.name))
        if not found:
            return
        # From the way with the least total time, try small changes while they help.
        num_steps = problem.objective.num_steps or _DEFAULT_STEPS
        best = min(found, key=lambda way: (_total_s(way, num_steps), way.key))
        priced = 0
        improved = True
        while improved and best.candidate is not None:
            improved = False
            for placement in fine_moves(best.candidate.placement):
                priced += 1
                if priced > MAX_TRIED:
                    return
                candidate = near.score_with_counts(placement, self.name, whole=True)
                if candidate is None or candidate.step_time_s >= best.step_time_s:
                    continue
                moved = ways.add(candidate)
                if moved and _total_s(moved, num_steps) < _total_s(best, num_steps):
                    best, improved = moved, True
                    # First improvement: moves of the new placement are tried from the start.
                    break


def _total_s(way: Continuation, num_steps: float) -> float:
    """Return seconds until the run ends; what has to come from a checkpoint first is not
    counted."""
    return (way.movement.time_s or 0.0) + num_steps * way.step_time_s


def _shown(front: Sequence[Continuation], num_steps: float) -> list[Continuation]:
    """Return the first, the last, and between the two the ways with the earliest end."""
    # The way that moves least and the fastest are always shown.
    if len(front) <= _NUM_SHOWN:
        return list(front)
    middle = sorted(front[1:-1], key=lambda way: _total_s(way, num_steps))[: _NUM_SHOWN - 2]
    return [way for way in front if way in (front[0], front[-1]) or way in middle]


def _chosen(shown: Sequence[Continuation], prefer: Prefer, num_steps: float | None) -> int:
    if prefer == "near":
        return 0
    if prefer == "best" or num_steps is None:
        return len(shown) - 1
    return min(range(len(shown)), key=lambda i: (_total_s(shown[i], num_steps), i))


def _pays_after(before: Continuation, way: Continuation) -> int | None:
    if before.movement.time_s is None or way.movement.time_s is None:
        return None
    # `front_of` makes later ways faster, so that this is above zero.
    saved_s = before.step_time_s - way.step_time_s
    return max(0, ceil((way.movement.time_s - before.movement.time_s) / saved_s))


def _plan_of(problem: Problem, board: Scoreboard, way: Continuation) -> Plan:
    if way.plan is not None:
        return way.plan
    candidate = way.candidate
    if candidate is None:
        raise AssertionError("a way is a candidate or a plan")
    used = {device.name for device in candidate.placement.devices()}
    if candidate.strategy == _NEAR:
        names = [d.name for d in problem.cluster.devices if d.name not in used]
        reasons = {name: problem.idle_reasons.get(name, LEFT_IDLE) for name in names}
    else:
        reasons = idle_reasons(problem, candidate)
    return plan_of(problem, candidate, reasons, board.interrupted)
