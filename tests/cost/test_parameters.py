"""Parameters on a device, beside those of the whole model's blocks and published counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cost.parameters import (
    attention_matrices,
    attention_sizes,
    embedding_params,
    head_params,
    layer_params,
    mean_of_kinds,
    query_key_value_size,
    shared_expert_matrices,
    stage_params,
    whole_layer_params,
    word_params,
)
from megatron_hetero.cost.share import even_share, member_shares
from megatron_hetero.model.blocks import blocks, num_parameters
from megatron_hetero.model.spec import Workload
from tests.cost.builders import make_workload

H = 512
DENSE = make_workload()
GROUPED = make_workload(
    num_query_groups=2,
    gated_mlp=True,
    add_bias_linear=False,
    add_qkv_bias=True,
    normalization="RMSNorm",
    position_embedding="rope",
    qk_layernorm=True,
    tied_embeddings=False,
)
EXPERTS = make_workload(
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=256,
    moe_shared_expert_intermediate_size=512,
    moe_shared_expert_gate=True,
    add_bias_linear=False,
)
MIXED = make_workload(
    num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=256, moe_layer_freq=(0, 1, 1, 1)
)
LATENT = make_workload(
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_head_dim=32,
    qk_pos_emb_head_dim=16,
    v_head_dim=32,
    qk_layernorm=True,
    add_bias_linear=False,
    position_embedding="rope",
)
GATED = make_workload(attention_output_gate=True, learns_softmax_offset=True)
ALL = (DENSE, GROUPED, EXPERTS, LATENT, GATED)


@pytest.mark.parametrize("workload", ALL)
def test_a_layer_on_one_gpu_is_the_models_block(workload: Workload) -> None:
    model = workload.model
    assert layer_params(model, even_share(model, 1)) == blocks(workload)[1].num_parameters
    assert whole_layer_params(model) == blocks(workload)[1].num_replicated_parameters


@pytest.mark.parametrize("workload", ALL)
@pytest.mark.parametrize("shares", [(1, 1), (3, 1), (1, 2, 1)])
def test_members_hold_a_layer_once_but_for_what_each_holds_whole(
    workload: Workload, shares: tuple[int, ...]
) -> None:
    model = replace(workload.model, num_query_groups=8)
    whole, copies = layer_params(model, even_share(model, 1)), len(shares) - 1
    members = member_shares(model, len(shares), shares)
    total = sum(layer_params(model, member) for member in members)
    assert total == whole + copies * whole_layer_params(model)


@pytest.mark.parametrize("workload", [*ALL, MIXED])
def test_one_stage_on_one_gpu_is_the_model(workload: Workload) -> None:
    model = workload.model
    rows = 1024  # 1000 words, padded to 128
    found = stage_params(model, even_share(model, 1), 4, True, True, rows)
    expected = num_parameters(workload)
    assert abs(found - expected) <= (3 if model.kinds else 0)  # a mean of kinds is rounded up


@given(st.sampled_from(ALL), st.integers(1, 3))
def test_stages_are_the_model_but_for_tied_words(workload: Workload, cut: int) -> None:
    model = workload.model
    share = even_share(model, 1)
    parts = stage_params(model, share, cut, True, False, 1024)
    parts += stage_params(model, share, 4 - cut, False, True, 1024)
    again = word_params(model, 1, 1024) if model.tied_embeddings else 0
    assert parts == stage_params(model, share, 4, True, True, 1024) + again


def test_a_dense_layer_by_hand() -> None:
    """Q, K, V and output h x h each, an MLP of 4h, biases, and two norms with bias."""
    matrices = 4 * H * H + 2 * H * 4 * H
    biases = 3 * H + H + 4 * H + H
    assert layer_params(DENSE.model, even_share(DENSE.model, 1)) == matrices + biases + 4 * H
    assert whole_layer_params(DENSE.model) == 4 * H + 2 * H


def test_grouped_queries_by_hand() -> None:
    """8 heads of 64 in 2 groups: keys and values are 128 wide."""
    share = even_share(GROUPED.model, 1)
    assert attention_sizes(GROUPED.model, share) == (512, 128)
    assert query_key_value_size(GROUPED.model, share) == 512 + 2 * 128
    assert attention_matrices(GROUPED.model, share) == (H * 768, H * H)
    expected = H * 768 + H * H + 768 + 3 * H * 4 * H + 2 * H + 2 * 64
    assert layer_params(GROUPED.model, share) == expected


def test_a_gate_of_the_output_is_as_wide_as_the_queries() -> None:
    share = even_share(GATED.model, 2)
    plain = even_share(DENSE.model, 2)
    more = query_key_value_size(GATED.model, share) - query_key_value_size(DENSE.model, plain)
    assert more == 256
    # An offset for each of four heads, and the gate's columns with their bias.
    assert layer_params(GATED.model, share) - layer_params(DENSE.model, plain) == 256 * (H + 1) + 4


def test_experts_by_hand() -> None:
    share = even_share(EXPERTS.model, 1)
    assert shared_expert_matrices(EXPERTS.model, share) == (H * 512, 512 * H)
    assert shared_expert_matrices(DENSE.model, even_share(DENSE.model, 1)) == ()
    attention = 4 * H * H
    experts, shared = 8 * 2 * H * 256, 2 * H * 512
    router, gate, norms = 8 * H, H, 4 * H
    assert layer_params(EXPERTS.model, share) == (
        attention + experts + shared + router + gate + norms
    )


def test_whole_experts_move_only_the_experts() -> None:
    model = EXPERTS.model
    many, few = member_shares(model, 2, None, 1, (5, 3))
    each = 2 * H * 256
    assert layer_params(model, many) - layer_params(model, few) == 2 * each
    even = layer_params(model, even_share(model, 2))
    assert layer_params(model, many) - even == each


def test_latent_attention_by_hand() -> None:
    share = even_share(LATENT.model, 1)
    down_q, up_q, down_kv, up_kv, out = attention_matrices(LATENT.model, share)
    assert (down_q, up_q) == (H * 96, 96 * 8 * (32 + 16))
    assert (down_kv, up_kv) == (H * (64 + 16), 64 * 8 * (32 + 32))
    assert out == 8 * 32 * H
    assert attention_sizes(LATENT.model, share) == (8 * 48, 8 * 32)
    # Each of two GPUs has the down-projections whole, unless the model divides them.
    half = attention_matrices(LATENT.model, even_share(LATENT.model, 2))
    assert half == (down_q, up_q // 2, down_kv, up_kv // 2, out // 2)
    divided = replace(LATENT.model, divides_latents=True)
    assert attention_matrices(divided, even_share(divided, 2))[0] == down_q // 2
    direct = replace(LATENT.model, q_lora_rank=0)
    assert attention_matrices(direct, even_share(direct, 1))[0] == H * 8 * 48


def test_layers_of_unlike_kinds_count_as_their_mean() -> None:
    model = MIXED.model
    sparse, dense = model.kinds
    share = even_share(model, 2)
    one = layer_params(sparse, share.of_kind(0))
    other = layer_params(dense, share.of_kind(1))
    assert layer_params(model, share) == -(-(3 * one + other) // 4)
    assert mean_of_kinds(model, lambda _, i: 10 if i else 1) == 4  # 13 / 4, rounded up
    assert whole_layer_params(model) == -(
        -(3 * whole_layer_params(sparse) + whole_layer_params(dense)) // 4
    )


def test_ends_of_the_model_by_hand() -> None:
    model = DENSE.model
    assert word_params(model, 4, 1024) == 1024 * H // 4
    assert embedding_params(model, 4, 1024) == 1024 * H // 4 + 256 * H  # positions are whole
    assert embedding_params(replace(model, position_embedding="rope"), 4, 1024) == 1024 * H // 4
    assert head_params(model, 4, 1024, holds_embedding=True) == 2 * H
    assert head_params(model, 4, 1024, holds_embedding=False) == 2 * H + 1024 * H // 4
    untied = replace(model, tied_embeddings=False, normalization="RMSNorm")
    assert head_params(untied, 4, 1024, holds_embedding=True) == H + 1024 * H // 4
