"""Content of the page, gathered before anything is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import UsageError
from megatron_hetero.flags.emit import megatron_args, render_bash
from megatron_hetero.flags.launch import NodeLaunch, node_launches
from megatron_hetero.plan.estimates import Estimates
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.advise.explain import Explanation, explain_plan
from megatron_hetero.planner.portfolio import strategies_of
from megatron_hetero.report.what_if import Variation, variations
from megatron_hetero.schedule.estimate import estimate_plan
from megatron_hetero.schedule.parts import OpSpan
from megatron_hetero.schedule.simulator.step import StepSimulation, simulate_plan
from megatron_hetero.schedule.stock import reasons_not_stock


@dataclass(frozen=True)
class Lane:
    """One row of the timeline: the operations on the GPUs of a stage."""

    replica: int
    stage: int
    devices: tuple[str, ...]
    operations: tuple[OpSpan, ...]


@dataclass(frozen=True)
class LaneGroup:
    """Rows of one origin: predicted, rehearsed or measured."""

    title: str
    step_time_s: float
    lanes: tuple[Lane, ...]


@dataclass(frozen=True)
class Content:
    """A plan on its cluster, scored and explained."""

    plan: Plan
    cluster: Cluster
    estimates: Estimates
    explanation: Explanation
    simulation: StepSimulation
    timelines: tuple[LaneGroup, ...]
    what_if: tuple[Variation, ...]
    not_stock: tuple[str, ...]
    arguments: str
    launches: tuple[NodeLaunch, ...]
    plan_name: str
    notes: tuple[str, ...] = ()
    """Sentences that follow the timelines."""

    @property
    def speedup_over_stock(self) -> float | None:
        """Divide the step time of stock Megatron's best plan by this one's; None where it has
        none."""
        stock = self.explanation.best_stock
        return None if stock is None else stock.step_time_s / self.explanation.step_time_s


def gather(
    plan: Plan,
    cluster: Cluster,
    profile: Profile | None = None,
    others: Sequence[LaneGroup] = (),
    plan_name: str = "plan.json",
    quick: bool = False,
) -> Content:
    """Score, simulate and explain a plan that is valid on `cluster`.

    Args:
        profile: measured times.
        others: timelines beside the predicted one.
        plan_name: the name of the plan's file in the commands.
        quick: compare with the plans of stock Megatron alone, without a search.
    Raises:
        UsageError: the plan carries no model.
        UnsupportedError: it asks for something that cannot be priced yet (named).
    """
    if plan.workload is None:
        raise UsageError(
            "the plan carries no model, so there is nothing to report; make it with "
            "`megatron-hetero plan`"
        )
    # Prices with the bound, then the simulation.
    estimates = estimate_plan(plan, cluster, profile)
    plan = replace(plan, estimates=estimates)
    simulation = simulate_plan(plan, cluster, profile=profile)
    lanes = tuple(
        Lane(stage.replica, stage.stage, stage.devices, stage.operations)
        for stage in simulation.timelines
    )
    # The explanation compares plans; `quick` keeps to stock Megatron's.
    return Content(
        plan=plan,
        cluster=cluster,
        estimates=estimates,
        explanation=explain_plan(
            plan,
            cluster,
            profile,
            strategies_of("symmetric") if quick else None,
        ),
        simulation=simulation,
        timelines=(LaneGroup("predicted", simulation.step_time_s, lanes), *others),
        what_if=variations(plan, cluster, profile),
        not_stock=reasons_not_stock(plan),
        arguments=render_bash(megatron_args(plan, plan_name)),
        launches=node_launches(plan, plan_name),
        plan_name=plan_name,
    )
