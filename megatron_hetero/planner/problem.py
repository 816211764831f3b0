"""What a strategy searches: the devices that may be used, in an order that no file can change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron_hetero.cluster.makers import mixed_libraries
from megatron_hetero.cluster.nodes import Device, Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.choices import context_parallels, may_divide_on
from megatron_hetero.cost.model import CostModel, MakeCosts
from megatron_hetero.cost.placement import PlacedStage, Placement
from megatron_hetero.cost.widths import usable_gpus
from megatron_hetero.cost.work.compute import can_train
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import LibraryError, UsageError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.layout import MAX_CONTEXT_PARALLEL
from megatron_hetero.planner.objective import THROUGHPUT, Objective, check_objective
from megatron_hetero.planner.replica_shapes import Likeness
from megatron_hetero.planner.restrictions.mixture import check_mixture
from megatron_hetero.planner.restrictions.one_library import check_trains, unused_reason


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


def chains_of(placement: Placement) -> list[Chain]:
    """Return the units that a placement's replicas run on."""
    return [tuple([unit_of(stage) for stage in r.stages]) for r in placement.replicas]


def layers_of(placement: Placement) -> list[tuple[int, ...]]:
    """Return the layers of a placement's stages, [replica][stage]."""
    return [tuple([stage.num_layers for stage in r.stages]) for r in placement.replicas]


@dataclass(frozen=True)
class Problem:
    """One planning question.

    `nodes` have at least one usable GPU and are sorted by name; `gpus` and `widths` give each its
    usable GPU indices and tensor-parallel widths, ascending; `idle_reasons` says why the rest of
    the cluster stays unused.
    """

    costs: CostModel
    nodes: tuple[Node, ...]
    gpus: Mapping[str, tuple[int, ...]]
    widths: Mapping[str, tuple[int, ...]]
    idle_reasons: Mapping[str, str]
    make_costs: MakeCosts = CostModel
    objective: Objective = THROUGHPUT

    @cached_property
    def likeness(self) -> Likeness:
        """Return which nodes and paths are alike."""
        return Likeness(self.cluster)

    @property
    def cluster(self) -> Cluster:
        """The whole cluster, nodes sorted by name."""
        return self.costs.cluster

    @property
    def workload(self) -> Workload:
        """Return what is trained."""
        return self.costs.workload

    @cached_property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return self.workload.model.num_layers

    @cached_property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step over all replicas."""
        training = self.workload.training
        return training.global_batch_size // training.micro_batch_size

    @cached_property
    def num_gpus(self) -> int:
        """GPUs that may be used."""
        return sum(len(self.gpus[node.name]) for node in self.nodes)

    @cached_property
    def divides_sequences(self) -> bool:
        """Whether stages may have context parallelism: where speed is all that counts."""
        objective = self.objective
        return (
            not (objective.stock_only or objective.may_want_fewer(self.cluster))
            and self.costs.has_variants
            and bool(self.dividing_nodes)
            and bool(context_parallels(self.costs, 1, max(2, self.num_gpus)))
        )

    @cached_property
    def dividing_nodes(self) -> frozenset[str]:
        """The nodes whose GPUs may have a part of each sequence."""
        training = self.workload.training
        return frozenset(n.name for n in self.nodes if may_divide_on(training, n.gpu_type))

    def context_sizes(self, width: int) -> frozenset[int]:
        """Return the context-parallel sizes above 1 of stages in groups of this width."""
        if width not in self._context_sizes:
            most = min(self.num_gpus // width, MAX_CONTEXT_PARALLEL)
            self._context_sizes[width] = frozenset(context_parallels(self.costs, width, most))
        return self._context_sizes[width]

    @cached_property
    def _context_sizes(self) -> dict[int, frozenset[int]]:
        return {}

    def may_be_a_unit(self, unit: Unit) -> bool:
        """Return whether job and nodes allow the groups of a unit.  Units in shares were checked
        where they were made (`moves.unlike_groups`)."""
        width, context = unit.width, unit.context_parallel
        return bool(unit.shares) or (
            (
                context == 1
                or (
                    context in self.context_sizes(width)
                    and all(node in self.dividing_nodes for node, _ in unit.parts)
                )
            )
            and all(
                width in self.widths[node] and len(indices) % width == 0
                for node, indices in unit.parts
            )
        )

    def max_stages(self) -> int:
        """Return the longest pipeline that the limits and the layers allow."""
        limit = self.cluster.limits.max_pipeline_parallel or self.num_layers
        return min(limit, self.num_layers)

    def replica_counts(self) -> range:
        """Return replica counts that the limits, the batch and the GPUs allow."""
        wanted = self.cluster.limits.num_replicas
        # A replica has a micro-batch and a GPU at least.
        most = min(self.num_micro_batches, self.num_gpus)
        if wanted is None:
            return range(1, most + 1)
        return range(wanted, wanted + 1) if wanted <= most else range(0)

    def may_start(self, unit: Unit) -> bool:
        """Return whether a replica's first stage may be there."""
        # A unit over several nodes has to be pinned with all of them.
        pins = self.cluster.limits.first_stage_nodes
        return not pins or all(node in pins for node, _ in unit.parts)

    def may_end(self, unit: Unit) -> bool:
        """Return whether a replica's last stage may be there."""
        pins = self.cluster.limits.last_stage_nodes
        return not pins or all(node in pins for node, _ in unit.parts)

    def chain_is_allowed(self, chain: Chain) -> bool:
        """Return whether length and both ends of a replica keep to the limits."""
        return (
            0 < len(chain) <= self.max_stages()
            and self.may_start(chain[0])
            and self.may_end(chain[-1])
        )


