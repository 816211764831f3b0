from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_hetero.bounds.estimate import estimates_of
from megatron_hetero.bounds.step_time import Bound
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.errors import (
    BoundFaultWarning,
    PlanFormatError,
    UsageError,
)
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from tests.cost.builders import (
    CLUSTER,
    FAST,
    SLOW,
    estimate_plan,
    make_cluster,
    make_workload,
    place,
)


def test_a_step_is_pipeline_sync_and_update() -> None:
    workload = make_workload()
    plan = place("tp2:3,tp1:1 @3 | tp1:4 @1", workload)
    estimates = estimate_plan(plan, CLUSTER)
    cost = CostModel(CLUSTER, workload).placement(placement_of(plan, CLUSTER))
    assert estimates.step_time_s == pytest.approx(
        max(estimates.replica_times_s) + estimates.gradient_sync_s + cost.update_s
    )
    assert estimates.tokens_per_s == pytest.approx(4 * 256 / estimates.step_time_s)
    assert [len(times) for times in estimates.stage_times_s] == [2, 1]
    assert [len(times) for times in estimates.boundary_times_s] == [1, 0]
    assert estimates.gradient_sync_s > 0
    assert set(estimates.devices) == {"a:0", "a:1", "b:0", "b:1"}
    for device in estimates.devices.values():
        assert sum(device.parts_bytes.values()) == device.peak_bytes
    assert not estimates.measured
    assert estimates.bound_s is not None and 0 < estimates.bound_s < estimates.step_time_s
    assert "launch counts" in estimates.bound_relaxes


def test_a_bound_above_the_step_is_reported_and_left_out() -> None:
    workload = make_workload()
    placement = placement_of(place("tp2:3,tp1:1 @3 | tp1:4 @1", workload), CLUSTER)
    costs = CostModel(CLUSTER, workload)
    cost = costs.placement(placement)
    bound = Bound(2 * cost.step_time_s, "nothing")
    with pytest.warns(BoundFaultWarning, match=r"a fault in megatron-hetero.*Please report"):
        estimates = estimates_of(costs, placement, cost, prove=lambda *_, **__: bound)
    assert (estimates.bound_s, estimates.gap, estimates.bound_relaxes) == (None, None, "")


def test_a_single_device_takes_micro_batches_times_all_pieces() -> None:
    workload = make_workload()
    cluster = make_cluster(("a", FAST, 1))
    estimates = estimate_plan(place("tp1:4 @4", workload, cluster), cluster)
    pieces = CostModel(cluster, workload).pieces(cluster.nodes[0], 1, 1024)
    one = pieces.embedding.total_s + 4 * pieces.layer.total_s + pieces.head.total_s
    # The device has both ends of a model with tied embeddings.
    one += pieces.tied_s
    assert estimates.replica_times_s[0] == pytest.approx(4 * one)
    assert estimates.gradient_sync_s == 0


def test_what_cannot_be_estimated_is_refused_by_name() -> None:
    plan = place("tp2:3,tp1:1 @3 | tp1:4 @1", make_workload())
    with pytest.raises(UsageError, match="carries no model"):
        estimate_plan(replace(plan, workload=None), CLUSTER)
    with pytest.raises(PlanFormatError, match="b:1, which the cluster does not have"):
        estimate_plan(plan, make_cluster(("a", FAST, 2), ("b", SLOW, 1)))
    bare = plan_from_layout(parse_layout("tp1:4 @4"), make_workload())
    with pytest.raises(PlanFormatError, match="names no devices"):
        estimate_plan(bare, CLUSTER)


def test_a_stage_is_priced_in_its_own_precision() -> None:
    in_bf16 = make_workload()
    in_fp32 = replace(in_bf16, training=replace(in_bf16.training, precision="fp32"))
    own = edit_first_stage(place("tp1:4 @4", in_bf16), precision="fp32")
    estimates = estimate_plan(own, CLUSTER)
    assert (
        estimates.replica_times_s
        == estimate_plan(place("tp1:4 @4", in_fp32), CLUSTER).replica_times_s
    )
    assert (
        estimates.replica_times_s
        != estimate_plan(place("tp1:4 @4", in_bf16), CLUSTER).replica_times_s
    )


