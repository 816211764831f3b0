"""The contract between planner and runtime: the frozen `Plan`, and its asymmetric part, `Layout`.

A `Layout` says what a person can type on one line: widths, shares, layer counts, micro-batches.
A `Plan` adds what a machine has to know: devices, recompute, precision, launch counts, estimates
and the inputs it was made from.  Nothing here checks anything: `plan.checks.validate` does, one
function for each invariant, and every way into a Plan (file, layout, planner) goes through it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from megatron_hetero.cluster.makers import Library
from megatron_hetero.hashed import value
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import ONLY_IF_SET, Precision
from megatron_hetero.plan.estimates import Estimates

PLAN_SCHEMA_VERSION = 1

ScheduleName = Literal["1f1b", "interleaved", "zero-bubble", "synthesised"]
"""Origin of the stages' orders; "1f1b" where they have none."""


@value(frozen=True)
class StageShape:
    """One stage: `num_layers` consecutive layers, held by `tensor_parallel` devices.

    `shares` gives each device's part of heads, MLP columns and vocabulary rows as small integers
    (3:2:2:1); None means equal parts.  With `context_parallel` c there are c such groups, each of
    which holds all of the stage's weights and one c-th of every sequence, or by `context_shares`
    each its own part of it.

    `expert_shares`, one for each device, deals whole experts out to the devices of a group (expert
    parallelism inside the stage); None divides every expert among all of them.  `expert_groups`
    deals experts out over the ranks of the stage, or of alike stages in several replicas
    (`plan.sharding.expert_groups`).  It is the pair of stock Megatron's sizes (EP, ETP): the parts
    into which the experts are dealt (`--expert-model-parallel-size`), and the ranks that divide
    each expert (`--expert-tensor-parallel-size`).

    `num_sharded_layers`: of the first so many layers of the stage each device keeps a part of the
    weights, gradients and optimizer's state that it holds with other replicas (ZeRO-3); they are
    gathered for each pass. The other layers are whole.
    """

    tensor_parallel: int
    num_layers: int
    shares: tuple[int, ...] | None = None
    context_parallel: int = 1
    expert_shares: tuple[int, ...] | None = field(default=None, metadata=ONLY_IF_SET)
    num_sharded_layers: int = field(default=0, metadata=ONLY_IF_SET)
    context_shares: tuple[int, ...] | None = field(default=None, metadata=ONLY_IF_SET)
    expert_groups: tuple[int, int] | None = field(default=None, metadata=ONLY_IF_SET)

    def __str__(self) -> str:
        # Parts in the order of the grammar in `plan.layout`; each is empty at its default.
        shares = "" if self.shares is None else f"({':'.join(map(str, self.shares))})"
        context = "" if self.context_parallel == 1 else f"cp{self.context_parallel}"
        if self.context_shares is not None:
            context = f"cp{self.context_parallel}({':'.join(map(str, self.context_shares))})"
        experts = ""
        if self.expert_shares is not None:
            table = f"({':'.join(map(str, self.expert_shares))})"
            # Equal shares are what the size alone means.
            is_equal = len(set(self.expert_shares)) == 1
            experts = f"ep{len(self.expert_shares)}{'' if is_equal else table}"
        elif self.expert_groups is not None:
            size, width = self.expert_groups
            # `epN` alone, with N the stage's width, would be read as `expert_shares`.
            is_told_apart = width == 1 and size != self.tensor_parallel
            experts = f"ep{size}{'' if is_told_apart else f'etp{width}'}"
        sharded = f"z{self.num_sharded_layers}" if self.num_sharded_layers else ""
        return f"tp{self.tensor_parallel}{shares}{context}{experts}:{self.num_layers}{sharded}"

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel * self.context_parallel

    @property
    def expert_width(self) -> int:
        """Return how many ranks divide each expert of a model with experts."""
        if self.expert_groups is not None:
            return self.expert_groups[1]
        return 1 if self.expert_shares is not None else self.tensor_parallel

    @property
    def uneven_context_shares(self) -> tuple[int, ...] | None:
        """Return the shares of every sequence where they are unlike; None where all are equal."""
        shares = self.context_shares
        return shares if shares is not None and len(set(shares)) > 1 else None


@dataclass(frozen=True)
class ReplicaShape:
    """One data-parallel copy of the model: its stages, and its micro-batches of each global batch.

    `micro_batch_size` is None when it is the job's (`--micro-batch-size`).
    """

    stages: tuple[StageShape, ...]
    num_micro_batches: int
    micro_batch_size: int | None = None

    def __str__(self) -> str:
        size = "" if self.micro_batch_size is None else f"x{self.micro_batch_size}"
        return f"{','.join(map(str, self.stages))} @{self.num_micro_batches}{size}"

    @property
    def num_devices(self) -> int:
        return sum(s.num_devices for s in self.stages)

    @property
    def num_layers(self) -> int:
        return sum(s.num_layers for s in self.stages)


