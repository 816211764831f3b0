"""A placement that a search found, as a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from megatron_hetero import __version__
from megatron_hetero.cluster.file.description import cluster_hash
from megatron_hetero.model.load import workload_hash
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import TokenDispatcher
from megatron_hetero.plan.build import canonical_hosts, in_rank_order
from megatron_hetero.plan.plan import Plan, Replica, Stage
from megatron_hetero.plan.stock_ranks import hosts_in_rank_order
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.problem import Problem


def with_dispatcher(workload: Workload, dispatcher: TokenDispatcher) -> Workload:
    """Return the same job with another dispatcher of tokens to experts, in its flags too."""
    flags = (*workload.megatron_args, "--moe-token-dispatcher-type", dispatcher)
    training = replace(workload.training, token_dispatcher=dispatcher)
    return replace(workload, training=training, megatron_args=flags)


@lru_cache
def _hash(workload: Workload) -> str:
    return workload_hash(workload)


def plan_inputs(problem: Problem, workload: Workload) -> dict[str, str]:
    """Return what a plan is made of, by hash (`Plan.inputs`)."""
    inputs = {"cluster": cluster_hash(problem.cluster), "model": _hash(workload)}
    if problem.costs.profile is not None:
        inputs["profile"] = problem.costs.profile.content_sha256
    return inputs


def bare_plan(
    problem: Problem, best: Candidate, reasons: Mapping[str, str], interrupted: bool = False
) -> Plan:
    """Return the plan of a candidate without estimates, whose bound takes time, and not
    validated; `reasons` says why its idle devices are idle."""
    # Stages as in plan.json.
    cluster, workload = problem.cluster, problem.workload
    dispatcher = best.placement.dispatcher
    # The dispatcher is a flag of the job, and is written into its flags.
    if dispatcher not in (None, workload.training.token_dispatcher):
        workload = with_dispatcher(workload, dispatcher)
    replicas = tuple(
        Replica(
            tuple(
                Stage(
                    stage.shape,
                    first,
                    tuple(device.name for device in stage.devices),
                    recompute=stage.recompute,
                    recompute_num_layers=stage.recompute_num_layers,
                    num_launched_forwards=count,
                    precision=problem.costs.own_precision(stage),
                    optimizer_share=stage.optimizer_share,
                )
                for first, stage, count in zip(
                    replica.first_layers,
                    replica.stages,
                    replica.launch_counts or [None] * len(replica.stages),
                    strict=True,
                )
            ),
            replica.num_micro_batches,
            replica.micro_batch_size,
        )
        for replica in best.placement.replicas
    )
    # Hosts in the order of ranks.
    if best.rank_order is None:
        hosts = canonical_hosts(replicas, cluster)
        # A stage over several machines has its ranks in their order.
        replicas = in_rank_order(replicas, hosts)
    else:
        hosts = hosts_in_rank_order(replicas, best.rank_order, cluster)
    used = {device.name for device in best.placement.devices()}
    return Plan(
        replicas,
        workload=workload,
        hosts=hosts,
        idle_devices=tuple(d.name for d in cluster.devices if d.name not in used),
        idle_reasons=reasons,
        exchange_groups=best.placement.exchange_groups,
        exchange_uplinks=best.placement.exchange_uplinks,
        inputs=plan_inputs(problem, workload),
        made_by=f"megatron-hetero {__version__} strategy {best.strategy}"
        + (" (interrupted)" if interrupted else ""),
    )
