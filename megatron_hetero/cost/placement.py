"""Layers on devices: the part of a plan that costs time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.hashed import hashed_once, value
from megatron_hetero.model.recompute import Recompute as Recompute
from megatron_hetero.model.training import Precision, TokenDispatcher
from megatron_hetero.plan.plan import StageShape

StateParts = tuple[float, ...]
"""Parts of the optimizer's states that a device keeps: of its layers, of a tied embedding, of the
embedding and of the head where they are not tied; then, only where stages deal experts out over
replicas unlike each other, of its experts."""

StageSettings = tuple[
    tuple[int, ...] | None,
    Recompute | None,
    int | None,
    StateParts | None,
    tuple[int, ...] | None,
]
"""Shares, recompute, its number of layers, parts of optimizer states, whole experts: as of
`PlacedStage`."""

NO_SETTINGS: StageSettings = (None, None, None, None, None)
"""Settings of a stage that does all as the job's flags say."""


@dataclass(frozen=True)
class Sharding:
    """The first `num_layers` layers of a stage, whose weights the replicas divide.

    `replicas` are all of them, which come to these layers together, as they are without sharded
    layers (`with_sharded_layers`).
    """

    num_layers: int
    replicas: tuple[PlacedReplica, ...]


@dataclass(frozen=True)
class PlacedExperts:
    """Experts of a stage that are dealt out over replicas: `sizes` as `StageShape.expert_groups`,
    and `devices` of the groups that the stage's own are in, in rank order."""

    sizes: tuple[int, int]
    devices: tuple[Device, ...]


@hashed_once
@value(frozen=True)
class PlacedStage:
    """`num_layers` layers on the devices of one tensor-parallel group, in rank order; of
    `context_parallel` such groups, one after the other, each with a part of every sequence, by
    `context_shares` (None: equal ones).

    `shares`: parts of the model's heads and MLP columns by device; None is equal parts.
    `recompute`: None is the job's own; with "full", `recompute_num_layers` of the stage's layers
    (None: all).  `optimizer_share` is as in a plan; `state_parts` follow from all of them
    (`with_optimizer_shares`): the parts of the distributed optimizer's states that its devices
    keep; None is as much as every other holder.  `expert_shares`: whole experts by device; None is
    a part of every expert on each.  `sharding` follows from all
    replicas; None where every device keeps its layers whole.  `precision` is what a plan gives
    the stage; None is the job's, or what takes its place on these GPUs
    (`cost.work.stage_precision`).  `experts` follow from all replicas (`with_expert_groups`).
    """

    devices: tuple[Device, ...]
    num_layers: int
    shares: tuple[int, ...] | None = None
    recompute: Recompute | None = None
    recompute_num_layers: int | None = None
    state_parts: StateParts | None = None
    optimizer_share: int | None = None
    context_parallel: int = 1
    expert_shares: tuple[int, ...] | None = None
    sharding: Sharding | None = None
    precision: Precision | None = None
    context_shares: tuple[int, ...] | None = None
    experts: PlacedExperts | None = None

    @property
    def shape(self) -> StageShape:
        """Return the stage's part of a layout."""
        return StageShape(
            self.width,
            self.num_layers,
            self.shares,
            self.context_parallel,
            self.expert_shares,
            self.num_sharded_layers,
            self.context_shares,
            self.expert_groups,
        )

    @property
    def expert_groups(self) -> tuple[int, int] | None:
        """Return the sizes of groups of experts over replicas; None without such."""
        return None if self.experts is None else self.experts.sizes

    @property
    def place_in_experts(self) -> int | None:
        """Return the place of the first device in its groups of experts over replicas; None without
        such."""
        return None if self.experts is None else self.experts.devices.index(self.devices[0])

    @property
    def width(self) -> int:
        """Return the tensor-parallel width."""
        return len(self.devices) // self.context_parallel

    @property
    def groups(self) -> tuple[PlacedStage, ...]:
        """Split the stage into its tensor-parallel groups; each holds all of its weights."""
        if self.context_parallel == 1:
            return (self,)
        return tuple(
            replace(
                self,
                devices=self.devices[i : i + self.width],
                context_parallel=1,
                context_shares=None,
            )
            for i in range(0, len(self.devices), self.width)
        )

    @property
    def cut(self) -> tuple[int, tuple[int, ...] | None, tuple[int, ...] | None]:
        """Return the width, the shares and the whole experts by device, by which the group divides
        parameters."""
        return self.width, self.shares, self.expert_shares

    @property
    def num_sharded_layers(self) -> int:
        """Return the number of layers whose weights the replicas divide."""
        return 0 if self.sharding is None else self.sharding.num_layers

    @property
    def own_settings(self) -> StageSettings:
        """Return the settings that the stage does not share with the job."""
        return (
            self.shares,
            self.recompute,
            self.recompute_num_layers,
            self.state_parts,
            self.expert_shares,
        )


