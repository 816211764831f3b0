"""Derive `megatron_hetero/cost/work/calibration.json` from published tables of kernels and layers.

    python tools/make_calibration.py FOLDER OUTPUT

Types with a table of products (`product_tables.py`) have all four constants of products from it,
and their memory efficiency from products of few rows.  FOLDER holds tables of other types, see
`calibration_tables.py`: forward times of the four matrix products of a layer at width 1 give
`max_efficiency` (products of at least 300 us at peak) and `overhead_s` (those under 150 us), with
the median traffic and decline of the others.  Layer norm and GELU give the memory efficiency that
stands for types without a table.  Whole layers at width 1 then give each type's own memory
efficiency, and what unfused attention moves for each score in fp32.  What fused attention reaches
comes from other tables (`attention_tables.py`), what kernels of unlike operands reach from
`benchmarks/tables/gpu-steps.json`.  No end-to-end measurement takes part.  The host's
time for each operator follows from narrow shards and small micro-batches; it is printed and stands
in `cluster/catalogue.json`.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attention_tables import NO_TABLE, attention_points, fit_attention
from calibration_tables import (
    CATALOGUE_NAMES,
    OPERATOR_HEADS,
    SAME_CHIP,
    SEQ_LENGTH,
    SHAPES,
    OperatorPoint,
    layer_points,
    operator_points,
)
from cast_tables import cast_points, fit_kernel_s
from expert_tables import expert_points, fit_experts
from gpu_steps import TABLE as STEPS_TABLE
from layer_fits import fit_launch, fit_layers, fit_link
from product_tables import by_gpu, fit_products, product_points, reading_efficiency, sources

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.work.calibration import (
    Calibration,
    has_tf32,
    product_flops_per_s,
)
from megatron_hetero.cost.work.products import GemmEfficiency, Product, ProductSpeed
from megatron_hetero.files import read_json, write_json
from megatron_hetero.model.training import Precision

NUM_WEIGHTS_PER_H2 = {
    "enc-attention-qkv": 3,
    "enc-attention-dense": 1,
    "enc-MLP-GEMM-1": 4,
    "enc-MLP-GEMM-2": 4,
}
STREAMING_OPERATORS = ("enc-1st-layernorm", "enc-MLP-gelu")
SCORE_OPERATORS = ("enc-attention-score", "enc-attention-softmax", "enc-attention-context")
CHIPS = {
    "V100-32GB": "V100-16GB",
    "V100-PCIe-16GB": "V100-16GB",
    "V100-PCIe-32GB": "V100-16GB",
    "Quadro-RTX-6000": "Titan-RTX",
    "Quadro-RTX-8000": "Titan-RTX",
    "RTX-4090-D": "RTX-4090",
    "A100-80GB-PCIe": "A100-80GB",
    "A800-80GB": "A100-80GB",
    "H800-80GB": "H100-80GB",
    "RTX-PRO-6000": "RTX-PRO-6000-Server",
    "RTX-PRO-6000-Max-Q": "RTX-PRO-6000-Server",
}
"""Types without a table of their own, and one that has the same chip."""
ATTENTION_CHIPS = {
    "H100-80GB": "H200",
    "GH200-96GB": "H200",
    "B200": "GB200",
    "B300": "GB200",
    "GB300": "GB200",
}
"""Types without a table of fused attention, and one with the same multiprocessors."""
MIXED_CHIPS = {"H100-80GB": "H200", "GH200-96GB": "H200"}
"""Types without a table of kernels of unlike operands, and one with the same multiprocessors, which
issue as many loads in a second."""


def fit(
    folder: Path, without: Collection[str] = (), widths: Collection[int] = (1,)
) -> dict[str, Any]:
    """Fit the content of `calibration.json`, without the tables of some GPU types.

    Args:
        widths: tensor-parallel widths of the layer tables that take part.
    """
    gpus = [gpu for gpu in sorted(CATALOGUE_NAMES) if gpu not in without]
    left_out = {CATALOGUE_NAMES[gpu] for gpu in without}
    gemm = {
        gpu: {"fp16": asdict(fit_products(points))}
        for gpu, points in by_gpu(product_points()).items()
        if gpu not in left_out
    }
    for dtype in ("fp8", "fp8_block"):
        for gpu, points in by_gpu(product_points(dtype)).items():
            if gpu in gemm:
                gemm[gpu][dtype] = asdict(fit_products(points))
    usual = {
        key: statistics.median(curve["fp16"][key] for curve in gemm.values())
        for key in ("traffic", "decline")
    }
    streaming: list[float] = []
    for gpu in gpus:
        if gpu in SAME_CHIP:
            continue
        known = gpu_type(CATALOGUE_NAMES[gpu])
        kinds = ("fp16",) if has_tf32(known) else ("fp16", "fp32")
        curves: dict[str, dict[str, float]] = {}
        for kind in kinds:
            points = operator_points(folder, gpu, kind)
            # Without tensor cores products are too slow for their traffic, or power, to show.
            beside = dict.fromkeys(usual, 0.0) if kind == "fp32" else usual
            curves[kind] = fit_gemm(points, known, kind, beside)
            streaming += [
                p.input_and_output_bytes / p.forward_s / known.memory_bytes_per_s
                for p in points
                if p.operator in STREAMING_OPERATORS and p.micro_batch_size >= 4
            ]
        own = sharing(gpu)
        measured = next((gemm[name] for name in own if name in gemm), curves)
        gemm |= {name: measured for name in own if name not in left_out}
    gemm["default"] = {
        kind: {
            key: round(statistics.median(c[kind][key] for c in gemm.values() if kind in c), 8)
            for key in ("max_efficiency", "overhead_s", "traffic", "decline")
        }
        for kind in ("fp16", "fp32", "fp8", "fp8_block")
    }
    data: dict[str, Any] = {
        "gemm": gemm,
        "memory_efficiency": {"default": round(min(1.0, statistics.median(streaming)), 3)}
        | {gpu: part for gpu, part in reading_efficiency().items() if gpu in gemm},
        "kernel_s": fit_kernel_s([p for p in cast_points() if p.gpu not in left_out]),
        "dropout_slowdown": 1.0,
        "score_traffic": {kind: {"forward": 8.0, "backward": 16.0} for kind in ("fp16", "fp32")},
        "attention": NO_TABLE,
        "same_chip": dict(CHIPS),
    }
    points = [p for p in attention_points() if CHIPS.get(p.gpu.name, p.gpu.name) not in left_out]
    data["attention"] = fit_attention(points, data)
    for other, chip in SAME_CHIP.items():
        share(data["attention"]["part_of_products"], CATALOGUE_NAMES[other], CATALOGUE_NAMES[chip])
    for other, chip in ATTENTION_CHIPS.items():
        lend(data, other, chip)
    data["mixed_bytes_per_s"] = mixed_rates(left_out)
    own_experts = [point for point in expert_points() if point.gpu.name not in left_out]
    data["grouped"] = fit_experts(own_experts, data)
    fit_half_scores(folder, gpus, data)
    links = {(g, w): fit_link(folder, g, w) for g in gpus for w in widths}
    layers = [p for p in layer_points(folder) if p.gpu in gpus and p.width in widths]
    fit_layers(layers, links, data)
    return data


def mixed_rates(left_out: Collection[str]) -> dict[str, float]:
    """Return the median bytes a second of kernels of unlike operands, by GPU type."""
    table = read_json(STEPS_TABLE).data
    rate = statistics.median(num_bytes / us * 1e6 for _, num_bytes, us in table["mixed"][1:])
    rates = {table["card"]: float(f"{rate:.2e}")}
    rates |= {other: rates[chip] for other, chip in MIXED_CHIPS.items() if chip in rates}
    return {gpu: rate for gpu, rate in rates.items() if gpu not in left_out}


def share(parts: dict[str, Any], one: str, other: str) -> None:
    """Give two types of one chip the entry that either of them has."""
    for name, own in ((one, other), (other, one)):
        if own in parts:
            parts.setdefault(name, parts[own])


def sharing(gpu: str) -> list[str]:
    """Return the names of all types that a table of operators stands for."""
    return [
        CATALOGUE_NAMES[own] for own in (gpu, *(o for o, chip in SAME_CHIP.items() if chip == gpu))
    ]


def lend(data: dict[str, Any], other: str, chip: str) -> None:
    """Give a type without a table of attention what another one's kernels reach of the peak."""
    parts, gemm = data["attention"]["part_of_products"], data["gemm"]
    if other in parts or not {other, chip} <= {*gemm} or chip not in parts:
        return
    ratio = gemm[chip]["fp16"]["max_efficiency"] / gemm[other]["fp16"]["max_efficiency"]
    parts[other] = {
        size: {name: round(part * ratio, 3) for name, part in passes.items()}
        for size, passes in parts[chip].items()
    }


