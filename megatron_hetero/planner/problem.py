"""What a strategy searches: the devices that may be used, in an order that no file can change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_hetero.cluster.makers import mixed_libraries
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.choices import context_parallels, may_divide_on
from megatron_hetero.cost.fp8_sizes import FP8_COLUMNS, sizes_without_fp8
from megatron_hetero.cost.model import CostModel, MakeCosts
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.widths import usable_gpus
from megatron_hetero.cost.work.compute import can_train
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import LibraryError, UnsupportedError, UsageError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.layout import MAX_CONTEXT_PARALLEL
from megatron_hetero.planner.objective import THROUGHPUT, Objective, check_objective
from megatron_hetero.planner.replica_shapes import Likeness
from megatron_hetero.planner.restrictions.mixture import check_mixture
from megatron_hetero.planner.restrictions.one_library import check_trains, unused_reason
from megatron_hetero.planner.units import Chain, Unit


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
    known: dict[object, object] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )
    """What several parts of an answer ask for, found once."""

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
    def is_by_time(self) -> bool:
        """True if the faster of two placements is always the better."""
        return not (self.objective.stock_only or self.objective.may_want_fewer(self.cluster))

    @cached_property
    def divides_sequences(self) -> bool:
        """Whether stages may have context parallelism: where speed is all that counts."""
        return (
            self.is_by_time
            and self.costs.has_variants
            and bool(self.dividing_nodes)
            and bool(context_parallels(self.costs, 1, max(2, self.num_gpus)))
        )

    @cached_property
    def dividing_nodes(self) -> frozenset[str]:
        """The nodes whose GPUs may have a part of each sequence."""
        return frozenset(n.name for n in self.nodes if may_divide_on(self.workload, n.gpu_type))

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
    lacking = sizes_without_fp8(workload.model, even_share(workload.model, 1))
    if training.fp8 and (sizes := [f"{size} {what}" for what, size in lacking]):
        raise UnsupportedError(
            f"--fp8-format: Transformer Engine has no fp8 product with {', '.join(sizes)}: no "
            f"multiple of {FP8_COLUMNS}; leave the flag out, or change the model's sizes"
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
