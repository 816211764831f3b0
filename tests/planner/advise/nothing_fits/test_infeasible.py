from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.model.training import TrainingSpec
from megatron_hetero.planner import plan_cluster
from megatron_hetero.planner.advise.capacity import MoreGpus
from megatron_hetero.planner.advise.nothing_fits import infeasible, relaxations
from tests.cost.builders import FAST, FREE, GIB, OLD, make_cluster, make_workload

LLAMA = ModelSpec(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    vocab_size=128256,
    seq_length=2048,
    max_position_embeddings=8192,
    gated_mlp=True,
    tied_embeddings=False,
    add_bias_linear=False,
    normalization="RMSNorm",
    position_embedding="rope",
)
TWO_NODES = make_cluster(("a", gpu_type("RTX-3090"), 2), ("b", gpu_type("RTX-3090"), 2))
SMALL = replace(FAST, name="SMALL", memory_bytes=2 * GIB)


def message(cluster: Cluster, workload: Workload) -> str:
    with pytest.raises(InfeasiblePlanError) as caught:
        plan_cluster(cluster, workload)
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_the_shortage_names_stage_gpu_and_bytes_and_more_gpus_help() -> None:
    text = message(make_cluster(("a", SMALL, 1)), make_workload(num_layers=80))
    assert "stage 0 of replica 0 (80 layers on 1x SMALL, a)" in text
    assert " GiB more on each GPU" in text or " MiB more on each GPU" in text
    assert "most goes to optimizer" in text
    assert (
        "Smallest relaxation that fits (planned and checked): 2 more SMALL: 2 more machines" in text
    )
    assert "like a (1x SMALL each)" in text


def test_recompute_is_the_first_relaxation_when_it_suffices() -> None:
    workload = make_workload(
        num_layers=16, seq_length=2048, micro_batch_size=1, flash_attention=False
    )
    text = message(make_cluster(("a", SMALL, 1)), workload)
    assert "(planned and checked): --recompute-granularity selective" in text


def test_a_smaller_micro_batch_is_found() -> None:
    workload = make_workload(
        num_layers=16, seq_length=1024, global_batch_size=64, micro_batch_size=64, recompute="full"
    )
    text = message(make_cluster(("a", SMALL, 1)), workload)
    assert "(planned and checked): --micro-batch-size 16" in text


def test_a_limit_can_be_the_cause() -> None:
    limits = Limits(max_pipeline_parallel=1, max_tensor_parallel=1, memory_reserve_bytes=0)
    cluster = make_cluster(("a", SMALL, 4), limits=limits)
    text = message(cluster, make_workload(num_layers=48, recompute="full"))
    assert "limits.max_tensor_parallel 2 instead of 1" in text


def test_no_gpu_in_the_precision() -> None:
    text = message(make_cluster(("o", OLD, 4)), make_workload())
    assert "no GPU of the cluster can be used (in bf16" in text
    assert "(planned and checked): --fp16 instead of --bf16." in text


def llama(micro_batch_size: int = 1, **changes: object) -> Workload:
    training = TrainingSpec(64, micro_batch_size, "bf16")
    return Workload(LLAMA, replace(training, **changes), (), "test")  # type: ignore[arg-type]


