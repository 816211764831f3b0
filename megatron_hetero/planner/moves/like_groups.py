"""Interchangeable groups of like GPUs in a structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_hetero.planner.units import Structure, Unit


def lengthwise(structure: Structure, kind_of: Mapping[str, int]) -> Structure:
    """Return the structure with like groups dealt node by node to replica after replica, so that
    activations stay inside nodes where possible.

    Args:
        kind_of: by node; groups of one kind and form are alike.
    """
    chains = [list(chain) for chain in structure]
    for alike in like_places(structure, kind_of):
        # Node by node: neighbours in this order are on one node as far as possible.
        units = sorted(
            [structure[r][s] for r, s in alike], key=lambda unit: (unit.node, unit.indices)
        )
        for (r, s), unit in zip(alike, units, strict=True):
            chains[r][s] = unit
    return tuple([tuple(chain) for chain in chains])


def like_places(
    structure: Sequence[Sequence[Unit]], kind_of: Mapping[str, int]
) -> list[list[tuple[int, int]]]:
    """Return replica and stage of the groups of one kind and form, for each; without groups on
    several nodes.

    Args:
        structure: the stages of each replica.
        kind_of: by node; groups of one kind and form are alike.
    """
    places: dict[tuple[int, tuple[int, ...]], list[tuple[int, int]]] = {}
    for r, chain in enumerate(structure):
        for s, unit in enumerate(chain):
            if not unit.beyond:
                places.setdefault((kind_of[unit.node], unit.form), []).append((r, s))
    return list(places.values())
