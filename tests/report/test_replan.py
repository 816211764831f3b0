"""What a new plan gains once a job has shown how fast its GPUs are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.report.page.content import Content, LaneGroup, gather
from megatron_hetero.report.replan import replan, replan_lines, replan_to_data
from tests.preflight.jobs import planned

PLAN, CLUSTER = planned(("fast", "A100-80GB", 2), ("slow", "RTX-4090", 2))


@pytest.fixture(scope="module")
def content() -> Content:
    return gather(PLAN, CLUSTER, quick=True)


def measured(content: Content, ratios: dict[str, float]) -> Content:
    """As if stages on these nodes had taken so many times as long."""
    (group,) = content.timelines
    lanes = []
    for lane in group.lanes:
        ratio = ratios[lane.devices[0].rpartition(":")[0]]
        spans = [
            o._replace(start_s=ratio * o.start_s, end_s=ratio * o.end_s) for o in lane.operations
        ]
        lanes.append(replace(lane, operations=tuple(spans)))
    job = LaneGroup("measured, step 10", 2 * group.step_time_s, tuple(lanes))
    return replace(content, timelines=(group, job))


def test_as_predicted_nothing_is_gained(content: Content) -> None:
    found = replan(measured(content, {"fast": 1.0, "slow": 1.0}), None)
    assert found.ratios == pytest.approx(dict.fromkeys(found.ratios, 1.0))
    assert found.kept_s == pytest.approx(content.estimates.step_time_s)
    assert found.gain < 0.01
    assert "no new plan is faster" in list(replan_lines(found))[1]


def test_a_type_that_is_much_slower_gets_less_work(content: Content) -> None:
    found = replan(measured(content, {"fast": 1.0, "slow": 3.0}), None)
    assert found.ratios["RTX-4090"] == pytest.approx(3.0)
    assert found.kept_s > content.estimates.step_time_s
    assert found.new_s < found.kept_s
    assert replan_to_data(found)["gain"] == pytest.approx(1 - found.new_s / found.kept_s)
    assert found.layout in list(replan_lines(found))[1]
