"""The small model stands for the real one: same holders, and the real bytes in all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cost.memory.states import state_bytes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.parameters import layer_params
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.sync.buckets import layer_tensors
from megatron_hetero.cost.sync.groups import sync_groups
from megatron_hetero.errors import UnsupportedError
from megatron_hetero.lab.rehearse.run import RehearsalOptions, rehearse
from megatron_hetero.lab.rehearse.small import small_model
from tests.cost.builders import FAST, make_cluster
from tests.runtime.workloads import plan as plan_of
from tests.schedule.simulator.test_step import placed, three_nodes


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
    vector = small.gradient_bytes("decoder.layers.0.input_layernorm.weight") / 16
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    sizes = {"self_attention.linear_qkv": 3 * hidden**2, "self_attention.linear_proj": hidden**2,
             "mlp.linear_fc1": hidden * ffn, "mlp.linear_fc2": hidden * ffn}  # fmt: skip
    vectors = layer_params(model, even_share(model, 1)) - sum(sizes.values())
    carried = vectors * vector
    for name, size in sizes.items():
        carried += size * small.gradient_bytes(f"decoder.layers.0.{name}.weight") / 16
        last = small.gradient_bytes(f"decoder.layers.2.{name}.weight")
        assert last == 12 * small.gradient_bytes(f"decoder.layers.0.{name}.weight") / 16
    assert carried == pytest.approx(real)
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


@pytest.mark.parametrize("flags", [{"use_distributed_optimizer": True},
                                   {"overlap_grad_reduce": True}], ids=str)  # fmt: skip
def test_buckets_are_the_real_ones_where_their_number_counts(flags: dict[str, bool]) -> None:
    """Buckets have the sizes of the real model; without these flags all begin at once."""
    sizes = {"hidden_size": 2048, "num_layers": 8, "tied_embeddings": False}
    plan = placed("tp1:8 @4 | tp1:5,tp1:3 @4", ["a:0"], ["b:0", "c:0"], **sizes, **flags)
    assert plan.workload is not None
    model = plan.workload.model
    small = small_model(plan, plan.workload)
    assert small.layer_runs == (1,) * 8
    shapes = small.shrunk.model
    hidden, ffn = shapes.hidden_size, shapes.ffn_hidden_size
    small_sizes = {"mlp.linear_fc2": hidden * ffn, "mlp.linear_fc1": hidden * ffn,
                   "self_attention.linear_qkv": 3 * hidden**2}  # fmt: skip
    real_sizes = layer_tensors(model)
    for (name, size), real in zip(small_sizes.items(), real_sizes, strict=False):
        assert small.real_elements(f"decoder.layers.3.{name}.weight", size) == real
    plain = placed("tp1:8 @4 | tp1:5,tp1:3 @4", ["a:0"], ["b:0", "c:0"], **sizes)
    assert plain.workload is not None
    assert small_model(plain, plain.workload).layer_runs == (5, 3)


def test_layers_of_other_matrices_are_refused() -> None:
    plan = placed("tp1:20,tp1:12 @4", ["a:0", "b:0"], num_layers=32)
    assert plan.workload is not None
    model = replace(
        plan.workload.model, kv_lora_rank=8, num_experts=2, moe_shared_expert_intermediate_size=64
    )
    with pytest.raises(UnsupportedError, match="latent attention and a shared expert"):
        small_model(plan, replace(plan.workload, model=model))


def test_a_plan_with_sharded_layers_is_not_rehearsed(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="sharded layers"):
        rehearse(
            plan_of("tp1:4z2 @2 | tp1:4z2 @2"),
            make_cluster(("a", FAST, 2)),
            None,
            RehearsalOptions(),
            tmp_path,
        )
