"""Seconds of a stage's model chunks, and of the two parts of their backward passes.

The cost model prices a stage as a whole.  Its time is divided among its chunks by their FLOPs, and
a backward pass into its parts likewise: matrix products cost as much for their weights as for their
inputs, attention has no weights, and what is recomputed belongs to the inputs.
"""

from __future__ import annotations

from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.model.blocks import Block, blocks
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.chunks import stage_chunks
from megatron_hetero.plan.plan import Stage
from megatron_hetero.schedule.parts import ChunkTimes


def stage_chunk_times(
    stage: Stage, times: PassTimes, workload: Workload, *, is_last: bool
) -> tuple[ChunkTimes, ...]:
    """Time each chunk of a plan's stage; `is_last`: its last chunk has the output layer.

    Args:
        stage: the plan's, with its chunks and recompute.
        times: of the whole stage for one micro-batch.
        is_last: its last chunk has the output layer.
    """
    # Blocks of each chunk: its layers, and the head behind the last layer.
    all_blocks = blocks(workload)
    layers, head = all_blocks[1:-1], all_blocks[-1]
    held: list[list[Block]] = [
        list(layers[c.first_layer : c.first_layer + c.num_layers]) for c in stage_chunks(stage)
    ]
    num_layers = stage.shape.num_layers
    recomputed = _recomputed_share(stage, workload, num_layers)
    if is_last:
        held[-1].append(head)
    # Divide the stage's measured or modelled seconds by the chunks' operations.
    total = sum(_flops(block) for chunk in held for block in chunk)
    found = []
    for chunk in held:
        share = sum(_flops(block) for block in chunk) / total
        # Weight gradients are the matrix products once; the backward pass has them twice, plus
        # recompute.
        products = sum(block.matmul_flops_forward for block in chunk)
        forward = sum(_flops(block) for block in chunk)
        again = recomputed * sum(_flops(block) for block in chunk if block.kind == "layer")
        weight_s = share * times.backward_s * products / (2 * forward + again)
        found.append(
            ChunkTimes(share * times.forward_s, share * times.backward_s - weight_s, weight_s)
        )
    return tuple(found)


def _recomputed_share(stage: Stage, workload: Workload, num_layers: int) -> float:
    """Return the part of the layers whose forward pass is done again; what selective recompute does
    again, scores and their softmax, is little beside it."""
    if (stage.recompute or workload.training.recompute) != "full":
        return 0.0
    some = stage.recompute_num_layers if stage.recompute else None
    return 1.0 if some is None else some / num_layers


def _flops(block: Block) -> float:
    return block.matmul_flops_forward + block.attention_flops_forward
