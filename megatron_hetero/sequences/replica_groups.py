"""The groups of a job on a plan: its replicas, each a pipeline of stages.

Replicas of equal stages that follow each other in the plan may divide a sequence: each runs its
part through its own pipeline, and like stages gather each other's keys and values.  Others train
whole sequences, each on its own.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import accumulate

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.placement import own_launch_counts
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.communication.communicators import stage_ranks
from megatron_hetero.plan.plan import Plan, Replica
from megatron_hetero.sequences.cluster_groups import refuse_models
from megatron_hetero.sequences.pipelines import PipelineRates
from megatron_hetero.sequences.price.group_price import GroupPrice
from megatron_hetero.sequences.price.replica_rates import group_prices, replica_rates
from megatron_hetero.sequences.tree import GroupTree, Nest, make_tree, nested


@dataclass(frozen=True)
class ReplicaGroups:
    """The groups, and the pipeline of each replica."""

    tree: GroupTree
    pipelines: tuple[PipelineRates, ...]


def replica_groups(
    cluster: Cluster, plan: Plan, workload: Workload, profile: Profile | None = None
) -> ReplicaGroups:
    """Make the groups of a job on a plan; the replicas of the plan are the ranks of the groups.

    Args:
        cluster: with the devices of the plan.
        plan: of `job_plan.dealt_plan`.
        workload: model and training.
        profile: measured times.
    Raises:
        InfeasiblePlanError: a replica cannot hold a single token.
    """
    refuse_models(workload)
    # Filled pipelines, whatever the deals.
    full = tuple(
        replace(r, num_micro_batches=max(r.num_micro_batches, *launch_counts(r)))
        for r in plan.replicas
    )
    placement = placement_of(replace(plan, replicas=full), cluster)
    # What each replica takes, and a check that it holds a token.
    rates = replica_rates(cluster, workload, placement, profile)
    for number, of in enumerate(rates):
        if of.rates.room_bytes <= of.rates.token_bytes:
            raise InfeasiblePlanError(
                f"replica {number} of the plan ({plan.replicas[number].shape}) has a GPU without "
                "room for the activations of a token. Give it more stages or GPUs, or use "
                "--use-distributed-optimizer."
            )
    # Only replicas alike, in a row, can divide a sequence.
    runs = _runs(plan)

    def prices_of(replicas: tuple[int, ...]) -> tuple[Hashable, tuple[GroupPrice, ...]]:
        # Unlike replicas cannot gather stage by stage.
        if not any(set(replicas) <= set(run) for run in runs):
            return "apart", ()
        prices = group_prices(
            cluster,
            workload,
            [placement.replicas[r] for r in replicas],
            [rates[r] for r in replicas],
        )
        # Equal prices are equal groups: the prices are their own name.
        return prices, prices

    # Pipelines with their rates; groups nested by the plan's order.
    pipelines = tuple(
        PipelineRates(of.stages, tuple(launch_counts(replica)))
        for of, replica in zip(rates, plan.replicas, strict=True)
    )
    nest: list[Nest] = [nested(list(run)) for run in runs]
    tree = make_tree(nested(nest), prices_of)
    # [replica], for the seconds of a step beyond its slowest stage.
    others = tuple(pipeline.other_stages for pipeline in pipelines)
    return ReplicaGroups(replace(tree, other_stages=others), pipelines)


def launch_counts(replica: Replica) -> list[int]:
    """Return the forwards launched by each stage before the first backward, given enough
    micro-batches; no count is below the next stage's."""
    own = own_launch_counts(len(replica.stages))
    asked = [s.num_launched_forwards or n for s, n in zip(replica.stages, own, strict=True)]
    return list(accumulate(reversed(asked), max))[::-1]


def replica_ranks(plan: Plan) -> list[tuple[int, ...]]:
    """Return the ranks of each replica, by stage and place in it."""
    ranks_of = stage_ranks(plan)
    return [
        tuple(rank for s in range(len(replica.stages)) for rank in ranks_of[r, s])
        for r, replica in enumerate(plan.replicas)
    ]


def _runs(plan: Plan) -> list[list[int]]:
    """Divide the replicas into runs of equal stages and equal compute order, in the order of ranks,
    as in a process group; replicas of a run may gather from each other."""
    ranks = replica_ranks(plan)
    shapes = [(replica.shape.stages, launch_counts(replica)) for replica in plan.replicas]
    found: list[list[int]] = [[0]]
    for r in range(1, len(shapes)):
        is_alike = shapes[r] == shapes[r - 1]
        if is_alike and all(a < b for a, b in zip(ranks[r - 1], ranks[r], strict=True)):
            found[-1].append(r)
        else:
            found.append([r])
    return found
