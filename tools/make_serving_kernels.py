"""Fit `serving/prices/kernels.json` to AIConfigurator's tables of kernels, and say how well.

    python tools/make_serving_kernels.py TABLES [--check-only] [--errors FILE]

TABLES is `aic-core/src/aiconfigurator_core/systems/data` of ai-dynamo/aiconfigurator (Apache-2.0).
It needs pyarrow, which nothing else here does.  For each table (card, engine, version) the mean
error of its rows is found five times: by its own constants; by the engine's other versions on the
card, as constants and, where they measured the same shape, as measured (no constants can do better
than that on average); by the other engines on the card; by the other cards.  FILE gets all of them.

Two kinds of rows say nothing of a step and are left out: attention of decode whose keys and values
lie in the card's cache, which those of a step never do (each layer has others; tables repeat one
call), and kernels that an engine takes only when asked to (`_ASKED_FOR`) where it has another.
Tables that even their own constants miss by more than half are named by their errors, and a second
summary is without them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.files import write_json
from megatron_hetero.serving.prices.kernels import KernelCurve, kernel_seconds

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
ENGINES = ("vllm", "sglang")
"""Engines that plans are made for; tables of TensorRT-LLM are held against them, and not fitted."""
_ASKED_FOR = ("triton", "vllm_flash_attn_fa4")
SOURCE = (
    "ai-dynamo/aiconfigurator@095f58a51 (2026-08-21), Apache-2.0: systems/data/<system>/"
    "{gemm,attention}; bf16 rows of vLLM and SGLang, all versions; made by "
    "tools/make_serving_kernels.py"
)
TARGET = Path(__file__).resolve().parent.parent / "megatron_hetero/serving/prices/kernels.json"
MOST_ROWS = 700
_LEAST_ROWS = 50
_MOST_GROUP, _MOST_GROUPS = 16, 16
"""Queries for a key-value head, and key-value heads on a GPU, of models that are served."""
_START = {"peak": 0.6, "bandwidth": 0.8, "fixed_s": 1.2e-5, "exposed": 0.5}
_RANGE = {
    "peak": (0.02, 1.2), "bandwidth": (0.05, 2.5), "fixed_s": (1e-7, 1e-3), "exposed": (0.02, 1.0),
    "block": (1e-3, 1e3), "size_power": (0.02, 1.5),
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Rows of an engine's version on a card, as columns.

    `flops_s` and `bytes_s` are of the sheet; `block_s` is of a block of 128 queries at the card's
    peak; `size` is the channels of a head over 128; `shape` is a number for each shape.
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
        kept &= (table["gemm_dtype"] == "bfloat16") & (n >= 512) & (k >= 512) & (m <= 8192)
        kept &= (n <= 65536) & (k <= 65536)
        flops, moved = 2 * m * n * k, 2 * (m * n + m * k + n * k)
        shape = _number(m, n, k)
    else:
        kept &= (table["kv_cache_dtype"] == "bfloat16") & (table["attn_dtype"] == "bfloat16")
        kept &= np.nan_to_num(table.get("window_size", np.zeros(len(latency)))) == 0
        sources = table["kernel_source"].astype(str)
        usual = ~np.isin(sources, _ASKED_FOR)
        kept &= usual if (kept & usual).sum() >= _LEAST_ROWS else True
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
        shape = _number(batch, tokens, heads, groups, size)
    places = np.flatnonzero(kept)
    if len(places) < _LEAST_ROWS:
        return None
    places = places[np.argsort(shape[places], kind="stable")][:MOST_ROWS]
    return Table(
        card, *path.parts[-3:-1], flops[places] / peak, moved[places] / gpu.memory_bytes_per_s,
        block[places], size[places] / 128 if kind != "products" else size[places],
        latency[places] * 1e-3, shape[places],
    )  # fmt: skip


def _number(*columns: np.ndarray) -> np.ndarray:
    """Return a number for each row that looks like chance, equal for equal rows."""
    found = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        found = (found ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        found ^= found >> np.uint64(29)
    return found


def predict(curve: KernelCurve, table: Table) -> np.ndarray:
    """Return the seconds of each row."""
    found: np.ndarray = kernel_seconds(
        curve, table.flops_s, table.bytes_s, table.block_s, table.size, np.maximum, np.minimum
    )
    return found


def fit(tables: Sequence[Table], kind: str) -> KernelCurve:
    """Fit the constants by relative errors, those of outliers counted less."""
    start = dict(_START)
    if kind == "prefill_attention":
        start |= {"block": 40.0, "size_power": 0.3}
    names = list(start)
    rows = joined(tables)

    def errors(logs: np.ndarray) -> np.ndarray:
        curve = KernelCurve(**dict(zip(names, np.exp(logs).tolist(), strict=True)))
        return np.log(predict(curve, rows) / rows.seconds)

    low, high = (np.log([_RANGE[name][i] for name in names]) for i in (0, 1))
    found = least_squares(
        errors, np.log(list(start.values())), bounds=(low, high), loss="soft_l1", f_scale=0.1
    )
    constants = zip(names, np.exp(found.x), strict=True)
    return KernelCurve(**{name: float(f"{value:.3g}") for name, value in constants})


def joined(tables: Sequence[Table]) -> Table:
    """Return the rows of several tables as one."""
    parts = [
        np.concatenate([getattr(table, name) for table in tables])
        for name in ("flops_s", "bytes_s", "block_s", "size", "seconds", "shape")
    ]
    return Table(tables[0].card, "", "", *parts)


def middle(curves: Sequence[KernelCurve]) -> KernelCurve:
    """Return the median of each constant."""
    names = list(KernelCurve.model_fields)
    return KernelCurve(**{n: float(f"{median(getattr(c, n) for c in curves):.3g}") for n in names})


def error(curve: KernelCurve, table: Table) -> float:
    """Return the mean absolute error, relative to what was measured."""
    return float(np.mean(np.abs(predict(curve, table) / table.seconds - 1)))


def same_shapes(table: Table, others: Sequence[Table]) -> float | None:
    """Return the error of the median of what other tables measured at the same shapes; None where
    fewer than 50 are the same."""
    measured: dict[int, list[float]] = {}
    for other in others:
        for shape, seconds in zip(other.shape.tolist(), other.seconds.tolist(), strict=True):
            measured.setdefault(shape, []).append(seconds)
    rows = zip(table.shape.tolist(), table.seconds.tolist(), strict=True)
    errors = [abs(median(measured[s]) / own - 1) for s, own in rows if s in measured]
    return mean(errors) if len(errors) >= _LEAST_ROWS else None


def held_out(kind: str, tables: Sequence[Table]) -> list[dict[str, Any]]:
    """Return each table's errors by constants of the others; None where there are no others."""
    by_engine: dict[tuple[str, str], list[Table]] = {}
    for table in tables:
        by_engine.setdefault((table.card, table.engine), []).append(table)
    whole = {key: fit(own, kind) for key, own in by_engine.items()}
    found = []
    for table in tables:
        same = [t for t in by_engine[table.card, table.engine] if t is not table]
        engines = [c for (card, e), c in whole.items() if card == table.card and e != table.engine]
        cards = [c for (card, e), c in whole.items() if card != table.card and e == table.engine]
        found.append({
            "kind": kind, "card": table.card, "engine": table.engine, "version": table.version,
            "own": error(fit([table], kind), table),
            "version_left_out": error(fit(same, kind), table) if same else None,
            "other_versions_measured": same_shapes(table, same),
            "engine_left_out": error(middle(engines), table) if engines else None,
            "card_left_out": error(middle(cards), table) if cards else None,
        })  # fmt: skip
    return found


