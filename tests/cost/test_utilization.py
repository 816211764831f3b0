"""Model FLOPs utilization by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cost.utilization import model_flops_per_step, utilization_of
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.place import place_in_order
from tests.cost.builders import FAST, OLD, SLOW, make_cluster, make_workload

WORKLOAD = make_workload(num_layers=4, hidden_size=512, global_batch_size=4)


def by_hand() -> float:
    """2 FLOPs for each weight of a product and token, half of the scores twice (QK and AV)."""
    m = WORKLOAD.model
    layer = 12 * m.hidden_size**2
    rows = -(-m.vocab_size // m.make_vocab_size_divisible_by) * m.make_vocab_size_divisible_by
    products = 2 * m.seq_length * (m.num_layers * layer + rows * m.hidden_size)
    scores = m.num_layers * 2 * 2 * m.seq_length**2 * m.hidden_size / 2
    return 3 * 4 * (products + scores)


def test_the_flops_of_a_step() -> None:
    assert model_flops_per_step(WORKLOAD) == pytest.approx(by_hand(), rel=1e-3)
    recomputed = replace(WORKLOAD, training=replace(WORKLOAD.training, recompute="full"))
    assert model_flops_per_step(recomputed) == model_flops_per_step(WORKLOAD)


def test_the_peak_of_the_gpus_in_use_and_of_all() -> None:
    cluster = make_cluster(("a", FAST, 1), ("b", SLOW, 1), ("c", OLD, 1))
    plan = replace(plan_from_layout(parse_layout("tp1:3,tp1:1 @4"), WORKLOAD), workload=WORKLOAD)
    placed = place_in_order(plan, make_cluster(("a", FAST, 1), ("b", SLOW, 1)))
    found = utilization_of(placed, cluster, 2.0)
    assert found is not None
    rate = model_flops_per_step(WORKLOAD) / 2.0
    assert found.flops_per_s_per_gpu == pytest.approx(rate / 2)
    precision = WORKLOAD.training.precision
    peaks = [gpu.peak_flops[precision] or gpu.peak_flops["fp16"] for gpu in (FAST, SLOW, OLD)]
    assert found.mfu == pytest.approx(rate / sum(p or 0 for p in peaks[:2]))
    assert found.mfu_of_cluster == pytest.approx(rate / sum(p or 0 for p in peaks))


def test_a_bare_layout_has_none() -> None:
    plan = plan_from_layout(parse_layout("tp1:4 @4"))
    assert utilization_of(plan, make_cluster(("a", FAST, 1)), 1.0) is None


def test_a_gpu_without_a_peak_leaves_the_utilization_open() -> None:
    unknown = replace(SLOW, name="UNKNOWN", peak_flops=dict.fromkeys(SLOW.peak_flops))
    cluster = make_cluster(("a", FAST, 2), ("b", unknown, 1))
    plan = replace(plan_from_layout(parse_layout("tp1:3,tp1:1 @4"), WORKLOAD), workload=WORKLOAD)
    found = utilization_of(place_in_order(plan, make_cluster(("a", FAST, 2))), cluster, 2.0)
    assert found is not None and found.mfu is not None
    assert found.mfu_of_cluster is None