def fit_gemm(
    points: Sequence[OperatorPoint], gpu: GpuType, kind: Precision, usual: Mapping[str, float]
) -> dict[str, float]:
    """Fit the efficiency to large products, and to small ones what each call costs besides.

    Args:
        points: of all operators of layers.
        gpu: whose they are.
        kind: "fp16" or "fp32".
        usual: traffic and decline of types with a table of products.
    """
    peak, element = product_flops_per_s(gpu, kind), 4 if kind == "fp32" else 2
    alone = ProductSpeed(peak, gpu.memory_bytes_per_s, element, GemmEfficiency(1.0, 0.0))
    moving = alone._replace(curve=GemmEfficiency(1e9, 0.0, usual["traffic"]))
    ideal_and_measured = []
    for point in points:
        weights = NUM_WEIGHTS_PER_H2.get(point.operator)
        if weights is not None:
            hidden = SHAPES[point.model][0]
            depth = hidden * (4 if point.operator == "enc-MLP-GEMM-2" else 1)
            product = Product.with_weights(
                point.micro_batch_size * SEQ_LENGTH, weights * hidden**2, depth
            )
            slowdown = (product.flops / 1e12) ** usual["decline"]
            left_s = point.forward_s - moving.seconds(product)
            ideal_and_measured.append((slowdown * alone.seconds(product), left_s))
    max_efficiency = statistics.median(i / m for i, m in ideal_and_measured if i > 300e-6)
    overheads = [m - i / max_efficiency for i, m in ideal_and_measured if i < 150e-6]
    overhead_s = max(0.0, statistics.median(overheads)) if overheads else 0.0
    constants = GemmEfficiency(round(max_efficiency, 3), round(overhead_s, 7), **usual)
    return asdict(constants)


