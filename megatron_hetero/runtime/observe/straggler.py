"""`--log-straggler` on ranks with unequal work: Megatron's own detector, given each rank's part.

`megatron.core.utils.StragglerDetector` times the forward passes, asks the GPU for its temperature,
power, use and clock, and logs the least and the most of all ranks. Its estimate of TFLOP/s divides
the job's FLOPs evenly among the ranks, then by `amp` (3: the forward pass is a third of a step); a
value of `amp` for each rank corrects that. Without CUDA it stays off, as in Megatron.

Megatron's loop configures the detector only if nobody has, so nothing is replaced.
"""

from __future__ import annotations

from typing import Any

from megatron_hetero.cost.parameters import attention_sizes
from megatron_hetero.cost.share import TensorShare, even_share, member_shares
from megatron_hetero.model.blocks import Block, blocks
from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.plan.chunks import stage_chunks
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import Position, rank_table
from megatron_hetero.plan.sharding.stage_ranges import StageRanks
from megatron_hetero.plan.sharding.token_shares import uneven_tokens

_STEP_OVER_FORWARD = 3.0
"""Megatron's own default of `amp`."""


def configure(args: Any, plan: Plan, workload: Workload, rank: int) -> None:
    """Set the detector up on this rank, as Megatron's loop would; the process group must exist.

    Args:
        args: Megatron's, with `log_straggler`.
        plan: the plan, with the micro-batch sizes of its replicas.
        workload: the job.
        rank: global rank.
    """
    from megatron.training.training import stimer

    table = rank_table(plan)
    part = flops_part(plan, workload, table[rank])
    stimer.configure(
        len(table),
        rank,
        mmcnt=args.straggler_minmax_count,
        amp=_STEP_OVER_FORWARD / (part * len(table)),
        port=args.straggler_ctrlr_port,
        enabled=not args.disable_straggler_on_startup,
    )


def flops_part(plan: Plan, workload: Workload, position: Position) -> float:
    """Compute a rank's part of the forward FLOPs of a step; all ranks together have 1."""
    model = workload.model
    parts = blocks(workload, plan.layout.tensor_parallel_widths)
    embedding, *layers, head = parts
    replica = plan.replicas[position.replica]
    stage = replica.stages[position.stage]
    shape = stage.shape
    shares = member_shares(
        model,
        shape.tensor_parallel,
        shape.shares,
        expert_shares=shape.expert_shares,
        expert_groups=shape.expert_groups,
    )
    share = shares[position.tensor_rank]
    # Products divide as the matrices, scores as the heads do.
    of_products = _products(model, share) / _products(model, even_share(model, 1))
    of_scores = share.query_groups / model.num_query_groups
    # FLOPs of one sample: the rank's part of each layer of its stage.
    flops = 0.0
    for chunk in stage_chunks(stage):
        for layer in layers[chunk.first_layer : chunk.first_layer + chunk.num_layers]:
            flops += of_products * layer.matmul_flops_forward
            flops += of_scores * layer.attention_flops_forward
    # Embedding and head divide by rows of the vocabulary.
    weights = shape.shares or (1,) * shape.tensor_parallel
    of_rows = weights[position.tensor_rank] / sum(weights)
    for end, is_here in ((embedding, position.stage == 0), (head, stage is replica.stages[-1])):
        flops += of_rows * _flops(end) if is_here else 0.0
    # The replica's part of all samples, and the rank's part of every sequence.
    sequences = [r.num_micro_batches * (r.micro_batch_size or 1) for r in plan.replicas]
    tokens = uneven_tokens(shape, model.seq_length)
    of_sequence = StageRanks((), shape.context_parallel, tokens).part(position.context_rank)
    of_batch = sequences[position.replica] / sum(sequences) * of_sequence
    return of_batch * flops / sum(map(_flops, parts))


def _products(model: ModelSpec, share: TensorShare) -> float:
    """Count the elements of a layer's matrices for a token on a rank, per hidden unit."""
    # A gated MLP has three matrices, any other two.
    columns = share.mlp_columns * (3 if model.gated_mlp else 2)
    active: float = model.moe_router_topk if model.num_experts else 1
    if share.experts or share.expert_ranks:
        # Its experts work on the tokens of all ranks that deal experts out together.
        active *= (share.experts or model.num_experts) / model.num_experts
        active *= share.expert_ranks / share.width if share.expert_ranks else 1.0
    shared = share.shared_columns * (3 if model.gated_mlp else 2)
    return 2 * sum(attention_sizes(model, share)) + active * columns + shared


def _flops(block: Block) -> float:
    return block.matmul_flops_forward + block.attention_flops_forward
