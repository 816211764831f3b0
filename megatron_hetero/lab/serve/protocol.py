"""Requests of OpenAI's completions interface as data, and what answers them.

What is not done is refused by name; a field that the interface does not have, too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from secrets import randbits
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_hetero.errors import UsageError
from megatron_hetero.lab.serve.batch import Drawn, Sampling

MAX_LOGPROBS = 20
_MAX_STOPS, _MAX_STOP = 16, 256
"""Most stops of a request, and most characters of one: each token of the answer is held to them."""
_CONTEXT_TOKENS = 5
"""Last tokens of a prompt that are read beside an answer's: a space before the first word, or a
character that the prompt began, shows beside them alone."""
_StopText = Annotated[str, Field(max_length=_MAX_STOP)]


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False


class _Common(BaseModel):
    """Fields of both kinds of requests; those that are typed `Literal` or None have no other value
    here yet."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str = Field(max_length=1024)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=1.0, ge=0, le=100)
    top_p: float | None = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    seed: int | None = None
    stop: _StopText | Annotated[list[_StopText], Field(max_length=_MAX_STOPS)] | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    user: str | None = None
    n: Literal[1] | None = 1
    presence_penalty: Literal[0] | None = 0
    frequency_penalty: Literal[0] | None = 0
    logit_bias: None = None

    @property
    def sampling(self) -> Sampling:
        """Return how tokens are drawn; without a seed, by one of chance."""
        return Sampling(
            1.0 if self.temperature is None else self.temperature,
            1.0 if self.top_p is None else self.top_p,
            self.top_k,
            randbits(63) if self.seed is None else self.seed,
            self.num_logprobs,
        )

    @property
    def num_logprobs(self) -> int | None:
        """Return how many likeliest tokens are asked for."""
        raise NotImplementedError

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the texts at which an answer ends."""
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in found if text)


class CompletionRequest(_Common):
    """Body of `/v1/completions`: one prompt, as text or as tokens."""

    prompt: str | list[int]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: Literal[False] | None = False
    best_of: Literal[1] | None = 1
    suffix: None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str


class ChatRequest(_Common):
    """Body of `/v1/chat/completions`: messages of text."""

    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: Literal[False] | None = False

    @property
    def num_logprobs(self) -> int | None:
        return None


def parse_request(body: bytes, is_chat: bool) -> CompletionRequest | ChatRequest:
    """Read a request.

    Raises:
        UsageError: it is no JSON, or a field is unknown, malformed or not supported; the message
            names it.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the body is not JSON: {error}") from error
    # JSON may name half of a character ("\\ud83d", of an emoji that was cut), which no text has.
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start : error.end])
        raise UsageError(f"the body has {half}, half of a surrogate pair: no character") from error
    # A list or a number is JSON, but no request.
    if not isinstance(data, dict):
        raise UsageError("the body is not a JSON object")
    try:
        return (ChatRequest if is_chat else CompletionRequest).model_validate(data)
    except ValidationError as error:
        # Without the input and at most five: an error is no place to send a body back.
        faults = [
            f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}"
            for fault in error.errors(include_input=False, include_url=False)[:5]
        ]
        raise UsageError("; ".join(faults)) from error


def end_tokens(tokenizer: Any, more: str) -> frozenset[int]:
    """Return the tokens that end an answer: the tokenizer's, if it has one, and `more`, numbers
    with commas between them."""
    own = () if tokenizer.eod is None else (int(tokenizer.eod),)
    return frozenset((*own, *(int(token) for token in more.split(",") if token)))


class AnswerText:
    """Text of one request, token by token.

    Args:
        tokenizer: Megatron's.
        stops: texts at which it ends, which it does not show.
        prompt: tokens that it follows.
        ends: tokens that end it, which it does not show.
    """

    def __init__(
        self, tokenizer: Any, stops: tuple[str, ...], prompt: Sequence[int], ends: frozenset[int]
    ) -> None:
        self._tokenizer, self._stops, self._ends = tokenizer, stops, ends
        self._num_prompt = len(prompt)
        self._before = list(prompt[-_CONTEXT_TOKENS:])
        # A character that the prompt has only begun is a part of the answer.
        self._num_before = len(tokenizer.detokenize(self._before).rstrip("\ufffd"))
        self.drawn: list[Drawn] = []
        self._shown = ""
        self.stopped = False

    def add(self, drawn: Drawn, ended: str | None) -> str:
        """Take a token; return the text that is new with it.

        Text that may be the beginning of a stop, or of a character, waits.
        """
        # The token that ends an answer is not part of it.
        if not (ended == "stop" and drawn.token in self._ends):
            self.drawn.append(drawn)
        text = self._tokenizer.detokenize([*self._before, *(d.token for d in self.drawn)])
        text = text[self._num_before :]
        # A stop may begin in text that was held back, so that the search begins before its end.
        for stop in self._stops:
            at = text.find(stop, max(0, len(self._shown) - len(stop)))
            if at >= 0:
                text, self.stopped = text[: max(at, len(self._shown))], True
        if not (self.stopped or ended):
            text = text[: len(text) - self._held_back(text)]
        new = text[len(self._shown) :]
        self._shown += new
        return new

    def _held_back(self, text: str) -> int:
        """Return how many last characters may change or turn out to be a stop."""
        # U+FFFD at the end: a character whose further bytes are still to come.
        most = len(text) - len(text.rstrip("\ufffd"))
        for stop in self._stops:
            # The longest end of the text that begins a stop.
            for length in range(min(len(stop) - 1, len(text)), most, -1):
                if stop.startswith(text[-length:]):
                    most = length
                    break
        return most

    def usage(self) -> dict[str, int]:
        """Return the tokens of prompt and answer."""
        num = len(self.drawn)
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": num,
            "total_tokens": self._num_prompt + num,
        }

    def logprobs(self, first: int = 0) -> dict[str, Any]:
        """Return log-probabilities of the tokens from the `first` on, in OpenAI's older form."""
        name = self._name
        return {
            "tokens": [name(d.token) for d in self.drawn[first:]],
            "token_logprobs": [d.logprob for d in self.drawn[first:]],
            "top_logprobs": [{name(t): p for t, p in d.likeliest} for d in self.drawn[first:]],
        }

    def _name(self, token: int) -> str:
        return str(self._tokenizer.detokenize([token]))


def chunk(
    kind: str, number: str, model: str, choice: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """Return the object of an answer, or of a part of one."""
    return {
        "id": number,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, **choice}],
        **more,
    }
