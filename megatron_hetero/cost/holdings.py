"""What each device of a plan keeps of the training's state: weights and optimizer, as intervals.

A tensor is the interval from 0 to 1, in the order in which it is divided; a device keeps a part of
it.  Norms and biases that all members of a group keep whole are counted with the part they belong
to.  With the distributed optimizer each replica keeps one part of the states of what it holds (in
equal parts here).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_hetero.cost.memory import state_bytes
from megatron_hetero.cost.parameters import head_params, layer_params, word_params
from megatron_hetero.cost.placement import Placement
from megatron_hetero.cost.share import TensorShare
from megatron_hetero.model.blocks import padded_vocab_size
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.chunks import stage_chunks
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.shards import shard_edges

Tensor = tuple[str, int, str]
"""(part of the model, layer, "weights" or "optimizer")."""
Interval = tuple[float, float]
Holdings = dict[str, dict[Tensor, Interval]]
"""Device name -> what it keeps."""


@dataclass(frozen=True)
class StagePart:
    """A stage as far as it matters here; `layers` are indices, `last` is the model's last layer."""

    devices: tuple[str, ...]
    layers: tuple[int, ...]
    shares: tuple[int, ...] | None


def parts_of_plan(plan: Plan) -> list[list[StagePart]]:
    """[replica][stage] of a plan with devices."""
    return [
        [
            StagePart(
                stage.devices,
                tuple(
                    layer
                    for chunk in stage_chunks(stage)
                    for layer in range(chunk.first_layer, chunk.first_layer + chunk.num_layers)
                ),
                stage.shape.shares,
            )
            for stage in replica.stages
        ]
        for replica in plan.replicas
    ]


def parts_of_placement(placement: Placement) -> list[list[StagePart]]:
    """[replica][stage] of a placement."""
    return [
        [
            StagePart(
                tuple(device.name for device in stage.devices),
                tuple(range(first, first + stage.num_layers)),
                stage.shares,
            )
            for first, stage in zip(replica.first_layers, replica.stages, strict=True)
        ]
        for replica in placement.replicas
    ]


class StateSizes:
    """Bytes of each whole tensor of a workload."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        model, states = workload.model, state_bytes(workload.training)
        whole = TensorShare(1, model.num_query_groups, model.ffn_hidden_size)
        columns = model.ffn_hidden_size * (3 if model.gated_mlp else 2)
        mlp = model.hidden_size * columns
        rows = padded_vocab_size(model, (1,))
        self._params = {
            "attention": layer_params(model, whole) - mlp,
            "mlp": mlp,
            "embedding": word_params(model, 1, rows),
            "head": head_params(model, 1, rows, holds_embedding=False),
        }
        self._bytes = {"weights": states.weight, "optimizer": states.optimizer}

    def bytes_of(self, tensor: Tensor) -> int:
        """Of a whole tensor."""
        return self._params[tensor[0]] * self._bytes[tensor[2]]


def holdings(workload: Workload, replicas: Sequence[Sequence[StagePart]]) -> Holdings:
    """What every device keeps."""
    divides = workload.training.use_distributed_optimizer
    found: Holdings = {}
    for r, stages in enumerate(replicas):
        part = (r / len(replicas), (r + 1) / len(replicas)) if divides else (0.0, 1.0)
        for stage in stages:
            for index, device in enumerate(stage.devices):
                kept = found.setdefault(device, {})
                for name, layer, (start, stop) in _intervals(workload, stage, index):
                    kept[name, layer, "weights"] = start, stop
                    length = stop - start
                    kept[name, layer, "optimizer"] = (
                        start + part[0] * length,
                        start + part[1] * length,
                    )
    return found


def _intervals(
    workload: Workload, stage: StagePart, index: int
) -> Iterator[tuple[str, int, Interval]]:
    model, width = workload.model, len(stage.devices)

    def interval(num_units: int) -> Interval:
        edges = shard_edges(num_units, width, stage.shares)
        return edges[index] / num_units, edges[index + 1] / num_units

    attention = interval(model.num_query_groups)
    mlp = interval(model.ffn_hidden_size)
    for layer in stage.layers:
        yield "attention", layer, attention
        yield "mlp", layer, mlp
    weights = stage.shares or (1,) * width
    rows = sum(weights[:index]) / sum(weights), sum(weights[: index + 1]) / sum(weights)
    if 0 in stage.layers:
        yield "embedding", 0, rows
    if model.num_layers - 1 in stage.layers:
        yield ("embedding" if model.tied_embeddings else "head"), 0, rows


def overlap_bytes(
    sizes: StateSizes, one: dict[Tensor, Interval], other: dict[Tensor, Interval]
) -> float:
    """Bytes that two devices both keep."""
    total = 0.0
    for tensor, (start, stop) in one.items():
        if tensor in other:
            common = min(stop, other[tensor][1]) - max(start, other[tensor][0])
            total += max(0.0, common) * sizes.bytes_of(tensor)
    return total


def held_bytes(sizes: StateSizes, kept: dict[Tensor, Interval]) -> float:
    """Bytes of all that a device keeps."""
    return sum((stop - start) * sizes.bytes_of(tensor) for tensor, (start, stop) in kept.items())


def without(interval: Interval, own: Interval | None) -> Iterable[Interval]:
    """The parts of an interval that lie outside another."""
    start, stop = interval
    if own is None or own[1] <= start or own[0] >= stop:
        return [interval]
    left, right = (start, max(start, own[0])), (min(stop, own[1]), stop)
    return [(a, b) for a, b in (left, right) if b > a]
