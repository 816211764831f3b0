"""Derives the small tables of kernels in `benchmarks/tables/` from a copy of the measured ones.

    git clone https://github.com/ai-dynamo/aiconfigurator
    pip install pyarrow
    python tools/extract_kernels.py CLONE

The tables are Parquet files of serving engines' kernels, one for each GPU, engine and version.  Of
each engine the newest version and the oldest one with as many shapes are kept, at the shapes below;
`kernels.json` says for each column of each GPU from which file, commit and licence it comes.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

OUTPUT = Path(__file__).resolve().parent.parent / "benchmarks" / "tables"
SYSTEMS = {
    "a100_sxm": "A100-80GB",
    "h100_sxm": "H100-80GB",
    "h200_sxm": "H200",
    "l40s": "L40S",
    "b200_sxm": "B200",
    "b300_sxm": "B300",
    "gb200": "GB200",
    "gb300": "GB300",
    "rtx_pro_6000_server": "RTX-PRO-6000-Server",
}
ENGINES = ("sglang", "trtllm", "vllm")
FOLDER = "aic-core/src/aiconfigurator_core/systems/data"
LICENCE = "Apache-2.0, Copyright (c) NVIDIA CORPORATION & AFFILIATES"
DTYPES = ("bfloat16", "fp8", "fp8_block")
EXPERT_ENGINES = ("trtllm", "vllm")
EXPERT_TOKENS = (512, 2048, 8192, 16384)
CAST_ENGINES = ("trtllm", "vllm")
"""SGLang's kernel of this table moves a tenth of what the other two do."""
CAST_ROWS = (1, 16, 256, 1024, 4096, 16384, 32768)
CAST_COLUMNS = (1024, 4096, 8192, 16384, 65536)
LEAST_MESSAGE = 4096
ROWS = (16, 256, 1024, 2048, 4096, 8192, 16384)
SIZES = (1024, 2048, 3072, 4096, 5120, 8192, 10240, 12288, 16384)
_WIDEST = 65536
"""Of weights that no cache holds: at 16 rows their product takes as long as reading them."""


class Clone:
    """The repository of the tables, at its checked-out commit."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.commit = self._git("rev-parse", "--short=9", "HEAD").decode().strip()
        listed = self._git("ls-tree", "-r", "--name-only", "HEAD", FOLDER).decode()
        self.files = listed.splitlines()

    def _git(self, *words: str) -> bytes:
        command = ["git", "-C", self._folder, *words]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout

    def rows(self, path: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of a Parquet file."""
        table = parquet.read_table(BytesIO(self._git("show", f"HEAD:{path}")))
        yield from table.to_pylist()

    def versions(self, system: str, kind: str, engine: str, name: str) -> list[str]:
        """Return the files of an engine's versions, newest first."""
        pattern = f"{FOLDER}/{system}/{kind}/{engine}/([^/]+)/{name}"
        found = [match for path in self.files if (match := re.fullmatch(pattern, path))]
        return [m[0] for m in sorted(found, key=lambda m: _order(m[1]), reverse=True)]


