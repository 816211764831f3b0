"""Messages and collectives under way in a rehearsal, and the delivering thread.

They stand for `torch.distributed.Work`: `wait` ends when the real transport and the described links
are both done, and notes the time at which that was due.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from typing import Any, Protocol

from megatron_hetero.lab.rehearse.clock import Clock, now, sleep_until
from megatron_hetero.lab.rehearse.links.board import Board, Key
from megatron_hetero.lab.rehearse.links.network import CollectiveHops


class Waiting(Protocol):
    """The transport, as messages and collectives under way see it."""

    board: Board
    clock: Clock

    def waited(self, due_s: float, asked_s: float) -> None:
        """Move the clock on: something, due at `due_s`, was asked for at `asked_s`."""

    def done_s(self, key: Key, ring: CollectiveHops | None, kind: str) -> float:
        """Wait for all ranks of a collective; return when the links complete it."""


class SendWork:
    """A message on its way; like gloo's, its `wait` ends when the receiver has it."""

    def __init__(self, transport: Waiting, key: Key) -> None:
        self._transport, self._key = transport, key
        self._has_left = threading.Event()
        self._works: list[Any] = []

    def left(self, works: list[Any]) -> None:
        """Store the real transport's works: the courier has handed the message over."""
        self._works = works
        self._has_left.set()

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the receiver has the message."""
        transport = self._transport
        # When this rank began to wait, in its own time.
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
        """Tell if `wait` would return at once."""
        return self._has_left.is_set() and all(work.is_completed() for work in self._works)


class ReceiveWork:
    """A message that this rank waits for.

    `post` asks the real transport for it. The time of that is written to the board before: as soon
    as the transport has the message, its sender reads it.
    """

    def __init__(self, transport: Waiting, key: Key, post: Callable[[], list[Any]]) -> None:
        self._transport, self._key = transport, key
        with transport.board.locked():
            transport.board.put(key, "asked_s", transport.clock.time())
        # Only now may the sender find the message asked for.
        self._works = post()

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the message has arrived."""
        transport = self._transport
        asked_s = transport.clock.time()
        for work in self._works:
            work.wait()
        with transport.board.locked():
            due_s = transport.board.get(self._key, "arrival_s")
        transport.waited(due_s, asked_s)
        return True

    def is_completed(self) -> bool:
        """Tell if `wait` would return at once."""
        return all(work.is_completed() for work in self._works)


class CollectiveWork(threading.Thread):
    """An asynchronous collective: a thread waits for the real one, then for the described links."""

    def __init__(
        self, transport: Waiting, key: Key, ring: CollectiveHops | None, kind: str, work: Any
    ) -> None:
        super().__init__(daemon=True)
        self._transport, self._key, self._ring = transport, key, ring
        self._kind, self._work = kind, work
        self._done_s = 0.0

    def run(self) -> None:
        """Wait for the real collective, then for the described links."""
        self._work.wait()
        self._done_s = self._transport.done_s(self._key, self._ring, self._kind)
        sleep_until(self._done_s)

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the collective is done."""
        came_s = self._transport.clock.time()
        # The thread has waited for transport and links.
        self.join()
        self._transport.waited(self._done_s, came_s)
        return True

    def is_completed(self) -> bool:
        """Tell if `wait` would return at once."""
        return not self.is_alive()


class Courier(threading.Thread):
    """A thread that acts at given times: it takes paths and delivers messages."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._changed = threading.Condition()
        self._number = 0

    def call_at(self, at_s: float, action: Callable[[], None]) -> None:
        """Call `action` at `at_s`; actions of equal time keep the order of the calls."""
        if self.ident is None:
            self.start()
        with self._changed:
            self._number += 1
            heapq.heappush(self._due, (at_s, self._number, action))
            self._changed.notify()

    def run(self) -> None:
        """Wait for the next due action, and call it, for ever."""
        while True:
            with self._changed:
                # A new action may be due before the one that is waited for.
                while not self._due or self._due[0][0] > now():
                    timeout_s = self._due[0][0] - now() if self._due else None
                    self._changed.wait(timeout_s)
                _, _, action = heapq.heappop(self._due)
            action()
