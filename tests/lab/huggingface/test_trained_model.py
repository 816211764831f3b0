"""A checkpoint and a config.json of another model: every difference is named."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_hetero.lab.huggingface.trained_model import differences_of

MODEL: dict[str, Any] = {
    "num_layers": 3,
    "num_attention_heads": 4,
    "group_query_attention": False,
    "num_query_groups": None,
    "kv_channels": 16,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": 128,
    "vocab_size": 101,
    "make_vocab_size_divisible_by": 128,
    "max_position_embeddings": 32,
    "num_experts": None,
    "moe_router_topk": 2,
}
DESCRIBED = {**MODEL, "padded_vocab_size": 101}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 2}, "num_layers is 3 in the checkpoint, 2 by config.json"),
        # Matrices of the same size, other rows in each head.
        ({"num_attention_heads": 8, "kv_channels": 8}, "num_attention_heads is 4"),
        ({"group_query_attention": True, "num_query_groups": 2}, "num_query_groups is 4"),
        ({"rotary_base": 500000.0}, "rotary_base is 10000"),
        ({"untie_embeddings_and_output_weights": False}, "untie_embeddings_and_output_weights"),
        ({"padded_vocab_size": 129}, "has 128 rows of a vocabulary, config.json wants 129"),
        ({"padded_vocab_size": 100}, "at least 101 tokens, config.json's 100"),
    ],
)
def test_another_model_is_named(changes: dict[str, Any], words: str) -> None:
    assert any(words in text for text in differences_of(MODEL, {**DESCRIBED, **changes}))


def test_what_means_the_same_is_no_difference() -> None:
    assert differences_of(MODEL, DESCRIBED) == []
    alike = {
        "rotary_base": 10000.0,
        # As many groups as heads, a longer context, padding that is in use.
        "group_query_attention": True,
        "num_query_groups": 4,
        "max_position_embeddings": 64,
        "padded_vocab_size": 128,
        "moe_router_topk": 8,
    }
    assert differences_of(MODEL, {**DESCRIBED, **alike}) == []
    # An older checkpoint has not all arguments.
    assert differences_of({"num_layers": 3}, DESCRIBED) == []


def test_a_learned_table_of_positions_has_a_length() -> None:
    learned = {"position_embedding_type": "learned_absolute"}
    found = differences_of(
        {**MODEL, **learned}, {**DESCRIBED, **learned, "max_position_embeddings": 64}
    )
    assert found == ["max_position_embeddings is 32 in the checkpoint, 64 by config.json"]


def test_a_vocabulary_whose_size_only_the_tokenizer_knew() -> None:
    """Rows of padding may be cut, the rows of tokens may not."""
    trained = {**MODEL, "vocab_size": None, "padded_vocab_size": 256}
    assert differences_of(trained, {**DESCRIBED, "padded_vocab_size": 129}) == []
    assert differences_of(trained, {**DESCRIBED, "padded_vocab_size": 128})
    # Rank 0 of a plan has width 1, and others width 2: 101 tokens are padded to 256 rows.
    assert differences_of({**trained, "world_size": 3}, DESCRIBED) == []
