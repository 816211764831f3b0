"""Parts of the engine without a model: steps, the scheduler, draws, requests and answers."""

from __future__ import annotations

import json
import queue
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_hetero.errors import UsageError
from megatron_hetero.lab.serve.batch import (
    BLOCK_TOKENS,
    Drawn,
    Sampling,
    Segment,
    Step,
    drawn_from_bytes,
    drawn_to_bytes,
)
from megatron_hetero.lab.serve.engine import RequestEvent, ServingEngine
from megatron_hetero.lab.serve.protocol import AnswerText, end_tokens, parse_request
from megatron_hetero.lab.serve.sampling import draw_token
from megatron_hetero.lab.serve.scheduler import Capacity, Scheduler


def test_a_step_arrives_as_it_left() -> None:
    segment = Segment(3, 16, (5, 6), (2, 9), 4, Sampling(0.5, 0.9, 7, 11, 2))
    step = Step.of((segment, Segment(4, 0, (1,), (0,))), 4)
    assert step.num_tokens == 4
    assert Step.from_bytes(step.to_bytes()) == step
    drawn = (Drawn(3, -0.5, ((3, -0.5), (1, -2.0))), Drawn(0, -1.0))
    assert drawn_from_bytes(drawn_to_bytes(drawn)) == drawn


def test_there_is_room_for_the_longest_tokens_of_a_step() -> None:
    token, logprob = 2**63 - 1, -1.2345678901234567e-300
    asked = Sampling(num_logprobs=20)
    for number in (1, 3, 500):
        step = Step.of(tuple(Segment(i, 0, (1,), (0,), 0, asked) for i in range(number)), 1)
        drawn = (Drawn(token, logprob, ((token, logprob),) * 20),) * number
        assert len(drawn_to_bytes(drawn)) <= step.most_drawn_bytes
    assert len(drawn_to_bytes(())) <= Step.of((Segment(0, 0, (1,), (0,)),), 1).most_drawn_bytes


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9])
def test_a_tiny_temperature_takes_the_likeliest(temperature: float) -> None:
    logits = torch.tensor([1.0, 7.0, -3.0, 6.999], dtype=torch.float64)
    assert draw_token(logits, Sampling(temperature, seed=3), 0).token == 1


@pytest.mark.parametrize("seed", range(20))
def test_every_sequence_is_computed_once_in_order_and_in_blocks_of_its_own(seed: int) -> None:
    """Random requests, cancellations and steps under way: every token of a sequence is computed at
    its position, once, and no block belongs to two sequences."""
    draws = random.Random(seed)
    capacity = Capacity(16 * BLOCK_TOKENS, draws.randint(1, 5), draws.randint(1, 20), 60, 3, 2)
    scheduler = Scheduler(capacity)
    wanted, told = {}, Counter[int]()
    for number in range(12):
        prompt = [draws.randrange(50) for _ in range(draws.randint(1, 30))]
        wanted[number] = (prompt, draws.randint(1, 20))
        scheduler.add(number, prompt, wanted[number][1], Sampling(), frozenset())
    cancelled = set(draws.sample(range(12), 3))
    known = {number: list(prompt) for number, (prompt, _) in wanted.items()}
    computed: Counter[int] = Counter()
    owners: dict[int, int] = {}
    under_way: list[Step] = []
    ended = set()
    while True:
        if cancelled and draws.random() < 0.1:
            number = cancelled.pop()
            scheduler.cancel(number)
            ended.add(number)
        step = scheduler.next_step() if len(under_way) < capacity.num_stages else None
        if step is not None:
            assert step.num_tokens % 2 == 0
            assert sum(len(s.tokens) for s in step.segments) <= capacity.step_tokens
            for segment in step.segments:
                assert segment.first == computed[segment.sequence]
                part = known[segment.sequence][segment.first : segment.stop]
                assert list(segment.tokens) == part
                assert segment.stop <= len(segment.blocks) * BLOCK_TOKENS
                computed[segment.sequence] = segment.stop
                for block in segment.blocks:
                    owner = owners.setdefault(block, segment.sequence)
                    assert owner == segment.sequence or owner in ended
                    owners[block] = segment.sequence
            under_way.append(step)
            continue
        if not under_way:
            break
        step = under_way.pop(0)
        drawn = [Drawn(draws.randrange(50), 0.0) for _ in step.drawn]
        for segment, found in zip(step.drawn, drawn, strict=True):
            known[segment.sequence].append(found.token)
        for number, _, why in scheduler.finish(step, drawn):
            told[number] += 1
            if why is not None:
                assert why == "length"
                ended.add(number)
    assert ended == set(range(12))
    assert all(told[n] == new for n, (_, new) in wanted.items() if told[n] and n not in ended)
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert len(scheduler._free) == capacity.num_blocks


