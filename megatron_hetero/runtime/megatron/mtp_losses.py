"""`MTPLossLoggingHelper.reduce_metrics_in_tracker`: losses of further tokens, of the whole job.

Megatron takes their mean over data-parallel ranks, which are equally many and run equally many
micro-batches of one size.  Replicas of a plan do neither, and nothing passes a group to it.
"""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.core.transformer.multi_token_prediction",
    name="MTPLossLoggingHelper.reduce_metrics_in_tracker",
    reason="replicas run unlike numbers and sizes of micro-batches",
    known={"d975eb0d3734d8ab": TESTED},
)


def apply(last_stages: dist.ProcessGroup, width: float, size: int) -> None:
    """Sum the log's losses over the last stages.

    Args:
        last_stages: all ranks of all last stages.
        width: ranks of this stage, which all have the losses of its micro-batches.
        size: sequences in a micro-batch of this rank, by which its losses count.
    """

    def reduce_metrics_in_tracker() -> None:
        tracker = MTPLossLoggingHelper.tracker
        # All ranks of a stage have the same numbers: each gives an equal part.
        weights = {
            "loss_values": size / width,
            "correct_values": 1 / width,
            "total_values": 1 / width,
        }
        for name, weight in weights.items():
            if name in tracker:
                tracker[name].mul_(weight)
                dist.all_reduce(tracker[name], group=last_stages)
        # Megatron divides by the step's micro-batches of this rank's size.
        if "loss_values" in tracker:
            tracker["loss_values"].div_(size)

    REPLACEMENT.apply(reduce_metrics_in_tracker)
