"""Flags that do not go with what a plan has are refused where the plan becomes flags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.errors import UnsupportedError
from megatron_hetero.flags.emit import megatron_args
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import canonical_hosts, plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import LayerRange, Plan
from megatron_hetero.planner import plan_cluster
from megatron_hetero.schedule.choice.choose import candidates
from tests.cost.builders import make_cluster, place_plan
from tests.plan.edits import with_stage
from tests.runtime.workloads import workload

ROOT = Path(__file__).resolve().parents[3]
PLAIN, DIVIDED = "tp2:5,tp1:3 @12 | tp1:8 @4", "tp1cp2:5,tp1:3 @12 | tp1:8 @4"
SHARES = "tp1cp2(3:1):5,tp1:3 @12 | tp1:8 @4"


def job(layout: str, *flags: str, **changes: Any) -> Plan:
    load = replace(workload(num_layers=8, global_batch_size=16, **changes), megatron_args=flags)
    return plan_from_layout(parse_layout(layout), load)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--reset-attention-mask", "its attention makes the causal mask itself"),
        ("--sft", "documents would have to be divided one by one"),
        ("--dataloader-inter-document-masking", "documents would have to be divided one by one"),
        ("--moe-router-load-balancing-type aux_loss sinkhorn", "would be balanced by itself"),
        ("--window-size=4,0 --transformer-impl local", "--window-size: use --transformer-impl"),
    ],
)
def test_flags_beside_divided_sequences(flags: str, says: str) -> None:
    """They are followed where no stage divides sequences."""
    with pytest.raises(UnsupportedError, match="do not go with the context parallelism") as found:
        megatron_args(job(DIVIDED, *flags.split()))
    assert says in str(found.value)
    assert megatron_args(job(PLAIN, *flags.split()))


@pytest.mark.parametrize(
    ("flags", "gpus", "says"),
    [
        ("", "RTX-3090", "neither --bf16 nor --fp16"),
        ("--fp16 --attention-backend unfused", "RTX-3090", "--attention-backend unfused: use auto"),
        ("--fp16 --softmax-type learnable", "RTX-3090", "--softmax-type: add --cp-comm-type a2a"),
        ("--fp16 --window-size 4,0", "RTX-3090", "--window-size: add --cp-comm-type a2a or all_g"),
        ("--fp16", "T4", r"replica 0, stage 0 divides sequences .*: T4 \(.* 7.5\) has none"),
    ],
)
def test_transformer_engine_divides_fused_attention_alone(flags: str, gpus: str, says: str) -> None:
    """Its own choice of a kernel, and what its ring asserts; local layers gather keys instead."""
    cluster = make_cluster(("a", gpu_type(gpus), 4))
    words = (*flags.split(), "--transformer-impl", "transformer_engine")

    def plan(*more: str) -> Plan:
        placed = place_plan(job(DIVIDED, *words, *more), cluster)
        return replace(placed, hosts=canonical_hosts(placed.replicas, cluster))

    with pytest.raises(UnsupportedError, match=says):
        megatron_args(plan(), "plan.json")
    if "--window-size" not in flags:
        assert megatron_args(plan("--transformer-impl", "local"), "plan.json")


def test_wide_heads_have_no_fused_kernel_on_small_gpus() -> None:
    """Transformer Engine 2.20 disables FlashAttention-2 there, and cuDNN has no backward pass."""
    words = ("--fp16", "--transformer-impl", "transformer_engine")

    def placed(gpu: str) -> Plan:
        cluster = make_cluster(("a", gpu_type(gpu), 4))
        found = place_plan(job(DIVIDED, *words, kv_channels=256), cluster)
        return replace(found, hosts=canonical_hosts(found.replicas, cluster))

    assert megatron_args(placed("A100-80GB"), "plan.json")
    with pytest.raises(UnsupportedError, match=r"8\.6\) has none for heads of 256 channels"):
        megatron_args(placed("RTX-3090"), "plan.json")


@pytest.mark.parametrize(
    "flags",
    ["--fp16", "--bf16", "--bf16 --softmax-type learnable --cp-comm-type a2a",
     "--bf16 --window-size 4,0 --cp-comm-type all_gather"],
)  # fmt: skip
def test_transformer_engine_divides_sequences_in_16_bits(flags: str) -> None:
    assert megatron_args(job(DIVIDED, *flags.split()))


def test_all_reasons_stand_in_one_message() -> None:
    with pytest.raises(UnsupportedError) as found:
        megatron_args(job(DIVIDED, "--sft", "--qk-clip"))
    assert "--sft" in str(found.value) and "--qk-clip" in str(found.value)


def test_the_last_of_a_flag_counts_and_so_does_megatrons_default() -> None:
    """Transformer Engine's layers, the default, have windows, where no ring divides sequences."""
    own = ("--bf16", "--window-size=4,0", "--cp-comm-type", "a2a")
    assert megatron_args(job(DIVIDED, *own))
    layers = ("--transformer-impl=local", "--transformer-impl", "transformer_engine")
    assert megatron_args(job(DIVIDED, *own, *layers))
    with pytest.raises(UnsupportedError, match="--window-size"):
        megatron_args(job(DIVIDED, *own, *layers[1:], layers[0]))