def edit_first_stage(plan: Plan, **changes: Any) -> Plan:
    replica, *others = plan.replicas
    stage, *rest = replica.stages
    stages = (replace(stage, **changes), *rest)
    return replace(plan, replicas=(replace(replica, stages=stages), *others))


def test_uneven_shares_weigh_on_each_device_in_proportion() -> None:
    workload = make_workload()
    even, uneven = (
        estimate_plan(place(f"{group}:4 @4", workload), CLUSTER) for group in ("tp2", "tp2(3:1)")
    )
    weights = [uneven.devices[d].parts_bytes["weights"] for d in ("a:0", "a:1")]
    assert weights[0] > weights[1]
    assert sum(weights) == 2 * even.devices["a:0"].parts_bytes["weights"]
    # Equal GPUs in unequal shares: all wait for the one that has most.
    assert uneven.step_time_s > even.step_time_s


def test_a_group_of_unlike_gpus_gains_from_shares_in_proportion_to_speed() -> None:
    """FAST does three times SLOW's FLOP/s; between the nodes runs a fast link."""
    cluster = make_cluster(("a", FAST, 1), ("b", SLOW, 1), between=Link(1e12, 1e-7))
    workload = make_workload(hidden_size=4096, seq_length=2048)
    even, shares, reverse = (
        estimate_plan(place(f"{group}:4 @4", workload, cluster), cluster).step_time_s
        for group in ("tp2", "tp2(3:1)", "tp2(1:3)")
    )
    assert shares < 0.7 * even < even < reverse


def test_recompute_of_a_stage_or_of_some_of_its_layers() -> None:
    plan = place("tp1:3,tp1:1 @4", make_workload())
    none, some, all_layers, selective = (
        estimate_plan(edit_first_stage(plan, **changes), CLUSTER)
        for changes in (
            {"recompute": "none"},
            {"recompute": "full", "recompute_num_layers": 1},
            {"recompute": "full"},
            {"recompute": "selective"},
        )
    )
    assert none == estimate_plan(plan, CLUSTER)
    times = [e.stage_times_s[0][0] for e in (none, some, all_layers)]
    assert times[1] - times[0] == pytest.approx((times[2] - times[0]) / 3)
    assert times[0] < selective.stage_times_s[0][0] < times[2]
    kept = [e.devices["a:0"].parts_bytes["activations"] for e in (none, some, all_layers)]
    assert kept[0] - kept[1] == pytest.approx((kept[0] - kept[2]) / 3)
    job = make_workload(recompute="full")
    assert estimate_plan(place("tp1:3,tp1:1 @4", job), CLUSTER).stage_times_s[0] == (
        all_layers.stage_times_s[0][0],
        estimate_plan(
            edit_first_stage(place("tp1:3,tp1:1 @4", job), recompute="none"), CLUSTER
        ).stage_times_s[0][1],
    )


def test_a_replica_with_micro_batches_of_its_own_size() -> None:
    workload = make_workload(per_token_loss=True)
    double, single = (
        estimate_plan(place(layout, workload), CLUSTER) for layout in ("tp1:4 @2x2", "tp1:4 @4")
    )
    twice = make_workload(micro_batch_size=2, per_token_loss=True)
    same, of_the_job = (
        estimate_plan(place(layout, twice), CLUSTER) for layout in ("tp1:4 @2x2", "tp1:4 @2")
    )
    assert same == of_the_job
    assert double.step_time_s == of_the_job.step_time_s < single.step_time_s
    activations = [e.devices["a:0"].parts_bytes["activations"] for e in (double, single)]
    assert activations[0] == 2 * activations[1]


