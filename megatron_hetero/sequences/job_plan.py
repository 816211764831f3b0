"""The plan of a job that trains in groups: every rank holds the whole model."""

from __future__ import annotations

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.hosts import hosts_of
from megatron_hetero.plan.plan import Plan, Replica, Stage, StageShape
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.sequences.cluster_groups import ClusterGroups


def groups_plan(cluster: Cluster, groups: ClusterGroups, workload: Workload) -> Plan:
    """Make the plan in which rank r is the r-th GPU of the groups, a replica of its own.

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
