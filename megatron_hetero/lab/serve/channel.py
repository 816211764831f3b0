"""Steps from the first rank to all, and tokens back from the last stage.

Both are bytes over gloo, also where activations go over NCCL: a wait there ends with an error when
a rank is gone, at once where its connection closes, else after the limit.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_hetero.lab.serve.batch import Drawn, Step, drawn_from_bytes, drawn_to_bytes

_IDLE, _STEP, _STOP = 0, 1, 2
_SIZE = 8
"""Bytes before the tokens of a step, that say how many follow."""


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
        self._asked: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._own: deque[bytes] = deque()

    def tell_step(self, step: Step) -> None:
        """Tell all ranks the next step, and make room for its tokens: on the first rank."""
        self._broadcast(_STEP, step.to_bytes())
        # Room for the answer is posted with the question, so that tokens arrive while steps run.
        if self._drawing != 0:
            num_bytes = _SIZE + step.most_drawn_bytes
            room = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            work = dist.irecv(room, self._drawing, group=self._tokens)
            assert work is not None
            self._asked.append((work, room))

    def tell_idle(self) -> None:
        """Tell all ranks that the first one lives."""
        self._broadcast(_IDLE, b"")

    def tell_stop(self) -> None:
        """Tell all ranks to end."""
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
        data = drawn_to_bytes(drawn)
        if self._rank == 0:
            self._own.append(data)
            return
        # A fixed number of bytes, which the receiver knows from the step.
        body = len(data).to_bytes(_SIZE, "little") + data.ljust(step.most_drawn_bytes, b"\0")
        message = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        # A message has to live until it has left.
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        work = dist.isend(message, 0, group=self._tokens)
        assert work is not None
        self._sent.append((work, message))

    def tokens_are_there(self) -> bool:
        """Tell if `take_tokens` need not wait."""
        if self._drawing == 0:
            return bool(self._own)
        return bool(self._asked) and self._asked[0][0].is_completed()

    def take_tokens(self) -> tuple[Drawn, ...]:
        """Wait for the tokens of the oldest step: on the first rank."""
        if self._drawing == 0:
            return drawn_from_bytes(self._own.popleft())
        work, room = self._asked.popleft()
        work.wait(self._limit)
        body = room.numpy().tobytes()
        size = int.from_bytes(body[:_SIZE], "little")
        return drawn_from_bytes(body[_SIZE : _SIZE + size])

    def _broadcast(self, kind: int, data: bytes) -> None:
        if self._steps.size() == 1:
            return
        head = torch.tensor([kind, len(data)], device="cpu")
        dist.broadcast(head, 0, group=self._steps)
        if data:
            body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(body, 0, group=self._steps)
