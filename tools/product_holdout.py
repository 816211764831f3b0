"""Prints how well the model of products predicts tables that it was not fitted to.

    python tools/product_holdout.py

For each GPU type of `benchmarks/tables/products.csv`, the mean absolute error of large products
(each side 2,048 or more): fitted to all; every number of rows in turn left out; every engine in
turn left out, and predicted; oldest versions predicted from the newest; the type itself left out,
priced as a type without a table; and with it all types of its compute capability.  Then the same
of fp8, the ratios of all pairs of types, layers of experts, and casts.  Last, whole layers on cards
that have no table, or few watts (`benchmarks/tables/prompt-layers.json`): the part of the peak that
their products reach is held against the prices, which know nothing of these layers.
`make_nvlink.py` prints such errors of collectives, `cost_holdout.py` those of fused attention.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from cast_tables import cast_points, fit_bandwidths, fit_kernel_s, large_casts
from expert_tables import ExpertPoint, expert_points, fit_experts, predict_experts
from product_tables import (
    TABLES,
    ProductPoint,
    by_gpu,
    fit_products,
    is_new,
    product_points,
    speed_of,
)

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cost.work.calibration import (
    Calibration,
    product_flops_per_s,
    shipped_calibration,
)
from megatron_hetero.cost.work.fused_attention import DEFAULT
from megatron_hetero.cost.work.products import (
    GemmEfficiency,
    GroupedCall,
    Product,
    ProductSpeed,
)
from megatron_hetero.files import read_json

WORDS = {"bfloat16": "bf16", "fp8": "fp8, one scale", "fp8_block": "fp8, scales of blocks"}


def errors(
    points: Iterable[ProductPoint], curve: GemmEfficiency, engine: str | None = None
) -> list[float]:
    """Return the relative errors of large products.

    Args:
        points: of one GPU type.
        curve: its constants.
        engine: the column that is predicted; None is the median of the newest.
    """
    found = []
    for point in points:
        measured_s = point.seconds((lambda column: column == engine) if engine else None)
        if point.is_large and measured_s:
            speed = speed_of(point.gpu, curve, point.dtype)
            found.append(speed.seconds(point.product) / measured_s - 1)
    return found


def rows_left_out(points: Sequence[ProductPoint]) -> list[float]:
    """Leave every number of rows out in turn."""
    found = []
    for rows in {point.product.rows for point in points if point.is_large}:
        own = [point for point in points if point.product.rows == rows]
        others = [point for point in points if point.product.rows != rows]
        found += errors(own, fit_products(others))
    return found


def engines_left_out(points: Sequence[ProductPoint]) -> list[float]:
    """Leave every engine out in turn, and predict it from the others."""
    columns = {column for point in points for column, _ in point.by_engine if is_new(column)}
    found = []
    for column in sorted(columns):
        others = [(p, p.seconds(lambda c, own=column: is_new(c) and c != own)) for p in points]
        known = [(point, seconds) for point, seconds in others if seconds]
        if known:
            curve = fit_products([p for p, _ in known], [s for _, s in known])
            found += errors(points, curve, column)
    return found


def versions_left_out(points: Sequence[ProductPoint]) -> list[float]:
    """Predict the oldest versions of the engines from the newest."""
    columns = {column for point in points for column, _ in point.by_engine if not is_new(column)}
    curve = fit_products(points)
    return [error for column in sorted(columns) for error in errors(points, curve, column)]


def chip_of(name: str) -> set[str]:
    """Return the type, and any other that has its constants."""
    gemm = shipped_calibration().gemm
    return {own for own, kind in gemm if (own, "fp16") in gemm and own != DEFAULT
            and gemm[own, "fp16"] == gemm[name, "fp16"]}  # fmt: skip


def kin_of(name: str) -> set[str]:
    """Return all types with a table that have the compute capability of a type."""
    own = gpu_type(name).compute_capability
    names = {gpu for gpu, _ in shipped_calibration().gemm if gpu != DEFAULT}
    return {gpu for gpu in names if gpu_type(gpu).compute_capability == own}


def without(names: Collection[str]) -> Calibration:
    """Return the shipped constants as if some types had no table."""
    shipped = shipped_calibration()
    gemm = {key: curve for key, curve in shipped.gemm.items() if key[0] not in names}
    for kind in ("fp16", "fp8", "fp8_block"):
        own = [c for (gpu, k), c in gemm.items() if k == kind and gpu != DEFAULT]
        medians = [
            statistics.median(getattr(curve, field) for curve in own)
            for field in ("max_efficiency", "overhead_s", "traffic", "decline")
        ]
        gemm[DEFAULT, kind] = GemmEfficiency(*medians)
    return replace(shipped, gemm=gemm)


def type_left_out(
    points: Sequence[ProductPoint], leaves: Callable[[str], Collection[str]] = chip_of
) -> list[float]:
    """Price a type without its table.

    Args:
        points: of the type.
        leaves: names the types that are left out with it.
    """
    gpu, calibration = points[0].gpu, without(leaves(points[0].gpu.name))
    if points[0].dtype == "bfloat16":
        return errors(points, calibration.gemm_efficiency(gpu, "bf16"))
    recipe = "tensorwise" if points[0].dtype == "fp8" else "mxfp8"
    return errors(points, calibration.fp8_efficiency(gpu, recipe))


def percent(found: Sequence[float]) -> str:
    """Write the mean absolute error."""
    return f"{100 * statistics.mean(map(abs, found)):.1f} %" if found else ""


def table(dtype: str) -> None:
    """Print the errors of each GPU type in one data type."""
    print(f"\nLarge products, {WORDS[dtype]}\n")
    print(
        "| GPU | fitted | rows left out | engine left out | old versions | type left out |"
        " capability left out |"
    )
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for gpu, points in by_gpu(product_points(dtype)).items():
        cells = (
            errors(points, fit_products(points)),
            rows_left_out(points),
            engines_left_out(points),
            versions_left_out(points),
            type_left_out(points),
            type_left_out(points, kin_of),
        )
        print(f"| {gpu} | " + " | ".join(map(percent, cells)) + " |")


def ratios() -> None:
    """Print, of all pairs of types, how far the predicted ratio is from the measured one."""
    print("\nRatios of two types\n")
    print("| products | priced | mean | worst | the pair |\n| --- | --- | --: | --: | --- |")
    for dtype, words in WORDS.items():
        priced: dict[str, Callable[[Sequence[ProductPoint]], list[float]]] = {
            "by their tables": lambda points: errors(points, fit_products(points)),
            "type left out": type_left_out,
            "capability left out": lambda points: type_left_out(points, kin_of),
        }
        for how, find in priced.items():
            medians = {
                gpu: statistics.median(1 + error for error in find(points))
                for gpu, points in by_gpu(product_points(dtype)).items()
            }
            # Either may stand above: the larger of both ratios counts.
            pairs = [
                (max(medians[a] / medians[b], medians[b] / medians[a]) - 1, f"{a}, {b}")
                for a, b in combinations(medians, 2)
            ]
            worst, pair = max(pairs)
            mean = statistics.mean(away for away, _ in pairs)
            print(f"| {words} | {how} | {100 * mean:.1f} % | {100 * worst:.1f} % | {pair} |")


def experts_left_out(
    points: Sequence[ExpertPoint], of: Callable[[ExpertPoint], Any]
) -> list[float]:
    """Leave every value of a property out in turn, and predict it with constants of the rest;
    errors in the order of the points."""
    data = read_json(TABLES.parents[1] / "megatron_hetero/cost/work/calibration.json").data
    curves = {
        value: GroupedCall(**fit_experts([p for p in points if of(p) != value], data))
        for value in {of(point) for point in points}
    }
    shipped = shipped_calibration()
    return [predict_experts(p, curves[of(p)], shipped) / p.seconds - 1 for p in points]


def experts() -> None:
    """Print the errors of layers of experts."""
    points, shipped = expert_points(), shipped_calibration()
    columns = (
        [predict_experts(p, shipped.grouped, shipped) / p.seconds - 1 for p in points],
        experts_left_out(points, lambda point: point.tokens),
        experts_left_out(points, lambda point: point.products[0].number),
        experts_left_out(points, lambda point: point.gpu.name),
    )
    print("\nLayers of grouped experts, bf16\n")
    print("| GPU | layers | fitted | median | tokens left out | experts left out | type left out |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for gpu in dict.fromkeys(point.gpu.name for point in points):
        rows = [index for index, point in enumerate(points) if point.gpu.name == gpu]
        fitted, *others = [[column[row] for row in rows] for column in columns]
        cells = percent(fitted), f"{100 * statistics.median(fitted):+.1f} %", *map(percent, others)
        print(f"| {gpu} | {len(rows)} | " + " | ".join(cells) + " |")


def prompt_layers() -> None:
    """Print what part of the peak the products of whole layers reach, measured and priced; with the
    table's types, those without a table."""
    data = read_json(TABLES / "prompt-layers.json").data
    print("\nProducts of whole layers that read prompts, part of the 16-bit peak\n")
    print("| GPU | model | table | measured | priced | apart | without watts |")
    print("| --- | --- | --- | --: | --: | --: | --: |")
    shipped = shipped_calibration()
    for row in data["layers"]:
        gpu = gpu_type(row["gpu"])
        peak = product_flops_per_s(gpu, "fp16")

        def priced_s(tokens: float, watts: float | None, row: Any = row, gpu: Any = gpu) -> float:
            curve = shipped.gemm_efficiency(replace(gpu, board_watts=watts), "fp16")
            speed = ProductSpeed(
                product_flops_per_s(gpu, "fp16"), gpu.memory_bytes_per_s, 2.0, curve
            )
            shapes = data["products"][row["model"]]
            return sum(speed.seconds(Product(tokens, out, depth)) for depth, out in shapes)

        sides = data["products"][row["model"]]
        weights = sum(inputs * outputs for inputs, outputs in sides)
        flops = [2.0 * tokens * weights for tokens in row["tokens"]]
        measured = statistics.median(
            f / (1e-3 * ms * peak) for f, ms in zip(flops, row["ms"], strict=True)
        )
        parts = [
            statistics.median(
                f / (priced_s(tokens, watts) * peak)
                for f, tokens in zip(flops, row["tokens"], strict=True)
            )
            for watts in (gpu.board_watts, None)
        ]
        has = "yes" if shipped.has_products(gpu.name) else "no"
        cells = (
            *(gpu.name, row["model"], has, f"{measured:.2f}", f"{parts[0]:.2f}"),
            *(f"{100 * (parts[0] / measured - 1):+.0f} %", f"{parts[1]:.2f}"),
        )
        print("| " + " | ".join(cells) + " |")


