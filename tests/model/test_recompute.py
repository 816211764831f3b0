"""Modules of selective recompute: as a job says them, and as Megatron refuses them."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from megatron.core.transformer import TransformerConfig

from megatron_hetero.errors import ModelError, UnsupportedError
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.recompute import recomputed
from megatron_hetero.model.spec import Workload

MINIMAL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 128 "
    "--max-position-embeddings 128 --vocab-size 1000 --global-batch-size 16 --micro-batch-size 2 "
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-grouped-gemm "
    "--moe-shared-expert-intermediate-size 64 --disable-bias-linear "
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 8 --position-embedding-type rope "
)
SELECTIVE = "--recompute-granularity selective "
PLAIN = "--disable-bias-linear "


def job(flags: str) -> Workload:
    return load_workload(None, shlex.split(MINIMAL + flags))


@pytest.mark.parametrize(
    ("flags", "modules"),
    [
        (SELECTIVE, ()),
        (SELECTIVE + "--recompute-modules core_attn", ()),
        (PLAIN + SELECTIVE + "--recompute-modules mlp core_attn", ("core_attn", "mlp")),
        (PLAIN + "--recompute-activations --recompute-modules mlp", ("mlp",)),
        (EXPERTS + SELECTIVE + "--recompute-modules moe_act layernorm", ("layernorm", "moe_act")),
        (LATENT + SELECTIVE + "--recompute-modules mla_up_proj", ("mla_up_proj",)),
        (EXPERTS + "--moe-layer-recompute", ("core_attn", "moe")),
        (EXPERTS + "--moe-layer-recompute --recompute-modules mlp", ("mlp", "moe")),
    ],
)
def test_a_job_says_what_is_computed_again(flags: str, modules: tuple[str, ...]) -> None:
    training = job(flags).training
    assert (training.recompute, training.recompute_modules) == ("selective", modules)
    assert recomputed(training) == set(modules or ("core_attn",))
    # Stages may have another granularity.
    assert recomputed(training, "none") == set()
    assert recomputed(training) < recomputed(training, "full")


def test_a_job_that_recomputes_nothing_may_say_what_selective_stages_would() -> None:
    training = job("--recompute-modules mlp").training
    assert recomputed(training) == set() and recomputed(training, "selective") == {"mlp"}


def test_the_older_flag_is_said_in_todays_words() -> None:
    """With the flag itself Megatron would make every stage selective, whatever the plan says."""
    args = job(EXPERTS + "--moe-layer-recompute").megatron_args
    assert "--moe-layer-recompute" not in args
    assert args[-5:] == (
        "--recompute-granularity", "selective", "--recompute-modules", "core_attn", "moe",
    )  # fmt: skip


REFUSED = [
    (SELECTIVE + "--recompute-modules attention", '"attention"; allowed: core_attn, layernorm'),
    (SELECTIVE + "--recompute-modules moe_act", "moe_act without --moe-grouped-gemm"),
    (SELECTIVE + "--recompute-modules mla_up_proj", "without --multi-latent-attention"),
    (
        EXPERTS + SELECTIVE + "--recompute-modules shared_experts --moe-shared-expert-overlap "
        "--moe-token-dispatcher-type alltoall",
        "shared_experts with --moe-shared-expert-overlap",
    ),
    (
        SELECTIVE + "--recompute-modules layernorm --fp8-format hybrid --bf16",
        "layernorm with --fp8-recipe delayed",
    ),
    (SELECTIVE + "--recompute-num-layers 2", "--recompute-num-layers counts layers of full"),
    (
        EXPERTS + "--moe-layer-recompute --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        "exclude each other in Megatron",
    ),
]


def test_a_recomputed_mlp_with_biases_is_planned_for_nobody() -> None:
    with pytest.raises(UnsupportedError, match=r"mlp with biases .* whose backward pass does not"):
        job(SELECTIVE + "--recompute-modules mlp")


@pytest.mark.parametrize(("flags", "said"), REFUSED)
def test_what_megatron_refuses_is_refused_at_the_flag(flags: str, said: str) -> None:
    with pytest.raises(ModelError, match="command line: ") as error:
        job(flags)
    assert said in str(error.value)


SHARED = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 64,
    "moe_token_dispatcher_type": "alltoall",
    "moe_shared_expert_overlap": True,
    "add_bias_linear": False,
}


@pytest.mark.parametrize(
    ("modules", "fields"),
    [
        (["attention"], {}),
        (["moe_act"], {}),
        (["mla_up_proj"], {}),
        (["shared_experts"], SHARED),
        (["layernorm"], {"fp8": "hybrid", "bf16": True}),
        (["core_attn"], {"recompute_num_layers": 2}),
        (["core_attn"], {"recompute_granularity": "full", "moe_layer_recompute": True}),
    ],
)
def test_megatron_refuses_the_same(modules: list[str], fields: dict[str, Any]) -> None:
    given = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8} | fields
    given = {"recompute_granularity": "selective", "recompute_modules": modules} | given
    with pytest.raises((ValueError, AssertionError), match=r"recompute|ayernorm"):
        TransformerConfig(**given)
    # Without recompute the rest of the job is fine.
    plain = {name: value for name, value in given.items() if "recompute" not in name}
    assert TransformerConfig(**plain).num_layers == 4