@dataclass(frozen=True)
class Layout:
    """The asymmetric part of a plan.

    Its text is the one-line form, canonical: one space around `|` and before `@`, none elsewhere;
    `plan.layout` parses it.
    """

    replicas: tuple[ReplicaShape, ...]

    def __str__(self) -> str:
        return " | ".join(map(str, self.replicas))

    @property
    def num_devices(self) -> int:
        return sum(r.num_devices for r in self.replicas)

    @property
    def tensor_parallel_widths(self) -> tuple[int, ...]:
        """Return the distinct widths, ascending."""
        return tuple(sorted({s.tensor_parallel for r in self.replicas for s in r.stages}))

    @property
    def has_context_parallel(self) -> bool:
        """Return True if a stage divides its sequences among several groups."""
        return any(s.context_parallel > 1 for r in self.replicas for s in r.stages)

    @property
    def has_uneven_context_parallel(self) -> bool:
        """Return True if the groups of a stage have unequal shares of its sequences."""
        return any(s.uneven_context_shares for r in self.replicas for s in r.stages)

    @property
    def has_expert_groups(self) -> bool:
        """Return True if a stage deals experts out as `StageShape.expert_groups` says."""
        return any(s.expert_groups for r in self.replicas for s in r.stages)

    @property
    def has_sharded_layers(self) -> bool:
        """Return whether the replicas keep parts of the weights of some layers."""
        return any(s.num_sharded_layers for r in self.replicas for s in r.stages)

    @property
    def has_idle_rounds(self) -> bool:
        """Return whether a replica that is done gives its parts of sharded layers to others, which
        have more micro-batches."""
        counts = {replica.num_micro_batches for replica in self.replicas}
        return self.has_sharded_layers and len(counts) > 1


@value(frozen=True)
class LayerRange:
    """Layers `first_layer .. first_layer + num_layers - 1` of the model."""

    first_layer: int
    num_layers: int


@dataclass(frozen=True)
class Stage:
    """A stage on its devices.  What is None follows the job's own flags.

    Layers `first_layer .. first_layer + shape.num_layers - 1`; the first stage of a replica also
    holds the embedding, the last one the final norm and the output layer.
    `devices` ("machine:index") are in tensor-parallel order, which is also rank order, one
    tensor-parallel group after the other; empty when the plan came from a bare layout.
    `num_launched_forwards`: forwards launched before the first backward (1F1B's own: the number of
    stages from this one to the last).
    `chunks`: the stage's pieces of the model where it holds several (interleaved pipeline); their
    layers make up `shape.num_layers`, and `first_layer` is that of the first.
    `order`: what the stage computes when (`plan.order`), for example "FFFBFBFBB"; None is 1F1B.
    `optimizer_share`: how much of the distributed optimizer's state each of its devices keeps of
    what it holds with other replicas, relative to the others' shares; None is 1.
    """

    shape: StageShape
    first_layer: int
    devices: tuple[str, ...] = ()
    recompute: Literal["none", "selective", "full"] | None = None
    recompute_num_layers: int | None = None
    precision: Precision | None = None
    num_launched_forwards: int | None = None
    chunks: tuple[LayerRange, ...] = ()
    order: str | None = None
    optimizer_share: int | None = None


@dataclass(frozen=True)
class Replica:
    """One copy of the model: its stages in pipeline order, and its micro-batches in a step.

    `micro_batch_size` is in sequences; None is the job's.
    """

    stages: tuple[Stage, ...]
    num_micro_batches: int
    micro_batch_size: int | None = None

    @property
    def shape(self) -> ReplicaShape:
        return ReplicaShape(
            tuple(s.shape for s in self.stages), self.num_micro_batches, self.micro_batch_size
        )


@dataclass(frozen=True)
class Host:
    """Machine of the launch, in `--node-rank` order, with the GPUs that train, in rank order.

    `node` is the machine's name, as under `nodes` in cluster.yaml; `host` is its address.
    `gpu_type` is None where these are of several types: `gpu_types` then has one for each.
    """

    node: str
    host: str
    gpu_type: str | None
    gpu_indices: tuple[int, ...]
    gpu_types: tuple[str, ...] = ()
    library: Library | None = None
    """Communication library of its GPUs; None where the name of their type says it."""

    @property
    def type_by_device(self) -> dict[str, str]:
        """Map each GPU of the host, by "machine:index" in rank order, to its type."""
        types = self.gpu_types or (self.gpu_type or "",) * len(self.gpu_indices)
        return {f"{self.node}:{i}": t for i, t in zip(self.gpu_indices, types, strict=True)}

    @property
    def kind(self) -> str:
        """Return the GPU type for people, or the types with the number of GPUs."""
        return self.gpu_type or " + ".join(
            f"{number} x {name}" for name, number in Counter(self.gpu_types).items()
        )


@dataclass(frozen=True)
class Plan:
    """Everything the runtime needs and nothing it must guess.

    `inputs` maps "cluster", "model", "profile" to the sha256 of their parsed content.
    `workload` and `estimates` are None for a plan made from a bare layout.
    `exchange_groups` are names of machines: gradients are reduced inside each group before they go
    from group to group (`exchange.groups.by_group`); empty is one exchange among all holders.
    `exchange_uplinks` gives each of these machines the relative bandwidth of its uplink, by which
    machines and groups own parts of gradients; empty is equal parts.
    """

    replicas: tuple[Replica, ...]
    workload: Workload | None = None
    hosts: tuple[Host, ...] = ()
    idle_devices: tuple[str, ...] = ()
    idle_reasons: Mapping[str, str] = field(default_factory=dict)
    schedule: ScheduleName = "1f1b"
    exchange_groups: tuple[tuple[str, ...], ...] = field(default=(), metadata=ONLY_IF_SET)
    exchange_uplinks: tuple[tuple[int, ...], ...] = field(default=(), metadata=ONLY_IF_SET)
    estimates: Estimates | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    made_by: str = ""
    schema_version: int = PLAN_SCHEMA_VERSION

    def __hash__(self) -> int:
        """Return a hash of the fields without mappings, which have none."""
        return hash((self.replicas, self.workload, self.hosts, self.schedule))

    @property
    def layout(self) -> Layout:
        """Return the shapes of all replicas, in the form of the one-line layout."""
        return Layout(tuple(r.shape for r in self.replicas))

    @cached_property
    def type_by_device(self) -> dict[str, str]:
        """Map every device in use, by "machine:index" in rank order, to its GPU type; empty without
        hosts."""
        return {d: t for host in self.hosts for d, t in host.type_by_device.items()}