def test_experts_beside_unlike_shares() -> None:
    """That a plan is checked for Transformer Engine beside them, its validation says."""
    flags = ("--transformer-impl", "local")
    assert megatron_args(job(SHARES, *flags, flash_attention=False))
    with pytest.raises(UnsupportedError, match="unlike shares of sequences"):
        megatron_args(job(SHARES, *flags, "--num-experts=4", flash_attention=False))


def test_a_bare_layout_has_no_flags_to_refuse() -> None:
    assert megatron_args(plan_from_layout(parse_layout(SHARES)))


MLP = "--recompute-modules mlp core_attn"


@pytest.mark.parametrize("asked", ["--recompute-activations", "--recompute-granularity=selective"])
def test_a_recomputed_mlp_with_biases(asked: str) -> None:
    def plan(*flags: str) -> Plan:
        return job(PLAIN, asked, *flags, recompute="selective")

    with pytest.raises(UnsupportedError, match="--recompute-modules mlp with biases: add --disa"):
        megatron_args(plan(*MLP.split()))
    assert megatron_args(plan(*MLP.split(), "--disable-bias-linear"))
    assert megatron_args(plan("--recompute-modules", "core_attn"))


def test_the_stages_say_what_is_recomputed() -> None:
    """Of the job's flags the modules stay, so one stage's own recompute is enough."""
    asked = job(PLAIN, *MLP.split())
    assert megatron_args(asked)
    assert megatron_args(with_stage(asked, 0, 1, recompute="full"), "plan.json")
    with pytest.raises(UnsupportedError, match="hand out the bias itself"):
        megatron_args(with_stage(asked, 0, 1, recompute="selective"), "plan.json")


@pytest.mark.parametrize("flag", ["--sft", "--reset-attention-mask"])
def test_packed_data_in_chunks(flag: str) -> None:
    def chunked(*flags: str) -> Plan:
        made = job("tp2:4,tp1:4 @16", *flags)
        for s in (0, 1):
            own = LayerRange(2 * s, 2), LayerRange(4 + 2 * s, 2)
            made = with_stage(made, 0, s, first_layer=2 * s, chunks=own)
        return made

    assert megatron_args(chunked(), "plan.json")
    assert megatron_args(job("tp2:4,tp1:4 @16", flag))
    with pytest.raises(UnsupportedError, match="every chunk would have to read the batch"):
        megatron_args(chunked(flag), "plan.json")


@pytest.mark.parametrize("flag", ["--sft", "--reset-attention-mask"])
def test_chunks_are_not_offered_for_packed_data(flag: str) -> None:
    cluster = load_cluster(ROOT / "benchmarks/rehearsal/three-and-one.yaml")
    flags = ("--num-layers=24", "--global-batch-size=16")
    load = load_workload(ROOT / "examples/a100-rtx4090/gpt-7b.sh", flags)
    plain = plan_cluster(cluster, load, strategy="columns")
    assert "every chunk" not in candidates(plain, cluster)[1].held
    load = replace(load, megatron_args=(*load.megatron_args, flag))
    offered = candidates(replace(plain, workload=load), cluster)[1]
    assert offered.plan is None and offered.held.startswith(f"{flag}: every chunk")
