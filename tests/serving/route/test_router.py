"""The router's shares, and what becomes of requests whose replica fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web  # noqa: E402
from aiohttp.test_utils import TestClient, TestServer  # noqa: E402

from megatron_hetero.serving.fleet.file import load_serving_plan  # noqa: E402
from megatron_hetero.serving.route.clients import base_url, send_part  # noqa: E402
from megatron_hetero.serving.route.router import CLASS_HEADER, RequestRouter  # noqa: E402
from megatron_hetero.serving.route.weights import (  # noqa: E402
    ReplicaTurns,
    RoutedReplica,
    targets_of,
)
from tests.serving.route.plans import two_replicas  # noqa: E402

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


async def _dies_first(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
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


@pytest.mark.parametrize("bad", [None, _failed, _dies_first])
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


async def _endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    while True:
        await response.write(b"data: {}\n\n" * 100)
        await asyncio.sleep(0.005)


def test_a_client_that_goes_away_is_no_fault_of_the_replica() -> None:
    async def run() -> tuple[dict[str, object], Counter[str]]:
        app = web.Application()
        app.router.add_post("/v1/completions", _endless)
        async with TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            router = RequestRouter([RoutedReplica(name, url, {"x": 1.0}) for name in "ab"])
            # Without cancellation, which would hide it that the next write fails.
            runner = web.AppRunner(router.application())
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            routed = f"http://127.0.0.1:{runner.addresses[0][1]}"
            async with aiohttp.ClientSession() as client:
                answer = await client.post(f"{routed}/v1/completions", data=b"{}")
                await answer.content.readany()
                answer.close()
                await asyncio.sleep(0.3)
                health = await (await client.get(f"{routed}/health")).json()
            await runner.cleanup()
        return health, Counter(router.counts)

    health, counts = asyncio.run(run())
    assert health["failed"] == []
    assert counts.total() == 1  # nobody else was asked the same


def test_a_client_that_reads_nothing_is_given_up() -> None:
    ended = []

    async def floods(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await send_part(request, response, b"x" * (1 << 20), limit_s=0.2)
        except ConnectionResetError as error:
            ended.append(str(error))
        return response

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/", floods)
        async with TestServer(app) as server:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            for _ in range(100):
                await asyncio.sleep(0.05)
                if ended:
                    break
            writer.close()

    asyncio.run(run())
    assert "has read nothing" in ended[0]


def test_a_body_that_is_too_long_is_refused_in_openais_form() -> None:
    async def run() -> tuple[int, dict[str, dict[str, str]]]:
        router = RequestRouter([RoutedReplica("a", "http://127.0.0.1:9", {"x": 1.0})])
        async with TestClient(TestServer(router.application())) as client:
            answer = await client.post("/v1/completions", data=b"x" * (2 << 20))
            return answer.status, await answer.json()

    status, data = asyncio.run(run())
    assert status == 413 and "bytes" in data["error"]["message"]


def test_addresses_may_end_as_servers_print_them(tmp_path: Path) -> None:
    plan = load_serving_plan(two_replicas(tmp_path / "serve.json"))
    urls = {"a": "http://n:8100/v1/", "b": "https://n/v1x"}
    assert [t.url for t in targets_of(plan, urls)] == ["http://n:8100", "https://n/v1x"]


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert base_url("::1", 8000) == "http://[::1]:8000/v1"
    assert base_url("node-0", 8000) == "http://node-0:8000/v1"
