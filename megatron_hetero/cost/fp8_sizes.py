"""Sizes of a layer's products that Transformer Engine multiplies in fp8.

Source: Transformer Engine's check of sizes (`assert_dim_for_fp8_exec`).
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_hetero.cost.share import TensorShare
from megatron_hetero.model.spec import ModelSpec

FP8_ROWS = 8
"""Divides the number of tokens of every product."""
FP8_COLUMNS = 16
"""Divides the last size of each factor."""


def sizes_without_fp8(model: ModelSpec, share: TensorShare) -> Iterator[tuple[str, int]]:
    """Yield what a member's products have that fp8 does not take, in words, and how many of it: no
    multiple of `FP8_COLUMNS`."""
    groups = share.query_groups
    # A query group brings along all of its query heads.
    heads = groups * (model.num_attention_heads // model.num_query_groups)
    sizes = {
        "hidden channels": model.hidden_size,
        "columns of queries": heads * model.kv_channels,
        "columns of keys": groups * model.kv_channels,
        "columns of the MLP": share.mlp_columns,
    }
    for what, size in sizes.items():
        if size % FP8_COLUMNS:
            yield what, size
