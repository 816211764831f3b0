"""Working sets and the buffer of unfused attention, by hand.

`tests.runtime.test_allocated` measures them.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.cost.memory.working import attention_buffer_bytes, working_bytes
from megatron_hetero.cost.share import even_share
from megatron_hetero.model.training import TrainingSpec
from tests.cost.builders import make_workload

TRAINING = TrainingSpec(
    4, 1, "fp32", flash_attention=False, attention_dropout=0.0, hidden_dropout=0.0
)


def test_fused_attention_has_no_buffer() -> None:
    model = make_workload().model
    share = even_share(model, 1)
    assert attention_buffer_bytes(model, TRAINING, share, True) == 0
    scores = model.num_attention_heads * model.seq_length**2 * 4
    assert attention_buffer_bytes(model, TRAINING, share, False) == scores
    halved = attention_buffer_bytes(model, TRAINING, even_share(model, 2), False)
    assert halved == scores // 2


def test_long_sequences_need_four_tensors_of_scores_less_what_is_let_go() -> None:
    model = replace(make_workload().model, seq_length=8192)
    share = even_share(model, 1)
    scores = model.num_attention_heads * model.seq_length**2 * 4
    mlp = model.seq_length * 4 * share.mlp_columns * (3 + 2 if model.gated_mlp else 2)
    assert working_bytes(model, TRAINING, share, False) == 3 * scores - mlp


def test_recomputed_attention_makes_its_scores_again() -> None:
    """The peak is the same moment; only what was kept before it differs."""
    model = replace(make_workload().model, seq_length=8192)
    share = even_share(model, 1)
    selective = replace(TRAINING, recompute="selective")
    scores = model.num_attention_heads * model.seq_length**2 * 4
    more = working_bytes(model, selective, share, False)
    assert more - working_bytes(model, TRAINING, share, False) == scores


def test_experts_work_on_a_row_for_each_token_that_comes_to_them() -> None:
    """Gradients of the input and the output of two rows for each token, and of what is widest: of
    all experts that are one call, or of one of eight."""
    model = replace(
        make_workload().model, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=1024,
        gated_mlp=True,
    )  # fmt: skip
    share, rows = even_share(model, 1), 2 * model.seq_length
    single = replace(TRAINING, precision="bf16")
    grouped = replace(single, grouped_experts=True)
    ends = 2 * rows * model.hidden_size
    assert working_bytes(model, single, share, True) == 2 * (ends + rows // 8 * 3 * 1024)
    assert working_bytes(model, grouped, share, True) == 2 * (ends + rows * 3 * 1024)


def test_gradients_that_lie_apart_of_experts_in_one_call_live_together() -> None:
    model = replace(
        make_workload().model, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=1024,
        gated_mlp=True,
    )  # fmt: skip
    share, rows, hidden = even_share(model, 1), 2 * model.seq_length, model.hidden_size
    apart = replace(TRAINING, precision="bf16", grouped_experts=True, unfused_gradients=True)
    gradients = 8 * hidden * 2048 + rows * (2048 + hidden)
    let_go = rows * (2048 + 1024)
    assert working_bytes(model, apart, share, True) == 2 * (gradients - let_go)
