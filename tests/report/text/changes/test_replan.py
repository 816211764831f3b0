"""What a new plan gains once a job has shown how fast its GPUs are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cost.work.profile import NO_STRETCH, Profile, Stretch
from megatron_hetero.report.content import Content, LaneGroup, gather
from megatron_hetero.report.text.changes.replan import (
    pass_ratios,
    replan,
    replan_lines,
    replan_to_data,
)
from megatron_hetero.schedule.simulator.step import simulate_plan
from tests.preflight.jobs import planned

PLAN, CLUSTER = planned(("fast", "A100-80GB", 2), ("slow", "RTX-4090", 2))


@pytest.fixture(scope="module")
def content() -> Content:
    return gather(PLAN, CLUSTER, quick=True)


def measured(content: Content, ratios: dict[str, Stretch]) -> Content:
    """As if passes of stages on these nodes had taken so many times as long."""
    (group,) = content.timelines
    lanes = []
    for lane in group.lanes:
        ratio = ratios[lane.devices[0].rpartition(":")[0]]
        spans = []
        for o in lane.operations:
            times = ratio.forward if o.kind == "forward" else ratio.backward
            spans.append(o._replace(end_s=o.start_s + times * (o.end_s - o.start_s)))
        lanes.append(replace(lane, operations=tuple(spans)))
    job = LaneGroup("measured, step 10", 2 * group.step_time_s, tuple(lanes))
    return replace(content, timelines=(group, job))


def test_as_predicted_nothing_is_gained(content: Content) -> None:
    found = replan(measured(content, {"fast": NO_STRETCH, "slow": NO_STRETCH}), None)
    for ratio in found.ratios.values():
        assert ratio == pytest.approx(NO_STRETCH)
    assert found.kept_s == pytest.approx(content.simulation.step_time_s)
    assert found.gain < 0.01
    assert "no new plan is faster" in list(replan_lines(found))[1]


def test_the_step_is_simulated_with_passes_as_long_as_measured(content: Content) -> None:
    """Where fixed costs are most of a pass, no speed of a GPU says how long it takes."""
    ratios = {"fast": Stretch(40.0, 15.0), "slow": Stretch(5.0, 20.0)}
    job = measured(content, ratios)
    found = pass_ratios(content, job.timelines[-1].lanes)
    assert found["A100-80GB"] == pytest.approx(ratios["fast"])
    stretched = Profile({}, stretches=found)
    simulation = simulate_plan(PLAN, CLUSTER, profile=stretched)
    for lane, stage in zip(job.timelines[-1].lanes, simulation.timelines, strict=True):
        for kind in ("forward", "backward"):
            took_s, measured_s = (
                [o.end_s - o.start_s for o in operations if o.kind == kind]
                for operations in (stage.operations, lane.operations)
            )
            assert took_s == pytest.approx(measured_s)
    assert replan(job, None).kept_s == pytest.approx(simulation.step_time_s)


def test_a_type_that_is_much_slower_gets_less_work(content: Content) -> None:
    found = replan(measured(content, {"fast": NO_STRETCH, "slow": Stretch(3.0, 3.0)}), None)
    assert found.ratios["RTX-4090"] == pytest.approx((3.0, 3.0))
    assert found.kept_s > content.estimates.step_time_s
    assert found.new_s < found.kept_s
    assert replan_to_data(found)["gain"] == pytest.approx(1 - found.new_s / found.kept_s)
    assert found.layout in list(replan_lines(found))[1]
