"""Messages and collectives of one rank, held to the described links.

Hooks of `torch.distributed` on their way to gloo.  A message leaves its sender when the described
links would have delivered it: a courier thread keeps it until then, so that its receiver waits in
the real transport.  A collective ends for all its ranks when the described ring would.  The bytes
that are counted are those of the real model.

Sender and receiver also note on the board when a message was due and asked for, in the rank's time,
so that the lag of this machine's own threads and sockets does not add up over the hops of a step
(see `clock`).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from megatron_hetero.lab.rehearse.clock import Clock, now, sleep_until
from megatron_hetero.lab.rehearse.links.board import LOOK_AGAIN_S, Board, Hops, Key
from megatron_hetero.lab.rehearse.links.network import Network, Ring
from megatron_hetero.lab.rehearse.links.works import (
    CollectiveWork,
    Courier,
    ReceiveWork,
    SendWork,
)

TINY_ELEMENTS = 64
"""Collectives of no more elements (counts, norms, losses) cost only the wait for all ranks."""


class SentSpan(NamedTuple):
    """A message of this rank, seconds since the step began."""

    receiver: int
    num_bytes: float
    posted_s: float
    arrival_s: float


class Transport:
    """The hooks of one rank.  `is_computing` is true while a forward or backward pass runs, whose
    tensor-parallel collectives are part of its time."""

    def __init__(
        self, rank: int, board: Board, network: Network, clock: Clock, tensor_ranks: Set[int]
    ) -> None:
        self.rank = rank
        self._tensor_ranks = frozenset(tensor_ranks)
        self._is_left_alone = False
        self.board, self.network, self.clock = board, network, clock
        self.is_computing = False
        self.activation_ratio = 1.0
        self.gradient_bytes: Callable[[tuple[int, ...], int], float] | None = None
        """(ranks, elements) -> real bytes of a gradient buffer."""
        self.sent: list[SentSpan] = []
        self.collectives: list[tuple[str, float, float]] = []
        """(kind, begin, end), seconds since the step began."""
        self.line_s: defaultdict[str, float] = defaultdict(float)
        """For how long what this rank put on them took each path and line, seconds of the
        cluster."""
        self._exchanged: tuple[str, float] | None = None
        self._counts: Counter[Key] = Counter()
        self._courier = Courier()
        self._batch = dist.batch_isend_irecv
        self._all_reduce = dist.all_reduce
        self._all_gather = dist.all_gather_into_tensor
        self._all_to_all = dist.all_to_all_single
        self._broadcast = dist.broadcast

    def install(self) -> None:
        """From now on, in this process."""
        dist.batch_isend_irecv = self._held_batch
        dist.all_reduce = self._held_all_reduce
        dist.all_gather_into_tensor = self._held_all_gather
        dist.all_to_all_single = self._held_all_to_all
        dist.broadcast = self._held_broadcast

    def _held_batch(self, operations: list[Any]) -> list[Any]:
        if self.clock.scale == 0:
            return self._batch(operations)
        works: list[Any] = []
        for operation in operations:
            if operation.op is dist.isend:
                works.append(self._send(operation))
            else:
                key = self._number(("message", operation.peer, self.rank, _name(operation.group)))
                works.append(ReceiveWork(self, key, partial(self._batch, [operation])))
        return works

    def _send(self, operation: Any) -> SendWork:
        key = self._number(("message", self.rank, operation.peer, _name(operation.group)))
        tensor = operation.tensor
        num_bytes = tensor.numel() * tensor.element_size() * self.activation_ratio
        hop = self.network.hop(self.rank, operation.peer)
        scale, begin_s = self.clock.scale, self.clock.step_begin_s
        posted_s = self.clock.time()
        hops = [(paths, seconds * scale) for paths, seconds in hop.taken(num_bytes)]
        work = SendWork(self, key)

        def take() -> None:
            with self.board.locked():
                if not self.board.is_its_turn(key, hops, posted_s):
                    self._courier.call_at(now() + LOOK_AGAIN_S, take)
                    return
                arrival_s = self.board.take(key, hops, posted_s) + hop.latency_s * scale
                self.board.put(key, "arrival_s", arrival_s)
                self._count(hop.taken(num_bytes))
            self.sent.append(
                SentSpan(operation.peer, num_bytes, posted_s - begin_s, arrival_s - begin_s)
            )
            self._courier.call_at(arrival_s, lambda: work.left(self._batch([operation])))

        with self.board.locked():
            self.clock.lost_s += self.board.announce(key, hops, posted_s)
        self._courier.call_at(self._turn_s(hops, posted_s), take)
        return work

    def _turn_s(self, hops: Hops, from_s: float) -> float:
        """When to take the paths of what is there at `from_s`: while it could not be over yet, and
        so late that what comes before it in the ranks' time has been announced."""
        longest_s = max(seconds for _, seconds in hops)
        return from_s + min(self.clock.allowance_s, longest_s / 2)

    def _held_all_reduce(
        self,
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        def real(is_async: bool) -> Any:
            return self._all_reduce(tensor, op, group, is_async)

        ranks = _ranks(group)
        if self._is_free(ranks):
            return real(async_op)
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

        ranks = _ranks(group)
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
        """Gradients on their way to their owners: every rank sends the same sizes."""

        def real(is_async: bool) -> Any:
            return self._all_to_all(
                output, tensor, output_split_sizes, input_split_sizes, group, is_async
            )

        ranks = _ranks(group)
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
        """New weights from their owner."""

        def real(is_async: bool) -> Any:
            return self._broadcast(tensor, src, group, is_async, group_src)

        ranks = _ranks(group)
        if self._is_free(ranks) or self._exchanged is None or group_src is None:
            return real(async_op)
        kind, each = self._exchanged
        chain = self.network.broadcast(ranks, ranks[group_src], tensor.numel() * each)
        return self.hold(group, chain, real, async_op, kind)

    @contextmanager
    def exchanging(self, kind: str, bytes_per_element: float) -> Iterator[None]:
        """Collectives in here exchange gradients or weights, of so many real bytes each."""
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
        """Collectives in here are real and nothing else."""
        self._is_left_alone = True
        try:
            yield
        finally:
            self._is_left_alone = False

    def hold(
        self,
        group: Any,
        ring: Ring | None,
        real: Callable[[bool], Any],
        async_op: bool,
        kind: str = "",
    ) -> Any:
        """Run a collective and end it when `ring` would; without a ring when all ranks are there.

        Args:
            real: runs it, asynchronously if told so.
            kind: of `OpSpan`, if the timeline shows it.
        """
        ranks = tuple(_ranks(group))
        key = self._number(("collective", ranks, _name(group)))
        self.clock.lost_s += self.board.come(key, self.clock.time(), len(ranks), self._hops(ring))
        if not async_op:
            real(False)
            self._until(self.done_s(key, ring, kind))
            return None
        work = CollectiveWork(self, key, ring, kind, real(True))
        work.start()
        return work

    def done_s(self, key: Key, ring: Ring | None, kind: str) -> float:
        """When a collective is done on the described links, once all its ranks have come: the real
        one may end earlier on some, as a broadcast does on its root."""
        scale = self.clock.scale
        _, ranks, *_ = key
        self.board.wait_for(key, len(cast(tuple[int, ...], ranks)))
        begin_s = self.board.latest_s(key)
        hops = self._hops(ring)
        if hops:
            sleep_until(self._turn_s(hops, begin_s))
        while True:
            with self.board.locked():
                done_s = self.board.get(key, "arrival_s")
                if not done_s and self.board.is_its_turn(key, hops, begin_s):
                    latency_s = ring.latency_s * scale if ring else 0.0
                    done_s = self.board.take(key, hops, begin_s) + latency_s
                    self.board.put(key, "arrival_s", done_s)
                    self._count(ring.hops if ring else ())
            if done_s:
                break
            time.sleep(LOOK_AGAIN_S)
        if ring is not None and kind:
            step_s = self.clock.step_begin_s
            self.collectives.append((kind, begin_s - step_s, done_s - step_s))
        return done_s

    def _count(self, hops: Hops) -> None:
        for paths, seconds in hops:
            for path in paths:
                self.line_s[self.network.path_names[path]] += seconds

    def _hops(self, ring: Ring | None) -> Hops:
        """In this machine's seconds."""
        scale = self.clock.scale
        return [(paths, seconds * scale) for paths, seconds in ring.hops] if ring else []

    def _until(self, at_s: float) -> None:
        sleep_until(at_s)
        self.clock.reach(at_s)

    def waited(self, due_s: float, asked_s: float) -> None:
        """The rank asked for a message at `asked_s`, and has it now; it was due at `due_s`."""
        self.clock.reach(self.clock.at(max(due_s, asked_s)))

    def _number(self, key: Key) -> Key:
        """The how manieth of its kind this is, which is the same on all ranks."""
        self._counts[key] += 1
        return (*key, self._counts[key])


def _ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def _name(group: Any) -> str:
    return str((group if group is not None else dist.group.WORLD).group_name)
