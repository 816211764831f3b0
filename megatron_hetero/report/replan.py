"""What a new plan would gain, now that a training job has shown how fast its GPUs are.

Each type's speed is what its stages really took beside their prediction (the median over them);
the planner is called with these speeds, and the old plan is priced with them too.  A single GPU
that lags behind its type is not planned around; it is named by the job's log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megatron_hetero.cost.estimate import estimate_plan
from megatron_hetero.cost.profile import Profile
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.planner import plan_cluster
from megatron_hetero.report.page.content import Content, Lane
from megatron_hetero.report.what_if import with_gpu_speed
from megatron_hetero.schedule.programme import COMPUTE
from megatron_hetero.units import format_duration

WORTH_SAYING = 0.01
"""A gain below this is none."""


@dataclass(frozen=True)
class Replan:
    """`ratios`: GPU type -> measured over predicted seconds; step times with these speeds, of the
    plan as it is and of the best new one, whose layout is `layout`."""

    ratios: Mapping[str, float]
    kept_s: float
    new_s: float
    layout: str

    @property
    def gain(self) -> float:
        """Part of the step that a new plan saves; 0 where the old one is as good."""
        return max(0.0, 1 - self.new_s / self.kept_s)


def replan(content: Content, profile: Profile | None) -> Replan:
    """Plan again with the speeds of the last group of `content.timelines`, which was measured.

    Raises:
        InfeasibleError: no plan fits the cluster.
    """
    plan, cluster = content.plan, content.cluster
    ratios = speed_ratios(content, content.timelines[-1].lanes)
    for name, ratio in ratios.items():
        cluster, profile = with_gpu_speed(cluster, profile, name, 1 / ratio)
    kept = estimate_plan(plan, cluster, profile)
    if plan.workload is None:  # `gather` has refused it
        raise ValueError("the plan carries no model")
    new = plan_cluster(cluster, plan.workload, profile=profile)
    new_s = estimate_plan(new, cluster, profile).step_time_s
    return Replan(ratios, kept.step_time_s, new_s, format_layout(new.layout))


def speed_ratios(content: Content, measured: Sequence[Lane]) -> dict[str, float]:
    """GPU type -> measured over predicted seconds of its stages' passes, the median over them."""
    type_of_node = {node.name: node.gpu_type.name for node in content.cluster.nodes}
    predicted = {(lane.replica, lane.stage): lane for lane in content.timelines[0].lanes}
    found: dict[str, list[float]] = {}
    for lane in measured:
        ratio = _computing_s(lane) / _computing_s(predicted[lane.replica, lane.stage])
        for name in dict.fromkeys(type_of_node[d.rpartition(":")[0]] for d in lane.devices):
            found.setdefault(name, []).append(ratio)
    return {name: median(ratios) for name, ratios in found.items()}


def _computing_s(lane: Lane) -> float:
    return sum(o.end_s - o.start_s for o in lane.operations if o.kind in COMPUTE)


def replan_lines(found: Replan) -> Iterator[str]:
    """For people."""
    ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in found.ratios.items())
    yield f"Measured / predicted time by GPU type: {ratios}"
    if found.gain < WORTH_SAYING:
        yield "At these speeds no new plan is faster than this one."
    else:
        yield (
            f"At these speeds a new plan takes {format_duration(found.new_s)} a step, this one "
            f"{format_duration(found.kept_s)} ({found.gain:.0%} less): {found.layout}"
        )


def replan_to_data(found: Replan) -> dict[str, Any]:
    """For programs."""
    return {
        "gpu_type_ratios": dict(found.ratios),
        "kept_step_time_s": found.kept_s,
        "new_step_time_s": found.new_s,
        "gain": found.gain,
        "layout": found.layout,
    }