def test_the_distributed_optimizer_divides_states_and_update() -> None:
    layout = "tp2:4 @3 | tp1:4 @1"
    plain, sharded = (
        estimate_plan(place(layout, make_workload(use_distributed_optimizer=on)), CLUSTER)
        for on in (False, True)
    )
    for device in ("a:0", "b:0"):
        before, after = (e.devices[device].parts_bytes for e in (plain, sharded))
        assert after["optimizer"] == pytest.approx(before["optimizer"] / 2, rel=1e-6)
        assert after["gradients"] == before["gradients"]


def test_a_stage_may_keep_more_of_the_divided_states() -> None:
    """Three quarters on the replica that asks for three times as much as the other."""
    workload = make_workload(use_distributed_optimizer=True)
    plan = edit_first_stage(place("tp2:4 @3 | tp1:2,tp1:2 @1", workload), optimizer_share=3)
    equal, unequal = (
        estimate_plan(p, CLUSTER) for p in (edit_first_stage(plan, optimizer_share=None), plan)
    )
    states = [e.devices["a:0"].parts_bytes["optimizer"] for e in (equal, unequal)]
    words = 12 * 1024 * 512 // 2  # of the tied embedding, which three stages hold
    layers = 2 * (states[0] - words / 3)
    assert states[1] == pytest.approx(0.75 * layers + words * 3 / 5, rel=1e-6)
    others = [e.devices["b:0"].parts_bytes["optimizer"] for e in (equal, unequal)]
    assert others[1] < others[0]


def test_launch_counts_are_priced_in_time_and_memory() -> None:
    """A hand-edited plan: forwards ahead hide a hop of many milliseconds, for their activations."""
    workload = make_workload(global_batch_size=16)
    cluster = make_cluster(("a", FAST, 1), ("b", FAST, 1), between=Link(1e9, 5e-3))
    plan = place("tp1:2,tp1:2 @16", workload, cluster)
    (replica,) = plan.replicas
    ahead, last = replica.stages
    edited = replace(
        plan,
        replicas=(replace(replica, stages=(replace(ahead, num_launched_forwards=10), last)),),
    )
    own, counted = estimate_plan(plan, cluster), estimate_plan(edited, cluster)
    assert counted.step_time_s < own.step_time_s / 2
    before, after = own.devices["a:0"].parts_bytes, counted.devices["a:0"].parts_bytes
    assert after["activations"] == 5 * before["activations"]
    # The runtime keeps what it sent, for up to as many forwards as it launches ahead, and has
    # receives posted for as many gradients as can be under way to it: 10 of each, not 1.
    activation_bytes = 256 * 512 * 2
    assert after["buffers"] - before["buffers"] == (9 + 9) * activation_bytes
    same = replace(
        plan, replicas=(replace(replica, stages=(replace(ahead, num_launched_forwards=2), last)),)
    )
    assert estimate_plan(same, cluster) == own


def test_replicas_that_cross_the_same_path_take_turns() -> None:
    """Eight pipelines over a link that one alone would hardly fill."""
    cluster = make_cluster(("a", FAST, 8), ("b", FAST, 8), between=Link(2e8, 0.0))
    workload = make_workload(global_batch_size=64)
    names = [f"{node}:{i}" for i in range(8) for node in "ab"]
    plan = plan_from_layout(parse_layout(" | ".join(["tp1:2,tp1:2 @8"] * 8)), workload)
    replicas = tuple(
        replace(
            r, stages=tuple(replace(s, devices=(names[2 * i + j],)) for j, s in enumerate(r.stages))
        )
        for i, r in enumerate(plan.replicas)
    )
    costs = CostModel(cluster, workload)
    cost = costs.placement(placement_of(replace(plan, replicas=replicas), cluster))
    assert cost.card_s == pytest.approx(64 * costs.activation_bytes / 2e8)
    assert cost.pipelines_s == cost.card_s > max(r.pipeline_s for r in cost.replicas)
