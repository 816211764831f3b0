from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cost.parameters import layer_params
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.work.calibration import product_flops_per_s, shipped_calibration
from megatron_hetero.cost.work.compute import (
    PassTimes,
    core_attention_times,
    gemm_efficiency,
    layer_times,
)
from megatron_hetero.cost.work.ends import head_times
from megatron_hetero.cost.work.fused_attention import has_fused_attention, uses_flash_attention
from megatron_hetero.errors import UnsupportedError
from megatron_hetero.model.blocks import blocks
from tests.cost.builders import FAST, OLD, SLOW, make_workload

WITHOUT_FLASH = replace(OLD, peak_flops={**OLD.peak_flops, "bf16": 1e14})


def test_pass_times_add_and_multiply() -> None:
    assert PassTimes(1, 2) + PassTimes(3, 4).times(2) == PassTimes(7, 10)
    assert PassTimes(1, 2).total_s == 3


def test_unmeasured_gpus_take_the_median_curve_and_measured_ones_their_own() -> None:
    # Of a compute capability that no type with a table has.
    unknown = replace(FAST, compute_capability="9.9")
    assert gemm_efficiency(unknown, "bf16") == gemm_efficiency(SLOW, "fp16")
    v100 = replace(OLD, name="V100-16GB")
    assert gemm_efficiency(v100, "fp16") != gemm_efficiency(OLD, "fp16")
    for precision in ("fp16", "fp32"):
        assert 0.5 < gemm_efficiency(FAST, precision).max_efficiency <= 1.05


def test_large_layers_approach_the_calibrated_peak() -> None:
    workload = make_workload(hidden_size=8192, micro_batch_size=8, seq_length=2048)
    times = layer_times(workload, FAST, 1)
    tokens = 8 * 2048
    flops = 2 * tokens * 12 * 8192**2
    share_of_peak = flops / times.forward_s / 300e12
    efficiency = gemm_efficiency(FAST, "bf16").max_efficiency
    assert 0.85 * efficiency < share_of_peak < efficiency


def test_small_layers_are_bound_by_the_cost_of_each_call() -> None:
    """Four products, attention, two norms, two sums with what went in, and an activation."""
    workload = make_workload(hidden_size=64, seq_length=32)
    overhead_s = gemm_efficiency(FAST, "bf16").overhead_s
    calibration = shipped_calibration()
    calls_s = 4 * overhead_s + calibration.attention.call_s["forward"] + 5 * calibration.kernel_s
    assert layer_times(workload, FAST, 1).forward_s == pytest.approx(calls_s, rel=0.1)


def test_wider_groups_are_faster_but_less_than_in_proportion() -> None:
    workload = make_workload(hidden_size=2048, seq_length=1024)
    one, four = (layer_times(workload, FAST, width).total_s for width in (1, 4))
    assert one / 4 < four < one


def test_recompute_adds_forward_work_to_backward() -> None:
    none, selective, full = (
        layer_times(make_workload(recompute=recompute), WITHOUT_FLASH, 1)
        for recompute in ("none", "selective", "full")
    )
    assert none.forward_s == selective.forward_s == full.forward_s
    assert none.backward_s < selective.backward_s < full.backward_s
    assert full.backward_s == pytest.approx(none.backward_s + none.forward_s)


def test_flash_attention_needs_capability_8_and_half_precision() -> None:
    model, training = make_workload().model, make_workload().training
    assert uses_flash_attention(model, training, FAST)
    assert not uses_flash_attention(model, training, OLD)
    assert not uses_flash_attention(model, replace(training, precision="fp32"), FAST)
    assert not uses_flash_attention(model, replace(training, flash_attention=False), FAST)


@pytest.mark.parametrize(
    ("gpu", "widest"),
    [("T4", 0), ("A100-80GB", 256), ("RTX-3090", 192), ("L40S", 192), ("H100-80GB", 256)],
)
def test_wide_heads_are_fused_on_some_gpus_only(gpu: str, widest: int) -> None:
    """As `get_attention_backend` of Transformer Engine 2.20 disables FlashAttention-2."""
    fused = [head for head in (64, 128, 192, 256) if has_fused_attention(head, gpu_type(gpu))]
    assert max(fused, default=0) == widest