def canonical_cluster(cluster: Cluster) -> Cluster:
    """Return the same cluster with its nodes sorted by name: the order of a file does not count."""
    return replace(cluster, nodes=tuple(sorted(cluster.nodes, key=lambda node: node.name)))


def make_problem(
    cluster: Cluster,
    workload: Workload,
    profile: Profile | None = None,
    make_costs: MakeCosts = CostModel,
    objective: Objective = THROUGHPUT,
) -> Problem:
    """Check the workload and sort out which GPUs can be used at all.

    Args:
        make_costs: prices that take the place of the project's own cost model.
        objective: what plans are compared by, and the limits of time and money.
    Raises:
        UsageError: the micro-batch size does not divide the global batch; the objective needs
            prices, or a number of steps, that are not given.
        UnsupportedError: the job asks for something that no plan of this version does.
        LibraryError: its GPUs have several communication libraries (`one_library` plans for each),
            or none with which anything trains.
    """
    # Refuse jobs that no plan trains.
    training = workload.training
    if training.global_batch_size % training.micro_batch_size:
        raise UsageError(
            f"--global-batch-size {training.global_batch_size} is no multiple of "
            f"--micro-batch-size {training.micro_batch_size}; change one of them"
        )
    if workload.model.num_experts and not training.sequence_parallel:
        raise UsageError(
            f"--num-experts {workload.model.num_experts} without --sequence-parallel: Megatron "
            "trains experts on a tensor-parallel group only so; add it (at width 1 it does nothing)"
        )
    check_mixture(workload)
    check_trains(cluster)
    # An order of nodes that no file can change.
    cluster = canonical_cluster(cluster)
    costs = make_costs(cluster, workload, profile)
    gpus: dict[str, tuple[int, ...]] = {}
    widths: dict[str, tuple[int, ...]] = {}
    idle_reasons: dict[str, str] = {}
    # GPUs and widths of each node, and why the others stay idle.
    for node in cluster.nodes:
        usable = usable_gpus(cluster, node)
        can_be_used = can_train(training, node.gpu_type)
        for device in node.devices:
            if why := unused_reason(cluster, node):
                idle_reasons[device.name] = why
            elif device.index not in usable:
                idle_reasons[device.name] = "kept idle by limits.idle or --without"
            elif not can_be_used:
                fp8 = " with --fp8-format" if training.fp8 else ""
                idle_reasons[device.name] = (
                    f"{node.gpu_type.name} cannot train in {training.precision}{fp8}"
                )
        if usable and can_be_used:
            gpus[node.name] = usable
            widths[node.name] = tuple(w for w in costs.widths(node) if w <= len(usable))
    nodes = tuple(node for node in cluster.nodes if node.name in gpus)
    # Data for the objective, and one library for all.
    check_objective(objective, cluster, nodes)
    if mixed := mixed_libraries((n.name, n.gpu_type.name, n.gpu_type.library) for n in nodes):
        raise LibraryError(mixed)
    return Problem(costs, nodes, gpus, widths, idle_reasons, make_costs, objective)


def equal_units(problem: Problem, node: Node, width: int) -> list[Unit]:
    """Return as many units of one width as the node's usable GPUs give."""
    if width not in problem.widths[node.name]:
        return []
    gpus = problem.gpus[node.name]
    starts = range(0, len(gpus) - width + 1, width)
    return [Unit(node.name, gpus[start : start + width]) for start in starts]
