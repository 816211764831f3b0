"""The gain of a new plan, at the GPU speeds measured in training.

Each type's forward and backward passes are stretched by what those of its stages really took
beside their prediction (the median over them).  The planner is called with passes so stretched, and
both plans are simulated with them.  The assumption about the new plan: a type's passes take that
many times as long whatever the layers and GPUs of a stage, fixed costs of kernels and the group's
own communication included.  Optimizer and messages keep their predicted times.  A single GPU that
lags behind its type is not planned around; the job's log names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from megatron_hetero.cost.work.profile import Profile, Stretch
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.planner import plan_cluster
from megatron_hetero.report.content import Content, Lane
from megatron_hetero.schedule.programme import BACKWARDS
from megatron_hetero.schedule.simulator.step import simulate_plan
from megatron_hetero.units import format_duration

WORTH_SAYING = 0.01
"""A gain below this is none."""


@dataclass(frozen=True)
class Replan:
    """`ratios`: GPU type -> measured over predicted seconds of its passes; simulated step times
    with passes so long, of the plan as it is and of the best new one, whose layout is `layout`."""

    ratios: Mapping[str, Stretch]
    kept_s: float
    new_s: float
    layout: str

    @property
    def gain(self) -> float:
        """Return the part of the step that a new plan saves; 0 where the old one is as good."""
        return max(0.0, 1 - self.new_s / self.kept_s)


def replan(content: Content, profile: Profile | None) -> Replan:
    """Plan again with passes as long as in the last group of `content.timelines`, which was
    measured.

    Raises:
        InfeasibleError: no plan fits the cluster.
    """
    plan, cluster = content.plan, content.cluster
    ratios = pass_ratios(content, content.timelines[-1].lanes)
    stretched = replace(profile or Profile({}), stretches=ratios)
    if plan.workload is None:  # `gather` has refused it
        raise ValueError("the plan carries no model")
    new = plan_cluster(cluster, plan.workload, profile=stretched, bounded=False)
    kept_s, new_s = (simulate_plan(p, cluster, profile=stretched).step_time_s for p in (plan, new))
    return Replan(ratios, kept_s, new_s, format_layout(new.layout))


def pass_ratios(content: Content, measured: Sequence[Lane]) -> dict[str, Stretch]:
    """Divide measured by predicted seconds of the passes of each GPU type's stages, the median over
    them."""
    # The first group of timelines is the prediction.
    predicted = {(lane.replica, lane.stage): lane for lane in content.timelines[0].lanes}
    found: dict[str, list[Stretch]] = {}
    # A stage counts for each type of GPU that it has.
    for lane in measured:
        real_s = _passes_s(lane)
        there_s = _passes_s(predicted[lane.replica, lane.stage])
        ratio = Stretch(*(real / there for real, there in zip(real_s, there_s, strict=True)))
        for name in dict.fromkeys(content.plan.type_by_device[d] for d in lane.devices):
            found.setdefault(name, []).append(ratio)
    return {
        name: Stretch(median(r.forward for r in ratios), median(r.backward for r in ratios))
        for name, ratios in found.items()
    }


def _passes_s(lane: Lane) -> tuple[float, float]:
    """Sum the seconds of the lane's forward passes, and of all parts of its backward passes."""
    forward_s, backward_s = (
        sum(o.end_s - o.start_s for o in lane.operations if o.kind in kinds)
        for kinds in (("forward",), BACKWARDS)
    )
    return forward_s, backward_s


def replan_lines(found: Replan) -> Iterator[str]:
    """Write the gain for people."""
    ratios = ", ".join(
        f"{name} {ratio.forward:.2f} / {ratio.backward:.2f}" for name, ratio in found.ratios.items()
    )
    yield f"Measured / predicted time by GPU type, forward / backward: {ratios}"
    if found.gain < WORTH_SAYING:
        yield (
            "With passes so long no new plan is faster than this one, which takes "
            f"{format_duration(found.kept_s)} a step."
        )
    else:
        yield (
            f"With passes so long a new plan takes {format_duration(found.new_s)} a step, this one "
            f"{format_duration(found.kept_s)} ({found.gain:.0%} less): {found.layout}"
        )


def replan_to_data(found: Replan) -> dict[str, Any]:
    """Convert the gain to data for programs."""
    return {
        "gpu_type_ratios": {name: ratio._asdict() for name, ratio in found.ratios.items()},
        "kept_step_time_s": found.kept_s,
        "new_step_time_s": found.new_s,
        "gain": found.gain,
        "layout": found.layout,
    }
