"""Reads published tables of fused attention, and fits what kernels reach of large products.

`benchmarks/tables/attention.json` holds cells of such tables, each with its source, licence, GPU,
kernel and shape.  The kernels are those that Transformer Engine runs, FlashAttention-2 below
compute capability 9.0 and cuDNN from there on, except for the RTX 3090.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scipy.optimize import least_squares

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.work.calibration import Calibration, product_flops_per_s
from megatron_hetero.cost.work.compute import PassTimes, core_attention_times
from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.model.training import TrainingSpec

TABLES = Path(__file__).resolve().parent.parent / "benchmarks" / "tables" / "attention.json"
BACKWARD_FLOPS = 2.5
HEAD_SIZES = (64, 128, 256)
"""Those of the medians for types without a table."""
_MANY = 4096
"""Heads, all sequences together, where a table does not say how many: the call's fixed cost is lost
among them."""
_EVEN = {"forward": 1.0, "backward": 1.0}
NO_TABLE: Mapping[str, Any] = {
    "part_of_products": {"default": {"128": _EVEN}},
    "extra_tokens": {"forward": 0.0, "backward": 0.0},
    "call_s": {"forward": 0.0, "backward": 0.0},
}
"""Attention at the rate of large products."""


@dataclass(frozen=True)
class AttentionPoint:
    """A call of fused attention; `heads` of all its sequences together, `backward_s` None where the
    table has the forward pass alone, `origin` the table with its licence."""

    gpu: GpuType
    kernel: str
    origin: str
    head_size: int
    heads: int
    length: int
    is_causal: bool
    forward_s: float
    backward_s: float | None

    @property
    def flops(self) -> float:
        """Count those of the forward pass: two products, of half the scores where causal."""
        square = 4.0 * self.heads * self.head_size * self.length**2
        return square / 2 if self.is_causal else square

    def seconds(self) -> dict[str, float]:
        """Return what was measured, by pass."""
        found = {"forward": self.forward_s}
        return found if self.backward_s is None else found | {"backward": self.backward_s}


def attention_points(group: str = "fitted") -> list[AttentionPoint]:
    """Read the tables that the constants come from, or the `others`."""
    found = []
    for table in json.loads(TABLES.read_text(encoding="utf-8"))[group]:
        heads = (table["batch"] or 1) * (table["heads"] or _MANY)
        origin = (
            f"{table['gpu']}, {table['kernel']}, head size {table['head_size']}, {table['dtype']}: "
            f"{table['source']} ({table['licence']})"
        )
        for index, length in enumerate(table["lengths"]):
            point = AttentionPoint(
                gpu_type(table["gpu"]), table["kernel"], origin, table["head_size"],
                heads, length, table["causal"], 0.0, None,
            )  # fmt: skip
            seconds = {
                f"{name}_s": _seconds(point.flops * times, table[name][index], table["unit"])
                for name, times in (("forward", 1.0), ("backward", BACKWARD_FLOPS))
                if name in table
            }
            found.append(replace(point, **seconds))
    return found


def _seconds(flops: float, cell: float, unit: str) -> float:
    return cell * 1e-3 if unit == "ms" else flops / (cell * 1e12)


def fit_attention(points: Sequence[AttentionPoint], data: Mapping[str, Any]) -> dict[str, Any]:
    """Fit the part `attention` of `calibration.json`, relative to the products of `data`.

    Each type and head size has a part of its own in either pass, all types share the extra tokens
    and the fixed cost of a call.
    A call without a mask has none of these: it stands for long sequences where a table has one
    length alone.
    """
    calibration = Calibration.from_data({**data, "attention": NO_TABLE})
    parts: dict[str, dict[str, dict[str, float]]] = {}
    extra, call_s = {}, {}
    for name in ("forward", "backward"):
        used = [point for point in points if name in point.seconds()]
        keys = sorted({_key(point, calibration) for point in used})
        ideal = [ideal_s(point, name, calibration) for point in used]

        def errors(
            logs: Sequence[float],
            name: str = name,
            used: Sequence[AttentionPoint] = used,
            keys: Sequence[tuple[str, int]] = keys,
            ideal: Sequence[float] = ideal,
        ) -> list[float]:
            tokens, own_s = math.exp(logs[-2]), math.exp(logs[-1])
            return [
                math.log(
                    (
                        ideal_s
                        / math.exp(logs[keys.index(_key(point, calibration))])
                        * (1 + (tokens / point.length if point.is_causal else 0.0))
                        + own_s
                    )
                    / point.seconds()[name]
                )
                for point, ideal_s in zip(used, ideal, strict=True)
            ]

        start = [math.log(0.9)] * len(keys) + [math.log(500.0), math.log(1e-5)]
        best = least_squares(errors, start, loss="soft_l1", f_scale=0.1).x
        for (gpu, size), log in zip(keys, best, strict=False):
            parts.setdefault(gpu, {}).setdefault(str(size), {})[name] = round(math.exp(log), 3)
        extra[name] = float(round(math.exp(best[-2])))
        call_s[name] = round(math.exp(best[-1]), 7)
    parts["default"] = _medians(parts)
    return {"part_of_products": parts, "extra_tokens": extra, "call_s": call_s}


def _key(point: AttentionPoint, calibration: Calibration) -> tuple[str, int]:
    name = point.gpu.name
    return calibration.same_chip.get(name, name), point.head_size


def ideal_s(point: AttentionPoint, name: str, calibration: Calibration) -> float:
    """Return the seconds of a pass at the rate of large products."""
    reached = calibration.gemm_efficiency(point.gpu, "bf16").max_efficiency
    flops = point.flops * (BACKWARD_FLOPS if name == "backward" else 1.0)
    return flops / (product_flops_per_s(point.gpu, "bf16") * reached)


def _medians(parts: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the median part of all types, each with its nearest head size."""
    found: dict[str, dict[str, float]] = {}
    for size in HEAD_SIZES:
        nearest = [
            by_size[min(by_size, key=lambda own, size=size: abs(math.log(int(own) / size)))]
            for by_size in parts.values()
        ]
        found[str(size)] = {
            name: round(statistics.median(part[name] for part in nearest), 3)
            for name in ("forward", "backward")
        }
    return found


def predict_attention(point: AttentionPoint, calibration: Calibration) -> PassTimes:
    """Predict a causal call by the cost model."""
    model = ModelSpec(
        num_layers=1,
        hidden_size=point.heads * point.head_size,
        ffn_hidden_size=point.heads * point.head_size,
        num_attention_heads=point.heads,
        num_query_groups=point.heads,
        kv_channels=point.head_size,
        vocab_size=1024,
        seq_length=point.length,
        max_position_embeddings=point.length,
    )
    workload = Workload(model, TrainingSpec(1, 1, "bf16"), (), "attention tables")
    return core_attention_times(workload, [(point.gpu, even_share(model, 1))], calibration)


def by_table(
    points: Iterable[AttentionPoint],
) -> dict[tuple[str, int, str], list[AttentionPoint]]:
    """Group causal calls by GPU type, head size and kernel."""
    found: dict[tuple[str, int, str], list[AttentionPoint]] = {}
    for point in points:
        if point.is_causal:
            key = (point.gpu.name, point.head_size, point.kernel)
            found.setdefault(key, []).append(point)
    return found
