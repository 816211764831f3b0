"""Layer split of a stock plan in Megatron's own flags."""

from __future__ import annotations

from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.stock import chained_layers


def is_even_split(plan: Plan) -> bool:
    """Tell if Megatron's equal split gives every stage its layers."""
    replica = plan.replicas[0]
    return len(set(chained_layers(replica))) == 1 and not any(
        stage.chunks for stage in replica.stages
    )


def pipeline_layout(plan: Plan) -> str:
    """Return `--pipeline-model-parallel-layout` of a stock plan, for example `Et*3|t*2L`.

    E is the embedding, t a decoder layer, m one that predicts further tokens, L the loss; the
    grammar is that of `PipelineParallelLayerLayout.parse_str_to_list`, without spaces or nesting.
    Several chunks of a stage follow each other in chain order, as Megatron reads them.
    """
    stages = ["t" if n == 1 else f"t*{n}" for n in chained_layers(plan.replicas[0])]
    # Layers of further tokens stand on the last stage.
    further = 0 if plan.workload is None else plan.workload.model.mtp_num_layers
    return f"E{'|'.join(stages)}{'m' * further}L"
