"""Weights and optimizer states that each device of a plan keeps, as intervals.

A tensor is the interval from 0 to 1, in the order in which it is divided; a device keeps parts of
it.  Norms and biases that all members of a group keep whole are counted with the part they belong
to.  With the distributed optimizer the replicas, and the context-parallel ranks of a stage, keep
equal parts of the states of each slice that none of their groups cuts further
(`plan.sharding.shards.slices`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_hetero.cost.memory.states import state_bytes
from megatron_hetero.cost.parameters import (
    further_params,
    head_params,
    layer_params,
    shared_expert_matrices,
    word_params,
)
from megatron_hetero.cost.placement import Placement
from megatron_hetero.cost.share import even_share
from megatron_hetero.model.blocks import padded_vocab_size
from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.plan.chunks import stage_chunks
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.sharding.expert_groups import expert_peers
from megatron_hetero.plan.sharding.shards import COLUMN_BLOCK, block_edges, shard_edges

Tensor = tuple[str, int, str]
"""(part of the model, layer, "weights" or "optimizer")."""
Interval = tuple[float, float]
Kept = dict[Tensor, tuple[Interval, ...]]
"""Parts of each tensor that a device keeps: intervals that do not overlap, rising."""
Holdings = dict[str, Kept]
"""Device name -> parts of tensors kept on the device."""


@dataclass(frozen=True)
class StagePart:
    """One tensor-parallel group of a stage; `layers` are indices.

    `experts`: what each device keeps of the experts, as an interval, where they are dealt out over
    replicas; None: as the group divides them.
    """

    devices: tuple[str, ...]
    layers: tuple[int, ...]
    shares: tuple[int, ...] | None
    context_rank: int = 0
    expert_shares: tuple[int, ...] | None = None
    experts: tuple[Interval, ...] | None = None

    def copy_of_experts(self, index: int) -> int:
        """Count the devices before this one that keep the same of the experts."""
        return 0 if self.experts is None else self.experts[:index].count(self.experts[index])


def parts_of_plan(plan: Plan) -> list[list[StagePart]]:
    """Return the groups of a plan with devices, [replica][group of a stage]."""
    peers = expert_peers(plan)
    return [
        [
            part
            for s, stage in enumerate(replica.stages)
            for part in _groups(
                stage.devices,
                tuple(
                    layer
                    for chunk in stage_chunks(stage)
                    for layer in range(chunk.first_layer, chunk.first_layer + chunk.num_layers)
                ),
                stage.shape.shares,
                stage.shape.tensor_parallel,
                stage.shape.expert_shares,
                _of_experts(
                    stage.shape.expert_groups,
                    peers.get((r, s), (r,)).index(r) * stage.shape.num_devices,
                    stage.shape.num_devices,
                ),
            )
        ]
        for r, replica in enumerate(plan.replicas)
    ]


def parts_of_placement(placement: Placement) -> list[list[StagePart]]:
    """Return the groups of a placement, [replica][group of a stage]."""
    return [
        [
            part
            for first, stage in zip(replica.first_layers, replica.stages, strict=True)
            for part in _groups(
                tuple(device.name for device in stage.devices),
                tuple(range(first, first + stage.num_layers)),
                stage.shares,
                stage.width,
                stage.expert_shares,
                _of_experts(
                    stage.expert_groups,
                    stage.experts.devices.index(stage.devices[0]) if stage.experts else 0,
                    len(stage.devices),
                ),
            )
        ]
        for replica in placement.replicas
    ]


def _of_experts(
    sizes: tuple[int, int] | None, first: int, number: int
) -> tuple[Interval, ...] | None:
    """Return the interval of experts on each device of a stage.

    Args:
        sizes: `StageShape.expert_groups`.
        first: place of the stage's first device among those of the replicas in its groups.
        number: devices of the stage.
    """
    if sizes is None:
        return None
    # Places in a group repeat along the devices of all its replicas.
    whole = sizes[0] * sizes[1]
    places = [place % whole for place in range(first, first + number)]
    return tuple((place / whole, (place + 1) / whole) for place in places)


def _groups(
    devices: tuple[str, ...],
    layers: tuple[int, ...],
    shares: tuple[int, ...] | None,
    width: int,
    expert_shares: tuple[int, ...] | None,
    experts: tuple[Interval, ...] | None,
) -> Iterator[StagePart]:
    # Each context-parallel rank is a group with all weights of the stage.
    for rank, start in enumerate(range(0, len(devices), width)):
        own = None if experts is None else experts[start : start + width]
        yield StagePart(devices[start : start + width], layers, shares, rank, expert_shares, own)


class StateSizes:
    """Bytes of each whole tensor of a workload."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        model, states = workload.model, state_bytes(workload.training)
        # Sizes are those of whole tensors, with the vocabulary padded for a single GPU.
        self._layers = {kind: _layer_parts(kind) for kind in model.kinds or (model,)}
        rows = padded_vocab_size(model, (1,))
        self._params = {
            "embedding": word_params(model, 1, rows),
            "head": head_params(model, 1, rows, holds_embedding=False)
            + further_params(model, even_share(model, 1)),
        }
        self._bytes = {"weights": states.weight, "optimizer": states.optimizer}

    def bytes_of(self, tensor: Tensor) -> int:
        """Return the bytes of a whole tensor."""
        name, layer, state = tensor
        params = self._params.get(name)
        # A part of a layer, whose size depends on the kind of the layer.
        if params is None:
            params = self._layers[self.workload.model.of_layer(layer)][name]
        return params * self._bytes[state]


