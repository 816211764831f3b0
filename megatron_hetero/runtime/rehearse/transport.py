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

import heapq
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_hetero.runtime.rehearse.board import Board, Key
from megatron_hetero.runtime.rehearse.clock import Clock, now, sleep_until
from megatron_hetero.runtime.rehearse.network import Network, Ring

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
        self.collectives: list[tuple[float, float]] = []
        self._counts: Counter[Key] = Counter()
        self._courier = _Courier()
        self._batch = dist.batch_isend_irecv
        self._all_reduce = dist.all_reduce
        self._all_gather = dist.all_gather_into_tensor

    def install(self) -> None:
        """From now on, in this process."""
        dist.batch_isend_irecv = self._held_batch
        dist.all_reduce = self._held_all_reduce
        dist.all_gather_into_tensor = self._held_all_gather

    def _held_batch(self, operations: list[Any]) -> list[Any]:
        if self.clock.scale == 0:
            return self._batch(operations)
        works: list[Any] = []
        for operation in operations:
            if operation.op is dist.isend:
                works.append(self._send(operation))
            else:
                key = self._number(("message", operation.peer, self.rank, _name(operation.group)))
                works.append(_Receive(self, key, self._batch([operation])))
        return works

    def _send(self, operation: Any) -> _Send:
        key = self._number(("message", self.rank, operation.peer, _name(operation.group)))
        tensor = operation.tensor
        num_bytes = tensor.numel() * tensor.element_size() * self.activation_ratio
        hop = self.network.hop(self.rank, operation.peer)
        scale = self.clock.scale
        posted_s = self.clock.time()
        with self.board.locked():
            done_s = self.board.take([(hop.paths, hop.seconds(num_bytes) * scale)], posted_s)
            arrival_s = done_s + hop.latency_s * scale
            self.board.put(key, "arrival_s", arrival_s)
        begin_s = self.clock.step_begin_s
        self.sent.append(
            SentSpan(operation.peer, num_bytes, posted_s - begin_s, arrival_s - begin_s)
        )
        work = _Send(self, key)
        self._courier.deliver(arrival_s, lambda: work.left(self._batch([operation])))
        return work

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
        ring = None
        if tensor.numel() > TINY_ELEMENTS:
            ring = self.gradient_ring(ranks, tensor.numel())
        return self.hold(group, ring, real, async_op)

    def _held_all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        def real(is_async: bool) -> Any:
            return self._all_gather(output, tensor, group, is_async)

        ranks = _ranks(group)
        if self._is_free(ranks):
            return real(async_op)
        num_bytes = output.numel() * output.element_size() * self.activation_ratio
        size = len(ranks)
        ring = self.network.ring(ranks, (size - 1) / size * num_bytes, size - 1)
        return self.hold(group, ring, real, async_op)

    def gradient_ring(self, ranks: Sequence[int], num_elements: int) -> Ring | None:
        """The all-reduce of a gradient buffer."""
        if self.gradient_bytes is None:
            return None
        num_bytes = self.gradient_bytes(tuple(ranks), num_elements)
        size = len(ranks)
        return self.network.ring(ranks, 2 * (size - 1) / size * num_bytes, 2 * (size - 1))

    def _is_free(self, ranks: Sequence[int]) -> bool:
        if self._is_left_alone or self.clock.scale == 0 or len(ranks) == 1:
            return True
        return self.is_computing and self._tensor_ranks.issuperset(ranks)

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Collectives in here are real and nothing else."""
        self._is_left_alone = True
        try:
            yield
        finally:
            self._is_left_alone = False

    def hold(
        self, group: Any, ring: Ring | None, real: Callable[[bool], Any], async_op: bool
    ) -> Any:
        """Run a collective and end it when `ring` would; without a ring when all ranks are there.

        Args:
            real: runs it, asynchronously if told so.
        """
        ranks = _ranks(group)
        key = self._number(("collective", tuple(ranks), _name(group)))
        self.board.come(key, self.clock.time())
        if not async_op:
            real(False)
            self._end(key, ring)
            return None
        work = _Collective(self, key, ring, real(True))
        work.start()
        return work

    def _end(self, key: Key, ring: Ring | None) -> None:
        self._until(self.done_s(key, ring))

    def done_s(self, key: Key, ring: Ring | None) -> float:
        """When a collective is done on the described links; all its ranks have come."""
        scale = self.clock.scale
        with self.board.locked():
            begin_s = self.board.get(key, "latest_s")
            done_s = self.board.get(key, "arrival_s")
            if not done_s:
                done_s = begin_s
                if ring is not None:
                    hops = [(paths, seconds * scale) for paths, seconds in ring.hops]
                    done_s = self.board.take(hops, begin_s) + ring.latency_s * scale
                self.board.put(key, "arrival_s", done_s)
        if ring is not None:
            step_s = self.clock.step_begin_s
            self.collectives.append((begin_s - step_s, done_s - step_s))
        return done_s

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


class _Send:
    """A message on its way; `wait` ends when its receiver has it, as gloo's own."""

    def __init__(self, transport: Transport, key: Key) -> None:
        self._transport, self._key = transport, key
        self._has_left = threading.Event()
        self._works: list[Any] = []

    def left(self, works: list[Any]) -> None:
        """The courier has handed it to the real transport."""
        self._works = works
        self._has_left.set()

    def wait(self, timeout: Any = None) -> bool:
        """Block until the receiver has it."""
        transport = self._transport
        came_s = transport.clock.time()
        self._has_left.wait()
        for work in self._works:
            work.wait()
        with transport.board.locked():
            arrival_s = transport.board.get(self._key, "arrival_s")
            asked_s = transport.board.get(self._key, "asked_s")
        transport.waited(max(arrival_s, asked_s), came_s)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would not block."""
        return self._has_left.is_set() and all(work.is_completed() for work in self._works)


class _Receive:
    """A message that is waited for."""

    def __init__(self, transport: Transport, key: Key, works: list[Any]) -> None:
        self._transport, self._key, self._works = transport, key, works
        with transport.board.locked():
            transport.board.put(key, "asked_s", transport.clock.time())

    def wait(self, timeout: Any = None) -> bool:
        """Block until it is here."""
        transport = self._transport
        asked_s = transport.clock.time()
        for work in self._works:
            work.wait()
        with transport.board.locked():
            due_s = transport.board.get(self._key, "arrival_s")
        transport.waited(due_s, asked_s)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would not block."""
        return all(work.is_completed() for work in self._works)


