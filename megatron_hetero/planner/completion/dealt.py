"""Replicas that deal experts out over alike ones: which way is fastest for each stage.

Replicas that are completed alike form blocks: as many as the largest group of experts of their
stages takes.  The replicas of a block do the same micro-batches, since their ranks exchange tokens
in every layer.  Every stage takes the way with which it is fastest for its number of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING

from megatron_hetero.plan.sharding.expert_groups import stages_in_group
from megatron_hetero.planner.completion.filled import Completion, Filled, shares
from megatron_hetero.planner.completion.stage_lines import StageOption
from megatron_hetero.planner.completion.stage_places import StagePlace
from megatron_hetero.planner.division.layers import minimax
from megatron_hetero.planner.units import Chain, Structure

if TYPE_CHECKING:
    from megatron_hetero.planner.completion.completer import Completer
    from megatron_hetero.planner.completion.tables import Tables

_LOOK = 500
"""Work of a stage whose ways to deal experts out are looked at for the first time."""


def dealt_over_replicas(
    completer: Completer, structure: Structure, size: int
) -> Completion | None:
    """Complete a structure with experts dealt out over replicas that are alike; None where it does
    not fit so, or no stage gains from it.

    Args:
        completer: of the problem.
        structure: what is completed.
        size: micro-batch size in sequences.
    """
    tables = completer.table(structure, size, False)
    alike: dict[int, list[int]] = {}
    for r, chain in enumerate(structure):
        alike.setdefault(completer.shape(chain), []).append(r)
    # Alike replicas are filled once, and fall into blocks.
    most = completer.batch // size - len(structure) + 1
    filled: dict[int, Filled] = {}
    blocks: list[list[int]] = []
    for members in alike.values():
        found = _filled(completer, tables, [structure[r] for r in members], most)
        if found is None:
            return None
        stages = zip(structure[members[0]], found.options, strict=True)
        # A block has as many replicas as every stage's groups of experts divide.
        whole = lcm(
            *(stages_in_group(own.expert_groups, len(unit.devices)) for unit, own in stages)
        )
        blocks += [members[i : i + whole] for i in range(0, len(members), whole)]
        filled.update(dict.fromkeys(members, found))
    # No stage gains: the plain completion is the same.
    if not any(option.expert_groups for one in filled.values() for option in one.options):
        return None
    # A block takes as many micro-batches at once as it has replicas.
    together = [replace(filled[b[0]], size=size * len(b)) for b in blocks]
    shared = shares(completer.batch, together)
    if shared is None:
        return None
    # All replicas of a block do the block's number of micro-batches.
    counts = {r: number for block, number in zip(blocks, shared[0], strict=True) for r in block}
    order = range(len(structure))
    return Completion(
        structure,
        tuple([filled[r] for r in order]),
        tuple([counts[r] for r in order]),
        shared[1],
        False,
        dispatcher=completer.dealt_by,
    )


def _filled(
    completer: Completer, tables: Tables, chains: Sequence[Chain], most: int
) -> Filled | None:
    """Return one of some alike replicas, each of whose stages may deal experts out over all of
    them; None where the layers do not fit."""
    first, depth = chains[0], len(chains[0])
    completer.work += 20 * depth
    before = tables.options.num_looked
    options: list[tuple[StageOption, ...]] = []
    for index, unit in enumerate(first):
        place = StagePlace(
            unit.devices,
            unit.tensor_shares,
            index == 0,
            index == depth - 1,
            min(depth - index, most),
            context_parallel=unit.context_parallel,
            context_shares=unit.context_shares,
            peers=tuple([chain[index].devices for chain in chains]),
        )
        options.append(tables.options.of(place))
    # Ways looked at for the first time are work; known ones are not.
    completer.work += _LOOK * (tables.options.num_looked - before)
    layers = minimax(
        completer.problem.num_layers, [[option.time_s for option in of] for of in options]
    )
    if layers is None:
        return None
    chosen = tuple([of[n - 1] for n, of in zip(layers, options, strict=True)])
    quick = completer.quick(tables, first, [option.time_s for option in chosen], False)
    return Filled(layers, chosen, None, tables.size, *quick)