@pytest.mark.parametrize("latent", [False, True])
def test_fused_attention_is_one_kernel_in_each_pass_with_an_efficiency_of_its_own(
    latent: bool,
) -> None:
    """Two products of half the scores; backward three as wide as queries (the scores again, the
    gradients of queries and keys), and two as wide as values (of softmax and values)."""
    sizes = {"kv_lora_rank": 64, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
    workload = make_workload(seq_length=4096, **(sizes if latent else {}))
    model, gpu = workload.model, gpu_type("H100-80GB")
    times = core_attention_times(workload, [(gpu, even_share(model, 1))])
    heads = model.num_attention_heads
    keys, values = (192, 128) if latent else (model.kv_channels, model.kv_channels)
    tokens = workload.training.micro_batch_size * 4096
    flops, back = (
        2.0 * tokens * heads * widths * 4096 / 2
        for widths in (keys + values, 3 * keys + 2 * values)
    )
    curve = gemm_efficiency(gpu, "bf16")
    rate = 989.4e12 * curve.max_efficiency
    part = shipped_calibration().attention_efficiency(gpu, keys, 4096)
    call_s = shipped_calibration().attention.call_s
    assert times.forward_s == pytest.approx(flops / (rate * part.forward) + call_s["forward"])
    assert times.backward_s == pytest.approx(back / (rate * part.backward) + call_s["backward"])


def test_head_grows_with_the_vocabulary() -> None:
    workload = make_workload()
    assert (
        head_times(workload, FAST, 1, 50_000).total_s > head_times(workload, FAST, 1, 1000).total_s
    )


def test_what_the_gpu_or_the_model_of_cost_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="OLD cannot train in bf16"):
        layer_times(make_workload(), OLD, 1)


def test_experts_cost_their_tokens_work_and_their_own_overhead() -> None:
    """Against a dense MLP as wide as all the experts that a token goes to, of the same products."""
    dense = make_workload(ffn_hidden_size=2 * 1024)
    experts = make_workload(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=1024)
    few = make_workload(num_experts=2, moe_router_topk=2, moe_ffn_hidden_size=1024)
    assert layer_times(experts, FAST, 1).forward_s > layer_times(few, FAST, 1).forward_s
    assert layer_times(few, FAST, 1).forward_s > layer_times(dense, FAST, 1).forward_s
    one = make_workload(num_experts=8, moe_router_topk=1, moe_ffn_hidden_size=1024)
    assert layer_times(experts, FAST, 1).forward_s > layer_times(one, FAST, 1).forward_s


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_a_device_holds_all_parameters_of_a_layer_with_experts(gated: bool, biases: bool) -> None:
    """`model.blocks` counts as Megatron's GPTModel does (`tests/model/test_blocks.py`)."""
    workload = make_workload(
        num_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=96,
        gated_mlp=gated,
        add_bias_linear=biases,
    )
    layer = next(b for b in blocks(workload) if b.kind == "layer")
    share = even_share(workload.model, 1)
    assert layer_params(workload.model, share) == layer.num_parameters
    halves = layer_params(workload.model, even_share(workload.model, 2))
    divided = layer.num_parameters - layer.num_replicated_parameters
    assert halves == divided // 2 + layer.num_replicated_parameters


def test_fp32_products_take_tensor_cores_where_there_are_any() -> None:
    """TF32 from compute capability 8.0 on has half the rate of bf16, and its curve."""
    assert product_flops_per_s(FAST, "fp32") == 150e12
    assert gemm_efficiency(FAST, "fp32") == gemm_efficiency(FAST, "bf16")
    assert product_flops_per_s(OLD, "fp32") == 15e12
    assert gemm_efficiency(OLD, "fp32") != gemm_efficiency(OLD, "fp16")


@pytest.mark.parametrize(
    ("name", "micro_batch_size", "forward_ms", "backward_ms"),
    [
        ("A100-40GB", 4, 8.20, 22.71),
        ("V100-16GB", 4, 28.84, 71.71),
        ("RTX-3090", 4, 16.95, 47.45),
        ("Titan-RTX", 8, 62.92, 159.24),
        ("GH200-96GB", 4, 3.57, 10.34),
    ],
)
def test_measured_types_come_near_the_layers_they_were_fitted_to(
    name: str, micro_batch_size: int, forward_ms: float, backward_ms: float
) -> None:
    """A layer of OPT-350M in fp32 (Sailor's layer table, MIT licence)."""
    workload = make_workload(
        hidden_size=1024,
        num_attention_heads=16,
        num_query_groups=16,
        kv_channels=64,
        seq_length=2048,
        precision="fp32",
        attention_dropout=0.0,
        micro_batch_size=micro_batch_size,
    )
    times = layer_times(workload, gpu_type(name), 1)
    assert times.total_s == pytest.approx((forward_ms + backward_ms) * 1e-3, rel=0.07)
    assert times.forward_s == pytest.approx(forward_ms * 1e-3, rel=0.1)


def test_types_with_the_same_chip_share_their_constants() -> None:
    assert gemm_efficiency(gpu_type("A100-80GB"), "bf16") == gemm_efficiency(
        gpu_type("A100-40GB"), "bf16"
    )
    assert gemm_efficiency(gpu_type("V100-32GB"), "fp16") == gemm_efficiency(
        gpu_type("V100-16GB"), "fp16"
    )


def test_dropout_of_scores_costs_time_where_they_are_stored() -> None:
    on, off = (
        layer_times(make_workload(attention_dropout=p, flash_attention=flash), FAST, 1)
        for p, flash in ((0.1, False), (0.0, False))
    )
    fused = [layer_times(make_workload(attention_dropout=p), FAST, 1).forward_s for p in (0.1, 0.0)]
    assert on.forward_s > off.forward_s and on.backward_s > off.backward_s
    assert fused[0] == fused[1]
