"""Shapes: pipelines that could be replicas, over the pools of a cluster.

A stage is a tensor-parallel group inside a machine; its width is a power of two.  A pipeline has
stages of one pool, or of two; within a pool they have one width.  Layers are divided by speed, by
memory, and in between: one shape for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.serving.fleet.pools import Pool, link_between
from megatron_hetero.serving.prices.engine import Engine
from megatron_hetero.serving.prices.memory import cache_pool, weight_bytes, working_bytes
from megatron_hetero.serving.prices.served import ServedModel
from megatron_hetero.serving.prices.steps import (
    ReplicaPipeline,
    ReplicaStage,
    StagePrice,
    stage_prices,
)
from megatron_hetero.serving.prices.work import StepWork

MAX_STAGES = 8
_BLENDS = (0.0, 0.5, 1.0)
"""Between layers by speed (0) and layers by memory (1)."""


@dataclass(frozen=True)
class Shape:
    """A pipeline and the pools of its stages, in order."""

    pipeline: ReplicaPipeline
    pools: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return pools, widths and layers in one line, such as `H100-80GB at main tp4:80`."""
        parts = []
        for pool, stage in zip(self.pools, self.pipeline.stages, strict=True):
            parts.append(f"{pool} tp{stage.width}:{stage.num_layers}")
        return ", ".join(parts)

    @property
    def place(self) -> str:
        """Return the pool that keys and values leave from and arrive at."""
        return self.pools[0]

    @property
    def has_one_width(self) -> bool:
        """Return whether all stages have the same width, as engines require."""
        return len({stage.width for stage in self.pipeline.stages}) == 1


def shapes_of(
    cluster: Cluster, pools: Sequence[Pool], served: ServedModel, engine: Engine
) -> tuple[Shape, ...]:
    """Return every shape with enough memory for the weights that the engine can run."""
    found: dict[str, Shape] = {}
    for sides in _sides(cluster, pools, served, engine):
        for shape in _divided(cluster, sides, served, engine):
            found.setdefault(shape.name, shape)
    return tuple(found.values())


_Side = tuple[Pool, int, int]
"""Pool, width of stages and number of stages."""


def _sides(
    cluster: Cluster, pools: Sequence[Pool], served: ServedModel, engine: Engine
) -> Iterator[tuple[_Side, ...]]:
    # Stages of one pool alone, by width and number.
    alone: list[_Side] = []
    for pool in pools:
        if served.precision_on(pool.gpu) is None:
            continue
        for width in _widths(pool, served, cluster.limits.max_tensor_parallel):
            # Groups of this width that the pool has room for.
            most = len(pool.devices) * (pool.gpus_per_machine // width)
            alone += [(pool, width, n) for n in range(1, min(MAX_STAGES, most) + 1)]
    limit = cluster.limits.max_pipeline_parallel or MAX_STAGES
    for side in alone:
        # Some numbers of stages stand for all, as each costs a price for every division.
        if side[2] <= min(limit, served.model.num_layers) and side[2] in (1, 2, 3, 4, 8):
            yield (side,)
    # Then pairs of pools, each pair in both orders: embedding and head weigh on the ends.
    for one in alone:
        for other in alone:
            together = one[2] + other[2]
            if one[0] is other[0] or together > min(limit, 4):
                continue
            if one[1] != other[1] and not engine.runs_unlike_widths:
                continue
            # Both sides hand activations on: in one format, by one library of collectives.
            sides = one, other
            if len({(served.precision_on(s[0].gpu), s[0].gpu.library) for s in sides}) == 1:
                yield sides


def _widths(pool: Pool, served: ServedModel, limit: int | None) -> list[int]:
    # Powers of two, which leave no gaps on a machine (`place.placed_replicas`).
    widths, width = [], 1
    while width <= min(pool.gpus_per_machine, limit or pool.gpus_per_machine):
        if served.allows_width(width):
            widths.append(width)
        width *= 2
    return widths


def _divided(
    cluster: Cluster, sides: tuple[_Side, ...], served: ServedModel, engine: Engine
) -> Iterator[Shape]:
    """Yield the shapes of stages of one or two pools: their divisions of the layers."""
    model = served.model
    # Stages with one layer each, until the layers are divided.
    stages = [
        ReplicaStage(pool.gpu, width, 1, pool.link)
        for pool, width, number in sides
        for _ in range(number)
    ]
    pools = tuple(pool.name for pool, _, number in sides for _ in range(number))
    by_name = {pool.name: pool for pool, _, _ in sides}
    # Without a link between two of its pools there is no such pipeline.
    hops = []
    for a, b in pairwise(pools):
        hop = _hop(cluster, by_name[a], by_name[b])
        if hop is None:
            return
        hops.append(hop)
    # By stage: how fast it is a layer, and how many layers it has room for.
    speeds, room = _weights_of_stages(stages, served, engine)
    if min(room) <= 0:
        return
    seen = set()
    # By speed, by room, and half of each; unlike blends may give equal layers.
    for blend in _BLENDS if len(stages) > 1 else (0.0,):
        weights = [
            (1 - blend) * s / sum(speeds) + blend * r / sum(room)
            for s, r in zip(speeds, room, strict=True)
        ]
        layers = _proportional(weights, model.num_layers)
        if layers in seen:
            continue
        seen.add(layers)
        placed = tuple(
            ReplicaStage(s.gpu, s.width, n, s.link) for s, n in zip(stages, layers, strict=True)
        )
        pipeline = ReplicaPipeline(placed, tuple(hops))
        if cache_pool(pipeline, served, engine).num_blocks:
            yield Shape(pipeline, pools)


def _hop(cluster: Cluster, one: Pool, other: Pool) -> Link | None:
    """Return the link between neighbouring stages: between machines, or inside the only one."""
    link = link_between(cluster, one, other)
    return one.link if link is None and one is other else link


def _weights_of_stages(
    stages: Sequence[ReplicaStage], served: ServedModel, engine: Engine
) -> tuple[list[float], list[float]]:
    """Return for each stage the layers per second in a step of decode, and the largest number of
    layers that fits with keys and values."""
    # 64 requests of 1024 tokens that decode one token each.
    work = StepWork(64.0, 64.0, 0.0, 64.0 * 1024)
    speeds, room = [], []
    for place, stage in enumerate(stages):
        (price,) = stage_prices((stage,), served, engine)
        # A stage as one in the middle, without embedding and head.
        inner = StagePrice(stage, served, price.layers, False, False, engine)
        speeds.append(1 / inner.seconds(work))
        is_last = place == len(stages) - 1
        ends = StagePrice(stage, served, price.layers, place == 0, is_last, engine)
        # What embedding and head take at the ends is not room for layers.
        free = stage.gpu.memory_bytes * engine.memory_part - working_bytes(ends, engine)
        free -= weight_bytes(ends) - weight_bytes(inner)
        # Keys and values of 32 K tokens beside the weights of each layer.
        held = 32_768 * served.kv_bytes(stage.width)
        room.append(free / (weight_bytes(inner) + held))
    return speeds, room


def _proportional(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """Divide layers by weights, at least one to each, the largest remainders first."""
    exact = [weight / sum(weights) * total for weight in weights]
    layers = [max(1, int(part)) for part in exact]
    # Rounding leaves some layers over, or takes too many for stages with less than one.
    while sum(layers) != total:
        step = 1 if sum(layers) < total else -1
        places = [i for i, n in enumerate(layers) if step > 0 or n > 1]
        best = max(places, key=lambda i: (step * (exact[i] - layers[i]), -i))
        layers[best] += step
    return tuple(layers)
