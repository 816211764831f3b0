"""Single layers, micro-batches and idle GPUs moved."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.planner.units import Chain, Unit


def fine_moves(placement: Placement) -> Iterator[Placement]:
    """Move a layer between stages, or a micro-batch between replicas."""
    yield from _layer_moves(placement)
    yield from _micro_batch_moves(placement)


def _layer_moves(placement: Placement) -> Iterator[Placement]:
    for r, replica in enumerate(placement.replicas):
        stages = replica.stages
        for source, giver in enumerate(stages):
            if giver.num_layers == 1:
                continue
            for target, taker in enumerate(stages):
                if target != source:
                    changed = list(stages)
                    changed[source] = PlacedStage(giver.devices, giver.num_layers - 1)
                    changed[target] = PlacedStage(taker.devices, taker.num_layers + 1)
                    moved = PlacedReplica(tuple(changed), replica.num_micro_batches)
                    yield _with_replica(placement, r, moved)


def _micro_batch_moves(placement: Placement) -> Iterator[Placement]:
    for source, giver in enumerate(placement.replicas):
        if giver.num_micro_batches == 1:
            continue
        for target, taker in enumerate(placement.replicas):
            if target != source:
                fewer = PlacedReplica(giver.stages, giver.num_micro_batches - 1)
                more = PlacedReplica(taker.stages, taker.num_micro_batches + 1)
                yield _with_replica(_with_replica(placement, source, fewer), target, more)


def _with_replica(placement: Placement, index: int, replica: PlacedReplica) -> Placement:
    replicas = placement.replicas
    return Placement((*replicas[:index], replica, *replicas[index + 1 :]))


def insertions(
    chains: list[Chain],
    units: list[Unit],
    counts: range,
    shape: Callable[[Chain], Hashable] = tuple,
) -> Iterator[tuple[Chain, ...]]:
    """Put each unit at every place of every replica, and as a replica of its own.

    Args:
        shape: of replicas for which it is equal, before and after, one is enough.
    """
    for unit in units:
        seen = set()
        if len(chains) in counts:
            # Equal replicas before and after are one change.
            for r, chain in enumerate(chains):
                before = shape(chain)
                for s in range(len(chain) + 1):
                    after = (*chain[:s], unit, *chain[s:])
                    change = before, shape(after)
                    if change not in seen:
                        seen.add(change)
                        yield tuple(replaced(chains, r, after))
        if len(chains) + 1 in counts:
            yield (*chains, (unit,))


def replaced(chains: list[Chain], index: int, chain: Chain) -> list[Chain]:
    """Return the chains with one replaced, or left out when empty."""
    return [*chains[:index], *([chain] if chain else []), *chains[index + 1 :]]
