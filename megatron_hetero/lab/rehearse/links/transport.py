"""Hooks of `torch.distributed` in a rehearsal: each call goes to gloo, held to the described links.

The bytes that count are those of the real model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.lab.rehearse.clock import Clock
from megatron_hetero.lab.rehearse.links.board import Board
from megatron_hetero.lab.rehearse.links.holding import LinkHolder, name_of, ranks_of
from megatron_hetero.lab.rehearse.links.network import Network
from megatron_hetero.lab.rehearse.links.works import ReceiveWork

TINY_ELEMENTS = 64
"""Collectives of no more elements (counts, norms, losses) cost only the wait for all ranks."""


class Transport(LinkHolder):
    """Hooks of one rank.

    `is_computing` is true during a forward or backward pass; tensor-parallel collectives are then
    part of the pass's time.
    """

    def __init__(
        self, rank: int, board: Board, network: Network, clock: Clock, tensor_ranks: Set[int]
    ) -> None:
        super().__init__(rank, board, network, clock)
        self._tensor_ranks = frozenset(tensor_ranks)
        self._is_left_alone = False
        self.is_computing = False
        self.activation_ratio = 1.0
        self.gradient_bytes: Callable[[tuple[int, ...], int], float] | None = None
        """(ranks, elements) -> real bytes of a gradient buffer."""
        self._exchanged: tuple[str, float] | None = None
        self._batch = dist.batch_isend_irecv
        self._all_reduce = dist.all_reduce
        self._all_gather = dist.all_gather_into_tensor
        self._all_to_all = dist.all_to_all_single
        self._broadcast = dist.broadcast

    def install(self) -> None:
        """Replace the functions of `torch.distributed` in this process."""
        self.install_messages()
        dist.all_reduce = self._held_all_reduce
        dist.all_gather_into_tensor = self._held_all_gather
        dist.all_to_all_single = self._held_all_to_all
        dist.broadcast = self._held_broadcast

    def install_messages(self) -> None:
        """Replace the messages alone; collectives stay as they are."""
        dist.batch_isend_irecv = self._held_batch

    def _held_batch(self, operations: list[Any]) -> list[Any]:
        # Free steps measure this machine and go unhindered.
        if self.clock.scale == 0:
            return self._batch(operations)
        works: list[Any] = []
        for operation in operations:
            if operation.op is dist.isend:
                tensor = operation.tensor
                # What is no activation announces the shape of one.
                ratio = self.activation_ratio if tensor.is_floating_point() else 1.0
                num_bytes = tensor.numel() * tensor.element_size() * ratio
                works.append(self.send(operation, num_bytes, self._batch))
            else:
                key = self.number(("message", operation.peer, self.rank, name_of(operation.group)))
                works.append(ReceiveWork(self, key, partial(self._batch, [operation])))
        return works

    def _held_all_reduce(
        self,
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        def real(is_async: bool) -> Any:
            return self._all_reduce(tensor, op, group, is_async)

        ranks = ranks_of(group)
        if self._is_free(ranks):
            return real(async_op)
        # Gradients of a known buffer, any other large buffer, or only a wait.
        ring, kind = None, "gradient_sync"
        if self._exchanged is not None:
            kind, each = self._exchanged
            ring = self.network.all_reduce(ranks, tensor.numel() * each)
        elif tensor.numel() > TINY_ELEMENTS and self.gradient_bytes is not None:
            num_bytes = self.gradient_bytes(tuple(ranks), tensor.numel())
            ring = self.network.all_reduce(ranks, num_bytes)
        return self.hold(group, ring, real, async_op, kind)

    def _held_all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        def real(is_async: bool) -> Any:
            return self._all_gather(output, tensor, group, is_async)

        ranks = ranks_of(group)
        if self._is_free(ranks):
            return real(async_op)
        num_bytes = output.numel() * output.element_size() * self.activation_ratio
        return self.hold(group, self.network.one_pass(ranks, num_bytes), real, async_op)

    def _held_all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Hold gradients on the way to the owners; every rank sends the same sizes."""

        def real(is_async: bool) -> Any:
            return self._all_to_all(
                output, tensor, output_split_sizes, input_split_sizes, group, is_async
            )

        ranks = ranks_of(group)
        # Only gradients in parts of known sizes go to owners.
        if self._is_free(ranks) or self._exchanged is None or input_split_sizes is None:
            return real(async_op)
        kind, each = self._exchanged
        parts = self.network.to_owners(ranks, [size * each for size in input_split_sizes])
        return self.hold(group, parts, real, async_op, kind)

    def _held_broadcast(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: Any = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Any:
        """Hold new weights on the way from the owner."""

        def real(is_async: bool) -> Any:
            return self._broadcast(tensor, src, group, is_async, group_src)

        ranks = ranks_of(group)
        # Only new weights come from an owner.
        if self._is_free(ranks) or self._exchanged is None or group_src is None:
            return real(async_op)
        kind, each = self._exchanged
        chain = self.network.broadcast(ranks, ranks[group_src], tensor.numel() * each)
        return self.hold(group, chain, real, async_op, kind)

    def held_rounds(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the start of an exchange by groups (`runtime.gradients.groups.grouped`)."""

        def held(
            exchange: Any,
            bucket: Any,
            flat: torch.Tensor,
            group: Any,
            purpose: str,
            division: Any = None,
        ) -> Any:
            ranks = ranks_of(group)
            if self._is_free(ranks) or self._exchanged is None:
                return start(exchange, bucket, flat, group, purpose, division)
            kind, each = self._exchanged
            # The messages of the plan, round by round, with the bytes of the real model.
            plan = exchange.plan(bucket, flat.numel(), purpose, division)

            def real(is_async: bool) -> Any:
                return start(exchange, bucket, flat, group, purpose, division)

            return self.hold(group, self.network.rounds(ranks, plan, each), real, True, kind)

        return held

    @contextmanager
    def exchanging(self, kind: str, bytes_per_element: float) -> Iterator[None]:
        """Count collectives inside the block as gradients or weights.

        Args:
            kind: kind of the span on the timeline.
            bytes_per_element: real bytes of each element.
        """
        self._exchanged = kind, bytes_per_element
        try:
            yield
        finally:
            self._exchanged = None

    def _is_free(self, ranks: Sequence[int]) -> bool:
        if self._is_left_alone or self.clock.scale == 0 or len(ranks) == 1:
            return True
        # Inside a stage the time of a pass has all of them, but for the gradients that its
        # context-parallel ranks exchange.
        is_inside = self._exchanged is None and self._tensor_ranks.issuperset(ranks)
        return self.is_computing and is_inside

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Leave collectives inside the block as they are."""
        self._is_left_alone = True
        try:
            yield
        finally:
            self._is_left_alone = False
