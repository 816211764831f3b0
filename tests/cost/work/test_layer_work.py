"""Work of the parts of a layer, by hand and beside the FLOPs of the model's blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cost.share import even_share, member_shares
from megatron_hetero.cost.work.layer_work import attention_work, mlp_work
from megatron_hetero.model.blocks import blocks
from megatron_hetero.model.spec import Workload
from tests.cost.builders import make_workload

S, B, H, F = 256, 2, 512, 2048
DENSE = make_workload(micro_batch_size=B)
GROUPED = make_workload(num_query_groups=2, gated_mlp=True, micro_batch_size=1)
EXPERTS = make_workload(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=256)
SHARED = make_workload(
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=256,
    moe_shared_expert_intermediate_size=512,
    moe_shared_expert_gate=True,
    gated_mlp=True,
)
LATENT = make_workload(
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_head_dim=32,
    qk_pos_emb_head_dim=16,
    v_head_dim=32,
    position_embedding="rope",
)


def test_attention_of_a_dense_layer_by_hand() -> None:
    """Four h x h matrices; scores and weighted values of s x s by heads, all of it unfused."""
    work = attention_work(DENSE.model, DENSE.training, even_share(DENSE.model, 1), False)
    assert work.gemm_flops == (2 * B * S * 3 * H * H, 2 * B * S * H * H)
    assert work.num_params == 4 * H * H
    assert work.attention_flops == (2 * B * S * S * H,) * 2
    scores = B * 8 * S * S
    assert work.score_bytes == 2 * scores
    assert work.score_dropout_bytes == 5 * scores  # read, written, and a byte of the mask
    # Norm, and bias, dropout and sum with a byte of the mask; a copy of the context.
    assert work.moved.forward == (B * S * H * (4 + (6 + 1) + 4), 3)
    # Norm; sum of gradients, dropout and bias; gradients of all three put together; the context.
    # Two weights of the norm and two biases are added to their main gradients.
    assert work.moved.backward == (B * S * H * (6 + (6 + 5 + 2) + 12 + 4), 6 + 4)


def test_fused_attention_skips_half_and_keeps_scores_on_chip() -> None:
    share = even_share(DENSE.model, 1)
    plain, fused = (attention_work(DENSE.model, DENSE.training, share, f) for f in (False, True))
    assert sum(fused.attention_flops) == sum(plain.attention_flops) / 2
    assert fused.score_bytes == fused.score_dropout_bytes == 0
    assert fused.gemm_flops == plain.gemm_flops


def test_no_dropout_moves_no_mask() -> None:
    training = replace(DENSE.training, attention_dropout=0.0)
    work = attention_work(DENSE.model, training, even_share(DENSE.model, 1), False)
    assert work.score_bytes > 0 and work.score_dropout_bytes == 0


def test_the_mlp_by_hand() -> None:
    work = mlp_work(DENSE.model, DENSE.training, even_share(DENSE.model, 1), False)
    assert work.gemm_flops == (2 * B * S * H * F,) * 2
    assert work.num_params == 2 * H * F
    # The activation reads and writes 16-bit columns, beside norm and residual.
    assert work.moved.forward == (B * S * H * 11 + B * S * 2 * F * 2, 3)
    # Backward an activation reads a gradient too, and the gradient of its bias is summed.
    assert work.moved.backward == (B * S * H * 19 + B * S * (3 + 1) * F * 2, 6 + 4)


def test_a_gated_mlp_has_a_first_product_twice_as_wide() -> None:
    model, training = GROUPED.model, GROUPED.training
    first, second = mlp_work(model, training, even_share(model, 1), False).gemm_flops
    assert first == 2 * second


@pytest.mark.parametrize("workload", [DENSE, GROUPED, EXPERTS, SHARED, LATENT])
def test_flops_are_those_of_the_models_blocks(workload: Workload) -> None:
    """Of one sequence on one GPU; blocks count the causal half of the scores, as fused."""
    model = workload.model
    training = replace(workload.training, micro_batch_size=1)
    layer = blocks(workload)[1]
    share = even_share(model, 1)
    parts = [of(model, training, share, True) for of in (attention_work, mlp_work)]
    gemms = sum(flops for part in parts for flops in part.gemm_flops)
    gate = 2.0 * S * H if model.moe_shared_expert_gate else 0.0  # of one column: no product here
    assert gemms + gate == pytest.approx(layer.matmul_flops_forward, rel=1e-9)
    scores = sum(flops for part in parts for flops in part.attention_flops)
    assert scores == pytest.approx(layer.attention_flops_forward)


@pytest.mark.parametrize("workload", [DENSE, GROUPED, EXPERTS, SHARED])
@pytest.mark.parametrize("shares", [(1, 1), (3, 1), (1, 1, 2)])
def test_members_do_the_work_once(workload: Workload, shares: tuple[int, ...]) -> None:
    """Products of a group add up to those of one GPU; the router's are every member's own."""
    model = replace(workload.model, num_query_groups=8, num_attention_heads=8)
    training = workload.training
    router = 2.0 * training.micro_batch_size * S * H * model.num_experts
    for of in (attention_work, mlp_work):
        whole = of(model, training, even_share(model, 1), True)
        members = [of(model, training, m, True) for m in member_shares(model, len(shares), shares)]
        copies = router * (len(shares) - 1) if of is mlp_work else 0.0
        assert sum(sum(m.gemm_flops) for m in members) == pytest.approx(
            sum(whole.gemm_flops) + copies
        )
        assert sum(sum(m.attention_flops) for m in members) == pytest.approx(
            sum(whole.attention_flops)
        )


def test_whole_experts_do_the_same_products() -> None:
    model, training = EXPERTS.model, EXPERTS.training
    whole = mlp_work(model, training, even_share(model, 1), True)
    dealt = [mlp_work(model, training, m, True) for m in member_shares(model, 2, None, 1, (5, 3))]
    router = whole.gemm_flops[0]
    assert sum(sum(d.gemm_flops) - router for d in dealt) == pytest.approx(
        sum(whole.gemm_flops) - router
    )
    ratio = (sum(dealt[0].gemm_flops) - router) / (sum(dealt[1].gemm_flops) - router)
    assert ratio == pytest.approx(5 / 3)
    assert len(dealt[0].gemm_flops) == 1 + 2 * 5  # its own experts, one after the other


def test_experts_by_hand() -> None:
    """Each token goes to 2 of 8 experts of 256 columns: 2 / 8 of the tokens on each."""
    work = mlp_work(EXPERTS.model, EXPERTS.training, even_share(EXPERTS.model, 1), False)
    router, *products = work.gemm_flops
    assert router == 2 * S * H * 8
    assert products == [2 * (S * 2 / 8) * H * 256] * 16
    assert work.num_params == 8 * 2 * H * 256 + 8 * H + 8  # of the router, with its bias


@given(st.integers(1, 4), st.booleans())
def test_work_grows_with_the_micro_batch(size: int, flash: bool) -> None:
    one = replace(DENSE.training, micro_batch_size=1)
    more = replace(DENSE.training, micro_batch_size=size)
    share = even_share(DENSE.model, 2)
    for of in (attention_work, mlp_work):
        a, b = (of(DENSE.model, training, share, flash) for training in (one, more))
        assert sum(b.gemm_flops) == size * sum(a.gemm_flops)
        assert b.moved == a.moved.times(size)
        assert b.num_params == a.num_params


def test_sequence_parallelism_divides_what_is_beside_the_products() -> None:
    share = even_share(DENSE.model, 4)
    plain = attention_work(DENSE.model, DENSE.training, share, True)
    divided = attention_work(
        DENSE.model, replace(DENSE.training, sequence_parallel=True), share, True
    )
    assert divided.moved.forward == plain.moved.forward.times(1 / 4)
    # Gradients of queries, keys and values are of all tokens: read and put together.
    of_all = B * S * 3 * H // 4 * 2 * 2
    whole, part = (own.moved.backward.num_bytes - of_all for own in (plain, divided))
    assert part == whole / 4
    assert divided.gemm_flops == plain.gemm_flops


def test_latents_that_every_member_holds_are_of_its_own_tokens() -> None:
    """Down-projections to latents are whole on each of two GPUs: with sequence parallelism each
    does its half of the tokens."""
    model = LATENT.model
    training = replace(LATENT.training, sequence_parallel=True)
    share = even_share(model, 2)
    plain = attention_work(model, LATENT.training, share, True).gemm_flops
    divided = attention_work(model, training, share, True).gemm_flops
    assert [d / p for d, p in zip(divided, plain, strict=True)] == [0.5, 1.0, 0.5, 1.0, 1.0]
    assert plain[0] == 2 * S * H * 96 and plain[2] == 2 * S * H * (64 + 16)


def test_context_parallelism_halves_tokens_but_not_what_they_look_at() -> None:
    model, training = DENSE.model, DENSE.training
    whole, half = (member_shares(model, 1, None, c)[0] for c in (1, 2))
    a, b = (attention_work(model, training, share, True) for share in (whole, half))
    assert sum(b.attention_flops) == sum(a.attention_flops) / 2
    assert sum(b.gemm_flops) == sum(a.gemm_flops) / 2
