"""Micro-batches that a stage holds at most: its launch count, 1F1B's, or the peak of an order."""

from __future__ import annotations

from functools import lru_cache

from megatron_hetero.plan.chunks import stage_chunks
from megatron_hetero.plan.order import parse_order
from megatron_hetero.plan.plan import Plan, Stage


def num_in_flight(plan: Plan, replica: int, stage: int) -> int:
    """Count the micro-batches whose activations a stage holds at most.

    Without an order this is the launch count of the stage, or 1F1B's own. With an order it is the
    peak of forwards whose gradients are not complete, rounded up where a stage has several chunks.

    Args:
        replica, stage: places in the plan.
    """
    held = plan.replicas[replica].stages[stage]
    # An order may hold more or fewer than the launch count of 1F1B would.
    if held.order is not None:
        return _peak_in_flight(held)
    own = held.num_launched_forwards
    return default_launched_forwards(plan, replica, stage) if own is None else own


def default_launched_forwards(plan: Plan, replica: int, stage: int) -> int:
    """Return 1F1B's own: one forward for each stage from this one to the last, if there are as
    many."""
    shape = plan.replicas[replica]
    return min(len(shape.stages) - stage, shape.num_micro_batches)


def _peak_in_flight(stage: Stage) -> int:
    """Count in micro-batches of the whole stage: a chunk counts by its share of the layers."""
    chunk_layers = tuple([chunk.num_layers for chunk in stage_chunks(stage)])
    return _peak_of_order(stage.order or "", chunk_layers, stage.shape.num_layers)


@lru_cache(maxsize=256)
def _peak_of_order(order: str, chunk_layers: tuple[int, ...], num_layers: int) -> int:
    # In layers, as chunks of a stage may have unlike numbers of these.
    layers = peak = 0
    for letter, chunk in parse_order(order):
        size = chunk_layers[chunk]
        # Activations stay until the weight gradient is done: after B, or after W where it is split.
        layers += {"F": size, "B": -size, "I": 0, "W": -size}[letter]
        peak = max(peak, layers)
    # Rounded up to whole micro-batches, and at least one.
    return max(1, -(-peak // num_layers))