def test_a_request_that_never_fits_is_refused() -> None:
    scheduler = Scheduler(Capacity(64, 4, 8, 40, 1, 1))
    with pytest.raises(UsageError, match="the model's length: 40"):
        scheduler.add(0, [1] * 30, 11, Sampling(), frozenset())
    scheduler = Scheduler(Capacity(32, 4, 8, 40, 1, 1))
    with pytest.raises(UsageError, match="keys and values that fit: 32"):
        scheduler.add(0, [1] * 30, 3, Sampling(), frozenset())


class _Stages:
    """Stages that keep what they are told, and give tokens when the test does."""

    def __init__(self) -> None:
        self.steps: queue.SimpleQueue[Step] = queue.SimpleQueue()
        self.give: Callable[[Any], None]

    def listen(self, on_tokens: Callable[[Any], None]) -> None:
        self.give = on_tokens

    def tell_step(self, step: Step) -> None:
        self.steps.put(step)

    def tell_idle(self) -> None: ...

    tell_stop = tell_idle

    def run(self, step: Step) -> None: ...


class _Late:
    """News in which the word to stop is late."""

    def __init__(self, news: queue.SimpleQueue[Any]) -> None:
        self._news = news
        self.get, self.get_nowait = news.get, news.get_nowait

    def put(self, item: Any) -> None:
        if item is not None:
            self._news.put(item)