def fit_half_scores(folder: Path, gpus: Sequence[str], data: dict[str, Any]) -> None:
    """Fit the elements moved for each score in 16 bits (fused softmax), and how much longer dropout
    takes than its traffic, from the operators."""
    calibration = Calibration.from_data(data)
    found: dict[str, list[float]] = {"forward": [], "backward": []}
    slowdowns: list[float] = []
    for gpu in gpus:
        known = gpu_type(CATALOGUE_NAMES[gpu])
        bytes_per_s = calibration.memory_bytes_per_s(known)
        times: Counter[tuple[str, int, str]] = Counter()
        for point in operator_points(folder, gpu, "fp16"):
            if point.operator == "enc-attention-dropout":
                # Reads and writes 2 bytes each, and a byte of mask, which is not among the sizes.
                traffic_s = 1.25 * point.input_and_output_bytes / bytes_per_s
                slowdowns.append(point.forward_s / traffic_s)
            if point.operator in SCORE_OPERATORS:
                times[point.model, point.micro_batch_size, "forward"] += point.forward_s
                times[point.model, point.micro_batch_size, "backward"] += point.backward_s
        curve = calibration.gemm_efficiency(known, "fp16")
        rate = product_flops_per_s(known, "fp16") * curve.max_efficiency
        for (model, size, name), time_s in times.items():
            hidden, heads, *_ = SHAPES[model]
            heads = OPERATOR_HEADS.get(model, heads)
            scores = size * heads * SEQ_LENGTH**2
            products_s = 4.0 * scores * (hidden // heads) / rate + 2 * curve.overhead_s
            left_s = time_s - products_s * (2 if name == "backward" else 1)
            found[name].append(left_s * bytes_per_s / (2 * scores))
    data["dropout_slowdown"] = round(statistics.median(slowdowns), 2)
    data["score_traffic"]["fp16"] = {k: round(statistics.median(v), 2) for k, v in found.items()}


def attention_sources() -> list[str]:
    """Name the tables of fused attention, each with its GPU, kernel, head size and licence."""
    return list(dict.fromkeys(point.origin for point in attention_points()))


def main() -> None:
    """Fit to all tables and write the result with its provenance."""
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    provenance = {
        "derived_from": "eth-easl/sailor@cf2c8e3cc53ce178fe58a4003f46b4b6b848fc33: operator tables "
        "(sailor/Planner/baselines/Aceso/profiler) and layer times "
        "(sailor/Planner/simulations/profiles_tmp.json)",
        "licence": "MIT, Copyright (c) 2023 - present, ETH Zurich; see calibration.LICENSE",
        "attention_derived_from": attention_sources(),
        "products_derived_from": sources(),
        "tool": "tools/make_calibration.py",
        "note": "Relative to the peaks of cluster/catalogue. On GPUs with TF32 fp32 products run "
        "at half of the 16-bit peak, and share that curve.",
    }
    data = fit(folder)
    write_json(output, data | {"provenance": provenance})
    print(f"launch_time of cluster/catalogue.json: {1e6 * fit_launch(folder, data):.0f} us")


if __name__ == "__main__":
    main()