WAYS = (
    "own", "version_left_out", "other_versions_measured", "engine_left_out", "card_left_out",
)  # fmt: skip


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the mean and the median over tables of each way to be predicted."""
    found = {}
    for way in WAYS:
        errors = [row[way] for row in rows if row[way] is not None]
        if errors:
            found[way] = {"mean": mean(errors), "median": median(errors), "tables": len(errors)}
    return found


def main() -> int:
    """Fit, print the errors of what was left out, and write."""
    parser = argparse.ArgumentParser(description="Fit the kernels of inference to tables.")
    parser.add_argument("tables", type=Path)
    parser.add_argument("--check-only", action="store_true", help="write no constants")
    parser.add_argument("--errors", type=Path, help="file for the errors of every table")
    arguments = parser.parse_args()
    kernels: dict[str, dict[str, dict[str, Any]]] = {}
    rows: list[dict[str, Any]] = []
    summaries = {}
    for kind, pattern in FILES.items():
        tables = [
            found
            for system, card in CARDS.items()
            for path in sorted((arguments.tables / system).glob(pattern))
            if (found := read(path, kind, card)) is not None
        ]
        own = held_out(kind, tables)
        rows += own
        summaries[kind] = {
            "all engines": summary(own),
            "vLLM and SGLang": summary([row for row in own if row["engine"] in ENGINES]),
            "vLLM and SGLang, tables that own constants describe": summary(
                [row for row in own if row["engine"] in ENGINES and row["own"] <= 0.5]
            ),
        }
        for row in own:
            words = " ".join(f"{w} {row[w]:.1%}" for w in WAYS if row[w] is not None)
            print(f"{kind} {row['card']} {row['engine']} {row['version']}: {words}")
        for name, found in summaries[kind].items():
            print(f"{kind}, {name}: " + ", ".join(
                f"{way} mean {e['mean']:.1%}, median {e['median']:.1%} of {e['tables']}"
                for way, e in found.items()
            ))  # fmt: skip
        kernels[kind] = curves_of(kind, tables)
    if arguments.errors:
        about = {"source": SOURCE, "summary": summaries, "tables": rows}
        write_json(arguments.errors, _rounded(about))
    if not arguments.check_only:
        write_json(TARGET, {"source": SOURCE, "kernels": kernels})
    return 0


def curves_of(kind: str, tables: Sequence[Table]) -> dict[str, dict[str, Any]]:
    """Return the constants of each engine on each card, and of cards without tables."""
    found: dict[str, dict[str, KernelCurve]] = {}
    for engine in ENGINES:
        cards = sorted({t.card for t in tables if t.engine == engine})
        found[engine] = {
            card: fit([t for t in tables if (t.card, t.engine) == (card, engine)], kind)
            for card in cards
        }
        found[engine]["default"] = middle(list(found[engine].values()))
    return {
        engine: {card: curve.model_dump() for card, curve in curves.items()}
        for engine, curves in found.items()
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(own) for key, own in value.items()}
    if isinstance(value, list):
        return [_rounded(own) for own in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
