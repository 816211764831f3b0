"""Bytes kept for backward: by hand, tensor by tensor, and what divides them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from megatron_hetero.cost.memory.activations import (
    layer_activation_bytes,
    mask_bytes,
    own_mask_bytes,
)
from megatron_hetero.cost.memory.ends import embedding_activation_bytes, head_activation_bytes
from megatron_hetero.cost.share import even_share, member_shares
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import Fp8Recipe, TrainingSpec
from tests.cost.builders import make_workload

S, H, A = 256, 512, 8
PLAIN = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
DENSE = make_workload(**PLAIN)
GROUPED = make_workload(num_query_groups=2, gated_mlp=True, position_embedding="rope", **PLAIN)
EXPERTS = make_workload(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=256, **PLAIN)
SHARED = make_workload(
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=256,
    moe_shared_expert_intermediate_size=512,
    moe_shared_expert_gate=True,
    **PLAIN,
)
LATENT = make_workload(
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_head_dim=32,
    qk_pos_emb_head_dim=16,
    v_head_dim=32,
    position_embedding="rope",
    **PLAIN,
)
ALL = (DENSE, GROUPED, EXPERTS, SHARED, LATENT)


def kept(workload: Workload, width: int = 1, flash: bool = True, recompute: str = "none") -> int:
    share = even_share(workload.model, width)
    return layer_activation_bytes(workload.model, workload.training, share, flash, recompute)


def test_a_dense_fused_layer_by_hand() -> None:
    """Inputs and outputs of two norms, Q, K, V and context, the MLP's input of the activation and
    of its second product; log-sum-exp of each row, and statistics of the norms."""
    sixteen_bit = 4 * S * H + 4 * S * H + 2 * S * 4 * H
    statistics = 2 * S * 8
    assert kept(DENSE) == 2 * sixteen_bit + statistics + 4 * S * A


def test_scores_are_kept_where_attention_is_not_fused() -> None:
    softmax = 2 * A * S * S
    assert kept(DENSE, flash=False) == kept(DENSE) - 4 * S * A + softmax
    dropped = make_workload(attention_dropout=0.1, hidden_dropout=0.0)
    # What dropout leaves, and a byte of its mask.
    assert kept(dropped, flash=False) == kept(DENSE, flash=False) + 3 * A * S * S
    assert kept(dropped) == kept(DENSE)  # fused kernels draw it again


def test_dropout_of_hidden_states_keeps_two_masks() -> None:
    dropped = make_workload(attention_dropout=0.0, hidden_dropout=0.1)
    assert kept(dropped) == kept(DENSE) + 2 * S * H


def test_a_gated_activation_keeps_more_where_it_is_not_fused() -> None:
    """Fused: both halves of the first product, and the input of the second."""
    gated = make_workload(gated_mlp=True, **PLAIN)
    split = make_workload(gated_mlp=True, fused_activation=False, **PLAIN)
    assert kept(gated) - kept(DENSE) == 2 * S * 4 * H
    assert kept(split) - kept(gated) == 2 * 2 * S * 4 * H


def test_full_recompute_keeps_the_input_alone() -> None:
    for workload in ALL:
        assert kept(workload, recompute="full") == 2 * S * H
        sequence = replace(workload, training=replace(workload.training, sequence_parallel=True))
        assert kept(sequence, width=2, recompute="full") == 2 * S * H // 2


@pytest.mark.parametrize(("workload", "flash"), list(product(ALL, [False, True])))
def test_more_recompute_never_keeps_more(workload: Workload, flash: bool) -> None:
    none, selective, full = (
        kept(workload, 1, flash, recompute) for recompute in ("none", "selective", "full")
    )
    assert full < selective < none


@pytest.mark.parametrize("workload", ALL)
@pytest.mark.parametrize("flash", [False, True])
def test_a_wider_group_keeps_less_on_each_and_more_on_all(workload: Workload, flash: bool) -> None:
    model = replace(workload.model, num_query_groups=8)
    of = replace(workload, model=model)
    sizes = [kept(of, width, flash) for width in (1, 2, 4, 8)]
    assert sizes == sorted(sizes, reverse=True)
    assert all(width * size > sizes[0] for width, size in zip((2, 4, 8), sizes[1:], strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_twice_the_sequences_keep_twice_as_much(size: int) -> None:
    for workload in (DENSE, EXPERTS):
        more = replace(workload, training=replace(workload.training, micro_batch_size=size))
        assert kept(more) == size * kept(workload)


def test_sequence_parallelism_divides_what_the_group_kept_whole() -> None:
    divided = make_workload(sequence_parallel=True, **PLAIN)
    whole = 2 * 4 * S * H + 2 * S * 8  # around the norms
    assert kept(DENSE, 4) - kept(divided, 4) == whole - whole // 4


def test_unlike_shares_keep_what_they_compute() -> None:
    """3 to 1: what is divided differs, what is whole is the same."""
    large, small = (
        layer_activation_bytes(DENSE.model, DENSE.training, share, True, "none")
        for share in member_shares(DENSE.model, 2, (3, 1))
    )
    whole = 2 * 4 * S * H + 2 * S * 8
    assert (large - whole) == 3 * (small - whole)


def test_experts_by_hand() -> None:
    """Each token goes to two experts: its copy, what their MLP keeps, and where it came from."""
    attention = 2 * (4 * S * H + 4 * S * H) + 2 * S * 8 + 4 * S * A
    each = (H + 2 * 256 + 256 + 1) * 2 + 16
    router = S * (2 * 12 + 8 * 8 + 4) + S * 8
    assert kept(EXPERTS) == attention + 2 * S * each + router


def test_a_shared_expert_keeps_what_an_mlp_keeps_and_its_gate() -> None:
    more = kept(SHARED) - kept(EXPERTS)
    assert more == S * 2 * (2 * 512) + S * 2 * (H + 1)


def test_whole_experts_keep_the_tokens_that_come_to_them() -> None:
    model, training = EXPERTS.model, EXPERTS.training
    many, few = (
        layer_activation_bytes(model, training, share, True, "none")
        for share in member_shares(model, 2, None, 1, (6, 2))
    )
    each = (H + 2 * 256 + 256 + 1) * 2 + 16
    assert many - few == (2 * S * 6 // 8 - 2 * S * 2 // 8) * each


def test_rotated_queries_and_keys_are_new_tensors_where_attention_is_not_fused() -> None:
    rotary = make_workload(position_embedding="rope", **PLAIN)
    tables = 4 * S * (H // A) * 2
    assert kept(rotary, flash=False) - kept(DENSE, flash=False) == 2 * S * 2 * H + tables
    assert kept(rotary) == kept(DENSE)


def test_context_parallelism_divides_a_fused_layer() -> None:
    whole, half = (member_shares(DENSE.model, 1, None, c)[0] for c in (1, 2))
    sizes = [
        layer_activation_bytes(DENSE.model, DENSE.training, share, True, "none")
        for share in (whole, half)
    ]
    assert sizes[0] == 2 * sizes[1]
    gathered = [
        layer_activation_bytes(DENSE.model, DENSE.training, share, False, "none")
        for share in (whole, half)
    ]
    assert gathered[1] > gathered[0] / 2  # keys and values of the whole sequence, and a mask


def test_the_embedding_by_hand() -> None:
    model, training = DENSE.model, DENSE.training
    assert embedding_activation_bytes(model, training, even_share(model, 1)) == S * 16
    assert embedding_activation_bytes(model, training, even_share(model, 2)) == S * 17
    rotary = replace(model, position_embedding="rope")
    assert embedding_activation_bytes(rotary, training, even_share(model, 1)) == S * 8
    dropped = replace(training, hidden_dropout=0.1)
    assert embedding_activation_bytes(model, dropped, even_share(model, 1)) == S * (16 + H)


def test_the_head_by_hand() -> None:
    """Both sides of the last norm, its statistics, the softmax in fp32, labels and weights."""
    model, training = DENSE.model, DENSE.training
    one = head_activation_bytes(model, training, even_share(model, 1), 1024)
    assert one == S * (2 * H * 2 + 8) + S * 1024 * 4 + S * 13
    four = head_activation_bytes(model, training, even_share(model, 4), 1024)
    assert one - four == S * 768 * 4


def test_masks_are_there_for_unfused_attention_alone() -> None:
    model, training = DENSE.model, DENSE.training
    share = even_share(model, 1)
    assert mask_bytes(model, training, share, False) == own_mask_bytes(
        model, training, share, False
    )
    assert mask_bytes(model, training, share, False) == S * S
    assert mask_bytes(model, training, share, True) == 0
    assert own_mask_bytes(model, training, share, True) == 0
    recomputed = replace(training, recompute="full")
    assert own_mask_bytes(model, recomputed, share, False) == 0
    half = member_shares(model, 1, None, 2)[0]
    assert mask_bytes(model, training, half, False) == 0
    assert mask_bytes(model, recomputed, half, False) == S // 2 * S
    assert own_mask_bytes(model, training, half, False) == 0


def in_fp8(workload: Workload, recipe: Fp8Recipe) -> Workload:
    training = replace(workload.training, precision="bf16", fp8=True, fp8_recipe=recipe)
    return replace(workload, training=training)


@pytest.mark.parametrize(
    ("recipe", "cast", "context"),
    [("tensorwise", 1, 0), ("delayed", 1, 1), ("blockwise", 1 + 1 / 32, 0), ("mxfp8", 33 / 32, 0)],
)
def test_products_in_fp8_keep_casts_of_their_inputs(
    recipe: Fp8Recipe, cast: float, context: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each element a byte in place of two, and its part of a scale.  The context is attention's
    own in 16 bits; with `delayed` the projection's cast of it is kept as well."""
    # Rows that fp8 adds to those of experts have tests of their own (`test_padded_rows`).
    monkeypatch.setattr(TrainingSpec, "padded_rows", 0.0)
    # Two norms' outputs, and the input of the second product.
    dense = S * (2 * H + 4 * H) * (2 - cast) - context * S * H
    assert kept(DENSE) - kept(in_fp8(DENSE, recipe)) == dense
    # The router keeps the second norm's output in 16 bits; each token is twice among the experts.
    experts = S * H * (2 - cast) + 2 * S * (H + 256) * (2 - cast) - context * S * H
    assert kept(EXPERTS) - kept(in_fp8(EXPERTS, recipe)) == experts
    # A shared expert shares the router's input, but for `delayed`.
    shared = experts + S * 512 * (2 - cast) - context * S * H
    assert kept(SHARED) - kept(in_fp8(SHARED, recipe)) == shared
    # Both down-projections cast the norm's output.
    latent = S * 2 * H * (1 - cast) + S * (H + 4 * H) * (2 - cast) - context * S * A * 32
    assert kept(LATENT) - kept(in_fp8(LATENT, recipe)) == latent


def test_full_recompute_in_fp8_keeps_the_input_in_16_bits() -> None:
    assert kept(in_fp8(DENSE, "delayed"), recompute="full") == 2 * S * H
