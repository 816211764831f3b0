"""The plan's estimate of memory, against what ranks of real runs hold: live tensor bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.lab.kit.live_bytes import LiveBytes
from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.lab.verify.small.text import VOCAB_SIZE
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.parallel import fused_rows
from megatron_hetero.schedule.estimate import estimate_plan
from tests.cost.builders import make_cluster, place_plan
from tests.runtime.workloads import DEEPSEEK_LIKE, LATENT, plan, workload

CPU = GpuType("CPU", 1 << 40, 1e10, dict.fromkeys(("bf16", "fp16", "fp32"), 1e11), "8.0", "a test")

# Layer norms: torch computes an RMS norm on a CPU in steps, and autograd keeps each.
LLAMA_LIKE = {
    "gated_mlp": True,
    "num_query_groups": 12,
    "add_bias_linear": False,
    "position_embedding": "rope",
    "tied_embeddings": False,
}

CASES: dict[str, tuple[str, dict[str, Any], tuple[dict[str, Any], ...]]] = {
    "unlike depth": ("tp2:3,tp1:1 @4 | tp1:4 @2", {"precision": "fp32", "qk_layernorm": True}, ()),
    "uneven shares": (
        "tp3(2:1:1):2,tp2(1:3):2 @3 | tp2:4 @2",
        {"precision": "fp32", "sequence_parallel": True, **LLAMA_LIKE},
        (),
    ),
    "distributed optimizer": (
        "tp2:3,tp1:1 @4 | tp1:4 @2",
        {"precision": "bf16", "use_distributed_optimizer": True, **LLAMA_LIKE},
        (),
    ),
    "sharded layers": (
        "tp1:4z3 @2 | tp1:4z3 @1",
        {"precision": "fp32", "use_distributed_optimizer": True, **LLAMA_LIKE},
        (),
    ),
    "experts": (
        "tp2:3,tp1:1 @4 | tp1:2,tp2(1:3):2 @2",
        {
            "precision": "fp32",
            "sequence_parallel": True,
            **LLAMA_LIKE,
            "num_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 192,
        },
        (),
    ),
    "latent attention": (
        "tp2:3,tp1:1 @4 | tp1:2,tp2:2 @2",
        {"precision": "fp32", **LATENT, "normalization": "LayerNorm"},
        (),
    ),
    "dense layers below experts": (
        "tp2:3,tp1:1 @4 | tp1:2,tp2(1:3):2 @2",
        {"precision": "fp32", **DEEPSEEK_LIKE, "normalization": "LayerNorm"},
        (),
    ),
    "recompute of norms and MLP": (
        "tp2:3,tp1:1 @4 | tp1:4 @2",
        {
            "precision": "fp32",
            "recompute": "selective",
            "recompute_modules": ("core_attn", "mlp"),
            **LLAMA_LIKE,
        },
        (),
    ),
    "recompute of the MLP": (
        "tp2:3,tp1:1 @4 | tp1:4 @2",
        {
            "precision": "fp32",
            "recompute": "selective",
            "recompute_modules": ("mlp",),
            **LLAMA_LIKE,
        },
        (),
    ),
    "recompute of up-projections and shared experts": (
        "tp2:3,tp1:1 @4 | tp1:2,tp2:2 @2",
        {
            "precision": "fp32",
            "recompute": "selective",
            "recompute_modules": ("mla_up_proj", "shared_experts"),
            **DEEPSEEK_LIKE,
            "normalization": "LayerNorm",
        },
        (),
    ),
    "recompute of experts": (
        "tp2:3,tp1:1 @4 | tp1:2,tp2:2 @2",
        {
            "precision": "fp32",
            "recompute": "selective",
            "recompute_modules": ("core_attn", "moe"),
            **DEEPSEEK_LIKE,
            "normalization": "LayerNorm",
        },
        (),
    ),
    "a gate of heads": (
        "tp2:3,tp1:1 @4 | tp1:4 @2",
        {"precision": "fp32", **LLAMA_LIKE, "attention_output_gate": True},
        (),
    ),
    "further tokens": (
        "tp2:3,tp1:1 @4 | tp1:4 @2",
        {"precision": "fp32", **LLAMA_LIKE, "mtp_num_layers": 2},
        (),
    ),
    "context parallel": (
        "tp2cp2(3:1):1,tp1:1,tp1cp3:2 @3 | tp1cp2(5:3):4 @2",
        {
            "precision": "fp32",
            "use_distributed_optimizer": True,
            "fused_scores": "divided",
            **LLAMA_LIKE,
        },
        (),
    ),
    "context parallel, heads alike": (
        "tp2cp2(3:1):1,tp1:1,tp1cp3:2 @3",
        {"precision": "fp32", "fused_scores": "divided", "qk_layernorm": True},
        (),
    ),
    "context parallel, unfused": (
        "tp2cp2(3:1):1,tp1:1,tp1cp3:2 @3",
        {"precision": "fp32", **LLAMA_LIKE},
        (),
    ),
    "context parallel and recompute": (
        "tp1cp2(3:1):1,tp1:2,tp2cp2:1 @3",
        {
            "precision": "fp32",
            "fused_scores": "divided",
            "qk_layernorm": True,
            "sequence_parallel": True,
        },
        ({}, {}, {"recompute": "selective"}),
    ),
    "recompute, launch counts and sizes": (
        "tp2:3,tp1:1 @2x2 | tp1:2,tp1:2 @6",
        {"precision": "bf16", "per_token_loss": True},
        (
            {"recompute": "full", "recompute_num_layers": 2},
            {"recompute": "selective"},
            {"num_launched_forwards": 5},
            {"num_launched_forwards": 3, "recompute": "full"},
        ),
    ),
}


_SLOW = {
    "unlike depth",
    "experts",
    "latent attention",
    "a gate of heads",
    "further tokens",
    "recompute of the MLP",
    "recompute of up-projections and shared experts",
    "context parallel, heads alike",
    "context parallel, unfused",
    "context parallel and recompute",
}
"""Parts of what another case has."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in _SLOW)) for n in CASES]
)
def test_ranks_hold_what_the_plan_estimates(name: str, tmp_path: Path) -> None:
    layout, changes, settings = CASES[name]
    asked = with_settings(plan(layout), settings)
    shrunk = shrink(asked, workload(**changes))
    jobs = VerifyJobs(shrunk, Options(steps=2), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    save_plan(asked, tmp_path / "plan.json")
    argv = (*jobs.training_arguments("adam"), f"--hetero-plan={tmp_path / 'plan.json'}")
    if changes["precision"] == "bf16":
        argv = (*argv, "--bf16")
    if changes.get("use_distributed_optimizer"):
        argv = (*argv, "--use-distributed-optimizer")
    if "fused_scores" not in changes:
        argv = (*argv, "--attention-backend=unfused")

    def train(rank: int) -> None:
        probe = BytesWithoutMasks()
        fused_rows._mask = probe.mask
        entry.main(argv, probe)
        probe.save(tmp_path / f"bytes-{rank}.json")

    num_ranks = asked.layout.num_devices
    shapes = [stage for replica in asked.layout.replicas for stage in replica.stages]
    num_layers = [shape.num_layers for shape in shapes for _ in range(shape.num_devices)]
    table_bytes = table_bytes_of(shrunk.model, changes)
    run_jobs([LocalJob("measured", num_ranks, train, tmp_path / "measured")], 120)
    estimated = estimated_parts(asked, shrunk.model, changes)
    # In fp32 scalars are left.  In bf16 a CPU keeps the statistics of norms in bf16 too, a GPU in
    # fp32, which at this size is a percent.
    tolerance = 0.02 if changes["precision"] == "bf16" else 0.001
    for rank in range(num_ranks):
        measured = json.loads((tmp_path / f"bytes-{rank}.json").read_text())
        for part in ("weights", "gradients", "optimizer"):
            # The distributed optimizer divides to the nearest row, and what a tensor-parallel group
            # holds whole among all of its members.
            near = 0.02 if changes.get("use_distributed_optimizer") else 0.0
            assert measured[part] == pytest.approx(estimated[rank][part], rel=near), (rank, part)
        kept = estimated[rank]["activations"]
        kept += num_layers[rank] * table_bytes
        assert measured["activations"] == pytest.approx(kept, rel=tolerance), rank


def table_bytes_of(model: ModelSpec, changes: dict[str, Any]) -> int:
    """Bytes of the rotary positions that each layer of latent attention has for itself, kept as an
    input of recomputed up-projections, once for all micro-batches."""
    if "mla_up_proj" not in changes.get("recompute_modules", ()):
        return 0
    return 4 * model.seq_length * model.qk_pos_emb_head_dim


class BytesWithoutMasks(LiveBytes):
    """Counts what a GPU would keep, whose fused kernels make the mask as they go."""

    def __init__(self) -> None:
        super().__init__()
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def mask(self, first: int, stop: int) -> torch.Tensor:
        """Return the mask of a run of rows in fp32, which the CPU's kernel then keeps as it is."""
        hidden = torch.arange(stop) > torch.arange(first, stop).unsqueeze(1)
        made = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
        return self._masks.setdefault((first, stop), made)

    def keep(self, storage: torch.UntypedStorage) -> bool:
        """Count a tensor that autograd keeps, if it is neither weight nor mask."""
        masks = {mask.untyped_storage().data_ptr() for mask in self._masks.values()}
        return storage.data_ptr() not in masks and super().keep(storage)


def with_settings(asked: Plan, settings: tuple[dict[str, Any], ...]) -> Plan:
    """The plan with settings of their own for its stages, in layout order."""
    rest = iter(settings)
    return replace(
        asked,
        replicas=tuple(
            replace(r, stages=tuple(replace(s, **next(rest, {})) for s in r.stages))
            for r in asked.replicas
        ),
    )


def estimated_parts(asked: Plan, model: Any, changes: dict[str, Any]) -> list[dict[str, int]]:
    """[rank] -> bytes by part, for the small model of the run and the kernels of a CPU."""
    num_ranks = asked.layout.num_devices
    cluster = make_cluster(("cpu", CPU, num_ranks), between=Link(1e9, 1e-5))
    base = workload(**changes)
    batch = sum(r.num_micro_batches * (r.micro_batch_size or 1) for r in asked.replicas)
    priced = replace(
        base,
        model=replace(
            model,
            vocab_size=VOCAB_SIZE,
            make_vocab_size_divisible_by=4,
            max_position_embeddings=model.seq_length,
        ),
        training=replace(
            base.training,
            global_batch_size=batch,
            flash_attention=False,
            fused_activation=False,
            local_layers=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
        ),
    )
    placed = place_plan(replace(asked, workload=priced), cluster)
    devices = estimate_plan(placed, cluster).devices
    return [dict(devices[f"cpu:{rank}"].parts_bytes) for rank in range(num_ranks)]
