"""Which sequences advance in a step: continuous batching with chunks of prompts.

A sequence is let in, in the order of arrival, when blocks for its prompt and for all that it may
generate are free; so none is ever thrown out again. Sequences that generate go first, one token
each, then prompts, up to a number of tokens in a step. While a step is under way in the pipeline
its sequences wait; others make up the next one, so that all stages have work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from megatron_hetero.errors import UsageError
from megatron_hetero.lab.serve.batch import BLOCK_TOKENS, Drawn, Sampling, Segment, Step


@dataclass(frozen=True)
class Capacity:
    """Limits of a replica.

    Attributes:
        kv_tokens: tokens whose keys and values are held.
        max_sequences: that run at once.
        step_tokens: most tokens of a step.
        max_length: tokens of a sequence, prompt and answer.
        num_stages: steps that are under way at once.
        multiple: of tokens in a step.
    """

    kv_tokens: int
    max_sequences: int
    step_tokens: int
    max_length: int
    num_stages: int
    multiple: int

    @property
    def num_blocks(self) -> int:
        """Return the blocks of keys and values."""
        return self.kv_tokens // BLOCK_TOKENS

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sequence that can be served."""
        return min(self.max_length, BLOCK_TOKENS * self.num_blocks)


@dataclass
class HeldSequence:
    """State of one sequence: `tokens` begin with its prompt; keys and values of `num_computed` are
    held, or will be when the step under way has ended."""

    number: int
    num_prompt: int
    max_new: int
    sampling: Sampling
    ends: frozenset[int]
    tokens: list[int]
    blocks: tuple[int, ...] = ()
    num_computed: int = 0
    is_under_way: bool = False
    is_cancelled: bool = False
    num_drawn: int = field(default=0)

    @property
    def num_blocks(self) -> int:
        """Return the blocks that the whole sequence may need."""
        return ceil((self.num_prompt + self.max_new) / BLOCK_TOKENS)


class Scheduler:
    """Waiting and running sequences of a replica, and its free blocks."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        # A stack with block 0 on top.
        self._free = list(range(capacity.num_blocks))[::-1]
        self._waiting: deque[HeldSequence] = deque()
        self._running: dict[int, HeldSequence] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def check(self, num_prompt: int, max_new: int) -> None:
        """Refuse a request that never fits.

        Raises:
            UsageError: it is longer than the model, or than all that the cache holds.
        """
        most = self.capacity.longest
        if num_prompt + max_new > most:
            is_model = most == self.capacity.max_length
            what = "the model's length" if is_model else "the keys and values that fit"
            raise UsageError(
                f"{num_prompt} tokens of prompt and {max_new} of answer exceed {what}: {most} "
                "tokens. Ask for fewer (max_tokens), or shorten the prompt."
            )

    def add(
        self,
        number: int,
        prompt: Sequence[int],
        max_new: int,
        sampling: Sampling,
        ends: frozenset[int],
    ) -> None:
        """Queue a sequence.

        Args:
            number: unique.
            prompt: its tokens, at least one.
            max_new: most tokens to draw, at least one.
            sampling: how they are drawn.
            ends: tokens after which it is over.
        Raises:
            UsageError: as `check`.
        """
        self.check(len(prompt), max_new)
        self._waiting.append(
            HeldSequence(number, len(prompt), max_new, sampling, ends, list(prompt))
        )

    def cancel(self, number: int) -> None:
        """Drop a sequence that nobody waits for; unknown ones are over already."""
        if number in self._running:
            running = self._running[number]
            running.is_cancelled = True
            # The step under way still writes into its blocks; `finish` ends it then.
            if not running.is_under_way:
                self._end(running)
            return
        self._waiting = deque(s for s in self._waiting if s.number != number)

    def next_step(self) -> Step | None:
        """Return the next step; None if no sequence can advance before another step has ended."""
        self._admit()
        ready = [s for s in self._running.values() if not s.is_under_way]
        # Shares of all, or the first step would take every sequence and the other stages idle.
        most = ceil(len(self._running) / self.capacity.num_stages)
        left = self.capacity.step_tokens
        segments: list[Segment] = []
        # Sequences that generate come before prompts; both keep the order of arrival.
        for running in sorted(ready, key=lambda s: s.num_computed < s.num_prompt):
            if len(segments) == most or not left:
                break
            # All tokens that are not computed yet: one in generation, a chunk of a prompt.
            stop = min(len(running.tokens), running.num_computed + left)
            first, running.num_computed = running.num_computed, stop
            running.is_under_way = True
            left -= stop - first
            segments.append(
                Segment(
                    running.number,
                    first,
                    tuple(running.tokens[first:stop]),
                    running.blocks[: ceil(stop / BLOCK_TOKENS)],
                    # Only behind the last known token a new one is drawn.
                    running.num_drawn if stop == len(running.tokens) else None,
                    running.sampling,
                )
            )
        return Step.of(tuple(segments), self.capacity.multiple) if segments else None

    def finish(self, step: Step, drawn: Sequence[Drawn]) -> list[tuple[int, Drawn, str | None]]:
        """Take over what a step has drawn.

        Args:
            step: the oldest one that is under way.
            drawn: its tokens, in the order of the segments that draw.
        Returns:
            (sequence, token, why it ended or None); "stop" or "length".
        """
        told = []
        tokens = iter(drawn)
        for segment in step.segments:
            running = self._running[segment.sequence]
            running.is_under_way = False
            # A chunk in the middle of a prompt draws nothing.
            if segment.draws is not None:
                found = next(tokens)
                running.tokens.append(found.token)
                running.num_drawn += 1
                why = None
                if found.token in running.ends:
                    why = "stop"
                elif running.num_drawn == running.max_new:
                    why = "length"
                if not running.is_cancelled:
                    told.append((running.number, found, why))
                if why is not None:
                    self._end(running)
                    continue
            if running.is_cancelled:
                self._end(running)
        return told

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.capacity.max_sequences:
            # The oldest waits for its blocks; a shorter one behind does not overtake.
            need = self._waiting[0].num_blocks
            if need > len(self._free):
                return
            running = self._waiting.popleft()
            running.blocks = tuple(self._free.pop() for _ in range(need))
            self._running[running.number] = running

    def _end(self, running: HeldSequence) -> None:
        del self._running[running.number]
        self._free += reversed(running.blocks)
