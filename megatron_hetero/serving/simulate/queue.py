"""One replica of an engine as a queue: vLLM's scheduler, in steps.

Each step takes a token for every request that decodes, then chunks of prompts up to the budget of
tokens.  A request holds blocks of keys and values for its tokens; when none is free, the request
that came last gives its blocks back and begins again, with what it has said as part of its prompt.
One that waits begins when all of its prompt has room, not its first chunk alone, and in no step
that threw another one out (vLLM's `scheduler_reserve_full_isl`, its default; vllm#37307).
A pipeline of p stages has p batches under way; a request stays in one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from megatron_hetero.serving.prices.cache import CachePool
from megatron_hetero.serving.prices.work import StepWork, step_work
from megatron_hetero.serving.workload.requests import Request


class EngineSteps(Protocol):
    """Prices of steps: `PipelinePrice`, or a test's."""

    def times(self, work: StepWork) -> tuple[float, float]:
        """Return the seconds of a step, and those until the next batch may start."""


@dataclass(eq=False)
class Running:
    """A request on its way.

    Attributes:
        done: tokens whose keys and values are there.
        said: tokens given out.
        cached: tokens at the front that the replica holds for the whole class.
        chunk: tokens in the step under way.
        has_place: whether it is in a batch.
        first_s, last_s: moments of its first and its last token.
    """

    request: Request
    ready_s: float
    done: int = 0
    said: int = 0
    cached: int = 0
    prompt: int = 0
    blocks: int = 0
    chunk: int = 0
    first_s: float = inf
    last_s: float = inf
    num_preemptions: int = 0
    has_place: bool = False

    @property
    def is_prefilled(self) -> bool:
        """Return whether the keys and values of the whole prompt are there."""
        return self.done >= self.prompt


@dataclass
class BatchLane:
    """A batch under way, and when its step ends (infinite: none is running)."""

    running: list[Running] = field(default_factory=list)
    ends_s: float = inf