@hashed_once
@value(frozen=True)
class PlacedReplica:
    """A pipeline and the number of micro-batches in a step.

    `launch_counts`: forwards that each stage launches before its first backward, shape [stage],
    falling along the pipeline; None is 1F1B's own.  `micro_batch_size`: None is the job's.
    """

    stages: tuple[PlacedStage, ...]
    num_micro_batches: int
    launch_counts: tuple[int, ...] | None = None
    micro_batch_size: int | None = None

    @cached_property
    def first_layers(self) -> tuple[int, ...]:
        """Return the index of each stage's first layer."""
        starts = [0]
        for stage in self.stages:
            starts.append(starts[-1] + stage.num_layers)
        return tuple(starts[:-1])

    @cached_property
    def num_rounds(self) -> int:
        """Return the number of micro-batches in which the stages take part: the replica's own, or
        with sharded layers the most of any replica."""
        shardings = [stage.sharding for stage in self.stages if stage.sharding is not None]
        peers = [peer for sharding in shardings for peer in sharding.replicas]
        return max([self.num_micro_batches, *[peer.num_micro_batches for peer in peers]])

    @cached_property
    def without_sharding(self) -> PlacedReplica:
        """Return the replica with all layers whole."""
        if all(stage.sharding is None for stage in self.stages):
            return self
        return replace(self, stages=tuple(replace(s, sharding=None) for s in self.stages))

    @cached_property
    def num_in_flight(self) -> tuple[int, ...]:
        """Return [stage] micro-batches kept for backward at the peak, the stage's warm-up depth."""
        counts = self.launch_counts or own_launch_counts(len(self.stages))
        # A stage never holds more micro-batches than the replica has in a step.
        return tuple(min(count, self.num_micro_batches) for count in counts)


@hashed_once
@value(frozen=True)
class Placement:
    """All replicas of a plan; `exchange_groups` and `exchange_uplinks` are as in the plan, and
    `dispatcher` sends tokens to experts (None: the job's own)."""

    replicas: tuple[PlacedReplica, ...]
    exchange_groups: tuple[tuple[str, ...], ...] = ()
    exchange_uplinks: tuple[tuple[int, ...], ...] = ()
    dispatcher: TokenDispatcher | None = None

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Return the distinct tensor-parallel widths, ascending."""
        return tuple(sorted({s.width for r in self.replicas for s in r.stages}))

    @cached_property
    def has_shares(self) -> bool:
        """Return whether any group has shares."""
        return any(s.shares for r in self.replicas for s in r.stages)

    @cached_property
    def has_context_parallel(self) -> bool:
        """Return whether any stage divides sequences among several groups."""
        return any(s.context_parallel > 1 for r in self.replicas for s in r.stages)

    @cached_property
    def has_expert_groups(self) -> bool:
        """Return whether any stage deals experts out over replicas."""
        return any(s.experts is not None for r in self.replicas for s in r.stages)

    @cached_property
    def mixes_expert_groups(self) -> bool:
        """Return whether some stages deal experts out over replicas, and not all of them alike."""
        stages = [stage for replica in self.replicas for stage in replica.stages]
        found = {(stage.expert_groups, len(stage.devices)) for stage in stages}
        return len(found) > 1 and any(groups for groups, _ in found)

    @cached_property
    def has_sharded_layers(self) -> bool:
        """Return whether replicas divide the weights of some layers."""
        return any(s.sharding is not None for r in self.replicas for s in r.stages)

    @cached_property
    def has_idle_rounds(self) -> bool:
        """Return whether a replica that is done gives its parts of sharded layers to others."""
        counts = {replica.num_micro_batches for replica in self.replicas}
        return self.has_sharded_layers and len(counts) > 1

    def devices(self) -> Iterator[Device]:
        """Yield every device used, in layout order."""
        for replica in self.replicas:
            for stage in replica.stages:
                yield from stage.devices


def own_launch_counts(num_stages: int) -> tuple[int, ...]:
    """Return 1F1B's own launch counts: one forward for each stage from this one to the last."""
    return tuple(range(num_stages, 0, -1))
