"""Steps from the first rank to all, and tokens back from the last stage.

Both are bytes over gloo, also where activations go over NCCL: a wait there ends with an error when
a rank is gone, at once where its connection closes, else after the limit.  Gloo tells of a message
only whoever waits for it, so a thread waits for tokens: the first rank may start the step of a new
request meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_hetero.lab.serve.batch import Drawn, Step, drawn_from_bytes, drawn_to_bytes

_IDLE, _STEP, _STOP = 0, 1, 2
_SIZE = 8
"""Bytes before the tokens of a step, that say how many follow."""

OnTokens = Callable[[tuple[Drawn, ...] | BaseException], None]
"""Takes the tokens of the oldest step under way, or why none will come."""


class Channel:
    """This rank's end. Collective.

    Args:
        drawing_rank: the rank that draws tokens, the first of the last stage.
        limit: of every wait.
    """

    def __init__(self, drawing_rank: int, limit: timedelta) -> None:
        self._rank, self._drawing = dist.get_rank(), drawing_rank
        self._steps = dist.new_group(backend="gloo", timeout=limit)
        self._tokens = dist.new_group(sorted({0, drawing_rank}), backend="gloo", timeout=limit)
        self._limit = limit
        self._asked: queue.SimpleQueue[tuple[dist.Work, torch.Tensor] | None] = queue.SimpleQueue()
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._on_tokens: OnTokens = _unheard

    def listen(self, on_tokens: OnTokens) -> None:
        """Hear the tokens of all further steps, from any thread: on the first rank."""
        self._on_tokens = on_tokens
        if self._drawing != 0:
            threading.Thread(target=self._await_tokens, name="tokens", daemon=True).start()

    def tell_step(self, step: Step) -> None:
        """Tell all ranks the next step, and make room for its tokens: on the first rank."""
        self._broadcast(_STEP, step.to_bytes())
        # Room for the answer is posted with the question, so that tokens arrive while steps run.
        if self._drawing != 0:
            num_bytes = _SIZE + step.most_drawn_bytes
            room = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            work = dist.irecv(room, self._drawing, group=self._tokens)
            assert work is not None
            self._asked.put((work, room))

    def tell_idle(self) -> None:
        """Tell all ranks that the first one lives."""
        self._broadcast(_IDLE, b"")

    def tell_stop(self) -> None:
        """Tell all ranks to end."""
        self._asked.put(None)
        self._broadcast(_STOP, b"")

    def hear(self) -> Step | None:
        """Wait for the next step; None is the end.  On all ranks but the first."""
        while True:
            # (kind, bytes that follow).
            head = torch.empty(2, dtype=torch.int64, device="cpu")
            dist.broadcast(head, 0, group=self._steps)
            kind, size = head.tolist()
            if kind == _STOP:
                return None
            if kind == _STEP:
                body = torch.empty(size, dtype=torch.uint8, device="cpu")
                dist.broadcast(body, 0, group=self._steps)
                return Step.from_bytes(body.numpy().tobytes())

    def send_tokens(self, step: Step, drawn: tuple[Drawn, ...]) -> None:
        """Send the tokens of a step to the first rank: on the drawing rank."""
        if self._rank == 0:
            self._on_tokens(drawn)
            return
        data = drawn_to_bytes(drawn)
        # A fixed number of bytes, which the receiver knows from the step.
        body = len(data).to_bytes(_SIZE, "little") + data.ljust(step.most_drawn_bytes, b"\0")
        message = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        # A message has to live until it has left.
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        work = dist.isend(message, 0, group=self._tokens)
        assert work is not None
        self._sent.append((work, message))

    def _await_tokens(self) -> None:
        """Hand the tokens of each step on as they come, in the order of the steps."""
        while (asked := self._asked.get()) is not None:
            work, room = asked
            try:
                work.wait(self._limit)
            except BaseException as error:
                # The loop of the first rank ends every request with it.
                self._on_tokens(error)
                return
            body = room.numpy().tobytes()
            size = int.from_bytes(body[:_SIZE], "little")
            self._on_tokens(drawn_from_bytes(body[_SIZE : _SIZE + size]))

    def _broadcast(self, kind: int, data: bytes) -> None:
        if self._steps.size() == 1:
            return
        head = torch.tensor([kind, len(data)], device="cpu")
        dist.broadcast(head, 0, group=self._steps)
        if data:
            body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(body, 0, group=self._steps)


def _unheard(_: tuple[Drawn, ...] | BaseException) -> None:
    raise RuntimeError("tokens have come before anyone listens")
