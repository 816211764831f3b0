"""What a server here and its clients owe each other: bounded bodies, limits of time, errors in
OpenAI's form.  The router keeps to it, and so do served replicas (`lab.serve.endpoint`)."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

BODY_BYTES = 1 << 20
_BODY_S = 30.0
"""Seconds within which a body must have come."""
KEPT_ALIVE_S = 75.0
"""Seconds after which a connection without a request, or with a part of its head, is closed."""
_UNREAD_S = 60.0
"""Seconds after which a client that reads nothing of a stream is given up."""


def base_url(host: str, port: int) -> str:
    """Return where clients find a server; an IPv6 address stands in brackets."""
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def error_object(message: str, kind: str) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def refused(status: int, message: str, kind: str) -> web.Response:
    """Return an error as an answer."""
    return web.json_response(error_object(message, kind), status=status)


async def read_body(request: web.Request) -> bytes | web.Response:
    """Read a whole body; return the refusal of one that is too long or too slow."""
    kind = "invalid_request_error"
    try:
        return await asyncio.wait_for(request.read(), _BODY_S)
    except TimeoutError:
        return refused(408, f"the body has not come within {_BODY_S:.0f} s", kind)
    except web.HTTPRequestEntityTooLarge:
        return refused(413, f"the body has more than {BODY_BYTES} bytes; shorten the prompt", kind)


async def send_part(
    request: web.Request, response: web.StreamResponse, data: bytes, limit_s: float = _UNREAD_S
) -> None:
    """Send a part of a stream.

    Raises:
        ConnectionResetError: the client is gone, or has read nothing for `limit_s`.
    """
    try:
        await asyncio.wait_for(response.write(data), limit_s)
    except TimeoutError as error:
        # A client that reads nothing would hold the replica's stream open.
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the client has read nothing for {limit_s:.0f} s") from error
