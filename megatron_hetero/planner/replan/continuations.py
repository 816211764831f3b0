"""Candidates of a re-planning, each with the cost of moving from the old plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from megatron_hetero.cost.memory.holdings import (
    StateSizes,
    holdings,
    parts_of_placement,
    parts_of_plan,
)
from megatron_hetero.cost.movement import Movement, Mover, surviving
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.price import price_of
from megatron_hetero.errors import HeteroError
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.hanging import hanging
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.evaluate.written import plan_inputs
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.replan.relabel import nearest_labels
from megatron_hetero.rounding import below
from megatron_hetero.schedule.estimate import estimate_plan

LEFT_IDLE = "left idle to stay near the plan before"


@dataclass(frozen=True)
class Continuation:
    """A candidate with its movement; `plan` where it is the old plan itself.

    `is_final`: its step is priced as its plan's is, with queues.
    """

    step_time_s: float
    movement: Movement
    candidate: Candidate | None
    plan: Plan | None = None
    is_final: bool = False

    @property
    def key(self) -> tuple[float, float]:
        """Least movement first; unknown times by bytes alone."""
        move_s = self.movement.time_s
        return (inf if move_s is None else move_s), self.movement.moved_bytes


class Continuations:
    """Candidates with their movements from the old plan."""

    def __init__(self, problem: Problem, old: Plan, store_bytes_per_s: float | None) -> None:
        self.problem = problem
        self.old = old
        self.found: list[Continuation] = []
        self.sizes = StateSizes(problem.workload)
        self.alive = frozenset(
            device.name
            for node in problem.nodes
            for device in node.devices
            if device.index in problem.gpus[node.name]
            # A device whose type changed under the same name has lost its state.
            if old.type_by_device.get(device.name, node.gpu_type.name) == node.gpu_type.name
        )
        kept = surviving(holdings(problem.workload, parts_of_plan(old)), self.alive)
        self.kept = kept
        self.mover = Mover(problem.cluster, self.sizes, kept, store_bytes_per_s)
        self._seen: set[object] = set()

    def way(self, candidate: Candidate) -> Continuation:
        """Return a candidate on the GPUs that keep most."""
        placement = nearest_labels(self.problem, candidate.placement, self.kept, self.sizes)
        wanted = holdings(self.problem.workload, parts_of_placement(placement))
        movement = self.mover.to(wanted)
        return Continuation(
            candidate.step_time_s, movement, replace(candidate, placement=placement)
        )

    def add(self, candidate: Candidate) -> Continuation | None:
        """Measure a candidate, unless it was or breaks a limit."""
        if candidate.placement in self._seen or not candidate.keeps_limits:
            return None
        if self.problem.objective.stock_only and not candidate.is_stock:
            return None
        self._seen.add(candidate.placement)
        way = self.way(candidate)
        self.found.append(way)
        return way

    def add_kept(self) -> None:
        """Add the old plan unchanged, if still runnable: with the plan's shares, orders and
        recompute."""
        problem, old = self.problem, self.old
        cluster = problem.cluster
        used = {d for r in old.replicas for s in r.stages for d in s.devices}
        # The old plan needs all of its GPUs.
        if not used <= self.alive:
            return
        idle = tuple(d.name for d in cluster.devices if d.name not in used)
        reasons = {d: problem.idle_reasons.get(d, LEFT_IDLE) for d in idle}
        plan = replace(
            old,
            workload=problem.workload,
            idle_devices=idle,
            idle_reasons=reasons,
            estimates=None,
            inputs=plan_inputs(problem, problem.workload),
        )
        # With today's links and limits the old plan may break a rule that it kept before.
        try:
            validate_plan(plan, cluster)
            plan = replace(plan, estimates=estimate_plan(plan, cluster, problem.costs.profile))
            validate_plan(plan, cluster)
        except HeteroError:
            return  # it breaks a limit, does not fit, or is for another batch
        estimates = plan.estimates
        if estimates is None or not self._keeps_limits(plan):
            return
        none = Movement(0.0, 0.0, 0.0)
        self.found.append(Continuation(estimates.step_time_s, none, None, plan, True))

    def front(self, rescorer: Rescorer) -> list[Continuation]:
        """Return the ways worth having (`front_of`) that end on GPUs, priced as their plans are.

        Queues only make a step longer, so what is behind without them stays behind.
        """
        # Each pass prices the first rough way of the front with queues, until all are final.
        ways = list(self.found)
        while True:
            front = front_of(ways)
            rough = next((way for way in front if not way.is_final), None)
            if rough is None or rough.candidate is None:
                return front
            ways = [way for way in ways if way is not rough]
            candidate = rescorer.with_queues(rough.candidate)
            if candidate.keeps_limits and hanging(self.problem, candidate) is None:
                ways.append(
                    replace(
                        rough,
                        step_time_s=candidate.step_time_s,
                        candidate=candidate,
                        is_final=True,
                    )
                )

    def _keeps_limits(self, plan: Plan) -> bool:
        """Return whether a plan without a candidate keeps the limits of time and money."""
        estimates, objective = plan.estimates, self.problem.objective
        if estimates is None:
            return False
        costs, cluster = self.problem.costs, self.problem.cluster
        placement = placement_of(plan, cluster)
        price = price_of(costs, placement, costs.placement(placement))
        standing = objective.standing_of(
            cluster, plan.layout.num_devices, estimates.step_time_s, price
        )
        return standing.excess == 0.0


def front_of(ways: Sequence[Continuation]) -> list[Continuation]:
    """Sort by movement, the least first, each faster than all that move less."""
    found: list[Continuation] = []
    # From the least movement on, only a shorter step earns its place.
    for way in sorted(ways, key=lambda way: (*way.key, way.step_time_s)):
        if not found or below(way.step_time_s, found[-1].step_time_s):
            found.append(way)
    return found
