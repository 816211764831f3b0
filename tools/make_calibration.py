"""Derive `megatron_hetero/cost/calibration.json` from the Sailor project's operator tables.

    python tools/make_calibration.py TABLES_DIR OUTPUT

TABLES_DIR holds `GPU/profiled-data-{fp16,fp32}/*.csv` as published by eth-easl/sailor at commit
cf2c8e3 (MIT licence).  Forward times of the four matrix products of a layer at TP 1 give
`max_efficiency` (products of at least 300 us at peak) and `overhead_s` (those under 150 us);
layer norm and GELU give the memory efficiency.  No end-to-end measurement takes part.
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from pathlib import Path

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.files import write_json

HIDDEN_SIZES = {"OPT-350": 1024, "GPT-Neo-2.7": 2560, "OPT-30": 7168}
SEQ_LENGTH = 2048
CATALOGUE_NAMES = {
    "A100-40": "A100-40GB",
    "GH-96": "GH200-96GB",
    "RTX-2080": "RTX-2080-Ti",
    "RTX-3090": "RTX-3090",
    "Titan-RTX": "Titan-RTX",
    "V100-16": "V100-16GB",
}
TF32_GPUS = ("A100-40", "GH-96")
"""Their fp32 tables were taken with TF32 products, which plain fp32 training does not use."""
NUM_WEIGHTS_PER_H2 = {
    "enc-attention-qkv": 3,
    "enc-attention-dense": 1,
    "enc-MLP-GEMM-1": 4,
    "enc-MLP-GEMM-2": 4,
}
STREAMING_OPERATORS = ("enc-1st-layernorm", "enc-MLP-gelu")
NOT_RUN_US = 1e7


def read_points(folder: Path, pattern: str) -> list[tuple[str, int, dict[str, str]]]:
    """(model, micro-batch size, row) of every operator that ran."""
    points = []
    for path in sorted(folder.glob(pattern)):
        match = re.fullmatch(r"(.+)_mbs(\d+)_tp1_algo0\.csv", path.name)
        if match is None:
            continue
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if float(row["forward-compute"]) < NOT_RUN_US:
                    points.append((match[1], int(match[2]), row))
    return points


def fit_gemm(points: list[tuple[str, int, dict[str, str]]], peak: float) -> dict[str, float]:
    """Large products fix the efficiency, small ones what each call costs besides."""
    ideal_and_measured = []
    for model, micro_batch_size, row in points:
        weights = NUM_WEIGHTS_PER_H2.get(row["op_name"])
        if weights is not None:
            flops = 2 * micro_batch_size * SEQ_LENGTH * weights * HIDDEN_SIZES[model] ** 2
            ideal_and_measured.append((flops / peak, float(row["forward-compute"]) * 1e-6))
    max_efficiency = statistics.median(i / m for i, m in ideal_and_measured if i > 300e-6)
    overheads = [m - i / max_efficiency for i, m in ideal_and_measured if i < 150e-6]
    overhead_s = max(0.0, statistics.median(overheads)) if overheads else 0.0
    return {"max_efficiency": round(max_efficiency, 3), "overhead_s": round(overhead_s, 7)}


def main() -> None:
    tables, output = Path(sys.argv[1]), Path(sys.argv[2])
    gemm: dict[str, dict[str, dict[str, float]]] = {}
    memory_efficiencies = []
    for folder in sorted(CATALOGUE_NAMES):
        gpu = gpu_type(CATALOGUE_NAMES[folder])
        curves = gemm.setdefault(gpu.name, {})
        for precision in ("fp16", "fp32"):
            points = read_points(tables / folder / f"profiled-data-{precision}", "*.csv")
            peak = gpu.peak_flops[precision]
            if peak and not (precision == "fp32" and folder in TF32_GPUS):
                curves[precision] = fit_gemm(points, peak)
            for _, micro_batch_size, row in points:
                if row["op_name"] in STREAMING_OPERATORS and micro_batch_size >= 4:
                    mebibytes = float(row["input_size"]) + float(row["output_size"])
                    rate = mebibytes * 2**20 / (float(row["forward-compute"]) * 1e-6)
                    memory_efficiencies.append(rate / gpu.memory_bytes_per_s)
    gemm["default"] = {
        precision: {
            key: round(
                statistics.median(c[precision][key] for c in gemm.values() if precision in c), 7
            )
            for key in ("max_efficiency", "overhead_s")
        }
        for precision in ("fp16", "fp32")
    }
    data = {
        "gemm": gemm,
        "memory_efficiency": round(min(1.0, statistics.median(memory_efficiencies)), 3),
        "provenance": {
            "derived_from": "eth-easl/sailor@cf2c8e3cc53ce178fe58a4003f46b4b6b848fc33, "
            "sailor/Planner/baselines/Aceso/profiler (operator tables)",
            "licence": "MIT, Copyright (c) 2023 - present, ETH Zurich; see calibration.LICENSE",
            "tool": "tools/make_calibration.py",
            "note": "Medians over operators; relative to the peaks of cluster/catalogue. fp32 "
            "tables of A100 and GH200 used TF32 and are left out.",
        },
    }
    write_json(output, data)


if __name__ == "__main__":
    main()