class _Collective(threading.Thread):
    """An asynchronous collective: a thread waits for the real one, then for the described links."""

    def __init__(self, transport: Transport, key: Key, ring: Ring | None, work: Any) -> None:
        super().__init__(daemon=True)
        self._transport, self._key, self._ring, self._work = transport, key, ring, work
        self._done_s = 0.0

    def run(self) -> None:
        """The thread's life."""
        self._work.wait()
        self._done_s = self._transport.done_s(self._key, self._ring)
        sleep_until(self._done_s)

    def wait(self, timeout: Any = None) -> bool:
        """Block until it is done."""
        came_s = self._transport.clock.time()
        self.join()
        self._transport.waited(self._done_s, came_s)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would not block."""
        return not self.is_alive()


class _Courier(threading.Thread):
    """Hands messages to the real transport when they are due."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._changed = threading.Condition()
        self._number = 0

    def deliver(self, at_s: float, hand_over: Callable[[], None]) -> None:
        """Call `hand_over` at `at_s`; equal times in the order in which they were given."""
        if not self.is_alive():
            self.start()
        with self._changed:
            self._number += 1
            heapq.heappush(self._due, (at_s, self._number, hand_over))
            self._changed.notify()

    def run(self) -> None:
        """The thread's life."""
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > now():
                    timeout_s = self._due[0][0] - now() if self._due else None
                    self._changed.wait(timeout_s)
                _, _, hand_over = heapq.heappop(self._due)
            hand_over()


def _ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def _name(group: Any) -> str:
    return str((group if group is not None else dist.group.WORLD).group_name)
