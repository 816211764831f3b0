from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.memory.activations import (
    layer_activation_bytes,
    mask_bytes,
)
from megatron_hetero.cost.memory.ends import head_activation_bytes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.work.fused_attention import uses_flash_attention
from megatron_hetero.errors import PlanFormatError, UsageError
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import LayerRange, Plan
from megatron_hetero.schedule import estimate
from megatron_hetero.schedule.of_plan import with_schedule
from megatron_hetero.schedule.orders.interleaved import interleaved
from megatron_hetero.schedule.simulator.step import simulate_plan
from tests.cost.builders import (
    BETWEEN,
    FAST,
    INSIDE,
    SLOW,
    estimate_plan,
    make_cluster,
    make_workload,
)


def placed(layout: str, *devices: list[str], num_layers: int = 4, **changes: object) -> Plan:
    """A plan of `layout` with the devices of each replica in reading order."""
    shape = parse_layout(layout)
    batch = sum(r.num_micro_batches for r in shape.replicas)
    workload = make_workload(num_layers, global_batch_size=batch, **changes)
    plan = plan_from_layout(shape, workload)
    replicas = []
    for replica, names in zip(plan.replicas, devices, strict=True):
        left = list(names)
        stages = []
        for stage in replica.stages:
            width = stage.shape.tensor_parallel
            stages.append(replace(stage, devices=tuple(left[:width])))
            left = left[width:]
        replicas.append(replace(replica, stages=tuple(stages)))
    return replace(plan, replicas=tuple(replicas), workload=workload)


def three_nodes(between: Link = BETWEEN, inside: Link = INSIDE) -> Cluster:
    nodes = ("a", FAST, 4), ("b", SLOW, 4), ("c", SLOW, 4)
    return make_cluster(*nodes, between=between, inside=inside)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 6), st.sampled_from([1e8, 1e9, 1e11]))
def test_a_lone_replica_takes_what_the_cost_model_says(
    depth: int, num_micro_batches: int, bytes_per_s: float
) -> None:
    layers = ",".join(["tp1:1"] * (depth - 1) + [f"tp1:{5 - depth}"])
    cluster = three_nodes(Link(bytes_per_s, 1e-4))
    plan = placed(f"{layers} @{num_micro_batches}", ["a:0", "b:0", "c:0"][:depth])
    estimates = estimate_plan(plan, cluster)
    found = simulate_plan(plan, cluster, is_stock=False)
    assert found.step_time_s == pytest.approx(estimates.step_time_s)
    assert found.peak_memory_bytes == {
        name: device.peak_bytes for name, device in estimates.devices.items()
    }
    used = {estimates.devices[name].used_bytes for s in found.timelines for name in s.devices}
    assert {stage.used_bytes for stage in found.timelines} <= used


def test_every_computation_lasts_as_priced_and_none_overlap() -> None:
    plan = placed("tp2:3,tp1:1 @5 | tp1:4 @2", ["a:0", "a:1", "b:0"], ["b:1"])
    cluster = three_nodes()
    found = simulate_plan(plan, cluster)
    costs = CostModel(cluster, plan.workload)
    placement = placement_of(plan, cluster)
    rows = costs.vocab_rows(placement.widths)
    for r, replica in enumerate(placement.replicas):
        for s, stage in enumerate(found.stages[r]):
            times = costs.stage(replica, s, rows).times
            count = replica.num_micro_batches
            computed = [o for o in stage.operations if o.micro_batch >= 0]
            assert len(computed) == 2 * count
            assert sum(o.end_s - o.start_s for o in computed) == pytest.approx(
                count * times.total_s
            )
            ends = [0.0, *(o.end_s for o in computed)]
            starts = [o.start_s for o in computed]
            assert all(end <= start + 1e-12 for end, start in zip(ends, starts, strict=False))
    assert found.step_time_s == max(o.end_s for t in found.timelines for o in t.operations)
    assert 0 < found.bubble < 1


def test_replicas_take_turns_on_a_path_that_they_share() -> None:
    """Two equal replicas over one slow card: its messages never overlap, and the step is longer
    than that of one replica alone."""
    slow = Link(2e7, 1e-4)
    cluster = three_nodes(slow)
    devices = ["a:0", "b:0"], ["a:1", "b:1"]
    one_plan = placed("tp1:2,tp1:2 @4", devices[0], tied_embeddings=False)
    both_plan = placed("tp1:2,tp1:2 @4 | tp1:2,tp1:2 @4", *devices, tied_embeddings=False)
    alone, both = simulate_plan(one_plan, cluster), simulate_plan(both_plan, cluster)
    assert both.pipelines_s > 1.5 * alone.pipelines_s
    forward = sorted(
        (m.start_s, m.end_s) for m in both.messages if m.operation.kind == "send_forward"
    )
    assert len(forward) == 8
    for (_, end_s), (start_s, _) in pairwise(forward):
        assert end_s <= start_s
    (card,) = [link for link in both.links if link.name == "a -> b"]
    activation_bytes = 256 * 512 * 2
    assert (card.num_messages, card.num_bytes) == (8, 8 * activation_bytes)


