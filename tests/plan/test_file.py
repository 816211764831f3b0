"""plan.json: what is written reads back equal, in equal bytes; what is strange is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import FileFormatError, PlanFormatError
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import (
    load_plan,
    plan_from_data,
    plan_json_schema,
    plan_to_data,
    save_plan,
)
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from tests.plan.edits import PLAN
from tests.plan.strategies import placed_plans


def test_a_saved_plan_loads_equal_in_equal_bytes(tmp_path: Path) -> None:
    save_plan(PLAN, tmp_path / "a.json")
    loaded = load_plan(tmp_path / "a.json")
    save_plan(loaded, tmp_path / "b.json")
    assert loaded == PLAN
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


@settings(max_examples=50)
@given(placed_plans())
def test_data_round_trips(planned: tuple[Plan, Cluster]) -> None:
    plan, _ = planned
    assert plan_from_data(json.loads(json.dumps(plan_to_data(plan)))) == plan


def test_equal_plans_have_equal_bytes_whatever_their_numbers_are_made_of(tmp_path: Path) -> None:
    assert PLAN.estimates is not None
    whole = replace(
        PLAN,
        estimates=replace(PLAN.estimates, step_time_s=2, gradient_sync_s=-0.0),
        idle_reasons={"b:1": "no use"},
    )
    zero = replace(PLAN, estimates=replace(PLAN.estimates, gradient_sync_s=0.0))
    assert whole == zero
    assert json.dumps(plan_to_data(whole)) == json.dumps(plan_to_data(zero))


def test_a_plan_of_a_bare_layout_is_a_file_too(tmp_path: Path) -> None:
    plan = plan_from_layout(parse_layout("tp2(2:1):3,tp1:1 @4x2 | tp1:4 @2"))
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


def test_defaults_may_be_left_out() -> None:
    stage = {"shape": {"tensor_parallel": 1, "num_layers": 3}, "first_layer": 0}
    data = {"schema_version": 1, "replicas": [{"stages": [stage], "num_micro_batches": 2}]}
    assert plan_from_data(data) == plan_from_layout(parse_layout("tp1:3 @2"))


def first_stage(data: dict[str, Any]) -> dict[str, Any]:
    stage: dict[str, Any] = data["replicas"][0]["stages"][0]
    return stage


@pytest.mark.parametrize(
    ("edit", "key", "says"),
    [
        (lambda d: d.update(schema_version=7), "schema_version", "is 7; .* reads 1"),
        (lambda d: d.update(schema_version=True), "schema_version", "is True; .* reads 1"),
        (lambda d: d.pop("schema_version"), None, "no schema_version; this is no plan.json"),
        (lambda d: d.update(colour="red"), "colour", 'unknown key "colour"'),
        (lambda d: first_stage(d).update(layers=3), "layers", r"stages\[0\].layers: unknown key"),
        (lambda d: first_stage(d).update(first_layer="0"), "first_layer", "valid integer"),
        (lambda d: first_stage(d).update(first_layer=0.0), "first_layer", "valid integer"),
        (lambda d: first_stage(d).update(recompute="some"), "recompute", "'none', 'selective'"),
        (lambda d: d["estimates"].update(step_time_s="2"), "step_time_s", "valid number"),
        (lambda d: d.pop("replicas"), None, '"replicas" is missing'),
        (lambda d: d.update(schedule="gpipe"), "schedule", "1f1b"),
        (lambda d: first_stage(d).update(first_layer=1), "first_layer", "layer 0 on no stage"),
        (
            lambda d: d["hosts"][1].update(gpu_indices=[2, 0]),
            None,
            "the last global rank is b:0",
        ),
    ],
)
def test_errors_name_file_and_line(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], key: str | None, says: str
) -> None:
    data = json.loads(json.dumps(plan_to_data(PLAN)))
    edit(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data, indent=2))
    with pytest.raises(PlanFormatError, match=says) as caught:
        load_plan(path)
    lines = path.read_text().splitlines()
    line = int(str(caught.value).removeprefix(f"{path}:").split(":")[0])
    assert key is None or f'"{key}"' in lines[line - 1]
    with pytest.raises(PlanFormatError, match=f"^edited:1: .*{says}"):
        plan_from_data(data, "edited")


@pytest.mark.parametrize("text", ["", "[]", "3", '{"schema_version": 1, "schema_version": 1}', "{"])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(FileFormatError, match=r"plan\.json:1: "):
        load_plan(tmp_path / "plan.json")


def test_the_schema_names_every_key_and_allows_no_other() -> None:
    schema = plan_json_schema()
    grouped = replace(PLAN, exchange_groups=(("a",), ("b",)), exchange_uplinks=((4,), (1,)))
    assert set(schema["properties"]) == set(plan_to_data(grouped))
    assert schema["additionalProperties"] is False
    assert set(schema["$defs"]["Stage"]["properties"]) == set(first_stage(plan_to_data(PLAN)))
    assert all(part["additionalProperties"] is False for part in schema["$defs"].values())
    json.dumps(schema)
