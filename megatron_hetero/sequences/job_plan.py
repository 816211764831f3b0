"""The plan and the groups of a job of dealt sequences: every rank holds the whole model, or the
stages of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.hosts import hosts_of
from megatron_hetero.plan.place import place_in_order
from megatron_hetero.plan.plan import Plan, Replica, Stage, StageShape
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.sequences.cluster_groups import ClusterGroups, cluster_groups
from megatron_hetero.sequences.pipelines import WHOLE
from megatron_hetero.sequences.price.modelled import TRAINED
from megatron_hetero.sequences.replica_groups import ReplicaGroups, replica_groups


def job_plan(
    cluster: Cluster, workload: Workload, asked: Plan | None, profile: Profile | None = None
) -> Plan:
    """Return the plan of a job of dealt sequences: the one that is asked for, or every GPU a
    replica.

    Args:
        cluster: the machines.
        workload: model and training.
        asked: validated; None is none.
        profile: measured times.
    """
    if asked is not None:
        return dealt_plan(cluster, asked, workload)
    groups = cluster_groups(cluster, workload, profile, exchanges=TRAINED)
    return groups_plan(cluster, groups, workload)


def job_groups(
    cluster: Cluster,
    workload: Workload,
    asked: Plan | None,
    plan: Plan,
    profile: Profile | None = None,
) -> ReplicaGroups:
    """Return the groups of a job of dealt sequences, and the pipeline of each replica.

    Args:
        cluster: the machines.
        workload: model and training.
        asked: as in `job_plan`.
        plan: that `job_plan` made of it.
        profile: measured times.
    """
    if asked is not None:
        return replica_groups(cluster, plan, workload, profile)
    tree = cluster_groups(cluster, workload, profile, exchanges=TRAINED).tree
    # Without a plan each rank is a replica of one stage, whose times are its group's.
    return ReplicaGroups(tree, (WHOLE,) * tree.num_ranks)


def groups_plan(cluster: Cluster, groups: ClusterGroups, workload: Workload) -> Plan:
    """Make a plan of single-GPU replicas, where rank r is the r-th GPU of the groups.

    The replicas' numbers of micro-batches only add up to the global batch: a deal decides them.

    Args:
        cluster: the machines.
        groups: of the job, on this cluster.
        workload: model and training.
    Raises:
        UsageError: there are fewer sequences in a step than ranks.
        UnsupportedError: cards of unlike type in one machine are not next to each other in the
            groups, so that a launcher cannot number the ranks like them.
    """
    # Every GPU is a replica, with its part of the batch.
    names = [device.name for device in groups.devices]
    batch, num_ranks = workload.training.global_batch_size, len(names)
    if batch < num_ranks:
        raise UsageError(
            f"--global-batch-size {batch}: --hetero-sequences deals at least one sequence for each "
            f"of the {num_ranks} GPUs in a step. Give {num_ranks} or more, or make GPUs idle "
            "(limits.idle in cluster.yaml)."
        )
    replicas = tuple(
        Replica(
            (Stage(StageShape(1, workload.model.num_layers), 0, (name,)),),
            batch // num_ranks + (r < batch % num_ranks),
            1,
        )
        for r, name in enumerate(names)
    )
    # Ranks must come out in the order of the groups.
    plan = Plan(replicas, hosts=hosts_of(names, cluster))
    validate_plan(plan)
    if [place.device for place in rank_table(plan)] != names:
        raise UnsupportedError(
            "--hetero-sequences: groups go by types of GPU, and a machine has cards of several "
            f"({', '.join(h.kind for h in plan.hosts if h.gpu_types)}) beside others like them, so "
            "that its ranks are not in a row. Leave cards of one type idle (limits.idle in "
            "cluster.yaml), or train on other machines."
        )
    return plan


def dealt_plan(cluster: Cluster, asked: Plan, workload: Workload) -> Plan:
    """Return a plan as a job of dealt sequences runs it: on devices, with micro-batches of one
    sequence, whose numbers only add up to the global batch.

    Args:
        cluster: the machines.
        asked: validated; one without devices gets those of the cluster in order.
        workload: model and training.
    Raises:
        UnsupportedError: the plan has what dealt sequences do not go with, by name.
        UsageError: the plan has another global batch than the job.
        PlanFormatError: the plan is not for the cluster.
    """
    # Refuse what dealt steps do not run.
    found = [*_unsupported(asked)]
    if found:
        raise UnsupportedError(
            "--hetero-sequences does not go with these parts of a plan yet:\n  "
            + "\n  ".join(dict.fromkeys(found))
            + "\nLeave them out of the plan."
        )
    # Micro-batches of one sequence each, as a deal counts.
    # Without a workload, a micro-batch of the plan counts as one sequence.
    job_size = 1 if asked.workload is None else asked.workload.training.micro_batch_size
    replicas = tuple(
        replace(
            replica,
            num_micro_batches=replica.num_micro_batches * (replica.micro_batch_size or job_size),
            micro_batch_size=1,
        )
        for replica in asked.replicas
    )
    made_for = asked.workload
    if made_for is not None:
        made_for = replace(made_for, training=replace(made_for.training, micro_batch_size=1))
    plan = replace(asked, replicas=replicas, workload=made_for, estimates=None)
    # The plan's batch must be the job's.
    batch, of_plan = workload.training.global_batch_size, sum(r.num_micro_batches for r in replicas)
    if batch != of_plan:
        raise UsageError(
            f"--global-batch-size {batch}: the micro-batches of the plan (@) have {of_plan} "
            "sequences. A deal decides who trains how many, but they have to add up: give "
            f"--global-batch-size {of_plan}, or other numbers in the plan."
        )
    plan = place_in_order(plan, cluster)
    validate_plan(plan, cluster)
    return plan


def _unsupported(plan: Plan) -> Iterator[str]:
    """Name what a deal cannot follow."""
    if plan.layout.has_context_parallel:
        yield "context parallelism (cp); the deal divides sequences, in other parts at each step"
    if plan.layout.has_sharded_layers:
        yield "sharded layers (z)"
    for replica in plan.replicas:
        for stage in replica.stages:
            if stage.order is not None or stage.chunks:
                yield "orders of computations (order, chunks); their micro-batches are counted"
            if stage.precision is not None:
                yield "the precision of single stages"
            if stage.shape.expert_shares is not None or stage.shape.expert_groups is not None:
                yield "experts (ep)"
