"""Weights kept in fp8 (`--fp8-param-gather`): what stock Megatron's own buffers hold and send."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.bounds.estimate import workload_of
from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost.memory.device import stage_memory
from megatron_hetero.cost.memory.libraries import KeptFree
from megatron_hetero.cost.memory.states import new_weight_bytes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.parameters import further_matrix_params, matrix_params, stage_params
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.share import even_share
from megatron_hetero.model.blocks import padded_vocab_size
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.exchange import stock_buckets
from megatron_hetero.schedule.exchange.gradients import GradientExchange
from megatron_hetero.schedule.exchange.stock_buckets import StockBuckets
from tests.schedule.simulator.test_step import placed, three_nodes

SIZES = {"hidden_size": 64, "num_layers": 4, "use_distributed_optimizer": True}
FP8 = {"fp8": True, "fp8_param_gather": True}
FULL = 40_000
"""Elements of a bucket: some of a layer's matrices."""
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "plain": {"add_bias_linear": False, "gated_mlp": True, "normalization": "RMSNorm"},
    "further": {"mtp_num_layers": 1},
    "experts": {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 96},
}
CASES = [
    (name, tied, overlaps, recipe)
    for name in MODELS
    for tied in (True, False)
    for overlaps in (False, True)
    for recipe in ("tensorwise", "mxfp8")
    # A gated matrix is one parameter, and two tensors of ours; layers of further tokens are one
    # tensor of ours.  Both end buckets elsewhere.
    if not (name in ("plain", "further") and overlaps)
]

SCRIPT = """
import json, sys
sys.modules["transformer_engine"] = None
import torch, torch.distributed as dist
from megatron_hetero.runtime import backend
backend.activate_cpu_backend()
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import param_and_grad_buffer as buffers
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec, get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
in_fp8, recipe = set(), None
# Transformer Engine's weights would answer so; the raw data of theirs is what is replaced.
buffers.is_float8tensor = lambda p: p in in_fp8
buffers.is_mxfp8tensor = lambda p: p in in_fp8 and recipe == "mxfp8"
def replaced(parameter, new):
    assert new.dtype == torch.uint8 and new.numel() == parameter.numel()
buffers.modify_underlying_storage = replaced
found = []
for m, overlaps, recipe, full in json.loads(sys.argv[2]):
    experts = m["num_experts"] or None
    config = TransformerConfig(
        num_layers=m["num_layers"], hidden_size=m["hidden_size"], num_attention_heads=8,
        ffn_hidden_size=m["ffn_hidden_size"], gated_linear_unit=m["gated_mlp"],
        add_bias_linear=m["add_bias_linear"], normalization=m["normalization"],
        num_moe_experts=experts, moe_router_topk=m["moe_router_topk"] or 2,
        moe_ffn_hidden_size=m["moe_ffn_hidden_size"] or None, use_cpu_initialization=True,
        mtp_num_layers=m["mtp_num_layers"] or None, bf16=True, params_dtype=torch.bfloat16,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, normalization=m["normalization"]
    )
    model = GPTModel(
        config, spec, vocab_size=m["rows"], max_sequence_length=m["max_position_embeddings"],
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=m["tied_embeddings"],
    ).bfloat16()
    in_fp8 = {
        p for name, p in model.named_parameters()
        if name.endswith(".weight") and ("linear_" in name or "eh_proj" in name)
    }
    model = DistributedDataParallel(config, DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, bucket_size=full,
        overlap_grad_reduce=overlaps, fp8_param_gather=True,
        reuse_grad_buf_for_mxfp8_param_ag=recipe == "mxfp8",
    ), model)
    groups = []
    for group in model.bucket_groups:
        params = [p for bucket in group.buckets for p in bucket.params]
        # Without what pads a parameter to 64 elements and a bucket to its ranks.
        sent = sum(
            bucket.param_data.element_size() * sum(p.numel() for p in bucket.params)
            for bucket in group.buckets
        )
        num_in_fp8 = sum(p.numel() for p in params if p in in_fp8)
        groups.append([sum(p.numel() for p in params), num_in_fp8, sent])
    held = {
        storage.data_ptr(): storage.nbytes()
        for buffer in model.buffers
        for storage in (buffer.param_data.untyped_storage(), buffer.grad_data.untyped_storage())
    }
    found.append([groups, sum(held.values()), len(list(model.parameters()))])
print("found", json.dumps(found))
"""


