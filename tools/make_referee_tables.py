"""Derive `benchmarks/tables/sailor.json` from the Sailor project's tables.

    python tools/make_referee_tables.py TABLES_DIR [OUTPUT]

TABLES_DIR holds layer_times.json, layer_memory.json and inter_node_bandwidth_fits.json as
published by eth-easl/sailor at commit cf2c8e3 (MIT licence, kept beside the output).  Nothing is
changed but the form: equal neighbouring layers become one entry with a count, equal fits one row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "benchmarks" / "tables" / "sailor.json"

SHAPES = {
    # hidden, layers, heads, sequence length, vocabulary: the project's training configurations
    "OPT-350": (1024, 24, 16, 2048, 50272),
    "GPT-Neo-2.7": (2560, 32, 32, 2048, 128256),
    "OPT-30": (7168, 48, 56, 2048, 50272),
    "LLAMA-3-8": (4096, 32, 32, 8192, 128256),
}
FIELDS = ("params_floats", "act_output_floats", "act_mem_floats")


def runs(rows: Iterable[tuple[Any, ...]]) -> list[list[Any]]:
    """Return [count, *row] for every run of equal rows."""
    return [[len(list(group)), *row] for row, group in groupby(rows)]


def in_order(layers: dict[str, Any]) -> list[Any]:
    """Sort values by number, not by text."""
    return [layers[key] for key in sorted(layers, key=int)]


def layer_times(data: dict[str, Any]) -> dict[str, Any]:
    return {
        model: {
            gpu: {
                size: {
                    width: runs(tuple(row) for row in in_order(layers))
                    for width, layers in by_width.items()
                }
                for size, by_width in by_size.items()
            }
            for gpu, by_size in by_gpu.items()
        }
        for model, by_gpu in data.items()
    }


def layer_memory(data: dict[str, Any]) -> dict[str, Any]:
    return {
        model: {
            width: runs(tuple(row[field] for field in FIELDS) for row in in_order(layers))
            for width, layers in by_width.items()
        }
        for model, by_width in data.items()
    }


def fits(data: dict[str, Any]) -> tuple[list[list[float]], dict[str, Any]]:
    """Return the distinct rows [c2, c1, c0, most bytes/s], and the row of each pair of senders and
    receivers."""
    rows: dict[tuple[float, ...], int] = {}

    def numbered(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: numbered(value) for key, value in sorted(node.items())}
        coefficients, most = node
        return rows.setdefault((*coefficients, most), len(rows))

    numbers = numbered(data)
    return [list(row) for row in rows], numbers


def main() -> None:
    tables = Path(sys.argv[1])
    output = Path(sys.argv[2]) if len(sys.argv) > 2 else OUTPUT
    times, memory, network = (
        json.loads((tables / name).read_text(encoding="utf-8"))
        for name in (
            "layer_times.json",
            "layer_memory.json",
            "inter_node_bandwidth_fits.json",
        )
    )
    rows, numbers = fits(network)
    data = {
        "provenance": {
            "derived_from": "eth-easl/sailor@cf2c8e3cc53ce178fe58a4003f46b4b6b848fc33: "
            "sailor/Planner/simulations/profiles_tmp.json, sailor/Planner/llm_info.json, "
            "sailor/providers/multizone_bandwidths_het.json",
            "licence": "MIT, Copyright (c) 2023 - present, ETH Zurich; see sailor.LICENSE",
            "tool": "tools/make_referee_tables.py",
            "what": "measurements of the Sailor authors, fp32, 2025",
        },
        "columns": {
            "layer_times": ["count", "forward_s", "backward_s", "update_s"],
            "layer_memory": ["count", *FIELDS],
            "fits": ["c2", "c1", "c0", "max_bytes_per_s"],
            "shapes": ["hidden_size", "num_layers", "num_heads", "seq_length", "vocab_size"],
        },
        "shapes": {model: list(shape) for model, shape in SHAPES.items()},
        "layer_times": layer_times(times),
        "layer_memory": layer_memory(memory),
        "fits": rows,
        "between": numbers,
    }
    output.write_text(json.dumps(data, sort_keys=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
