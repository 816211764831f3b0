"""Shares of the distributed optimizer's states by free memory.

By default the holders of a weight divide its states equally, so the holder with the least memory
decides what fits.  Here those without room for an equal part keep as much as they have room for,
and the others equal parts of the rest (water filling): each gradient goes to its owner, so that
parts near to equal are exchanged soonest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import ceil, gcd, inf
from typing import TYPE_CHECKING

from megatron_hetero.cost.choices import may_choose
from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import Placement
from megatron_hetero.cost.placing import with_optimizer_shares
from megatron_hetero.planner.completion.filled import Completion
from megatron_hetero.planner.completion.tables import NO_STATES, Tables
from megatron_hetero.planner.units import Structure
from megatron_hetero.rounding import ROUNDING

if TYPE_CHECKING:
    from megatron_hetero.planner.completion.completer import Completer

_LARGEST = 16
"""Shares are whole numbers up to this."""
_MARGINS = (1.0, 1.25, inf)
"""What is tried of the least level; without an end each keeps in proportion to its room."""


def by_room(completer: Completer, structure: Structure, size: int) -> Completion | None:
    """Complete a structure with the optimizer's states divided by free memory; None where they are
    not divided, equal parts are the same, or it does not fit.

    Args:
        completer: of the problem.
        structure: what is completed.
        size: micro-batch size in sequences.
    """
    if not completer.sharded or not may_choose(completer.costs, "optimizer_share"):
        return None
    if len(structure) < 2 or completer.batch < size * len(structure):
        return None
    # First as if states took no memory: what is left then is their room.
    free = completer.whole(structure, completer.table(structure, size, False, NO_STATES))
    if free is None:
        return None
    for placement in with_shares_by_room(completer.costs, free.placement(completer.own_size)):
        found = _in_parts(completer, structure, size, placement)
        if found is not None:
            return found
    return None


def _in_parts(
    completer: Completer, structure: Structure, size: int, placement: Placement
) -> Completion | None:
    # Each stage's part of the states, and tables with these parts.
    parts = {
        # A part p of the states is as if 1 / p holders divided them.
        unit: StateHolders(*[1 / part for part in stage.state_parts])
        for units, replica in zip(structure, placement.replicas, strict=True)
        for unit, stage in zip(units, replica.stages, strict=True)
        if stage.state_parts is not None
    }
    equal = completer.table(structure, size, False)
    tables = completer.by_room[structure, size] = Tables(equal.costs, equal.options, parts)
    found = completer.whole(structure, tables)
    # Complete anew: what fits may be other layers.
    if found is None:
        return None
    shares = [[stage.optimizer_share for stage in r.stages] for r in placement.replicas]
    return replace(found, optimizer_shares=shares)


def with_shares_by_room(costs: CostModel, placement: Placement) -> Iterator[Placement]:
    """Yield the placement with shares by the states that each stage's fullest device has room for:
    as near to equal as memory allows, and less near, since shares are whole numbers and the ends of
    a model have states of their own.  Without anything to divide nothing comes."""
    training = costs.workload.training
    if not training.use_distributed_optimizer or not may_choose(costs, "optimizer_share"):
        return
    if len(placement.replicas) < 2:
        return
    costs, rows = costs.sharded_as(placement), costs.vocab_rows(placement.widths)
    rooms = [
        [_room(costs, placement, r, s, rows) for s in range(len(replica.stages))]
        for r, replica in enumerate(placement.replicas)
    ]
    most = max(room for of_replica in rooms for room in of_replica)
    if most <= 0:
        return
    level, tried = _level(placement, rooms), set[tuple[tuple[int, ...], ...]]()
    for margin in _MARGINS:
        # None keeps more than this.
        whole = min(most, margin * level)
        shares = _in_whole_numbers([[min(1.0, room / whole) for room in of] for of in rooms])
        common = gcd(*(share for of_replica in shares for share in of_replica))
        found = tuple(tuple(share // common for share in of_replica) for of_replica in shares)
        # Equal parts are what the default says.
        if found not in tried and len({share for own in found for share in own}) > 1:
            yield with_optimizer_shares(placement, found)
        tried.add(found)


def _in_whole_numbers(parts: Sequence[Sequence[float]]) -> list[list[int]]:
    """Return shares for parts of the largest one, in the whole numbers up to `_LARGEST` that round
    down least."""
    smallest = min(part for of_replica in parts for part in of_replica)

    def rounded(most: int) -> list[list[int]]:
        return [[max(1, int(most * part + ROUNDING)) for part in of] for of in parts]

    def kept(most: int) -> float:
        shares = chain.from_iterable(rounded(most))
        return min(
            share / (most * part)
            for share, part in zip(shares, chain.from_iterable(parts), strict=True)
            if most * part >= 1
        )

    # Fewer than make the smallest part a whole one would give it too much.
    least = min(_LARGEST, ceil(1 / smallest) if smallest else _LARGEST)
    return rounded(max(range(least, _LARGEST + 1), key=lambda most: (kept(most), most)))


def _level(placement: Placement, rooms: Sequence[Sequence[float]]) -> float:
    """Return the least part of a layer's states that its holders keep at most, so that they have
    room for all of them; infinite where they have none.

    Args:
        rooms: copies of all the states of its layers that each stage has room for,
            [replica][stage].
    """
    holders: dict[int, list[float]] = {}
    for replica, of_replica in zip(placement.replicas, rooms, strict=True):
        for first, stage, room in zip(
            replica.first_layers, replica.stages, of_replica, strict=True
        ):
            for layer in range(first, first + stage.num_layers):
                holders.setdefault(layer, []).extend([room] * stage.context_parallel)
    return max(map(_level_of, set(map(tuple, map(sorted, holders.values())))))


def _level_of(rooms: Sequence[float]) -> float:
    left = 1.0
    for number, room in enumerate(rooms):
        # Equal parts of what is left, once all that are left have room for them.
        level = left / (len(rooms) - number)
        if room >= level:
            return level
        left -= room
    return inf


def _room(costs: CostModel, placement: Placement, r: int, s: int, rows: int) -> float:
    """Return how many copies of all the states of the stage's layers fit into the fullest
    device."""
    replica = placement.replicas[r]
    num_layers = replica.stages[s].num_layers
    memory = costs.stage_memory(replica, s, rows)
    states = memory.parts_bytes(num_layers)["optimizer"]
    copies = memory.update_base_bytes + num_layers * memory.update_layer_bytes
    # Two moments may be the peak: in a pass, and in the update with copies of the states.
    moments = (
        (memory.training_bytes(num_layers), states),
        (memory.updating_bytes(num_layers), states + copies),
    )
    room = min((memory.capacity_bytes - held + own) / own for held, own in moments)
    return max(0.0, room / costs.holders.layers)
