"""Prints how well the model of products predicts tables that it was not fitted to.

    python tools/product_holdout.py

For each GPU type of `benchmarks/tables/products.csv`, the mean absolute error of large products
(each side 2,048 or more): fitted to all; every number of rows in turn left out; every engine in
turn left out, and predicted; oldest versions predicted from the newest; and the type itself left
out, priced as a type without a table.  Then the same of fp8, the ratio of types, and layers of
experts.  `make_nvlink.py` does so for collectives.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations

from expert_tables import expert_points, predict_experts
from product_tables import (
    ProductPoint,
    by_gpu,
    fit_products,
    is_new,
    product_points,
    speed_of,
)

from megatron_hetero.cost.work.calibration import DEFAULT, Calibration, shipped_calibration
from megatron_hetero.cost.work.products import GemmEfficiency

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


def without(name: str) -> Calibration:
    """Return the shipped constants as if a type had no table."""
    shipped = shipped_calibration()
    gemm = {key: curve for key, curve in shipped.gemm.items() if key[0] != name}
    for kind in ("fp16", "fp8", "fp8_block"):
        own = [c for (gpu, k), c in gemm.items() if k == kind and gpu != DEFAULT]
        medians = [
            statistics.median(getattr(curve, field) for curve in own)
            for field in ("max_efficiency", "overhead_s", "traffic", "decline")
        ]
        gemm[DEFAULT, kind] = GemmEfficiency(*medians)
    return replace(shipped, gemm=gemm)


def type_left_out(points: Sequence[ProductPoint]) -> list[float]:
    """Price a type by its sheet alone."""
    gpu, calibration = points[0].gpu, without(points[0].gpu.name)
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
    print("| GPU | fitted | rows left out | engine left out | old versions | type left out |")
    print("| --- | --: | --: | --: | --: | --: |")
    for gpu, points in by_gpu(product_points(dtype)).items():
        cells = (
            errors(points, fit_products(points)),
            rows_left_out(points),
            engines_left_out(points),
            versions_left_out(points),
            type_left_out(points),
        )
        print(f"| {gpu} | " + " | ".join(map(percent, cells)) + " |")


def ratios() -> None:
    """Print the worst ratio of two types, predicted over measured."""
    calibration, shipped = {}, {}
    for gpu, points in by_gpu(product_points()).items():
        own = shipped_calibration().gemm_efficiency(points[0].gpu, "bf16")
        shipped[gpu] = statistics.median(1 + error for error in errors(points, own))
        calibration[gpu] = statistics.median(1 + error for error in type_left_out(points))
    for words, found in (("fitted", shipped), ("both left out", calibration)):
        worst = max(
            combinations(found, 2), key=lambda pair: abs(found[pair[0]] / found[pair[1]] - 1)
        )
        away = found[worst[0]] / found[worst[1]] - 1
        print(f"\nRatio of two types, {words}: worst {100 * away:+.1f} % ({' over '.join(worst)})")


def experts() -> None:
    """Print the errors of layers of experts."""
    calibration = shipped_calibration()
    found: dict[str, list[float]] = {}
    for point in expert_points():
        predicted_s = predict_experts(point, calibration.grouped, calibration)
        found.setdefault(point.gpu.name, []).append(predicted_s / point.seconds - 1)
    print("\nLayers of grouped experts, bf16\n\n| GPU | layers | error | median |")
    print("| --- | --: | --: | --: |")
    for gpu, own in found.items():
        print(f"| {gpu} | {len(own)} | {percent(own)} | {100 * statistics.median(own):+.1f} % |")


def main() -> None:
    """Print every table."""
    for dtype in WORDS:
        table(dtype)
    ratios()
    experts()


if __name__ == "__main__":
    main()