def _layer_parts(model: ModelSpec) -> dict[str, int]:
    """Count the parameters of a layer's MLP or experts, the shared one included, and of all else of
    the layer."""
    share = even_share(model, 1)
    # The first matrix is two where the MLP is gated.
    columns = share.mlp_columns * (3 if model.gated_mlp else 2) * (model.num_experts or 1)
    mlp = model.hidden_size * columns + sum(shared_expert_matrices(model, share))
    return {"attention": layer_params(model, share) - mlp, "mlp": mlp}


def holdings(workload: Workload, replicas: Sequence[Sequence[StagePart]]) -> Holdings:
    """Return the intervals that every device keeps."""
    divides = workload.training.use_distributed_optimizer
    # Every weight's interval on every device.
    weights = [
        ((r, stage.context_rank, stage.copy_of_experts(index)), device, name, layer, interval)
        for r, stages in enumerate(replicas)
        for stage in stages
        for index, device in enumerate(stage.devices)
        for name, layer, interval in _intervals(workload, stage, index)
    ]
    # With a divided optimizer: all cuts of a tensor, and who holds it between two of them.
    cuts: dict[tuple[str, int], set[float]] = {}
    held: dict[tuple[str, int], list[tuple[tuple[int, int, int], Interval]]] = {}
    if divides:
        for copy, _, name, layer, interval in weights:
            cuts.setdefault((name, layer), set()).update(interval)
            held.setdefault((name, layer), []).append((copy, interval))
    slices = {key: list(pairwise(sorted(edges))) for key, edges in cuts.items()}
    # For each slice: the copies that hold it, each of which keeps one part of its states.
    turns = {
        key: {
            (a, b): sorted({copy for copy, (start, stop) in held[key] if start <= a and b <= stop})
            for a, b in of_key
        }
        for key, of_key in slices.items()
    }
    found: Holdings = {}
    # Each device keeps its weights whole, and its turn's part of the states of each slice.
    for copy, device, name, layer, interval in weights:
        kept = found.setdefault(device, {})
        kept[name, layer, "weights"] = (interval,)
        kept[name, layer, "optimizer"] = (interval,)
        if divides:
            start, stop = interval
            holders = turns[name, layer]
            kept[name, layer, "optimizer"] = tuple(
                _part((a, b), holders[a, b].index(copy), len(holders[a, b]))
                for a, b in slices[name, layer]
                if start <= a and b <= stop
            )
    return found


def _part(interval: Interval, index: int, count: int) -> Interval:
    """Cut one of `count` equal parts out of an interval."""
    start, stop = interval
    # The last part ends at the stop itself, so that rounding leaves no gap.
    step = (stop - start) / count
    return start + index * step, stop if index == count - 1 else start + (index + 1) * step


def _intervals(
    workload: Workload, stage: StagePart, index: int
) -> Iterator[tuple[str, int, Interval]]:
    model, width = workload.model, len(stage.devices)

    def interval(num_units: int, block: int) -> Interval:
        edges = block_edges(num_units, block, width, stage.shares)
        return edges[index] / num_units, edges[index + 1] / num_units

    # Edges of whole units, as fractions of the tensor.
    attention = interval(model.num_query_groups, 1)
    mlp = interval(model.mlp_columns, COLUMN_BLOCK)
    # Experts dealt out in the group, then over replicas, replace the cut by columns.
    if stage.expert_shares is not None:
        edges = shard_edges(model.num_experts, width, stage.expert_shares)
        mlp = edges[index] / edges[-1], edges[index + 1] / edges[-1]
    if stage.experts is not None:
        mlp = stage.experts[index]
    for layer in stage.layers:
        yield "attention", layer, attention
        yield "mlp", layer, mlp
    # Rows of the vocabulary divide by the shares themselves; padding is left out.
    weights = stage.shares or (1,) * width
    rows = sum(weights[:index]) / sum(weights), sum(weights[: index + 1]) / sum(weights)
    if 0 in stage.layers:
        yield "embedding", 0, rows
    if model.num_layers - 1 in stage.layers:
        yield ("embedding" if model.tied_embeddings else "head"), 0, rows


def overlap_bytes(sizes: StateSizes, one: Kept, other: Kept) -> float:
    """Sum the bytes that two devices both keep."""
    total = 0.0
    for tensor in one.keys() & other.keys():
        # Both lists of intervals are short: each pair is compared.
        common = sum(
            max(0.0, min(stop, b) - max(start, a))
            for start, stop in one[tensor]
            for a, b in other[tensor]
        )
        total += common * sizes.bytes_of(tensor)
    return total


def held_bytes(sizes: StateSizes, kept: Kept) -> float:
    """Sum the bytes of all that a device keeps."""
    return sum(
        (stop - start) * sizes.bytes_of(tensor)
        for tensor, intervals in kept.items()
        for start, stop in intervals
    )


def without(interval: Interval, own: Sequence[Interval]) -> Iterator[Interval]:
    """Yield the parts of an interval outside the rising intervals `own`.

    >>> list(without((0.0, 1.0), [(0.25, 0.5)]))
    [(0.0, 0.25), (0.5, 1.0)]
    """
    # `start` moves past each own interval; what lies before it is missing.
    start, stop = interval
    for a, b in own:
        if a > start:
            yield start, min(a, stop)
        start = max(start, b)
        if start >= stop:
            return
    yield start, stop
