"""OpenAI's completions interface of a replica, by aiohttp on a thread of its own.

aiohttp is one library for the server here and the client in the router (`serving.route`); it bounds
bodies and headers, and a client that reads slowly holds up nobody else. There is no key and no
encryption: it listens on the loopback interface unless told otherwise.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from megatron_hetero.errors import EnvironmentMismatchError, UsageError
from megatron_hetero.lab.serve.engine import RequestEvent, ServingEngine
from megatron_hetero.lab.serve.protocol import (
    AnswerText,
    ChatRequest,
    CompletionRequest,
    chunk,
    end_tokens,
    parse_request,
)
from megatron_hetero.lab.serve.rank import ServeOptions
from megatron_hetero.serving.route.clients import (
    BODY_BYTES,
    KEPT_ALIVE_S,
    base_url,
    error_object,
    read_body,
    refused,
    send_part,
)

_LAST_WORDS_S = 1.0
"""Seconds for clients to read how their requests ended, when the server ends."""
_DEFAULT_TOKENS = 16
"""OpenAI's own number for completions without `max_tokens`; chats have no limit but the model's."""


def endpoint(engine: ServingEngine, tokenizer: Any, options: ServeOptions) -> Callable[[], None]:
    """Start to listen; return the function that ends it.

    Raises:
        EnvironmentMismatchError: the address cannot be bound.
    """
    # The loop has a thread of its own: this one computes.
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="endpoint", daemon=True)
    thread.start()
    service = _Service(engine, tokenizer, options)
    starting = asyncio.run_coroutine_threadsafe(service.start(), loop)
    try:
        runner = starting.result()
    except OSError as error:
        engine.stop()
        raise EnvironmentMismatchError(
            f"cannot listen on {options.host}:{options.port}: {error.strerror}; choose another "
            "--port"
        ) from error
    print(f"> serving {options.name} on {base_url(options.host, options.port)}", flush=True)

    def end() -> None:
        # First the handlers, which still tell their clients, then the loop.
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(_LAST_WORDS_S + 5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)

    return end


class _Service:
    """Handlers of a replica's interface."""

    def __init__(self, engine: ServingEngine, tokenizer: Any, options: ServeOptions) -> None:
        self._engine, self._tokenizer, self._options = engine, tokenizer, options
        self._ends = end_tokens(tokenizer, options.end_tokens)
        self._counter = 0

    async def start(self) -> web.AppRunner:
        """Bind and listen."""
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        # A client that goes away ends its handler, which cancels the request.
        runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=_LAST_WORDS_S,
            handler_cancellation=True,
            keepalive_timeout=KEPT_ALIVE_S,
        )
        await runner.setup()
        await web.TCPSite(runner, self._options.host, self._options.port).start()
        return runner

    async def _health(self, _: web.Request) -> web.Response:
        if self._engine.failure is not None:
            return refused(503, self._engine.failure, "server_error")
        running, waiting = self._engine.load()
        return web.json_response({"status": "ok", "running": running, "waiting": waiting})

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self._options.name, "object": "model", "owned_by": "megatron-hetero"}
        return web.json_response({"object": "list", "data": [model]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, is_chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, is_chat=True)

    async def _answer(self, request: web.Request, is_chat: bool) -> web.StreamResponse:
        body = await read_body(request)
        # The body was too large or broke off; the answer says so.
        if isinstance(body, web.Response):
            return body
        try:
            asked = parse_request(body, is_chat)
            prompt = self._prompt(asked)
            return await self._generate(request, asked, prompt, is_chat)
        except UsageError as error:
            return refused(400, str(error), "invalid_request_error")

    def _prompt(self, asked: CompletionRequest | ChatRequest) -> list[int]:
        """Return the prompt's tokens.

        Raises:
            UsageError: the tokenizer cannot read it, or a token does not exist.
        """
        if isinstance(asked, ChatRequest):
            messages = [message.model_dump() for message in asked.messages]
            tokens = self._templated(messages)
        elif isinstance(asked.prompt, str):
            tokens = self._tokens(asked.prompt)
        else:
            tokens = asked.prompt
        # A token beyond the vocabulary would end the rank in its embedding.
        size = int(self._tokenizer.vocab_size)
        strange = [token for token in tokens if not 0 <= token < size]
        if strange:
            raise UsageError(f"prompt: token {strange[0]} is not between 0 and {size - 1}")
        if not tokens:
            raise UsageError("prompt: it has no tokens; give at least one")
        return tokens

    def _tokens(self, text: str) -> list[int]:
        try:
            return [int(token) for token in self._tokenizer.tokenize(text)]
        except (ValueError, KeyError) as error:
            raise UsageError(f"prompt: the tokenizer cannot read it: {error}") from error

    def _templated(self, messages: list[dict[str, str]]) -> list[int]:
        try:
            found = self._tokenizer.apply_chat_template(
                messages, None, tokenize=True, add_generation_prompt=True
            )
        except Exception as error:
            # Templates are programs of the model's makers, which may raise anything.
            why = (str(error) or type(error).__name__).splitlines()[0][:200]
            raise UsageError(
                "messages: this model's tokenizer has no chat template, or its template refuses "
                f"them ({why}); use /v1/completions"
            ) from error
        # Newer tokenizers of Hugging Face answer with the mask beside the tokens.
        tokens = found["input_ids"] if isinstance(found, Mapping) else found
        return [int(token) for token in tokens]

    async def _generate(
        self,
        request: web.Request,
        asked: CompletionRequest | ChatRequest,
        prompt: list[int],
        is_chat: bool,
    ) -> web.StreamResponse:
        """Submit a request and send what comes of it, whole or as it comes."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[RequestEvent]()
        answer = AnswerText(self._tokenizer, asked.stops, prompt, self._ends)
        # Completions have OpenAI's number, chats all that is left of the longest sequence.
        most = asked.max_tokens or _DEFAULT_TOKENS
        if isinstance(asked, ChatRequest):
            room = max(self._engine.capacity.longest - len(prompt), 1)
            most = asked.max_completion_tokens or asked.max_tokens or room

        # Events come from the computing thread; the queue belongs to the loop.
        def on_event(event: RequestEvent) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        number = self._engine.submit(prompt, most, asked.sampling, self._ends, on_event)
        self._counter += 1
        form = _Form(f"cmpl-{self._counter}", self._options.name, is_chat, asked.num_logprobs)
        try:
            if asked.stream:
                usage = asked.stream_options is not None and asked.stream_options.include_usage
                return await _stream(request, events, answer, form, usage)
            return await _whole(events, answer, form)
        finally:
            # Nothing where it is over; else the client has gone, or a stop was found.
            self._engine.cancel(number)


class _Form:
    """Forms of an answer's objects: completions' or chat's."""

    def __init__(self, number: str, model: str, is_chat: bool, num_logprobs: int | None) -> None:
        self._number, self._model, self._is_chat = number, model, is_chat
        self._num_logprobs = num_logprobs

    def whole(self, text: str, answer: AnswerText, ended: str) -> dict[str, Any]:
        """Return a whole answer."""
        usage = answer.usage()
        if self._is_chat:
            message = {"role": "assistant", "content": text}
            choice: dict[str, Any] = {"message": message, "finish_reason": ended}
            return chunk("chat.completion", self._number, self._model, choice, usage=usage)
        logprobs = self._logprobs(answer, 0)
        choice = {"text": text, "finish_reason": ended, "logprobs": logprobs}
        return chunk("text_completion", self._number, self._model, choice, usage=usage)

    def part(self, text: str, answer: AnswerText, first: int, ended: str | None) -> dict[str, Any]:
        """Return what is new of an answer, with the tokens from number `first` on."""
        if self._is_chat:
            choice: dict[str, Any] = {"delta": {"content": text}, "finish_reason": ended}
            return chunk("chat.completion.chunk", self._number, self._model, choice)
        choice = {"text": text, "finish_reason": ended, "logprobs": self._logprobs(answer, first)}
        return chunk("text_completion", self._number, self._model, choice)

    def usage(self, answer: AnswerText) -> dict[str, Any]:
        """Return the last object of a stream, with the tokens of all of it."""
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        found = chunk(kind, self._number, self._model, {}, usage=answer.usage())
        return {**found, "choices": []}

    def _logprobs(self, answer: AnswerText, first: int) -> dict[str, Any] | None:
        return None if self._num_logprobs is None else answer.logprobs(first)


async def _whole(
    events: asyncio.Queue[RequestEvent], answer: AnswerText, form: _Form
) -> web.Response:
    text = ""
    while True:
        event = await events.get()
        # The replica has failed: the whole answer is an error.
        if event.drawn is None:
            return refused(503, event.error or "no answer", "server_error")
        text += answer.add(event.drawn, event.ended)
        ended = "stop" if answer.stopped else event.ended
        if ended is not None:
            return web.json_response(form.whole(text, answer, ended))


async def _stream(
    request: web.Request,
    events: asyncio.Queue[RequestEvent],
    answer: AnswerText,
    form: _Form,
    with_usage: bool,
) -> web.StreamResponse:
    """Send server-sent events; an error after the first of them is an event too."""
    # Before the first token an error is a status, which a router can act on.
    event = await events.get()
    if event.error is not None:
        return refused(503, event.error, "server_error")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    first = 0
    while True:
        drawn = event.drawn
        if drawn is None:
            await _send(request, response, error_object(str(event.error), "server_error"))
            return response
        text = answer.add(drawn, event.ended)
        ended = "stop" if answer.stopped else event.ended
        # A token may add no text yet, where a character or a stop is not complete.
        if text or ended:
            await _send(request, response, form.part(text, answer, first, ended))
            first = len(answer.drawn)
        if ended:
            break
        event = await events.get()
    if with_usage:
        await _send(request, response, form.usage(answer))
    await send_part(request, response, b"data: [DONE]\n\n")
    return response


async def _send(request: web.Request, response: web.StreamResponse, data: dict[str, Any]) -> None:
    await send_part(request, response, b"data: " + json.dumps(data).encode() + b"\n\n")