class ReplicaQueue:
    """A replica that takes requests and gives out tokens.

    Args:
        price: of its steps.
        pool: of keys and values.
        max_batched_tokens: of a step.
        max_sequences: that run at once.
        num_lanes: batches under way, one for each stage.
        stops_after_prefill: its requests go on elsewhere.
        shared_tokens: of each class, at the front of every prompt.
    """

    def __init__(
        self,
        price: EngineSteps,
        pool: CachePool,
        max_batched_tokens: int = 8192,
        max_sequences: int = 256,
        num_lanes: int = 1,
        stops_after_prefill: bool = False,
        shared_tokens: Sequence[int] = (),
    ) -> None:
        self.price = price
        self.pool, self._groups = pool, pool.groups
        self.free_blocks = pool.num_blocks
        self.budget, self.max_sequences = max_batched_tokens, max_sequences
        self.lanes = [BatchLane() for _ in range(num_lanes)]
        self.waiting: deque[Running] = deque()
        self.stops_after_prefill = stops_after_prefill
        # Only whole blocks of a shared prefix are kept.
        self._shared = [self._whole(tokens) for tokens in shared_tokens]
        self._is_shared = any(self._shared)
        self._cached: set[int] = set()
        self.busy_s = self._entry_free_s = self._exit_free_s = 0.0
        self.num_preemptions = 0

    @property
    def num_outstanding(self) -> int:
        """Return the requests that wait or run."""
        return len(self.waiting) + sum(len(lane.running) for lane in self.lanes)

    def holds(self, request: Request) -> bool:
        """Tell if the longest state of a request fits the empty replica."""
        tokens = request.input_tokens
        tokens += 0 if self.stops_after_prefill else request.output_tokens
        return tokens <= self.pool.longest

    def take(self, running: Running, is_prefilled: bool = False) -> None:
        """Let a request wait for its place.

        Args:
            running: the request.
            is_prefilled: its keys and values have come from another replica but for the last
                token's, which the first step computes again.
        """
        running.prompt = running.request.input_tokens
        running.done = running.prompt - 1 if is_prefilled else 0
        self.waiting.append(running)

    def start(self, now: float) -> list[float]:
        """Start a step in each lane that is idle and has work; return the moments of their ends."""
        ends = []
        for lane in self.lanes:
            if lane.ends_s == inf:
                work = self._fill(lane)
                if work.tokens:
                    step_s, next_s = self.price.times(work)
                    # A new batch enters the pipeline when its first stage is free.
                    begins = max(now, self._entry_free_s)
                    self._entry_free_s = begins + next_s
                    # The slowest stage is busy for as long as the next batch has to wait.
                    self.busy_s += next_s
                    # No batch overtakes the one before it: the last stage takes them in order.
                    lane.ends_s = max(begins + step_s, self._exit_free_s + next_s)
                    self._exit_free_s = lane.ends_s
                    ends.append(lane.ends_s)
        return ends

    def finish(self, now: float) -> list[Running]:
        """End the steps that end now; return the requests that leave."""
        left: list[Running] = []
        for lane in self.lanes:
            if lane.ends_s == now:
                lane.ends_s = inf
                left += self._end_step(lane, now)
        return left

    def release(self, running: Running) -> None:
        """Give the blocks of a request back."""
        self.free_blocks += running.blocks
        running.blocks = 0

    def _fill(self, lane: BatchLane) -> StepWork:
        """Choose the tokens of a step: decodes first, then prompts under way, then new ones."""
        thrown_out = self.num_preemptions
        for running in list(lane.running):
            # Not one that gave its place up to one before it.
            if running.done >= running.prompt and running.has_place:
                # Most tokens have room; the first behind a prompt gives back what its chunk held.
                changes = running.done == running.prompt or self._groups.changes_at(running.done)
                running.chunk = int(not changes or self._allot(lane, running, 1))
        # Decodes have their tokens first; prompts share what is left of the budget.
        left = self.budget - sum(r.chunk for r in lane.running)
        for running in [r for r in lane.running if not r.is_prefilled]:
            chunk = min(left, running.prompt - running.done)
            if chunk > 0 and running.has_place and self._allot(lane, running, chunk):
                left -= chunk
                running.chunk = chunk
        # New requests in the order of arrival: one that does not fit holds up those behind it.
        is_full = self.num_preemptions > thrown_out
        promised = self._promised_blocks() if self.waiting else 0
        while left > 0 and self.waiting and self._has_place() and not is_full:
            running = self.waiting[0]
            cached = self._cached_tokens(running)
            chunk = min(left, running.prompt - max(running.done, cached))
            # All of the prompt that the shared prefix does not cover has to have room.
            needed = self._groups.to_admit(running.prompt, max(running.done, cached), cached)
            if not self._has_room(needed + promised, running):
                break
            self.waiting.popleft()
            running.cached, running.done = cached, max(running.done, cached)
            running.has_place = True
            lane.running.append(running)
            self._allot(lane, running, chunk)
            promised += self._groups.missing(running.prompt, running.done + chunk)
            left -= chunk
            running.chunk = chunk
        return self._work([r for r in lane.running if r.chunk])

    def _work(self, chosen: Sequence[Running]) -> StepWork:
        """Return what a step does that takes the chunks of some requests."""
        prompts = [r for r in chosen if not r.is_prefilled]
        contexts = [r.done + 1 for r in chosen if r.is_prefilled]
        ended = sum(r.done + r.chunk >= r.prompt for r in prompts)
        return step_work(
            contexts, [(r.done, r.chunk) for r in prompts], ended, self._groups.window or None
        )

    def _promised_blocks(self) -> int:
        """Return the blocks that prompts under way have still to fill."""
        return sum(
            self._groups.missing(r.prompt, r.done + r.chunk)
            for lane in self.lanes for r in lane.running if not r.is_prefilled
        )  # fmt: skip

    def _has_place(self) -> bool:
        return sum(len(lane.running) for lane in self.lanes) < self.max_sequences

    def _cached_tokens(self, running: Running) -> int:
        kind = running.request.class_index
        if kind not in self._cached or kind >= len(self._shared):
            return 0
        # At least one token is computed, so that there is one to sample from.
        return min(self._shared[kind], self._whole(running.prompt - 1))

    def _whole(self, tokens: int) -> int:
        return tokens - tokens % self._groups.block_tokens

    def _allot(self, lane: BatchLane, running: Running, num_tokens: int) -> bool:
        """Get blocks for further tokens; requests that came later in the lane give theirs up."""
        # Blocks beyond those that the request has; fewer where a window has moved on.
        held = self._groups.held(running.done + num_tokens, running.done, running.cached)
        needed = held - running.blocks
        # The last to come gives its place up first, even if that is this request.
        while not self._has_room(needed, running):
            last = lane.running[-1]
            self._preempt(lane, last)
            if last is running:
                return False
        self.free_blocks -= needed
        running.blocks += needed
        return True

    def _has_room(self, num_blocks: int, running: Running) -> bool:
        """Tell if so many blocks are free for a request; prefixes that no request uses give theirs
        back first."""
        if num_blocks > self.free_blocks:
            used = {r.request.class_index for lane in self.lanes for r in lane.running if r.cached}
            for kind in sorted(self._cached - used - {running.request.class_index}):
                self._cached.remove(kind)
                self.free_blocks += self._groups.shared(self._shared[kind])
        return num_blocks <= self.free_blocks

    def _preempt(self, lane: BatchLane, running: Running) -> None:
        lane.running.remove(running)
        running.has_place = False
        running.chunk = 0
        self.release(running)
        # Tokens given out are computed again, as a part of the prompt.
        running.prompt = running.request.input_tokens + running.said
        running.done = running.cached = 0
        running.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(running)

    def _end_step(self, lane: BatchLane, now: float) -> list[Running]:
        left: list[Running] = []
        for running in lane.running:
            chunk, running.chunk = running.chunk, 0
            running.done += chunk
            if not chunk or running.done < running.prompt:
                continue
            # The prompt is complete: its front can serve the class.
            if self._is_shared:
                self._keep_prefix(running)
            if self.stops_after_prefill:
                left.append(running)  # its blocks stay until they are handed over
                continue
            running.said += 1
            running.first_s = min(running.first_s, now)
            running.last_s = now
            if running.said >= running.request.output_tokens:
                self.release(running)
                left.append(running)
        if left:
            gone = {id(running) for running in left}
            lane.running = [r for r in lane.running if id(r) not in gone]
        return left

    def _keep_prefix(self, running: Running) -> None:
        """Keep the shared prefix of a class's prompts, which later requests need not compute."""
        kind = running.request.class_index
        if kind in self._cached or kind >= len(self._shared) or not self._shared[kind]:
            return
        blocks = self._groups.shared(self._shared[kind])
        if blocks <= self.free_blocks:
            self.free_blocks -= blocks
            self._cached.add(kind)
