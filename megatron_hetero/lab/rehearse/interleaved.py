"""Passes and messages of stock Megatron's interleaved schedule in a rehearsal.

The schedule calls the same two functions for every model chunk, and posts its messages one by one
(`overlap_p2p_comm`) where 1F1B posts them in batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


class StockPasses:
    """Chunk and micro-batch of each pass of one step."""

    def __init__(self) -> None:
        self._chunk_of_model: dict[int, int] = {}
        self._chunk_of_output: dict[int, int] = {}
        self._counts: Counter[tuple[str, int]] = Counter()

    def forward(self, model: Any) -> tuple[int, int]:
        """Count a forward pass; return (micro-batch, chunk). First ones come in chunk order."""
        # The first passes of a step go through the chunks in order, which numbers the models.
        chunk = self._chunk_of_model.setdefault(id(model), len(self._chunk_of_model))
        return self._count("forward", chunk), chunk

    def made(self, output: Any, chunk: int) -> None:
        """Store the chunk of an output kept by Megatron until the backward pass."""
        self._chunk_of_output[id(_tensor(output))] = chunk

    def backward(self, output: Any) -> tuple[int, int]:
        """Count the backward pass of an output; return its (micro-batch, chunk)."""
        chunk = self._chunk_of_output.pop(id(_tensor(output)))
        return self._count("backward", chunk), chunk

    def _count(self, kind: str, chunk: int) -> int:
        self._counts[kind, chunk] += 1
        return self._counts[kind, chunk] - 1


def _tensor(output: Any) -> Any:
    return output[0] if isinstance(output, list) else output


def batched_p2p_ops(post: Callable[[list[Any]], list[Any]]) -> Callable[..., dict[str, Any]]:
    """Return a `p2p_communication._p2p_ops` that goes through `post`, a `batch_isend_irecv`.

    As in Megatron, even and odd ranks post in opposite orders, and a group of two uses one process
    group for each direction: messages of a pair are told apart by their order only.
    """

    def posted(
        *,
        tensor_send_prev: Any,
        tensor_recv_prev: Any,
        tensor_send_next: Any,
        tensor_recv_next: Any,
        group: Any,
        prev_pipeline_rank: int,
        next_pipeline_rank: int,
    ) -> dict[str, Any]:
        # Directions have groups of their own, so that a pair's messages cannot be confused.
        from_even = group
        from_odd = dist.group.WORLD if group.size() == 2 else group
        is_even = group.rank() % 2 == 0
        sends, receives = (from_even, from_odd) if is_even else (from_odd, from_even)
        names = {
            "send_next": (dist.isend, tensor_send_next, next_pipeline_rank, sends),
            "recv_prev": (dist.irecv, tensor_recv_prev, prev_pipeline_rank, receives),
            "send_prev": (dist.isend, tensor_send_prev, prev_pipeline_rank, sends),
            "recv_next": (dist.irecv, tensor_recv_next, next_pipeline_rank, receives),
        }
        # Opposite orders on even and odd ranks, as Megatron posts them.
        order = ["send_next", "recv_prev", "send_prev", "recv_next"]
        if not is_even:
            order = ["recv_prev", "send_next", "recv_next", "send_prev"]
        works = {}
        for name in order:
            operation, tensor, peer, own_group = names[name]
            if tensor is not None:
                (works[name],) = post([dist.P2POp(operation, tensor, peer, own_group)])
        return works

    return posted
