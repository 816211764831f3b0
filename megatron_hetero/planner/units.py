"""GPUs that hold a stage, and the chains and structures that are made of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.placement import PlacedStage, Placement


class _UnitFields(NamedTuple):
    node: str
    indices: tuple[int, ...]
    context_parallel: int = 1
    beyond: tuple[tuple[str, tuple[int, ...]], ...] = ()
    shares: tuple[int, ...] = ()


class Unit(_UnitFields):
    """GPUs of a node that work as a tensor-parallel group for a stage. With `context_parallel` c
    the unit has c such groups, each with a part of every sequence. `beyond` are GPUs on further
    nodes. `shares`, if unequal, divide each tensor among GPUs, or each sequence among groups. A
    tuple, as a `Device` is: structures of thousands of units are looked up and sorted all the time.
    """

    @cached_property
    def width(self) -> int:
        """Tensor-parallel width."""
        if self.context_parallel == 1 and not self.beyond:
            return len(self.indices)
        return sum([len(own) for _, own in self.parts]) // self.context_parallel

    @property
    def is_plain(self) -> bool:
        """True for a single group on a single node, in equal shares."""
        return self.context_parallel == 1 and not self.beyond and not self.shares

    @cached_property
    def parts(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Pairs of a node and the unit's GPUs on the node."""
        return ((self.node, self.indices), *self.beyond)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Its GPUs in rank order."""
        return tuple([Device(node, index) for node, indices in self.parts for index in indices])

    @cached_property
    def form(self) -> tuple[int, ...]:
        """A key, equal for units that differ only in nodes and GPU indices: the context-parallel
        size, the number of GPUs on each node, and after a zero the shares."""
        counts = [len(indices) for _, indices in self.parts]
        return (self.context_parallel, *counts, *((0, *self.shares) if self.shares else ()))

    @cached_property
    def group_nodes(self) -> tuple[str, ...]:
        """The node of each of its tensor-parallel groups; of one over several nodes the first."""
        if self.context_parallel == 1:
            return (self.node,)
        return tuple([node for node, own in self.parts for _ in range(len(own) // self.width)])

    @cached_property
    def stage(self) -> PlacedStage:
        """A stage of a single layer on the unit, to price boundaries."""
        return PlacedStage(
            self.devices,
            1,
            self.tensor_shares,
            context_parallel=self.context_parallel,
            context_shares=self.context_shares,
        )

    @property
    def tensor_shares(self) -> tuple[int, ...] | None:
        """The shares of its GPUs in each tensor; None where they are equal."""
        return self.shares or None if self.context_parallel == 1 else None

    @property
    def context_shares(self) -> tuple[int, ...] | None:
        """The shares of its groups in each sequence; None where they are equal."""
        return self.shares or None if self.context_parallel > 1 else None


def unit_of(stage: PlacedStage) -> Unit:
    """Return the unit that a placed stage runs on."""
    shares = stage.shares or stage.context_shares or ()
    return unit_on(stage.devices, stage.context_parallel, shares)


def unit_on(devices: Iterable[Device], context_parallel: int, shares: tuple[int, ...]) -> Unit:
    """Return GPUs as one unit; those on one node come together.

    Args:
        devices: its GPUs.
        context_parallel: groups of as many GPUs that they are.
        shares: as of `Unit`.
    """
    indices: dict[str, list[int]] = {}
    for device in devices:
        indices.setdefault(device.node, []).append(device.index)
    # The first node is the unit's own; units are compared by it first.
    (first, *beyond) = [(node, tuple(found)) for node, found in indices.items()]
    return Unit(*first, context_parallel, tuple(beyond), shares)


def divides(structure: Iterable[Chain]) -> bool:
    """Return whether any stage of a structure divides sequences among several groups."""
    return any(unit.context_parallel > 1 for chain in structure for unit in chain)


def keep_step(structure: Sequence[Chain]) -> bool:
    """Return whether replicas may divide the weights of layers: there are several, all of one
    depth, and every stage is one group in equal shares."""
    is_even = len({len(chain) for chain in structure}) == 1
    return is_even and len(structure) > 1 and all(unit.is_plain for c in structure for unit in c)


def joined_units(units: Sequence[Unit]) -> Unit:
    """Join units of equal width into a single unit that divides sequences among the groups; GPUs of
    a node come together."""
    indices: dict[str, tuple[int, ...]] = {}
    for unit in units:
        for node, own in unit.parts:
            indices[node] = (*indices.get(node, ()), *own)
    # The same order in all stages: neighbours on one node have the same part of a sequence.
    (first, *beyond) = sorted(indices.items())
    return Unit(*first, sum(unit.context_parallel for unit in units), tuple(beyond))


Chain = tuple[Unit, ...]
"""The stages of one replica, first to last."""
Structure = tuple[Chain, ...]
"""The replicas of a job."""


def along_and_across(units: Sequence[Unit], num_replicas: int) -> tuple[Structure, ...]:
    """Return equal replicas of all units: each of units that follow each other, and each with one
    of every so many; once where both are the same."""
    depth = len(units) // num_replicas
    replicas = range(num_replicas)
    along = tuple(tuple(units[r * depth : (r + 1) * depth]) for r in replicas)
    across = tuple(tuple(units[r::num_replicas]) for r in replicas)
    return (along,) if along == across else (along, across)


def chains_of(placement: Placement) -> list[Chain]:
    """Return the units that a placement's replicas run on."""
    return [tuple([unit_of(stage) for stage in r.stages]) for r in placement.replicas]


def layers_of(placement: Placement) -> list[tuple[int, ...]]:
    """Return the layers of a placement's stages, [replica][stage]."""
    return [tuple([stage.num_layers for stage in r.stages]) for r in placement.replicas]
