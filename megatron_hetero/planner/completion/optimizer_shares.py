"""Shares of the distributed optimizer's states by free memory.

By default the holders of a weight divide its states equally, so the holder with the least memory
decides what fits.  Here holders with more room keep more (water filling): all fill the same part of
their free memory.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

from megatron_hetero.cost.choices import may_choose
from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import Placement
from megatron_hetero.cost.placing import with_optimizer_shares
from megatron_hetero.planner.completion.filled import Completion
from megatron_hetero.planner.completion.tables import NO_STATES, Tables
from megatron_hetero.planner.units import Structure

if TYPE_CHECKING:
    from megatron_hetero.planner.completion.completer import Completer

_LARGEST = 16
"""Shares are whole numbers up to this."""


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
    placement = with_shares_by_room(completer.costs, free.placement(completer.own_size))
    if placement is None:
        return None
    # Each stage's part of the states, and tables with these parts.
    parts = {
        # A part p of the states is as if 1 / p holders divided them.
        unit: StateHolders(*[1 / part for part in stage.state_parts])
        for chain, replica in zip(structure, placement.replicas, strict=True)
        for unit, stage in zip(chain, replica.stages, strict=True)
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


def with_shares_by_room(costs: CostModel, placement: Placement) -> Placement | None:
    """Return the placement with shares in proportion to the states that each stage's fullest
    device has room for; None where they would be equal, or there is nothing to divide."""
    training = costs.workload.training
    if not training.use_distributed_optimizer or not may_choose(costs, "optimizer_share"):
        return None
    if len(placement.replicas) < 2:
        return None
    costs, rows = costs.sharded_as(placement), costs.vocab_rows(placement.widths)
    rooms = [
        [_room(costs, placement, r, s, rows) for s in range(len(replica.stages))]
        for r, replica in enumerate(placement.replicas)
    ]
    # Relative to the largest room, in whole numbers up to `_LARGEST`.
    most = max(room for of_replica in rooms for room in of_replica)
    if most <= 0:
        return None
    shares = [[max(1, round(_LARGEST * room / most)) for room in of] for of in rooms]
    # Equal rooms: the default says the same.
    if all(share == _LARGEST for of_replica in shares for share in of_replica):
        return None
    common = gcd(*(share for of_replica in shares for share in of_replica))
    shares = [[share // common for share in of_replica] for of_replica in shares]
    return with_optimizer_shares(placement, shares)


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
