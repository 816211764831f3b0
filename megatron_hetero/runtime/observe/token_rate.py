"""Tokens per second of the whole job, which Megatron's log leaves out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_hetero.runtime.observe.log_values import write_values


class TokenRate:
    """Observer of Megatron's log on the printing rank, with an added line for each interval.

    It counts every token of the global batch, masked or not, over the wall time since the previous
    line; the first line includes the first step's warm-up.
    """

    def __init__(self, count: Callable[[], int] | None = None) -> None:
        """Begin to count.

        Args:
            count: tokens of all steps so far, of the whole job; None: every sample has as many.
        """
        self._since = time.perf_counter()
        self._count, self._counted, self._tokens = count, 0, 0

    def observe(self, iteration: int, loss_dict: dict[str, Any], grad_norm: Any) -> None:
        from megatron.core.num_microbatches_calculator import get_current_global_batch_size
        from megatron.training import get_args

        args = get_args()
        # This step's: batches may grow (--step-batch-size-schedule).
        self._tokens += get_current_global_batch_size() * args.seq_length
        if dist.get_rank() != dist.get_world_size() - 1 or iteration % args.log_interval:
            return
        now = time.perf_counter()
        # Documents have unlike lengths, so their tokens are counted, not the samples.
        if self._count is not None:
            self._counted, before = self._count(), self._counted
            self._tokens = self._counted - before
        rate = self._tokens / (now - self._since)
        self._since, self._tokens = now, 0
        print(
            f" [whole job] iteration {iteration:8d} | tokens per second: {rate:,.1f} |", flush=True
        )
        write_values({"tokens-per-second": rate}, iteration)