def _order(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def products(clone: Clone) -> tuple[list[tuple[Any, ...]], dict[str, dict[str, str]]]:
    """Return rows of (GPU, data type, m, n, k, microseconds by engine), and the sources."""
    rows: list[tuple[Any, ...]] = []
    sources: dict[str, dict[str, str]] = {}
    for system, gpu in SYSTEMS.items():
        cells: dict[tuple[str, int, int, int], dict[str, float]] = {}
        for engine in ENGINES:
            files = clone.versions(system, "gemm", engine, "gemm_perf.parquet")
            for age, path in (("new", files[0]), ("old", files[-1])):
                if age == "old" and len(files) == 1:
                    continue
                column = f"{engine}-{age}"
                sources.setdefault(gpu, {})[column] = f"{path}@{clone.commit}"
                for row in clone.rows(path):
                    key = row["gemm_dtype"], int(row["m"]), int(row["n"]), int(row["k"])
                    if is_wanted(*key) and row["latency"] > 0:
                        cells.setdefault(key, {})[column] = round(1e3 * row["latency"], 2)
        for key, own in sorted(cells.items()):
            rows.append((gpu, *key, *(own.get(f"{e}-{a}", "") for a in ("new", "old")
                                      for e in ENGINES)))  # fmt: skip
    return rows, sources


def is_wanted(dtype: str, m: int, n: int, k: int) -> bool:
    """Tell if a product is among those that are kept: of every second pair of widths."""
    if dtype not in DTYPES or m not in ROWS:
        return False
    if m == min(ROWS):
        return dtype == "bfloat16" and min(n, k) >= SIZES[0] and max(n, k) == _WIDEST
    return n in SIZES and k in SIZES and (SIZES.index(n) + SIZES.index(k)) % 2 == 0


def experts(clone: Clone) -> tuple[list[tuple[Any, ...]], dict[str, dict[str, str]]]:
    """Return rows of (GPU, tokens, hidden, ffn, top-k, experts, microseconds by engine): gated
    experts in bf16, all on one GPU, tokens spread evenly; and the sources."""
    rows: list[tuple[Any, ...]] = []
    sources: dict[str, dict[str, str]] = {}
    names = "num_tokens", "hidden_size", "inter_size", "topk", "num_experts"
    for system, gpu in SYSTEMS.items():
        cells: dict[tuple[int, ...], dict[str, float]] = {}
        for engine in EXPERT_ENGINES:
            path = clone.versions(system, "moe", engine, "moe_perf.parquet")[0]
            sources.setdefault(gpu, {})[engine] = f"{path}@{clone.commit}"
            for row in clone.rows(path):
                is_whole = row["moe_tp_size"] == row["moe_ep_size"] == 1
                is_plain = row["moe_dtype"] == "bfloat16" and row["distribution"] == "balanced"
                is_gated = "nongated" not in row["kernel_source"] and row["hidden_size"] != 2688
                if is_whole and is_plain and is_gated and row["num_tokens"] in EXPERT_TOKENS:
                    key = tuple(int(row[name]) for name in names)
                    cells.setdefault(key, {})[engine] = round(1e3 * row["latency"], 1)
        rows += [
            (gpu, *key, *(own.get(engine, "") for engine in EXPERT_ENGINES))
            for key, own in sorted(cells.items())
        ]
    return rows, sources


def casts(clone: Clone) -> tuple[list[tuple[Any, ...]], dict[str, dict[str, str]]]:
    """Return rows of (GPU, rows, columns, microseconds by engine): a matrix of 16 bits is read,
    scaled and written in fp8, which memory alone bounds; and the sources."""
    rows: list[tuple[Any, ...]] = []
    sources: dict[str, dict[str, str]] = {}
    for system, gpu in SYSTEMS.items():
        cells: dict[tuple[int, int], dict[str, float]] = {}
        for engine in CAST_ENGINES:
            # Cards without fp8 have no such table.
            for path in clone.versions(system, "quantize", engine, "scale_matrix_perf.parquet")[:1]:
                sources.setdefault(gpu, {})[engine] = f"{path}@{clone.commit}"
                for row in clone.rows(path):
                    key = int(row["m"]), int(row["k"])
                    if key[0] in CAST_ROWS and key[1] in CAST_COLUMNS and row["latency"] > 0:
                        cells.setdefault(key, {})[engine] = round(1e3 * row["latency"], 2)
        rows += [
            (gpu, *key, *(own.get(engine, "") for engine in CAST_ENGINES))
            for key, own in sorted(cells.items())
        ]
    return rows, sources


def collectives(clone: Clone) -> tuple[list[tuple[Any, ...]], dict[str, dict[str, str]]]:
    """Return rows of (GPU, operation, GPUs, bytes, microseconds) of NCCL, and the sources."""
    rows: list[tuple[Any, ...]] = []
    sources: dict[str, dict[str, str]] = {}
    for system, gpu in SYSTEMS.items():
        path = clone.versions(system, "comm", "nccl", "nccl_perf.parquet")[0]
        sources[gpu] = {"us": f"{path}@{clone.commit}"}
        found = {}
        for row in clone.rows(path):
            size = int(row["message_size"])
            if row["nccl_dtype"] == "half" and size.bit_count() == 1 and size >= LEAST_MESSAGE:
                key = row["op_name"], int(row["num_gpus"]), 2 * size
                found[key] = round(1e3 * row["latency"], 2)
        rows += [(gpu, *key, time) for key, time in sorted(found.items())]
    return rows, sources


def main() -> None:
    """Write the tables and what they come from."""
    clone = Clone(sys.argv[1])
    engines = [f"{e}-{a}" for a in ("new", "old") for e in ENGINES]
    files = {
        "products.csv": (("gpu", "dtype", "m", "n", "k", *engines), *products(clone)),
        "experts.csv": (
            ("gpu", "tokens", "hidden", "ffn", "topk", "experts", *EXPERT_ENGINES),
            *experts(clone),
        ),
        "casts.csv": (("gpu", "rows", "columns", *CAST_ENGINES), *casts(clone)),
        "collectives.csv": (
            ("gpu", "operation", "gpus", "bytes", "us"),
            *collectives(clone),
        ),
    }
    for name, (head, rows, _) in files.items():
        with (OUTPUT / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([head, *rows])
    about = {
        "repository": "ai-dynamo/aiconfigurator",
        "licence": LICENCE,
        "tool": "tools/extract_kernels.py",
    } | {
        name: {"unit": "microseconds", "columns": sources}
        for name, (_, _, sources) in files.items()
    }
    text = json.dumps(about, indent=2, sort_keys=True)
    (OUTPUT / "kernels.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
