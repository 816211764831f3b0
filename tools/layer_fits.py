"""Constants of the cost model from whole layers: links, memory efficiency, score traffic, launches.

`make_calibration.py` fits products and operators first.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from calibration_tables import (
    CATALOGUE_NAMES,
    SEQ_LENGTH,
    LayerPoint,
    all_reduce_points,
    layer_points,
    table_workload,
)
from scipy.optimize import least_squares

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost.network.collectives import all_reduce_s
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.work.calibration import (
    Calibration,
)
from megatron_hetero.cost.work.compute import PassTimes, layer_times, slowest
from megatron_hetero.cost.work.launches import layer_launches

_MOST_MICROSECONDS = 200
"""For an operator: more than any host needs."""
_PRIOR_DEVIATION = 0.15
"""How far (in logarithms) a type's memory efficiency may lie from the streaming operators'."""


@cache
def fit_link(folder: Path, gpu: str, width: int) -> Link:
    """Fit latency and bandwidth of a ring all-reduce, by least squares of relative errors; of half
    as many GPUs where the width was not measured."""
    if width == 1:
        return Link(1e12, 0.0)
    points = list(all_reduce_points(folder, gpu, width))
    if not points:
        return fit_link(folder, gpu, width // 2)
    rounds, volume = 2 * (width - 1), 2 * (width - 1) / width

    def errors(logs: Sequence[float]) -> list[float]:
        latency_s, bytes_per_s = math.exp(logs[0]), math.exp(logs[1])
        return [
            math.log((rounds * latency_s + volume * size / bytes_per_s) / time_s)
            for size, time_s in points
        ]

    best = least_squares(errors, [math.log(1e-5), math.log(1e10)], loss="soft_l1", f_scale=0.1).x
    return Link(math.exp(best[1]), math.exp(best[0]))


def predict(point: LayerPoint, link: Link, calibration: Calibration) -> PassTimes:
    """Predict a layer of the tables by the cost model, communication included.

    These layers exchange in turn in both passes: over PCIe, where exchanges are half of the time,
    either pass shows all of its all-reduces (`docs/cost-model.md`, "Exchanges under products").
    """
    workload = table_workload(point.model, point.micro_batch_size, "fp32")
    times = layer_times(workload, gpu_type(CATALOGUE_NAMES[point.gpu]), point.width, calibration)
    tokens = point.micro_batch_size * SEQ_LENGTH
    num_bytes = 4.0 * tokens * workload.model.hidden_size
    # Two all-reduces in each pass.
    exchange_s = 2 * all_reduce_s(num_bytes, point.width, link)
    return times + PassTimes(exchange_s, exchange_s)


def fit_layers(
    points: Sequence[LayerPoint], links: Mapping[tuple[str, int], Link], data: dict[str, Any]
) -> None:
    """Score traffic in fp32 and each type's memory efficiency, from whole layers.

    Every pair of model and type weighs alike; the sum of both passes weighs twice each of them.
    """
    gpus = sorted({point.gpu for point in points})
    num_of = Counter((point.model, point.gpu) for point in points)
    streaming = data["memory_efficiency"]["default"]

    def set_constants(logs: Sequence[float]) -> None:
        forward, backward, *efficiencies = [round(math.exp(x), 3) for x in logs]
        data["score_traffic"]["fp32"] = {"forward": forward, "backward": backward}
        for gpu, efficiency in zip(gpus, efficiencies, strict=True):
            data["memory_efficiency"][CATALOGUE_NAMES[gpu]] = efficiency

    def errors(logs: Sequence[float]) -> list[float]:
        found = [(x - math.log(streaming)) / _PRIOR_DEVIATION * 0.1 for x in logs[2:]]
        calibration = Calibration.from_data(with_constants(data, gpus, logs))
        for point in points:
            times = predict(point, links[point.gpu, point.width], calibration)
            weight = 1 / math.sqrt(num_of[point.model, point.gpu])
            found += [
                weight * 0.5 * math.log(times.forward_s / point.forward_s),
                weight * 0.5 * math.log(times.backward_s / point.backward_s),
                weight * math.log(times.total_s / point.total_s),
            ]
        return found

    start = [math.log(8.0), math.log(16.0), *[math.log(streaming)] * len(gpus)]
    set_constants(least_squares(errors, start, loss="soft_l1", f_scale=0.1).x)


def fit_launch(
    folder: Path,
    data: Mapping[str, Any],
    without: Collection[str] = (),
    widths: Collection[int] = (1, 2, 4, 8),
) -> float:
    """Fit the host's seconds for each operator, in whole microseconds: on each machine those of the
    least mean error of its layers, and of these the fewest, because a floor must not be higher than
    a quick host's.

    Args:
        data: the constants, fitted already.
        without: types of the tables that do not take part.
        widths: tensor-parallel widths that take part.
    """
    calibration = Calibration.from_data(data)
    of_type: dict[str, list[tuple[LayerPoint, PassTimes]]] = {}
    for point in layer_points(folder):
        if point.gpu not in without and point.width in widths:
            link = fit_link(folder, point.gpu, point.width)
            times = predict(point, link, calibration)
            of_type.setdefault(point.gpu, []).append((point, times))
    found = [best_launch(points) for points in of_type.values()]
    return min((launch_s for launch_s in found if launch_s), default=0.0)


def best_launch(points: Sequence[tuple[LayerPoint, PassTimes]]) -> float:
    """Return the seconds for each operator that fit the layers of one machine best; 0 where its
    GPUs are never kept waiting."""

    def error(launch_s: float) -> float:
        return statistics.mean(
            abs(with_launches(point, times, launch_s).total_s / point.total_s - 1)
            for point, times in points
        )

    return min((1e-6 * number for number in range(_MOST_MICROSECONDS)), key=error)


def with_launches(point: LayerPoint, times: PassTimes, launch_s: float) -> PassTimes:
    """Return the times of a layer whose operators the host launches in so many seconds each."""
    workload = table_workload(point.model, point.micro_batch_size, "fp32")
    share = even_share(workload.model, point.width)
    launches = layer_launches(workload.model, workload.training, share, flash=False, fused=False)
    return slowest([times, PassTimes(launches.forward * launch_s, launches.backward * launch_s)])


def with_constants(data: dict[str, Any], gpus: Sequence[str], logs: Sequence[float]) -> Any:
    """Return `data` with the constants that `fit_layers` seeks, unrounded."""
    forward, backward, *efficiencies = [math.exp(x) for x in logs]
    own = {CATALOGUE_NAMES[g]: e for g, e in zip(gpus, efficiencies, strict=True)}
    return data | {
        "score_traffic": data["score_traffic"]
        | {"fp32": {"forward": forward, "backward": backward}},
        "memory_efficiency": data["memory_efficiency"] | own,
    }
