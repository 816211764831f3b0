"""Fit `serving/prices/kernels.json` to AIConfigurator's tables of kernels, and say how well.

    python tools/make_serving_kernels.py TABLES [--check-only]

TABLES is `aic-core/src/aiconfigurator_core/systems/data` of ai-dynamo/aiconfigurator (Apache-2.0).
It needs pyarrow, which nothing else here does.  Printed for each card: the constants; the mean
error of an engine's version by constants of the others (median over versions); the mean error of
the card by the median of all other cards.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.files import write_json

CARDS = {
    "a100_sxm": "A100-80GB", "h100_sxm": "H100-80GB", "h200_sxm": "H200", "l40s": "L40S",
    "b200_sxm": "B200", "b300_sxm": "B300", "gb200": "GB200", "gb300": "GB300",
    "rtx_pro_6000_server": "RTX-PRO-6000-Server",
}  # fmt: skip
FILES = {
    "products": "gemm/*/*/gemm_perf.parquet",
    "decode_attention": "attention/*/*/generation_attention_perf.parquet",
    "prefill_attention": "attention/*/*/context_attention_perf.parquet",
}
SOURCE = (
    "ai-dynamo/aiconfigurator@095f58a51 (2026-08-21), Apache-2.0: systems/data/<system>/"
    "{gemm,attention}; bf16 rows of all engines and versions; made by tools/make_serving_kernels.py"
)
TARGET = Path(__file__).resolve().parent.parent / "megatron_hetero/serving/prices/kernels.json"
MOST_ROWS = 3000
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Seconds of the FLOPs at the peak, of the bytes at the bandwidth, and measured."""


def read(path: Path, kind: str, card: str, rng: np.random.Generator) -> Rows | None:
    """Read the rows of a table that count, at most 3,000 of them; None of too few."""
    import pyarrow.parquet as parquet

    table: dict[str, Any] = {
        k: np.array(v) for k, v in parquet.read_table(path).to_pydict().items()
    }
    latency = table["latency"]
    kept = np.isfinite(latency) & (latency > 0)
    if kind == "products":
        m, n, k = (table[name].astype(float) for name in "mnk")
        kept &= (table["gemm_dtype"] == "bfloat16") & (n >= 512) & (k >= 512) & (m <= 8192)
        kept &= (n <= 65536) & (k <= 65536)
        flops, moved = 2 * m * n * k, 2 * (m * n + m * k + n * k)
    else:
        kept &= (table["kv_cache_dtype"] == "bfloat16") & (table["attn_dtype"] == "bfloat16")
        kept &= table.get("window_size", np.zeros(len(latency))) == 0
        batch, size = table["batch_size"].astype(float), table["head_dim"].astype(float)
        heads, groups = table["num_heads"].astype(float), table["num_key_value_heads"].astype(float)
        tokens = table["isl"].astype(float)
        if kind == "decode_attention":
            tokens = tokens + table["step"]
            kept &= batch * tokens >= 2048
            flops, moved = 4 * batch * tokens * heads * size, 4 * batch * tokens * groups * size
        else:
            kept &= (table["step"] == 0) & (tokens >= 256)
            flops = 2 * batch * tokens**2 * heads * size
            moved = batch * tokens * 2 * size * (2 * heads + 2 * groups)
    places = np.flatnonzero(kept)
    if len(places) < 50:
        return None
    places = places if len(places) <= MOST_ROWS else rng.choice(places, MOST_ROWS, replace=False)
    gpu = gpu_type(card)
    peak = gpu.peak_flops["bf16"] or 1.0
    seconds = latency[places] * 1e-3
    return flops[places] / peak, moved[places] / gpu.memory_bytes_per_s, seconds


def predict(logs: np.ndarray, rows: Rows) -> np.ndarray:
    """Predict seconds from the logarithms of (part of the peak, of the bandwidth, fixed cost)."""
    peak, bandwidth, fixed_s = np.exp(logs)
    return np.maximum(rows[0] / peak, rows[1] / bandwidth) + fixed_s


def fit(tables: list[Rows]) -> np.ndarray:
    """Fit the constants by the mean absolute logarithm of predicted over measured."""
    rows = joined(tables)

    def loss(logs: np.ndarray) -> float:
        return float(np.mean(np.abs(np.log(predict(logs, rows) / rows[2]))))

    starts = ((-0.4, -0.2, -11.5), (-1.0, -0.5, -12.0))
    found = [minimize(loss, s, method="Nelder-Mead", options={"maxiter": 600}) for s in starts]
    best: np.ndarray = min(found, key=lambda result: result.fun).x
    return best


def joined(tables: list[Rows]) -> Rows:
    """Return the rows of several tables as one."""
    first, second, third = (np.concatenate(parts) for parts in zip(*tables, strict=True))
    return first, second, third


def error(logs: np.ndarray, rows: Rows) -> float:
    """Return the mean absolute error, relative to what was measured."""
    return float(np.mean(np.abs(predict(logs, rows) / rows[2] - 1)))


def main() -> int:
    """Fit, print the errors of what was left out, and write."""
    parser = argparse.ArgumentParser(description="Fit the kernels of inference to tables.")
    parser.add_argument("tables", type=Path)
    parser.add_argument("--check-only", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    kernels: dict[str, dict[str, dict[str, float]]] = {}
    for kind, pattern in FILES.items():
        tables: dict[str, list[tuple[str, Rows]]] = defaultdict(list)
        for system, card in CARDS.items():
            for path in sorted((arguments.tables / system).glob(pattern)):
                rows = read(path, kind, card, rng)
                if rows is not None:
                    tables[card].append(("/".join(path.parts[-3:-1]), rows))
        fits = {card: fit([rows for _, rows in parts]) for card, parts in tables.items()}
        for card, parts in tables.items():
            held = [
                error(fit([r for name, r in parts if name != left]), rows)
                for left, rows in parts
                if len(parts) > 1
            ]
            others = np.median([fits[other] for other in fits if other != card], axis=0)
            whole = error(others, joined([rows for _, rows in parts]))
            print(
                f"{kind} {card}: {np.exp(fits[card]).round(8)}; versions left out "
                f"{np.median(held):.1%}, card left out {whole:.1%}"
            )
        fits["default"] = np.median(list(fits.values()), axis=0)
        kernels[kind] = {
            card: {
                "peak": round(float(np.exp(logs[0])), 3),
                "bandwidth": round(float(np.exp(logs[1])), 3),
                "fixed_s": round(float(np.exp(logs[2])), 7),
            }
            for card, logs in fits.items()
        }
    if not arguments.check_only:
        write_json(TARGET, {"source": SOURCE, "kernels": kernels})
    return 0


if __name__ == "__main__":
    sys.exit(main())
