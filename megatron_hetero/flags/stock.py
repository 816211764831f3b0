"""The layers of a stock plan as Megatron's flags give them."""

from __future__ import annotations

from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.stock import chained_layers


def is_even_split(plan: Plan) -> bool:
    """Whether Megatron's own equal split gives every stage its layers."""
    replica = plan.replicas[0]
    return len(set(chained_layers(replica))) == 1 and not any(
        stage.chunks for stage in replica.stages
    )


def pipeline_layout(plan: Plan) -> str:
    """`--pipeline-model-parallel-layout` of a stock plan, for example `Et*3|t*2L`.

    E embedding, t decoder layer, L loss; grammar of `PipelineParallelLayerLayout.parse_str_to_list`
    (no spaces, no nesting).  Several chunks a stage follow each other along the chain, as Megatron
    reads them.
    """
    stages = ["t" if n == 1 else f"t*{n}" for n in chained_layers(plan.replicas[0])]
    return f"E{'|'.join(stages)}L"