def with_gpus(num_gpus: int) -> Cluster:
    """`num_gpus` RTX-3090 in nodes of two."""
    sizes = [2] * (num_gpus // 2) + [1] * (num_gpus % 2)
    nodes = [(f"n{i}", gpu_type("RTX-3090"), size) for i, size in enumerate(sizes)]
    return make_cluster(*nodes)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_number_of_gpus_is_the_smallest(recompute: str) -> None:
    workload = llama(recompute=recompute)
    text = message(TWO_NODES, workload)
    match = re.search(r"Smallest relaxation that fits \(planned and checked\): (\d+) more", text)
    assert match is not None
    num_more = int(match[1])
    plan_cluster(with_gpus(4 + num_more), workload)
    message(with_gpus(4 + num_more - 1), workload)


def test_fewer_gpus_with_other_settings_are_named_too() -> None:
    workload = replace(llama(), model=replace(LLAMA, seq_length=4096))
    text = message(TWO_NODES, workload)
    alone, _, with_recompute = text.partition("; or with --recompute-granularity full")
    pattern = r"(\d+) more RTX-3090"
    most, fewest = re.search(pattern, alone), re.search(pattern, with_recompute)
    assert most is not None and fewest is not None
    assert int(fewest[1]) < int(most[1])


def test_gpus_and_a_smaller_micro_batch_need_no_more_changes() -> None:
    workload = make_workload(
        num_layers=40, seq_length=2048, global_batch_size=256, micro_batch_size=32
    )
    text = message(make_cluster(("a", SMALL, 1)), workload)
    assert "with --micro-batch-size 1 instead of 32, " in text


def test_fp16_where_bf16_excludes_every_gpu() -> None:
    v100s = make_cluster(("a", gpu_type("V100-32GB"), 4))
    text = message(v100s, llama())
    assert "--fp16 instead of --bf16, 1 more V100-32GB: one more machine with 1x" in text


def test_fp8_is_named_where_it_keeps_cards_out() -> None:
    nodes = ("a", gpu_type("RTX-4090"), 1), ("b", gpu_type("RTX-3090"), 2)
    big = replace(llama(), model=replace(LLAMA, num_layers=6))
    job = replace(big, training=replace(big.training, fp8=True))
    text = message(make_cluster(*nodes, limits=FREE), job)
    assert "(planned and checked): no --fp8-format." in text


def test_half_precisions_that_a_mixed_box_fits_in_are_both_named() -> None:
    """Too large for the one card with bf16: the Titans help in fp16, for all stages or theirs."""
    nodes = ("a", gpu_type("RTX-3090"), 1), ("b", gpu_type("Titan-RTX"), 2)
    big = replace(llama(), model=replace(LLAMA, num_layers=6))
    text = message(make_cluster(*nodes, limits=FREE), big)
    assert "--fp16 instead of --bf16; or --stage-precision mixed." in text


def test_two_limits_together() -> None:
    limits = Limits(max_pipeline_parallel=1, idle_devices=("a:1",), memory_reserve_bytes=0)
    cluster = make_cluster(("a", SMALL, 1), ("b", SMALL, 1), limits=limits)
    idle = replace(cluster, limits=replace(limits, idle_devices=("b",)))
    text = message(idle, make_workload(num_layers=44, recompute="full", sequence_parallel=True))
    assert "no limits.max_pipeline_parallel (now 1) and no limits.idle" in text


def test_a_limit_is_relaxed_no_further_than_needed() -> None:
    limits = Limits(num_replicas=4, memory_reserve_bytes=0)
    cluster = make_cluster(*((f"n{i}", SMALL, 1) for i in range(6)), limits=limits)
    text = message(cluster, make_workload(num_layers=44, recompute="full"))
    assert "(planned and checked): limits.num_replicas 3 instead of 4" in text


def test_what_no_gpus_can_hold_is_said() -> None:
    text = message(make_cluster(("a", SMALL, 1)), make_workload(num_layers=4, hidden_size=32768))
    assert "No relaxation that was tried fits." in text
    assert "Proved not to fit: up to 128 more SMALL in nodes of 1; " in text


MIXTRAL = replace(
    LLAMA,
    vocab_size=32000,
    seq_length=4096,
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=14336,
)


def test_a_model_that_only_single_gpus_in_one_long_pipeline_hold() -> None:
    """Every plan that is fast lacks memory; the advice was to use a smaller model."""
    limits = Limits()
    nodes = ("rig", gpu_type("RTX-3090"), 2), ("box", gpu_type("RTX-A6000"), 1)
    workload = replace(llama(sequence_parallel=True), model=MIXTRAL)
    text = message(make_cluster(*nodes, limits=limits), workload)
    match = re.search(r"A relaxation that fits \(planned and checked\): (\d+) more (\S+): ", text)
    assert match is not None and match[2] == "RTX-A6000"
    more = [(f"more{i}", gpu_type("RTX-A6000"), 1) for i in range(int(match[1]))]
    plan_cluster(make_cluster(*nodes, *more, limits=limits), workload, strategy="constructive")


def test_what_is_said_not_to_fit_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: set[tuple[str, int]] = set()

    def with_more(cluster: Cluster, more: MoreGpus) -> Cluster:
        planned.add((more.node.gpu_type.name, more.num_gpus))
        return relaxations.with_more(cluster, more)

    monkeypatch.setattr(infeasible, "with_more", with_more)
    cluster = make_cluster(("a", SMALL, 1), limits=Limits(memory_reserve_bytes=0))
    text = message(cluster, make_workload(num_layers=4, hidden_size=32768))
    said = {
        (name, int(number))
        for numbers, name in re.findall(r"((?:\d+, )*\d+) more (\S+) in nodes of", text)
        for number in numbers.split(", ")
    }
    assert said
    assert said <= planned
    assert "--recompute" not in text, "plans choose it by themselves"
    assert "smaller model" not in text
