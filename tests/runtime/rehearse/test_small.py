"""The small model stands for the real one: same holders, and the real bytes in all."""

from __future__ import annotations

import pytest

from megatron_hetero.cost.memory import state_bytes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.parameters import layer_params
from megatron_hetero.cost.placement import placement_of
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.sync import sync_groups
from megatron_hetero.runtime.rehearse.small import small_model
from tests.schedule.test_step import placed, three_nodes


def test_layers_with_the_same_holders_are_one_layer() -> None:
    plan = placed("tp1:20,tp1:12 @4 | tp2:16,tp1:16 @2", ["a:0", "b:0"], ["a:1", "a:2", "b:1"],
                  num_layers=32)  # fmt: skip
    assert plan.workload is not None
    small = small_model(plan, plan.workload)
    assert small.layer_runs == (16, 4, 12)
    assert [
        [stage.shape.num_layers for stage in replica.stages]
        for replica in small.shrunk.plan.replicas
    ] == [[2, 1], [1, 2]]
    model = small.shrunk.model
    assert model.num_layers == 3
    gradient = state_bytes(plan.workload.training).gradient
    real = gradient * layer_params(plan.workload.model, even_share(plan.workload.model, 1))
    matrix = small.gradient_bytes("decoder.layers.0.mlp.linear_fc1.weight") / 16
    vector = small.gradient_bytes("decoder.layers.0.input_layernorm.weight") / 16
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    matrices = 4 * hidden**2 + 2 * hidden * ffn
    vectors = layer_params(model, even_share(model, 1)) - matrices
    assert matrices * matrix + vectors * vector == pytest.approx(real)
    assert small.gradient_bytes("decoder.layers.2.mlp.linear_fc1.weight") == 12 * matrix
    assert len({g.holders for g in sync_groups(placement_of(plan, three_nodes()),
                plan.workload.model, 1024)}) == 4  # fmt: skip


def test_a_crossing_has_the_real_bytes() -> None:
    plan = placed("tp1:2,tp1:2 @4", ["a:0", "b:0"])
    assert plan.workload is not None
    small = small_model(plan, plan.workload)
    model = small.shrunk.model
    element_bytes = 4  # what a CPU computes in
    sent = model.seq_length * model.hidden_size * element_bytes
    costs = CostModel(three_nodes(), plan.workload)
    assert sent * small.activation_ratio == pytest.approx(costs.activation_bytes)
