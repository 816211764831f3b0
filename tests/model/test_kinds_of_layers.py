"""Layers of unlike kinds and latent attention, read from flags and counted as Megatron counts."""

from __future__ import annotations

import shlex
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_hetero.errors import ModelError
from megatron_hetero.model.blocks import blocks, num_parameters
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import ModelSpec, Workload

BASE = shlex.split(
    "--num-layers 6 --hidden-size 512 --num-attention-heads 8 --seq-length 256 "
    "--max-position-embeddings 256 --vocab-size 4096 --global-batch-size 8 --micro-batch-size 1 "
    "--ffn-hidden-size 1536 --swiglu --untie-embeddings-and-output-weights --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope"
)
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512"
LATENT = (
    "--multi-latent-attention --q-lora-rank 192 --kv-lora-rank 128 --qk-head-dim 64 "
    "--qk-pos-emb-head-dim 32 --v-head-dim 48 --qk-layernorm"
)


def workload(flags: str) -> Workload:
    return load_workload(None, [*BASE, *shlex.split(flags)])


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ("1", ()),
        ("2", (1, 0, 1, 0, 1, 0)),
        ("'([0]*2+[1]*4)'", (0, 0, 1, 1, 1, 1)),
        ("[0,1]*3", (0, 1, 0, 1, 0, 1)),
        ("[1]*6", ()),
        ("([0]*1+[1,0]*2+[1])", (0, 1, 0, 1, 0, 1)),
        ("([1]*2+[0]*1)*2", (1, 1, 0, 1, 1, 0)),
        ("([0]+[1]*2)*2", (0, 1, 1, 0, 1, 1)),
        ("([0]*1)+([1]*5)", (0, 1, 1, 1, 1, 1)),
        ("(([0]*1)+([1]))*3", (0, 1, 0, 1, 0, 1)),
    ],
)
def test_which_layers_have_experts(given: str, pattern: tuple[int, ...]) -> None:
    model = workload(f"{EXPERTS} --moe-layer-freq {given}").model
    assert model.moe_layer_freq == pattern
    assert [kind.num_experts for kind in model.kinds] == ([8, 0] if pattern else [])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"{EXPERTS} --moe-layer-freq [0]*3+[1]*2", "of 5 layers.*--num-layers is 6"),
        (f"{EXPERTS} --moe-layer-freq every", 'a list such as "'),
        (f"{EXPERTS} --moe-layer-freq [0]*6", "none of 6 layers"),
        (f"{EXPERTS} --moe-layer-freq [0]*9999999", 'a list such as "'),
        (f"{EXPERTS} --moe-layer-freq [1]*10**9", 'a list such as "'),
        (f"{EXPERTS} --moe-layer-freq ([1]*6000)*6000", 'a list such as "'),
        (f"{EXPERTS} --moe-layer-freq '([0]*3+[1]*3'", 'a list such as "'),
        (f"{EXPERTS} --moe-layer-freq '[0]*3+[1]*3)'", 'a list such as "'),
        (f"{EXPERTS} --moe-layer-freq {'(' * 900}[1]{')' * 900}", 'a list such as "'),
        (f"{LATENT} --group-query-attention", "takes one of them"),
    ],
)
def test_what_cannot_be_is_one_clear_error(flags: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        workload(flags)


def test_the_frequency_of_a_dense_model_is_not_read() -> None:
    assert workload("--moe-layer-freq 2").model.moe_layer_freq == ()


CASES = {
    "dense, grouped queries": "--group-query-attention --num-query-groups 2",
    "experts": EXPERTS,
    "a shared expert": f"{EXPERTS} --moe-shared-expert-intermediate-size 256",
    "dense layers among experts": f"{EXPERTS} --moe-layer-freq [0]*2+[1]*4",
    "latent attention": LATENT,
    "latent attention without latents of queries": LATENT.replace("--q-lora-rank 192", ""),
    "all of it": f"{LATENT} {EXPERTS} --moe-layer-freq [0]+[1]*5 "
    "--moe-shared-expert-intermediate-size 512",
    "further tokens": "--mtp-num-layers 2",
    "further tokens of a model with all of it": f"{LATENT} {EXPERTS} --moe-layer-freq [0]+[1]*5 "
    "--moe-shared-expert-intermediate-size 512 --mtp-num-layers 1",
    "a gate of heads": "--attention-output-gate --group-query-attention --num-query-groups 4",
}


@pytest.mark.parametrize("name", CASES)
def test_the_work_is_megatrons_own_count(name: str) -> None:
    """`num_floating_point_operations` leaves out routers, and counts a few elements for norms."""
    from megatron.training.training import num_floating_point_operations

    job = workload(CASES[name])
    batch = job.training.global_batch_size
    flops = sum(b.matmul_flops_forward + b.attention_flops_forward for b in blocks(job))
    theirs = num_floating_point_operations(_arguments(job.model), batch)
    assert 3 * batch * flops == pytest.approx(theirs, rel=0.01)


def _arguments(model: ModelSpec) -> Any:
    experts = model.num_experts
    return SimpleNamespace(
        **{
            name: getattr(model, name)
            for name in (
                "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
                "kv_channels", "num_query_groups", "seq_length", "attention_output_gate",
                "moe_router_topk", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
                "v_head_dim",
            )
        },
        q_lora_rank=model.q_lora_rank or None,
        multi_latent_attention=bool(model.kv_lora_rank),
        group_query_attention=model.num_query_groups != model.num_attention_heads,
        num_experts=experts or None,
        moe_layer_freq=list(model.moe_layer_freq) or 1,
        moe_ffn_hidden_size=model.moe_ffn_hidden_size or None,
        moe_shared_expert_intermediate_size=model.moe_shared_expert_intermediate_size or None,
        moe_latent_size=None,
        mtp_num_layers=model.mtp_num_layers or None,
        swiglu=model.gated_mlp,
        padded_vocab_size=model.vocab_size,
        experimental_attention_variant=None,
        hybrid_layer_pattern=None,
        is_hybrid_model=False,
        linear_attention_freq=None,
    )  # fmt: skip


def test_the_least_layers_need_no_more_than_any() -> None:
    """What bounds are computed for: no layer of the job has fewer parameters or less work."""
    job = workload(CASES["all of it"])
    least = Workload(job.model.least, job.training, (), "")
    for block, low in zip(blocks(job), blocks(least), strict=True):
        assert low.num_parameters <= block.num_parameters
        assert low.matmul_flops_forward <= block.matmul_flops_forward
        assert low.attention_flops_forward <= block.attention_flops_forward
    assert num_parameters(least) < num_parameters(job)
    plain = workload(EXPERTS).model
    assert plain.least is plain


def test_a_plan_file_has_the_new_fields_only_where_they_are_used() -> None:
    from megatron_hetero.plan.build import plan_from_layout
    from megatron_hetero.plan.file import plan_from_data, plan_to_data
    from megatron_hetero.plan.layout import parse_layout

    for flags, is_written in (("", False), (CASES["all of it"], True)):
        plan = plan_from_layout(parse_layout("tp1:6 @8"), workload(flags))
        data = plan_to_data(plan)
        assert ("kv_lora_rank" in data["workload"]["model"]) == is_written
        assert plan_from_data(data) == plan