def casts() -> None:
    """Print what kernels that memory bounds take, beside their price, which knows of these kernels
    the fixed time alone."""
    points, shipped = cast_points(), shipped_calibration()
    print("\nCasts of 16 bits to fp8, by memory alone\n")
    print("| GPU | fixed us | of the bandwidth | priced | large ones | other types' fixed us |")
    print("| --- | --: | --: | --: | --: | --: |")
    for gpu, part in fit_bandwidths(points).items():
        own = [point for point in points if point.gpu == gpu]
        rate = shipped.memory_bytes_per_s(gpu_type(gpu))
        errors = [
            (shipped.kernel_s + point.num_bytes / rate) / point.seconds - 1
            for point in large_casts(own)
        ]
        others = fit_kernel_s([point for point in points if point.gpu != gpu])
        print(
            f"| {gpu} | {1e6 * fit_kernel_s(own):.1f} | {part:.2f} | "
            f"{rate / gpu_type(gpu).memory_bytes_per_s:.2f} | "
            f"{statistics.mean(map(abs, errors)):.1%} | {1e6 * others:.1f} |"
        )


def main() -> None:
    """Print every table."""
    for dtype in WORDS:
        table(dtype)
    ratios()
    experts()
    casts()
    prompt_layers()


if __name__ == "__main__":
    main()