def test_messages_of_one_pipeline_share_a_path_that_it_crosses_twice() -> None:
    """From a to b go the activations of the first boundary and the gradients of the second."""
    cluster = three_nodes(Link(1e8, 1e-4))
    there_and_back = placed("tp1:1,tp1:1,tp1:2 @8", ["a:0", "b:0", "a:1"])
    onwards = placed("tp1:1,tp1:1,tp1:2 @8", ["a:0", "b:0", "c:0"])
    found = simulate_plan(there_and_back, cluster)
    (card,) = [link for link in found.links if link.name == "a -> b"]
    assert card.num_messages == 16
    assert found.pipelines_s > simulate_plan(onwards, cluster).pipelines_s


def test_gradients_are_exchanged_once_their_holders_are_done() -> None:
    plan = placed("tp1:4 @2 | tp1:3,tp1:1 @2", ["a:0"], ["a:1", "b:0"], tied_embeddings=False)
    found = simulate_plan(plan, three_nodes())
    # The output layer goes with the last layer, the embedding with the first three.
    assert [c.holders for c, _, _ in found.collectives] == [((0, 0), (1, 1)), ((0, 0), (1, 0))]
    for collective, start_s, end_s in found.collectives:
        done = [found.stages[r][s].compute_end_s for r, s in collective.holders]
        assert max(done) <= start_s < end_s <= found.step_time_s


def test_stock_megatron_waits_for_its_sends() -> None:
    plan = placed("tp1:2,tp1:2 @6", ["a:0", "b:0"])
    cluster = three_nodes(Link(2e7, 1e-4))
    ours = simulate_plan(plan, cluster, is_stock=False)
    stock = simulate_plan(plan, cluster, is_stock=True)
    assert stock.step_time_s > ours.step_time_s
    for message in stock.messages:
        if message.operation.kind == "send_forward" and message.operation.micro_batch == 0:
            later = [o for o in stock.stages[0][0].operations if o.start_s >= message.posted_s]
            assert min(o.start_s for o in later) >= message.arrival_s


def test_memory_rises_and_falls_with_the_micro_batches_in_flight() -> None:
    found = simulate_plan(placed("tp1:2,tp1:2 @4", ["a:0", "b:0"]), three_nodes())
    first, last = found.stages[0]
    assert first.peak_in_flight == 2
    assert last.peak_in_flight == 1
    assert first.memory[0][1] == first.memory[-1][1] < first.peak_memory_bytes
    assert len({held for _, held in first.memory}) == 3


def test_an_interleaved_last_stage_keeps_the_head_of_one_micro_batch() -> None:
    """Two stages of two chunks of two layers: the last one keeps 3 chunks at the peak (two of the
    first chunk, one of the last one), and what the loss keeps of the last chunk's micro-batch."""
    plan = placed("tp1:4,tp1:4 @4", ["a:0", "b:0"], num_layers=8)
    stages = [
        replace(stage, first_layer=2 * s, chunks=(LayerRange(2 * s, 2), LayerRange(4 + 2 * s, 2)))
        for s, stage in enumerate(plan.replicas[0].stages)
    ]
    plan = replace(plan, replicas=(replace(plan.replicas[0], stages=tuple(stages)),))
    plan = with_schedule(plan, 0, interleaved((0, 1) * 2, 4), "interleaved")
    found = estimate.estimate_plan(plan, three_nodes(), bounded=False).devices["b:0"]
    workload = plan.workload
    assert workload is not None
    share = even_share(workload.model, 1)
    rows = CostModel(three_nodes(), workload).vocab_rows([1])
    given = workload.model, workload.training, share
    flash = uses_flash_attention(workload.model, workload.training, SLOW)
    # A last stage has its batch's mask; other layers' are its own.
    of_layer = layer_activation_bytes(*given, flash, "none")
    head = head_activation_bytes(*given, rows) + mask_bytes(*given, flash)
    assert found.parts_bytes["activations"] == 3 * 2 * of_layer + head


def test_what_cannot_be_simulated_is_refused() -> None:
    layout = parse_layout("tp1:2,tp1:2 @4")
    with pytest.raises(UsageError, match="carries no model"):
        simulate_plan(plan_from_layout(layout), three_nodes())
    workload = make_workload(4, global_batch_size=4)
    with pytest.raises(PlanFormatError, match="names no devices"):
        simulate_plan(plan_from_layout(layout), three_nodes(), workload)