def _started(engine: ServingEngine, stages: _Stages) -> tuple[threading.Thread, list[Exception]]:
    """Run an engine on a thread of its own; return the thread, and what it ends with."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            engine.run(stages, stages)  # type: ignore[arg-type]
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_ranks_that_end_together_stop_and_have_not_failed() -> None:
    engine, stages = ServingEngine(Capacity(1024, 4, 8, 40, 2, 1)), _Stages()
    engine._news = _Late(engine._news)  # type: ignore[assignment]
    events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
    thread, _ = _started(engine, stages)
    engine.submit([1, 2], 1, Sampling(), frozenset(), events.put)
    stages.steps.get(timeout=5)
    # Another rank is gone, and that is read before the word to stop.
    engine.stop()
    stages.give(RuntimeError("connection closed"))
    assert events.get(timeout=5).error == "the server is stopping"
    thread.join(5)


def test_a_request_starts_while_the_tokens_of_another_one_are_awaited() -> None:
    engine, stages = ServingEngine(Capacity(1024, 4, 8, 40, 2, 1)), _Stages()
    events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
    thread, errors = _started(engine, stages)
    engine.submit([1, 2], 1, Sampling(), frozenset(), events.put)
    (first,) = stages.steps.get(timeout=5).segments
    # Its stage is free, and nothing has come of it yet.
    engine.submit([3], 2, Sampling(), frozenset(), events.put)
    (second,) = stages.steps.get(timeout=5).segments
    assert (first.sequence, second.sequence) == (0, 1)
    stages.give((Drawn(7, 0.0),))
    assert events.get(timeout=5).ended == "length"
    stages.give((Drawn(8, 0.0),))
    assert events.get(timeout=5).drawn == Drawn(8, 0.0)
    # A rank that is gone ends what is left.
    stages.give(RuntimeError("connection closed"))
    assert "connection closed" in str(events.get(timeout=5).error)
    thread.join(5)
    assert not thread.is_alive() and len(errors) == 1


def test_draws_follow_the_distribution_and_its_cuts() -> None:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64))
    assert draw_token(logits, Sampling(0.0), 0).token == 1
    counts = Counter(draw_token(logits, Sampling(seed=5), n).token for n in range(4000))
    for token, part in enumerate((0.1, 0.4, 0.2, 0.3)):
        assert abs(counts[token] / 4000 - part) < 4 * (part * (1 - part) / 4000) ** 0.5
    assert {draw_token(logits, Sampling(top_k=2), n).token for n in range(200)} == {1, 3}
    assert {draw_token(logits, Sampling(top_p=0.75), n).token for n in range(200)} == {1, 2, 3}
    assert {draw_token(logits, Sampling(top_p=0.7), n).token for n in range(200)} == {1, 3}
    first = [draw_token(logits, Sampling(seed=8), n).token for n in range(20)]
    assert first == [draw_token(logits, Sampling(seed=8), n).token for n in range(20)]
    found = draw_token(logits, Sampling(0.0, num_logprobs=2), 0)
    assert [token for token, _ in found.likeliest] == [1, 3]
    assert abs(found.logprob - float(logits[1])) < 1e-12


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"model": "m"}', "prompt"),
        (b'{"model": "m", "prompt": "1", "n": 2}', "n: "),
        (b'{"model": "m", "prompt": "1", "temperature": -1}', "temperature"),
        (b'{"model": "m", "prompt": "1", "temperature": NaN}', "temperature"),
        (b'{"model": "m", "prompt": "1", "max_tokens": 0}', "max_tokens"),
        (b'{"model": "m", "prompt": "1", "best": 1}', "best"),
        (b'{"model": "m", "prompt": ["a", "b"]}', "prompt"),
        (b'{"model": "m", "prompt": "cut \\ud83d"}', "half of a surrogate pair"),
    ],
)
def test_a_hostile_body_is_refused_by_name(body: bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_request(body, is_chat=False)


class _Letters:
    """A tokenizer of letters, of which some are halves of a character."""

    vocab_size = 256

    def detokenize(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def test_an_answer_shows_whole_characters_and_no_stop() -> None:
    text = "a€b STOP never"
    answer = AnswerText(_Letters(), ("STOP",), [1, 2, 3], frozenset())
    shown = []
    for token in text.encode():
        shown.append(answer.add(Drawn(token, 0.0), None))
        if answer.stopped:
            break
    assert "".join(shown) == "a€b "
    assert "\ufffd" not in json.dumps(shown)
    assert answer.usage()["prompt_tokens"] == 3


class _Pieces:
    """A tokenizer whose pieces have the space before a word, which is lost in front (as of Llama 2,
    Mistral, Gemma)."""

    vocab_size, eod = 4, None
    pieces = "▁the", "▁fox", "es", "▁run"

    def detokenize(self, tokens: list[int]) -> str:
        text = "".join(self.pieces[t] for t in tokens).replace("▁", " ")
        return text.removeprefix(" ")


def test_an_answer_continues_its_prompt() -> None:
    # "the" + " fox" + "es" + " run", not "thefoxes run".
    answer = AnswerText(_Pieces(), (), [0], end_tokens(_Pieces(), ""))
    assert [answer.add(Drawn(token, 0.0), None) for token in (1, 2, 3)] == [" fox", "es", " run"]
    # A character that the prompt began, byte by byte.
    euro = "€".encode()
    answer = AnswerText(_Letters(), (), list(b"a" + euro[:1]), frozenset())
    assert [answer.add(Drawn(token, 0.0), None) for token in euro[1:]] == ["", "€"]


def test_ends_of_an_answer_are_the_tokenizers_and_the_models() -> None:
    tokenizer = _Pieces()
    assert end_tokens(tokenizer, "") == frozenset()
    tokenizer.eod = 3  # type: ignore[assignment]
    assert end_tokens(tokenizer, "1,2") == {1, 2, 3}
