"""Which plans stock Megatron can express, and the layout string in which it takes uneven stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from megatron_hetero.plan.check_structure import default_launched_forwards
from megatron_hetero.plan.check_workload import divided_sizes
from megatron_hetero.plan.plan import Plan, Replica, Stage
from megatron_hetero.plan.ranks import Position, rank_table

RankOrder = Literal["tp-dp-pp", "tp-pp-dp"]
"""Megatron's two orders of ranks, the fastest first: the default, and `--use-tp-pp-dp-mapping`."""


def is_stock(plan: Plan) -> bool:
    """Whether stock Megatron, without the plug-in, runs exactly this plan.

    All replicas have the same stages, one tensor-parallel width, one micro-batch count and size;
    every stage follows the same settings; and the ranks bind to places in one of Megatron's two
    orders.  `plan` is valid.
    """
    return not reasons_not_stock(plan)


def reasons_not_stock(plan: Plan) -> tuple[str, ...]:
    """What of the plan stock Megatron cannot express, in words; empty for a stock plan."""
    return tuple(_shape_reasons(plan)) or tuple(_setting_reasons(plan))


def _shape_reasons(plan: Plan) -> Iterator[str]:
    first = plan.replicas[0]
    if len(plan.layout.tensor_parallel_widths) > 1:
        widths = ", ".join(map(str, plan.layout.tensor_parallel_widths))
        yield f"stages of different tensor-parallel widths ({widths})"
    if any(len(replica.stages) != len(first.stages) for replica in plan.replicas):
        yield "replicas of different pipeline depths"
    elif any(_layers(replica) != _layers(first) for replica in plan.replicas):
        yield "replicas with different layers in a stage"
    if any(r.num_micro_batches != first.num_micro_batches for r in plan.replicas):
        yield "replicas with different numbers of micro-batches"
    if len({micro_batch_size(plan, replica) for replica in plan.replicas}) > 1:
        yield "replicas with different micro-batch sizes"
    if any(_is_uneven(plan, stage) for replica in plan.replicas for stage in replica.stages):
        yield "tensor-parallel groups of uneven shares"


def _setting_reasons(plan: Plan) -> Iterator[str]:
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    if len({recompute(plan, stage) for stage in stages}) > 1:
        yield "stages with different recompute"
    precision = None if plan.workload is None else plan.workload.training.precision
    if any(stage.precision not in (None, precision) for stage in stages):
        yield "stages with a precision of their own"
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            default = default_launched_forwards(plan, r, s)
            if stage.num_launched_forwards not in (None, default):
                yield f"a launch count of its own (replica {r}, stage {s})"
    if not rank_orders(plan):
        yield "ranks bound to GPUs in an order that is neither of Megatron's two"


def _layers(replica: Replica) -> list[int]:
    return [stage.shape.num_layers for stage in replica.stages]


def _is_uneven(plan: Plan, stage: Stage) -> bool:
    """Equal shares (1:1) are stock's own where the width divides everything."""
    shares = stage.shape.shares
    if shares is None:
        return False
    if len(set(shares)) > 1 or plan.workload is None:
        return True
    return any(units % len(shares) for *_, units in divided_sizes(plan.workload.model))


def micro_batch_size(plan: Plan, replica: Replica) -> int | None:
    """Sequences in a micro-batch of a replica; None if neither plan nor workload says."""
    if replica.micro_batch_size is not None or plan.workload is None:
        return replica.micro_batch_size
    return plan.workload.training.micro_batch_size


def recompute(plan: Plan, stage: Stage) -> tuple[str | None, int | None]:
    """Granularity and number of recomputed layers (None: all) of a stage.

    The granularity is None if neither stage nor workload says.
    """
    if stage.recompute is not None:
        return stage.recompute, stage.recompute_num_layers
    return (None if plan.workload is None else plan.workload.training.recompute), None


def rank_orders(plan: Plan) -> tuple[RankOrder, ...]:
    """Which of Megatron's orders give every global rank its place; the default order first.

    Place (replica d, stage p, tensor rank k) of a plan with D equal replicas of P stages of width t
    has, by `parallel_state.RankGenerator`, rank k + t (d + D p) in the default order tp-cp-ep-dp-pp
    and k + t (p + P d) in the order tp-cp-ep-pp-dp of `--use-tp-pp-dp-mapping`.
    """
    width = plan.replicas[0].stages[0].shape.tensor_parallel
    num_replicas, num_stages = len(plan.replicas), len(plan.replicas[0].stages)

    def default(place: Position) -> int:
        return place.tensor_rank + width * (place.replica + num_replicas * place.stage)

    def pipeline_first(place: Position) -> int:
        return place.tensor_rank + width * (place.stage + num_stages * place.replica)

    places = tuple(enumerate(rank_table(plan)))
    orders: list[RankOrder] = []
    if all(default(place) == rank for rank, place in places):
        orders.append("tp-dp-pp")
    if all(pipeline_first(place) == rank for rank, place in places):
        orders.append("tp-pp-dp")
    return tuple(orders)


def is_even_split(plan: Plan) -> bool:
    """Whether Megatron's own equal split gives every stage its layers."""
    return len({stage.shape.num_layers for stage in plan.replicas[0].stages}) == 1


def pipeline_layout(plan: Plan) -> str:
    """`--pipeline-model-parallel-layout` of a stock plan, for example `Et*3|t*2L`.

    E embedding, t decoder layer, L loss; grammar of `PipelineParallelLayerLayout.parse_str_to_list`
    (no spaces, no nesting).
    """
    stages = [
        "t" if n == 1 else f"t*{n}" for n in (s.shape.num_layers for s in plan.replicas[0].stages)
    ]
    return f"E{'|'.join(stages)}L"
