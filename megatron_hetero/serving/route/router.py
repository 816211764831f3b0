"""Requests handed on to the replicas of a plan by their shares, over HTTP.

A replica that cannot be reached, or refuses because it has failed, gets no request for a while, and
one that shows no sign of life (`link`) none until it does; as long as nothing of an answer has gone
to the client, another replica gets the request. An answer that breaks off ends with an error that
the client sees, never as if it were whole.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress

from aiohttp import ClientError, ClientResponse, web

from megatron_hetero.serving.route.clients import (
    BODY_BYTES,
    error_object,
    read_body,
    refused,
    send_part,
)
from megatron_hetero.serving.route.link import PATIENCE, Patience, ReplicaLink
from megatron_hetero.serving.route.weights import ReplicaTurns, RoutedReplica

CLASS_HEADER = "X-Request-Class"
"""Header in which a client may name its class of the workload."""
_AVOIDED_S = 5.0
"""Seconds without requests for a replica that has failed."""
_FAILED = frozenset({502, 503, 504})


class RequestRouter:
    """Router of a few replicas.

    Args:
        targets: the replicas, at least one.
        patience: with silent replicas.
    """

    def __init__(self, targets: Sequence[RoutedReplica], patience: Patience = PATIENCE) -> None:
        self._turns = ReplicaTurns(targets)
        self._avoided: dict[str, float] = {}
        self._links = {target.name: ReplicaLink(target.url, patience) for target in targets}
        self.counts = {target.name: 0 for target in targets}
        """Requests handed on, by replica."""

    def application(self) -> web.Application:
        """Return the server's application."""
        # aiohttp refuses a longer body where the body is read.
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._hand_on)
        app.router.add_post("/v1/completions", self._hand_on)
        app.router.add_post("/v1/chat/completions", self._hand_on)
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, _: web.Application) -> None:
        for link in self._links.values():
            await link.close()

    async def _health(self, _: web.Request) -> web.Response:
        avoided = sorted(self._now_avoided())
        # The router is well as long as one replica is not avoided.
        status = 503 if len(avoided) == len(self.counts) else 200
        return web.json_response({"failed": avoided, "requests": self.counts}, status=status)

    async def _hand_on(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        if isinstance(body, web.Response):
            return body
        # Replicas that this request has been to.
        tried: set[str] = set()
        why = "no replica shows a sign of life"
        while True:
            avoided = self._now_avoided() | tried
            kind = request.headers.get(CLASS_HEADER)
            target = self._turns.next(kind, avoided)
            if target is None and not tried:
                # All have failed lately: one may be back, but not one that is known to be silent.
                target = self._turns.next(kind, self._silent())
            if target is None:
                if tried:
                    why = f"no replica serves this request; the last said: {why}"
                return refused(503, why, "server_error")
            tried.add(target.name)
            found = await self._try(request, body, target)
            if not isinstance(found, str):
                return found
            why = f"{target.name}: {found}"
            # A failed replica gets a pause, so that others do not wait for it in turn.
            self._avoided[target.name] = time.monotonic() + _AVOIDED_S

    async def _try(
        self, request: web.Request, body: bytes, target: RoutedReplica
    ) -> web.StreamResponse | str:
        """Hand a request to a replica; return why another one must take it, as words."""
        kind = request.headers.get("Content-Type", "application/json")
        self.counts[target.name] += 1
        link = self._links[target.name]
        try:
            async with link.ask(request.method, request.path, body, kind) as answer:
                # These say that the replica failed; all other answers are the client's.
                if answer.status in _FAILED:
                    return (await answer.text(errors="replace"))[:200]
                return await self._pass_back(request, answer, target)
        except (ClientError, TimeoutError, OSError) as error:
            return str(error) or type(error).__name__

    async def _pass_back(
        self, request: web.Request, answer: ClientResponse, target: RoutedReplica
    ) -> web.StreamResponse:
        """Send an answer on as it comes."""
        kind = answer.headers.get("Content-Type", "application/json")
        if not kind.startswith("text/event-stream"):
            # Whole before anything is sent: one that breaks off is another replica's.
            whole = await answer.read()
            return web.Response(body=whole, status=answer.status, headers={"Content-Type": kind})
        # A stream that ends before its first part is another replica's too.
        part = await answer.content.readany()
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
        end = b""
        # A client that is gone or reads nothing says nothing about the replica.
        with suppress(ConnectionResetError):
            await response.prepare(request)
            while part:
                # The end of what was sent, to close an event that broke off.
                end = (end + part)[-64:]
                await send_part(request, response, part)
                try:
                    part = await answer.content.readany()
                except (ClientError, TimeoutError, OSError) as error:
                    # What was sent cannot be taken back, so no other replica can go on.
                    self._avoided[target.name] = time.monotonic() + _AVOIDED_S
                    link = self._links[target.name]
                    why = link.silence if link.is_silent else error
                    await _break_off(response, end, f"{target.name} broke off: {why}")
                    break
        return response

    def _now_avoided(self) -> frozenset[str]:
        now = time.monotonic()
        failed = frozenset(name for name, until in self._avoided.items() if until > now)
        return failed | self._silent()

    def _silent(self) -> frozenset[str]:
        return frozenset(name for name, link in self._links.items() if link.is_silent)


async def _break_off(response: web.StreamResponse, end: bytes, why: str) -> None:
    """Tell a client inside a stream that the rest will not come."""
    # A part of an event may have been sent; an empty line ends it.
    gap = b"" if end.endswith(b"\n\n") or not end else b"\n\n"
    event = json.dumps(error_object(why, "server_error")).encode()
    await response.write(gap + b"data: " + event + b"\n\n")
