"""Requests per second of a replica that serves a single class, by phase, within the deadlines.

A replica that decodes b requests at once takes a step for each of their tokens: more requests share
the weights that a step reads, and each waits longer.  The largest batch that memory, the engine and
the deadline between tokens allow is taken.  A pipeline of p stages has p batches under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import floor, inf

from megatron_hetero.serving.prices.memory import cache_pool
from megatron_hetero.serving.prices.prompts import MeanRequest, mean_request
from megatron_hetero.serving.prices.served import ServedModel
from megatron_hetero.serving.prices.steps import PipelinePrice
from megatron_hetero.serving.prices.work import StepWork, pairs_of
from megatron_hetero.serving.workload.requests import RequestClass


@dataclass(frozen=True)
class PhaseRate:
    """What a replica does for a class in a phase.

    Attributes:
        per_s: requests per second; 0 where it cannot serve the class.
        batch: requests that it has under way.
        first_token_s, between_tokens_s: of a request that is alone, and with the batch full.
    """

    per_s: float
    batch: int = 0
    first_token_s: float = 0.0
    between_tokens_s: float = 0.0


NOTHING = PhaseRate(0.0)


class PhaseRates:
    """Rates of one replica.

    Args:
        price: of its steps.
    """

    def __init__(self, price: PipelinePrice) -> None:
        self.price, self.engine = price, price.engine
        self.pool = cache_pool(price.pipeline, price.served, price.engine)
        self._window = price.served.window
        self._lanes = len(price.pipeline.stages)

    def rate(self, phase: str, kind: RequestClass) -> PhaseRate:
        """Return what the replica does for a class in "prefill", "decode" or "both"."""
        # A prefill replica holds the prompt alone, others the answer as well.
        longest = kind.input_tokens.most if phase == "prefill" else kind.most_tokens
        if longest > self.pool.longest:
            return NOTHING
        # A request that is alone already takes longer than its deadline.
        first_s = self.first_token_s(kind)
        if phase != "decode" and first_s > kind.first_token_s:
            return NOTHING
        if phase == "prefill":
            return PhaseRate(self._prefill_per_s(kind), 0, first_s)
        if phase == "decode":
            return self._best_batch(kind, lambda batch: self._decoding(kind, batch), first_s)
        best = self._best_batch(kind, lambda batch: self._mixing(kind, batch), first_s)
        # Prompts beside decodes are too slow where prompts are long and answers short.
        return self._one_at_a_time(kind, first_s) if best is NOTHING else best

    def first_token_s(self, kind: RequestClass) -> float:
        """Return the seconds to the first token of a request that is alone, in chunks."""
        return self._prompt_s(kind.input_tokens.mean, self._mean(kind).prefix)

    def _prompt_s(self, tokens: float, prefix: float) -> float:
        # Chunk by chunk: each attends to all tokens before and to its own.
        done, total = min(prefix, tokens - 1), 0.0
        left = tokens - done
        while left > 0:
            chunk = min(left, float(self.engine.max_batched_tokens))
            work = StepWork(chunk, float(chunk == left), pairs_of(done, chunk))
            total += self.price.times(self._near(work, pairs_of(done, chunk, self._window)))[0]
            left, done = left - chunk, done + chunk
        return total

    def alone_between_s(self, kind: RequestClass) -> float:
        """Return the seconds between the tokens of a request that decodes alone."""
        return self._decoding(kind, 1.0)[1]

    def _prefill_per_s(self, kind: RequestClass) -> float:
        """Return the prompts per second in steps full of prompts."""
        # As many prompts as fill a step; a long one takes several steps.
        mean = self._mean(kind)
        number = self.engine.max_batched_tokens / mean.new
        work = StepWork(mean.new * number, max(1.0, number), mean.pairs * number)
        return number / self.price.times(self._near(work, number * mean.near_pairs))[1]

    def _best_batch(
        self, kind: RequestClass, step: Callable[[float], tuple[float, float]], first_s: float
    ) -> PhaseRate:
        """Return the rate with the batch that serves most within the deadline between tokens."""
        # A larger batch serves more, until the deadline between tokens is missed.
        best = NOTHING
        for batch in _batches(self._most_batch(kind)):
            per_s, between_s = step(float(batch))
            if between_s <= kind.between_tokens_s and per_s > best.per_s:
                best = PhaseRate(per_s, batch, first_s, between_s)
        return best

    def _most_batch(self, kind: RequestClass) -> int:
        groups, mean = self.pool.groups, self._mean(kind)
        # Tokens that a request holds by itself in all groups; the shared prefix is held once.
        held = groups.mean_held(mean.held)
        shared = groups.mean_held(mean.prefix)
        # A prompt of each batch also holds the chunk that is under way, beyond its window.
        beyond = self._lanes * groups.beyond_window(mean.new, self.engine.max_batched_tokens)
        fits = (self.pool.num_blocks * groups.block_tokens - shared - beyond) / held
        return max(1, min(self.engine.max_sequences * self._lanes, int(fits)))

    def _decoding(self, kind: RequestClass, batch: float) -> tuple[float, float]:
        """Return (requests per second, seconds between tokens) of decoding alone."""
        # The first token comes from prefill; an answer of one token takes a step here, too, as the
        # decoder gives out all tokens.
        steps = max(1.0, kind.output_tokens.mean - 1)
        part, mean = batch / self._lanes, self._mean(kind)
        work = StepWork(part, part, 0.0, part * mean.context)
        between_s = self._round_s(self._near(work, 0.0, part * mean.near_context))
        return batch / (steps * between_s), between_s

    def _mixing(self, kind: RequestClass, batch: float) -> tuple[float, float]:
        """Return the same of steps that decode and prefill: as many prompts as requests end.

        A step takes whole prompts, or pieces of its budget's size: decodes are bound by memory and
        prompts by products, so that a few tokens in each step would cost less than they do.
        """
        steps = kind.output_tokens.mean - 1
        if steps <= 0:
            return self._prefill_per_s(kind), 0.0
        part, mean = batch / self._lanes, self._mean(kind)
        new = mean.new
        room = self.engine.max_batched_tokens - part
        if room < 1:
            return 0.0, inf
        # Pieces of prompts that each step has to take: a request begins for each that ends.
        piece = min(new, room)
        wanted = part / steps * new / piece
        taken = min(wanted, room / piece)

        def round_s(number: int) -> float:
            tokens = number * piece
            prompts = tokens / new
            work = StepWork(
                part + tokens, part + prompts, prompts * mean.pairs, part * mean.context
            )
            near = prompts * mean.near_pairs, part * mean.near_context
            return self._round_s(self._near(work, *near))

        # Of the batches of a pipeline one that has a piece more holds up the others.
        fewer = floor(taken)
        chance = 1 - (1 - (taken - fewer)) ** self._lanes
        between_s = (1 - chance) * round_s(fewer) + chance * round_s(fewer + 1)
        # Prompts that do not fit delay every step by the same ratio.
        between_s *= wanted / taken
        return batch / (steps * between_s), between_s

    def _one_at_a_time(self, kind: RequestClass, first_s: float) -> PhaseRate:
        """Return the rate of requests that have the replica to themselves."""
        between_s = self.alone_between_s(kind)
        if between_s > kind.between_tokens_s:
            return NOTHING
        steps = max(0.0, kind.output_tokens.mean - 1)
        prefix = self._mean(kind).prefix
        mean_s = kind.input_tokens.mean_of(lambda tokens: self._prompt_s(tokens, prefix))
        return PhaseRate(1 / (mean_s + steps * between_s), 1, first_s, between_s)

    def _near(self, work: StepWork, pairs: float, context: float = 0.0) -> StepWork:
        """Return the work with what layers with a window attend to; as it is without such layers,
        so that equal work is priced once."""
        if self._window is None:
            return work
        return work._replace(near_pairs=pairs, near_context=context)

    def _mean(self, kind: RequestClass) -> MeanRequest:
        return mean_request(kind, self._window)

    def _round_s(self, work: StepWork) -> float:
        """Return the seconds between a request's tokens, with such a batch in each stage."""
        # A round lasts as one batch through all stages, or as all batches on the slowest stage.
        whole_s, slowest_s = self.price.times(work)
        return max(whole_s, self._lanes * slowest_s)


def kv_hand_over_bytes(served: ServedModel, kind: RequestClass, block_tokens: int) -> float:
    """Return the mean bytes of keys and values of a prompt that go from prefill to decode."""
    return kind.input_tokens.mean_of(lambda n: served.hand_over_bytes(n, block_tokens))


def _batches(most: int) -> Iterator[int]:
    """Yield batches to try, up to `most`: neighbours are a sixth apart."""
    batch = 1
    while batch < most:
        yield batch
        batch = max(batch + 1, batch * 7 // 6)
    yield most
