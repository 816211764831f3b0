from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.of_plan import check_schedules, replica_schedule, with_schedule
from megatron_hetero.schedule.orders.one_f_one_b import one_f_one_b

PLAN = plan_from_layout(parse_layout("tp1:2,tp1:2 @3 | tp1:4 @1"))


def with_orders(*orders: str) -> Plan:
    first, *others = PLAN.replicas
    stages = tuple(
        replace(stage, order=order) for stage, order in zip(first.stages, orders, strict=True)
    )
    return replace(PLAN, replicas=(replace(first, stages=stages), *others), schedule="synthesised")


def test_launch_counts_make_1f1b() -> None:
    assert replica_schedule(PLAN, 0) == one_f_one_b(2, 3)
    assert replica_schedule(PLAN, 1) == one_f_one_b(1, 1)


def test_orders_take_its_place() -> None:
    deep = one_f_one_b(2, 3, (3, 1))
    plan = with_schedule(PLAN, 0, deep, "synthesised")
    assert [stage.order for stage in plan.replicas[0].stages] == ["FFFBBB", "FBFBFB"]
    assert replica_schedule(plan, 0) == deep
    check_schedules(plan)


def test_orders_that_wait_for_each_other_are_no_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stage 0 wants a gradient before its second forward, stage 1 two forwards before a gradient.

    Each order by itself is sound.
    """
    plan = with_orders("FBFBFB", "FFBFBB")
    with pytest.raises(PlanFormatError, match=r"replica 0: the schedule deadlocks"):
        check_schedules(plan)
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    assert main(["validate", str(path)]) == 4
    assert "plan.json: replica 0: the schedule deadlocks" in capsys.readouterr().err
