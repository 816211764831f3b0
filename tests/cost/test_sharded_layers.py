"""Prices of layers whose weights the replicas divide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.estimate import estimate_plan
from megatron_hetero.schedule.simulator.step import simulate_plan
from tests.cost.builders import (
    FAST,
    SLOW,
    bytes_between_nodes,
    make_cluster,
    make_workload,
    place_plan,
)

WORKLOAD = make_workload(8, 1024, 12, use_distributed_optimizer=True)
CLUSTER = make_cluster(("a", FAST, 2), ("b", SLOW, 1))


def placed(layout: str) -> Plan:
    return place_plan(replace(plan_from_layout(parse_layout(layout)), workload=WORKLOAD), CLUSTER)


def test_memory_falls_by_the_parts_of_the_others() -> None:
    costs = CostModel(CLUSTER, WORKLOAD)
    found = []
    for sharded in ("", "z4", "z8"):
        plan = placed(" | ".join([f"tp1:8{sharded} @4"] * 3))
        devices = estimate_plan(plan, CLUSTER).devices
        found.append(devices["b:0"].parts_bytes)
    whole, half, all_ = found
    placement = placement_of(placed("tp1:8 @4 | tp1:8 @4 | tp1:8 @4"), CLUSTER)
    rows = costs.vocab_rows((1,))
    layer = costs.sharded_as(placement).stage_memory(placement.replicas[2], 0, rows).per_layer
    for part in ("weights", "gradients"):
        assert whole[part] - half[part] == pytest.approx(4 * layer[part] * 2 / 3, abs=2)
        assert half[part] - all_[part] == pytest.approx(4 * layer[part] * 2 / 3, abs=2)
    assert whole["optimizer"] == half["optimizer"] == all_["optimizer"]
    # Of one layer at a time gradients, and those that the others have sent.
    assert half["buffers"] - whole["buffers"] == 2 * layer["gradients"]
    # Or, where a checkpoint is saved, the whole weights in the place of activations.
    saved = 8 * layer["weights"] - all_["activations"]
    assert all_["buffers"] == max(half["buffers"], saved)


def test_all_replicas_pass_a_sharded_layer_at_the_pace_of_the_slowest() -> None:
    costs = CostModel(CLUSTER, WORKLOAD)
    plan = placed("tp1:8z3 @5 | tp1:8z3 @4 | tp1:8z3 @3")
    placement = placement_of(plan, CLUSTER)
    costs, rows = costs.sharded_as(placement), costs.vocab_rows((1,))
    priced = [costs.replica(replica, rows) for replica in placement.replicas]
    plain = [costs.replica(replica.without_sharding, rows) for replica in placement.replicas]
    slowest = max(plain, key=lambda cost: cost.stages[0].times.total_s).stages[0].times
    stages = [replica.stages[0] for replica in placement.replicas]
    reduce_s, gather_s = costs.layer_exchange_s(stages)
    for cost in priced:
        times = cost.stages[0].times
        assert times.forward_s == pytest.approx(slowest.forward_s + 3 * gather_s)
        assert times.backward_s == pytest.approx(slowest.backward_s + 3 * (gather_s + reduce_s))
        assert cost.pipeline_s == pytest.approx(5 * times.total_s)


def test_the_exchange_at_the_end_has_the_whole_layers_alone() -> None:
    costs = CostModel(CLUSTER, WORKLOAD)
    alone_s = []
    for sharded in (0, 4, 8):
        suffix = f"z{sharded}" if sharded else ""
        placement = placement_of(placed(" | ".join([f"tp1:8{suffix} @4"] * 3)), CLUSTER)
        alone_s.append(costs.sync_s(placement, costs.vocab_rows((1,))))
    assert alone_s[0] > alone_s[1] > alone_s[2] > 0
    assert alone_s[0] - alone_s[1] == pytest.approx(alone_s[1] - alone_s[2], rel=0.15)


@pytest.mark.parametrize(
    "layout",
    [
        "tp1:8z5 @4 | tp1:8z5 @4 | tp1:8z5 @4",
        "tp2:8z8 @6 | tp1:8z8 @6",
        "tp1:8z2 @6x1 | tp1:8z2 @3x2",
    ],
)
def test_the_simulation_has_the_price(layout: str) -> None:
    plan = placed(layout)
    priced, simulated = estimate_plan(plan, CLUSTER), simulate_plan(plan, CLUSTER)
    assert simulated.step_time_s == pytest.approx(priced.step_time_s, rel=0.01)
    assert priced.bound_s is None


def test_more_traffic_between_nodes() -> None:
    costs = CostModel(CLUSTER, WORKLOAD)
    sent = []
    for sharded in ("", "z8"):
        placement = placement_of(placed(" | ".join([f"tp1:8{sharded} @4"] * 3)), CLUSTER)
        cost = costs.placement(placement)
        sent.append(sum(bytes_between_nodes(costs, placement, cost).values()))
    # Gradients of four micro-batches for those of one, and weights eight times for once.
    assert 4 < sent[1] / sent[0] < 8
