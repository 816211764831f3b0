"""AIConfigurator's tables of kernels of inference, as columns.

Two kinds of rows say nothing of a step and are left out: attention of decode whose keys and values
lie in the card's cache, which those of a step never do (each layer has others; tables repeat one
call), and kernels that an engine takes only when asked to (`_ASKED_FOR`) where it has another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array, vstack

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.serving.prices.sizes import SizeGrid

CARDS = {
    "a100_sxm": "A100-80GB", "h100_sxm": "H100-80GB", "h200_sxm": "H200", "l40s": "L40S",
    "b200_sxm": "B200", "b300_sxm": "B300", "gb200": "GB200", "gb300": "GB300",
    "rtx_pro_6000_server": "RTX-PRO-6000-Server",
}  # fmt: skip
_CACHE_MB = {
    "A100-80GB": 40, "H100-80GB": 50, "H200": 50, "L40S": 96, "B200": 126, "B300": 126,
    "GB200": 126, "GB300": 126, "RTX-PRO-6000-Server": 128,
}  # fmt: skip
"""The second-level cache, of NVIDIA's white papers of the architectures."""
_SMALL = 64
"""A call that reads this part of the cache takes the fixed cost, wherever its data lie."""
FILES = {
    "products": "gemm/*/*/gemm_perf.parquet",
    "decode_attention": "attention/*/*/generation_attention_perf.parquet",
    "prefill_attention": "attention/*/*/context_attention_perf.parquet",
}
_ASKED_FOR = ("triton", "vllm_flash_attn_fa4")
_MOST_ROWS = 700
LEAST_ROWS = 50
_MOST_GROUP, _MOST_GROUPS = 16, 16
"""Queries for a key-value head, and key-value heads on a GPU, of models that are served."""
GRIDS = {
    # Rows, columns and depth.
    "products": SizeGrid((0, 4, 4), (8, 5, 5)),
    # Tokens that a request attends to, and key-value heads of all requests.
    "decode_attention": SizeGrid((0, 0), (10, 9)),
}
"""Nodes around all rows of the tables."""


@dataclass(frozen=True)
class Table:
    """Rows of an engine's version on a card, as columns.

    `flops_s` and `bytes_s` are of the sheet; `block_s` is of a block of 128 queries at the card's
    peak; `size` is the channels of a head over 128; `shape` is a number for each shape; `nodes` has
    the weights of the nodes of `GRIDS` in each row, None of a kind without.
    """

    card: str
    engine: str
    version: str
    flops_s: np.ndarray
    bytes_s: np.ndarray
    block_s: np.ndarray
    size: np.ndarray
    seconds: np.ndarray
    shape: np.ndarray
    nodes: csr_array | None = None


def read(path: Path, kind: str, card: str) -> Table | None:
    """Read the rows of a table that count, at most 700 of them, all tables the same shapes as far
    as they have them; None of too few."""
    import pyarrow.parquet as parquet

    read_in = parquet.read_table(path)
    table: dict[str, Any] = {c: read_in.column(c).to_numpy() for c in read_in.column_names}
    gpu = gpu_type(card)
    peak = gpu.peak_flops["bf16"] or 1.0
    latency = table["latency"].astype(float)
    kept = np.isfinite(latency) & (latency > 0)
    size, block = np.ones(len(latency)), np.zeros(len(latency))
    if kind == "products":
        m, n, k = (table[name].astype(float) for name in "mnk")
        kept &= (table["gemm_dtype"] == "bfloat16") & (n >= 512) & (k >= 512)
        kept &= (m >= 1) & (m <= 8192)
        kept &= (n <= 65536) & (k <= 65536)
        flops, moved = 2 * m * n * k, 2 * (m * n + m * k + n * k)
        shape, sizes = _number(m, n, k), [m, n, k]
    else:
        kept &= (table["kv_cache_dtype"] == "bfloat16") & (table["attn_dtype"] == "bfloat16")
        kept &= np.nan_to_num(table.get("window_size", np.zeros(len(latency)))) == 0
        sources = table["kernel_source"].astype(str)
        usual = ~np.isin(sources, _ASKED_FOR)
        kept &= usual if (kept & usual).sum() >= LEAST_ROWS else True
        batch, size = table["batch_size"].astype(float), table["head_dim"].astype(float)
        heads, groups = table["num_heads"].astype(float), table["num_key_value_heads"].astype(float)
        kept &= (heads <= _MOST_GROUP * groups) & (groups <= _MOST_GROUPS)
        tokens, before = table["isl"].astype(float), table["step"].astype(float)
        if kind == "decode_attention":
            tokens = tokens + before
            flops, moved = 4 * batch * tokens * heads * size, 4 * batch * tokens * groups * size
            cache = _CACHE_MB[card] * 1e6
            kept &= (moved >= cache) | (moved <= cache / _SMALL)
            kept &= batch * tokens >= 2048
        else:
            kept &= (before == 0) & (tokens >= 256)
            flops = 2 * batch * tokens**2 * heads * size
            moved = batch * tokens * 2 * size * (2 * heads + 2 * groups)
            block = 4 * 128 * tokens * size / peak
        shape, sizes = _number(batch, tokens, heads, groups, size), [tokens, batch * groups]
    places = np.flatnonzero(kept)
    if len(places) < LEAST_ROWS:
        return None
    places = places[np.argsort(shape[places], kind="stable")][:_MOST_ROWS]
    return Table(
        card, *path.parts[-3:-1], flops[places] / peak, moved[places] / gpu.memory_bytes_per_s,
        block[places], size[places] / 128 if kind != "products" else size[places],
        latency[places] * 1e-3, shape[places], _nodes(kind, np.stack(sizes, axis=1)[places]),
    )  # fmt: skip


def _nodes(kind: str, sizes: np.ndarray) -> csr_array | None:
    """Return the weights of a grid's nodes in each row; None of a kind without a grid."""
    if kind not in GRIDS:
        return None
    grid = GRIDS[kind]
    found = [(row, *pair) for row, own in enumerate(sizes) for pair in grid.around(own)]
    rows, nodes, weights = map(np.array, zip(*found, strict=True))
    return csr_array((weights, (rows, nodes)), shape=(len(sizes), grid.num_nodes))


def _number(*columns: np.ndarray) -> np.ndarray:
    """Return a number for each row that looks like chance, equal for equal rows."""
    found = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        found = (found ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        found ^= found >> np.uint64(29)
    return found


def joined(tables: Sequence[Table]) -> Table:
    """Return the rows of several tables as one."""
    parts = [
        np.concatenate([getattr(table, name) for table in tables])
        for name in ("flops_s", "bytes_s", "block_s", "size", "seconds", "shape")
    ]
    nodes = [table.nodes for table in tables if table.nodes is not None]
    return Table(tables[0].card, "", "", *parts, vstack(nodes, format="csr") if nodes else None)
