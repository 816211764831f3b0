"""Devices in a cluster's order for a plan that names none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.names import island_name
from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.place import place_in_order
from tests.plan.strategies import A100, RTX_4090, cluster_of, node


def test_stages_take_the_gpus_of_the_cluster_in_its_order() -> None:
    placed = place_in_order(
        plan_from_layout(parse_layout("tp2:2,tp1:2 @4")), cluster_of(node("a", 2), node("b", 1))
    )
    assert [stage.devices for stage in placed.replicas[0].stages] == [("a:0", "a:1"), ("b:0",)]


@pytest.mark.parametrize("layout", ["tp2:4 @4", "tp1cp2:4 @4"])
def test_unlike_gpus_of_one_machine_are_named_with_their_types(layout: str) -> None:
    """No order of machines helps here, and the message does not say that one would alone."""
    islands = [
        replace(node(island_name("box", gpu.name), 1, gpu), host="box", gpu_indices=(i,))
        for i, gpu in enumerate((A100, RTX_4090))
    ]
    with pytest.raises(PlanFormatError) as error:
        place_in_order(plan_from_layout(parse_layout(layout)), cluster_of(*islands))
    words = str(error.value)
    assert "replica 0, stage 0 would have box:0 (A100-40GB), box:1 (RTX-4090)" in words
    assert "not equal GPUs of one machine" in words
    assert "make the plan with `megatron-hetero plan`" in words
