"""Ratios of measured to fitted seconds on a grid over the sizes of kernels, fitted to tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.sparse import identity
from scipy.sparse.linalg import spsolve
from serving_tables import GRIDS, Table, joined

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.serving.prices.kernels import KernelCurve, kernel_seconds

TOLERANCE = 0.1
"""Relative errors beyond this count less and less, for constants and for ratios."""
_ROUNDS = 8
"""Weighted least squares of the ratios, each with the weights of the errors before."""
_PULL = 1.0
"""Rows that pull each ratio to 1, so that a node without rows is left to the constants."""
_RISING = {"products": (0,), "decode_attention": (0, 1)}
"""Sizes of which more never lasts shorter; columns and depth of a matrix are given."""
_ROUNDING = 1e-3
_QUERIES = 4
"""For a key-value head, where the least rise of attention is looked for; a usual number."""


@dataclass(frozen=True)
class Fitted:
    """Constants, and the logarithms of the ratios of a kind that has them."""

    curve: KernelCurve
    ratio_logs: np.ndarray | None = None


def predict(fitted: Fitted, table: Table) -> np.ndarray:
    """Return the seconds of each row."""
    found: np.ndarray = kernel_seconds(
        fitted.curve, table.flops_s, table.bytes_s, table.block_s, table.size,
        np.maximum, np.minimum,
    )  # fmt: skip
    if fitted.ratio_logs is not None:
        found = found * np.exp(table.nodes @ fitted.ratio_logs)
    return found


def with_ratios(kind: str, curve: KernelCurve, tables: Sequence[Table]) -> Fitted:
    """Fit ratios to what constants leave of tables, by the same loss as the constants."""
    rows = joined(tables)
    if rows.nodes is None:
        return Fitted(curve)
    left = np.log(rows.seconds / predict(Fitted(curve), rows))
    pull = _PULL * identity(rows.nodes.shape[1], format="csc")
    weights = np.ones(len(left))
    logs = np.zeros(rows.nodes.shape[1])
    for _ in range(_ROUNDS):
        weighted = rows.nodes.multiply(weights[:, None]).tocsr()
        logs = spsolve((rows.nodes.T @ weighted + pull).tocsc(), weighted.T @ left)
        weights = 1 / np.sqrt(1 + ((left - rows.nodes @ logs) / TOLERANCE) ** 2)
    cards = sorted({table.card for table in tables})
    rows_at = np.asarray(rows.nodes.sum(axis=0)).ravel()
    return Fitted(curve, rising(kind, curve, cards, logs, rows_at))


def rising(
    kind: str, curve: KernelCurve, cards: Sequence[str], logs: np.ndarray, rows_at: np.ndarray
) -> np.ndarray:
    """Return the nearest ratios with which no call of more lasts shorter.

    Args:
        kind: of kernels.
        curve: the constants; a ratio may fall along a size by what their seconds rise.
        cards: that the constants are of.
        logs: of the ratios at the nodes.
        rows_at: weights of the nodes.
    """
    counts = GRIDS[kind].counts
    found, weights = logs.reshape(counts), rows_at.reshape(counts) + _PULL
    may_fall = {axis: least_rise(kind, curve, cards, axis) for axis in _RISING[kind]}
    # One size after the other, until neither changes anything.
    for _ in range(100):
        before = found
        for axis, falls in may_fall.items():
            level = np.moveaxis(found + falls, axis, -1).copy()
            own = np.moveaxis(weights, axis, -1)
            for line in np.ndindex(level.shape[:-1]):
                level[line] = isotonic_regression(level[line], weights=own[line]).x
            found = np.moveaxis(level, -1, axis) - falls
        if np.abs(found - before).max() < _ROUNDING / 10:
            break
    return np.round(found, 3).ravel()


def least_rise(
    kind: str, curve: KernelCurve, cards: Sequence[str], axis: int
) -> np.ndarray:  # fmt: skip
    """Return how much the logarithm of the constants' seconds has risen at each node since the
    first one, at the least slope within each cell along a size."""
    grid = GRIDS[kind]
    exponents = [first + np.arange(n) for first, n in zip(grid.first, grid.counts, strict=True)]
    parts = np.linspace(0, 1, 5)
    fine = (exponents[axis][:-1, None] + parts).ravel()
    axes = [fine if place == axis else own for place, own in enumerate(exponents)]
    sizes = np.meshgrid(*(4.0**own for own in axes), indexing="ij")
    least = np.inf
    for card in cards:
        gpu = gpu_type(card)
        peak = gpu.peak_flops["bf16"] or 1.0
        if kind == "products":
            rows, columns, depth = sizes
            flops = 2 * rows * columns * depth
            moved = 2 * (rows * columns + rows * depth + columns * depth)
        else:
            moved = 4 * 128 * sizes[0] * sizes[1]
            flops = _QUERIES * moved
        seconds = kernel_seconds(
            curve, flops / peak, moved / gpu.memory_bytes_per_s, 0.0, 1.0, np.maximum, np.minimum
        )
        logs = np.moveaxis(np.log(seconds), axis, -1)
        slopes = np.diff(logs.reshape(*logs.shape[:-1], -1, len(parts)), axis=-1)
        least = np.minimum(least, (len(parts) - 1) * slopes.min(axis=-1) - _ROUNDING)
    risen = np.concatenate([np.zeros((*least.shape[:-1], 1)), np.cumsum(least, axis=-1)], axis=-1)
    return np.moveaxis(risen, -1, axis)
