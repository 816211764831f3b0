"""Whole experts dealt out to the devices of a stage: on one line, in the file, and refused."""

from __future__ import annotations

import pytest

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.file import plan_from_data, plan_to_data
from megatron_hetero.plan.layout import format_layout, parse_layout
from megatron_hetero.schedule.stock import reasons_not_stock
from tests.runtime.workloads import MIXTRAL_LIKE, workload


@pytest.mark.parametrize(
    "line",
    ["tp2ep2:4 @6", "tp4(3:2:2:1)ep4(2:1:1:1):3,tp1:1 @4 | tp2ep2(3:1):4 @2", "tp1ep1:4 @6"],
)
def test_a_line_is_read_and_written(line: str) -> None:
    layout = parse_layout(line)
    assert format_layout(layout) == line
    plan = plan_from_layout(layout)
    assert plan_from_data(plan_to_data(plan)).layout == layout
    # Equal tables are Megatron's own expert parallelism.
    tables = {s.expert_shares for r in layout.replicas for s in r.stages}
    is_equal = len(tables) == 1 and all(len(set(table or ())) == 1 for table in tables)
    assert (reasons_not_stock(plan) == ()) == is_equal


def test_a_stage_without_a_table_has_no_new_key() -> None:
    data = plan_to_data(plan_from_layout(parse_layout("tp2:4 @6")))
    assert "expert_shares" not in data["replicas"][0]["stages"][0]["shape"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tp4ep2(2:1):4 @6", "so it is 4"),
        ("tp2ep2(1:2:3):4 @6", "takes 2 shares, not 3"),
        ("tp2ep:4 @6", "expert-parallel size after 'ep'"),
    ],
)
def test_what_the_grammar_refuses(line: str, words: str) -> None:
    with pytest.raises(PlanFormatError, match=words):
        parse_layout(line)


@pytest.mark.parametrize(
    ("line", "changes", "words"),
    [
        ("tp3ep3:4 @6", {}, r"does not divide 4 experts.*ep3\(2:2:1\)"),
        ("tp6ep6(2:1:1:1:1:1):4 @6", {}, "each of 6 devices an expert, and the model has 4"),
        ("tp2ep2:4 @6", {"num_experts": 0}, "no experts"),
    ],
)
def test_what_the_model_refuses(line: str, changes: dict[str, object], words: str) -> None:
    job = workload(**(MIXTRAL_LIKE | changes))
    with pytest.raises(PlanFormatError, match=words):
        validate_plan(plan_from_layout(parse_layout(line), job))


def test_unlike_numbers_are_what_shares_are_for() -> None:
    validate_plan(plan_from_layout(parse_layout("tp3ep3(2:1:1):4 @6"), workload(**MIXTRAL_LIKE)))
