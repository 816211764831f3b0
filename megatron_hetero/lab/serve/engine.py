"""The loop of the first rank: requests in from other threads, steps out to all ranks, tokens back.

Requests and tokens come in one queue: a request that comes while a step is under way starts as soon
as the first stage is free, and does not wait for that step's tokens.
A rank that is gone makes a wait end with an error; every request that is not over then gets the
reason, and so does every later one.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_hetero.lab.serve.batch import Drawn, Sampling, Step
from megatron_hetero.lab.serve.channel import Channel
from megatron_hetero.lab.serve.scheduler import Capacity, Scheduler
from megatron_hetero.lab.serve.stage import StageRunner

_IDLE_S = 0.5
"""Seconds after which ranks without work hear from the first one."""


@dataclass(frozen=True)
class RequestEvent:
    """News of a request: a token, and why it was the last; or an error, which ends it."""

    drawn: Drawn | None
    ended: str | None = None
    error: str | None = None


OnEvent = Callable[[RequestEvent], None]


@dataclass(frozen=True)
class _Tokens:
    """What the oldest step under way has drawn, or why its tokens will not come."""

    drawn: tuple[Drawn, ...] | BaseException


@dataclass(frozen=True)
class _Request:
    number: int
    prompt: Sequence[int]
    max_new: int
    sampling: Sampling
    ends: frozenset[int]


class ServingEngine:
    """Requests of a replica. `submit`, `cancel` and `stop` may be called from any thread, `run` and
    `follow` from the one that computes; events come from it."""

    def __init__(self, capacity: Capacity) -> None:
        self._scheduler = Scheduler(capacity)
        self.capacity = capacity
        self._news: queue.SimpleQueue[_Request | int | _Tokens | None] = queue.SimpleQueue()
        self._listeners: dict[int, OnEvent] = {}
        self._lock = threading.Lock()
        self._next = 0
        self._is_stopping = False
        self.failure: str | None = None
        """Why the replica serves no more."""

    def submit(
        self,
        prompt: Sequence[int],
        max_new: int,
        sampling: Sampling,
        ends: frozenset[int],
        on_event: OnEvent,
    ) -> int:
        """Queue a request; return its number.

        Args:
            prompt: its tokens, at least one.
            max_new: most tokens of the answer.
            sampling: how they are drawn.
            ends: tokens after which the answer is over.
            on_event: called for each token; the last call has `ended` or `error`.
        Raises:
            UsageError: it can never fit.
        """
        self._scheduler.check(len(prompt), max_new)
        # Number, listener and queue under one lock: a failure finds every listener, or comes first.
        with self._lock:
            number = self._next
            self._next += 1
            failure = self.failure
            if failure is None:
                self._listeners[number] = on_event
                self._news.put(_Request(number, tuple(prompt), max_new, sampling, ends))
        if failure is not None:
            on_event(RequestEvent(None, error=failure))
        return number

    def cancel(self, number: int) -> None:
        """Drop a request: nobody listens any more."""
        with self._lock:
            # A request that is over has no listener.
            if self._listeners.pop(number, None) is not None:
                self._news.put(number)

    def stop(self) -> None:
        """End the loop; open requests end with an error."""
        self._is_stopping = True
        self._news.put(None)

    def load(self) -> tuple[int, int]:
        """Return how many requests run and wait."""
        return self._scheduler.num_running, self._scheduler.num_waiting

    def run(self, channel: Channel, runner: StageRunner) -> None:
        """Serve until `stop`: on the first rank.

        Raises:
            RuntimeError: a rank is gone, or its answer late; all requests have been told.
        """
        why = "the server is stopping"
        try:
            self._loop(channel, runner)
            channel.tell_stop()
        except BaseException as error:
            # Where all ranks are told to end, others may be gone before this one has heard of it.
            if not self._is_stopping:
                reason = f"a rank is gone or does not answer ({_first(error)})"
                why = f"the replica has failed: {reason}"
            raise
        finally:
            self._fail(why)

    def _loop(self, channel: Channel, runner: StageRunner) -> None:
        channel.listen(lambda drawn: self._news.put(_Tokens(drawn)))
        under_way: deque[Step] = deque()
        while True:
            step = None
            # As many steps under way as stages, so that each stage has one.
            if len(under_way) < self.capacity.num_stages:
                step = self._scheduler.next_step()
            # The first rank is a stage itself: it tells the step and computes its own part.
            if step is not None:
                channel.tell_step(step)
                under_way.append(step)
                drawn = runner.run(step)
                if drawn is not None:
                    channel.send_tokens(step, drawn)
            # News are awaited only where nothing else is to be done.
            if not self._take_news(channel, under_way, waits=step is None):
                return

    def _take_news(self, channel: Channel, under_way: deque[Step], waits: bool) -> bool:
        """Take requests and tokens that have come, or wait for some; return False for the end."""
        while True:
            try:
                news = self._news.get(timeout=_IDLE_S) if waits else self._news.get_nowait()
            except queue.Empty:
                # Ranks that wait would take silence for the end of this rank.
                if waits and not under_way:
                    channel.tell_idle()
                return True
            # What else is there is taken without a wait.
            waits = False
            if news is None:
                return False
            self._take(news, under_way)

    def _take(self, news: _Request | int | _Tokens, under_way: deque[Step]) -> None:
        """Take one piece of news.

        Raises:
            BaseException: why the tokens of a step will not come.
        """
        if isinstance(news, _Tokens):
            if isinstance(news.drawn, BaseException):
                raise news.drawn
            self._tell(self._scheduler.finish(under_way.popleft(), news.drawn))
        elif isinstance(news, int):
            self._scheduler.cancel(news)
        else:
            # `submit` has checked that it fits.
            self._scheduler.add(news.number, news.prompt, news.max_new, news.sampling, news.ends)

    def _tell(self, told: list[tuple[int, Drawn, str | None]]) -> None:
        for number, drawn, ended in told:
            with self._lock:
                # The client may have gone in the meantime.
                listener = self._listeners.get(number)
                if ended is not None:
                    self._listeners.pop(number, None)
            if listener is not None:
                listener(RequestEvent(drawn, ended))

    def _fail(self, why: str) -> None:
        with self._lock:
            self.failure = why
            listeners = list(self._listeners.values())
            self._listeners.clear()
        for listener in listeners:
            listener(RequestEvent(None, error=why))


def follow(channel: Channel, runner: StageRunner) -> None:
    """Compute what the first rank tells, until it ends: on every other rank."""
    while (step := channel.hear()) is not None:
        drawn = runner.run(step)
        if drawn is not None:
            channel.send_tokens(step, drawn)


def _first(error: BaseException) -> str:
    """Return the first line of an error."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
