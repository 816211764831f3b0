"""The router's shares, and what becomes of requests whose replica fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web  # noqa: E402
from aiohttp.test_utils import TestClient, TestServer  # noqa: E402

from megatron_hetero.serving.route.router import CLASS_HEADER, RequestRouter  # noqa: E402
from megatron_hetero.serving.route.weights import ReplicaTurns, RoutedReplica  # noqa: E402

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def test_turns_follow_the_plan_exactly_over_a_period() -> None:
    turns = ReplicaTurns(
        [RoutedReplica("a", "", {"x": 3, "y": 0}), RoutedReplica("b", "", {"x": 1, "y": 2})]
    )
    of_x = [turns.next("x").name for _ in range(8)]  # type: ignore[union-attr]
    assert Counter(of_x) == {"a": 6, "b": 2}
    assert "b" in of_x[:4] and "b" in of_x[4:]
    assert {turns.next("y").name for _ in range(5)} == {"b"}  # type: ignore[union-attr]
    of_all = Counter(turns.next().name for _ in range(60))  # type: ignore[union-attr]
    assert of_all == {"a": 30, "b": 30}
    # b is gone: a serves its class y all the same.
    assert turns.next("y", frozenset("b")).name == "a"  # type: ignore[union-attr]
    assert turns.next("y", frozenset("ab")) is None


async def _good(_: web.Request) -> web.StreamResponse:
    return web.json_response({"from": "good"})


async def _failed(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "a rank is gone"}}, status=503)


async def _breaks_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b'data: {"choices": []}\n\ndata: {"cho')
    assert request.transport is not None
    request.transport.abort()
    return response


async def _bad_request(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no"}}, status=400)


def _answers(
    handlers: list[Handler | None], num: int
) -> tuple[list[tuple[int, str]], Counter[str]]:
    """Send requests, one after the other, to replicas with these handlers; None: nobody listens."""

    async def run() -> tuple[list[tuple[int, str]], Counter[str]]:
        targets, servers = [], []
        for index, handler in enumerate(handlers):
            url = "http://127.0.0.1:9"
            if handler is not None:
                app = web.Application()
                app.router.add_post("/v1/completions", handler)
                server = TestServer(app)
                await server.start_server()
                servers.append(server)
                url = str(server.make_url("")).rstrip("/")
            targets.append(RoutedReplica(str(index), url, {"x": 1.0}))
        router = RequestRouter(targets)
        async with TestClient(TestServer(router.application())) as client:
            found = []
            for _ in range(num):
                headers = {CLASS_HEADER: "x"}
                answer = await client.post("/v1/completions", data=b"{}", headers=headers)
                found.append((answer.status, await answer.text()))
        for server in servers:
            await server.close()
        return found, Counter(router.counts)

    return asyncio.run(run())


@pytest.mark.parametrize("bad", [None, _failed])
def test_another_replica_takes_what_one_cannot(bad: Handler | None) -> None:
    found, counts = _answers([bad, _good], 6)
    assert [status for status, _ in found] == [200] * 6
    assert counts["1"] == 6
    assert counts["0"] == 1  # then it is left alone for a while


def test_an_answer_that_breaks_off_ends_with_an_error() -> None:
    ((status, text),), _ = _answers([_breaks_off], 1)
    assert status == 200
    assert '"server_error"' in text.splitlines()[-2]
    assert "[DONE]" not in text


def test_no_replica_is_a_clear_answer_and_refusals_are_passed_on() -> None:
    ((status, text),), _ = _answers([None], 1)
    assert status == 503 and "no replica" in text
    ((status, text),), _ = _answers([_bad_request], 1)
    assert status == 400 and "no" in text