def made(name: str, tied: bool, overlaps: bool, recipe: str) -> Plan:
    flags = {"tied_embeddings": tied, "overlap_grad_reduce": overlaps, "fp8_recipe": recipe}
    shape = {"position_embedding": "learned_absolute", **MODELS[name], **SIZES, **FP8, **flags}
    return placed("tp1:4 @4 | tp1:4 @4", ["a:0"], ["b:0"], **shape)


@pytest.fixture(scope="module")
def megatrons(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    jobs = []
    for case in CASES:
        workload = made(*case).workload
        assert workload is not None
        model = {**vars(workload.model), "rows": padded_vocab_size(workload.model, (1,))}
        plain = {k: v for k, v in model.items() if isinstance(v, str | int | bool)}
        jobs.append([plain, case[2], case[3], FULL])
    store = tmp_path_factory.mktemp("store") / "store"
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(store), json.dumps(jobs)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        timeout=300,
    )
    assert not run.returncode, run.stderr
    found: list[Any] = json.loads(run.stdout.split("found ")[-1])
    return found


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_buckets_hold_and_send_what_megatrons_do(
    megatrons: list[Any], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock_buckets, "stock_bucket_elements", lambda _: FULL)
    plan = made(*CASES[number])
    assert plan.workload is not None
    model, training = plan.workload.model, plan.workload.training
    rows = padded_vocab_size(model, (1,))
    of_stages = StockBuckets(placement_of(plan, three_nodes()), model, training, rows, {})
    found = []
    for bucket, _ in of_stages:
        numbers = bucket.num_params, bucket.num_in_matrices
        found.append([*numbers, new_weight_bytes(training, *numbers)])
    groups, *_ = megatrons[number]
    assert found == groups
    assert len(found) > 1 if CASES[number][2] else len(found) == 1


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_weights_and_gradients_take_what_megatrons_buffers_do(
    megatrons: list[Any], number: int
) -> None:
    """Weights of `mxfp8` have no buffer; those of layers for further tokens count in 16 bits."""
    name, *_, recipe = CASES[number]
    workload = made(*CASES[number]).workload
    assert workload is not None
    model, share = workload.model, even_share(workload.model, 1)
    memory = stage_memory(
        workload, gpu_type("H100-80GB"), share, first=True, last=True, num_in_flight=1,
        vocab_rows=padded_vocab_size(model, (1,)), kept_free=KeptFree(0, 0),
    )  # fmt: skip
    parts, (groups, held, num) = memory.parts_bytes(model.num_layers), megatrons[number]
    in_fp8 = sum(num_in_fp8 for _, num_in_fp8, _ in groups)
    further = further_matrix_params(model, share)
    assert (further > 0) == (name == "further")
    own = parts["weights"] - further - (in_fp8 if recipe == "mxfp8" else 0)
    # A parameter begins at a multiple of 64 elements.
    assert 0 <= held - own - parts["gradients"] <= (2 + 4) * 64 * num


def test_new_weights_in_fp8_take_half_of_the_time_of_others() -> None:
    """Nearly: embeddings stay in 16 bits.  Of `mxfp8` all are sent so."""
    seconds = {}
    for recipe in ("tensorwise", "mxfp8", None):
        plan = placed(
            "tp1:4 @4 | tp1:4 @4", ["a:0"], ["b:0"], use_distributed_optimizer=True,
            **({"fp8": True, "fp8_param_gather": True, "fp8_recipe": recipe} if recipe else {}),
        )  # fmt: skip
        cluster = three_nodes(Link(1e9, 0.0))
        costs = CostModel(cluster, workload_of(plan))
        _, gathers = GradientExchange(costs, placement_of(plan, cluster), 1024, {}, {}).stock()
        seconds[recipe] = sum(max(busy_s for _, busy_s in c.hops) for c in gathers)
    model = workload_of(plan).model
    matrices = 4 * matrix_params(model, even_share(model, 1))
    whole = stage_params(model, even_share(model, 1), 4, True, True, 1024)
    assert seconds["mxfp8"] == seconds[None]
    assert seconds["tensorwise"] / seconds[None] == pytest.approx(1 - matrices / whole / 2)
