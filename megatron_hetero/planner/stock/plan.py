"""A division of a stock case's layers as a plan, with the flags of the settings; and its price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf

from megatron_hetero import __version__
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import Recompute
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.model.arguments import command_line_words, group_arguments
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.plan import LayerRange, Plan, Replica, Stage, StageShape
from megatron_hetero.plan.stock_ranks import hosts_in_rank_order
from megatron_hetero.planner.evaluate.written import plan_inputs, with_dispatcher
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.stock.case import StockCase
from megatron_hetero.planner.stock.in_flight import stock_schedule
from megatron_hetero.planner.units import Chain
from megatron_hetero.schedule.estimate import plan_cost
from megatron_hetero.schedule.of_plan import with_schedule

_SETTINGS = frozenset(
    {
        "--micro-batch-size",
        "--recompute-activations",
        "--recompute-granularity",
        "--recompute-method",
        "--recompute-num-layers",
        "--recompute-modules",
    }
)
_RECOMPUTE_FLAGS: Mapping[Recompute, tuple[str, ...]] = {
    "none": (),
    "selective": ("--recompute-granularity", "selective"),
    "full": (
        "--recompute-granularity", "full", "--recompute-method", "uniform",
        "--recompute-num-layers", "1",
    ),
}  # fmt: skip


def priced_step_s(problem: Problem, plan: Plan) -> float:
    """Return the seconds of a plan's step as `explain` prices it; infinite where it does not fit.

    The plan may have other flags than the job, and so other prices.
    """
    cluster, workload = problem.cluster, plan.workload or problem.workload
    costs = problem.known.get(workload)
    if not isinstance(costs, CostModel):
        costs = problem.known[workload] = CostModel(cluster, workload, problem.costs.profile)
    cost = plan_cost(plan, costs, placement_of(plan, cluster))
    return inf if cost.missing_bytes > 0 else cost.step_time_s


def stock_plan(
    case: StockCase,
    division: Sequence[int],
    num_recomputed: int,
    num_micro_batches: int | None = None,
) -> Plan:
    """Return the plan of one division.

    Args:
        division: layers of each virtual stage.
        num_recomputed: layers of every stage, with recompute as needed.
        num_micro_batches: of each replica, for a part of a step; by default those of a step.
    """
    problem, settings = case.problem, case.settings
    # Layers of each stage over its chunks, and the one recompute of all.
    depth = case.grid.num_stages
    stages = [sum(division[p::depth]) for p in range(depth)]
    recompute = settings.least_recompute
    some = None
    # As many as the largest stage has: that is full recompute.
    if num_recomputed >= max(stages):
        recompute = "full"
    elif num_recomputed:
        some = num_recomputed
    # The workload under the case's settings.
    workload = with_settings(problem.workload, settings.micro_batch_size, recompute)
    if settings.dispatcher != workload.training.token_dispatcher:
        workload = with_dispatcher(workload, settings.dispatcher)
    number = num_micro_batches or case.num_micro_batches
    replicas = tuple(
        Replica(_stages(case, chain, division, some), number)
        for chain in case.grid.chains
    )
    # Hosts in the order of Megatron's ranks.
    hosts = hosts_in_rank_order(replicas, case.grid.rank_order, problem.cluster)
    used = {name for r in replicas for s in r.stages for name in s.devices}
    plan = Plan(
        replicas,
        workload=workload,
        hosts=hosts,
        idle_devices=tuple(d.name for d in problem.cluster.devices if d.name not in used),
        inputs=plan_inputs(problem, workload),
        made_by=f"megatron-hetero {__version__} strategy stock",
    )
    # Chunks have Megatron's interleaved order.
    if settings.num_chunks > 1:
        schedule = stock_schedule(depth, settings.num_chunks, number)
        for r in range(len(replicas)):
            plan = with_schedule(plan, r, schedule, "interleaved")
    return plan


def _stages(
    case: StockCase, chain: Chain, division: Sequence[int], some: int | None
) -> tuple[Stage, ...]:
    context, groups = case.grid.context_parallel, case.settings.expert_groups
    # Experts as flags, or as a table of the stage where both mean the same.
    table = None
    if groups == (case.grid.width, 1) and case.settings.dispatcher == "allgather" and context == 1:
        # Inside a stage, as the plug-in deals them out too.
        table, groups = (1,) * case.grid.width, None
    depth = len(chain)
    first_layers = [sum(division[:place]) for place in range(len(division))]
    found = []
    # Chunks of a stage are every `depth`-th division.
    for p, unit in enumerate(chain):
        chunks = tuple(
            LayerRange(first_layers[place], division[place])
            for place in range(p, len(division), depth)
        )
        num_layers = sum(chunk.num_layers for chunk in chunks)
        found.append(
            Stage(
                StageShape(
                    unit.width,
                    num_layers,
                    context_parallel=context,
                    expert_shares=table,
                    expert_groups=groups,
                ),
                chunks[0].first_layer,
                tuple(device.name for device in unit.devices),
                recompute="full" if some else None,
                recompute_num_layers=min(some, num_layers) if some else None,
                chunks=chunks if len(chunks) > 1 else (),
            )
        )
    return tuple(found)


@lru_cache
def with_settings(workload: Workload, micro_batch_size: int, recompute: Recompute) -> Workload:
    """Return the same job with another micro-batch size and another recompute, in its flags too."""
    training = workload.training
    if (training.micro_batch_size, training.recompute) == (micro_batch_size, recompute):
        return workload
    # All flags but those that the settings replace.
    kept = [
        word
        for argument in group_arguments(command_line_words(workload.megatron_args))
        if argument.flag not in _SETTINGS
        for word in argument.words or ()
    ]
    flags = (*kept, "--micro-batch-size", str(micro_batch_size), *_RECOMPUTE_FLAGS[recompute])
    if recompute == "selective" and training.recompute_modules:
        flags = (*flags, "--recompute-modules", *training.recompute_modules)
    changed = replace(training, micro_batch_size=micro_batch_size, recompute=recompute)
    return replace(workload, training=changed, megatron_args=flags)
