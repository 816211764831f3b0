"""What becomes of requests whose replica lives on without a word, and comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web  # noqa: E402
from aiohttp.test_utils import TestClient, TestServer  # noqa: E402

from megatron_hetero.serving.route import router  # noqa: E402
from megatron_hetero.serving.route.link import Patience  # noqa: E402
from megatron_hetero.serving.route.router import RequestRouter  # noqa: E402
from megatron_hetero.serving.route.weights import RoutedReplica  # noqa: E402

QUICK = Patience(every_s=0.1, sign_s=0.4, most_missed=2)
PATH = "/v1/completions"


class Replica:
    """A replica that can stop to answer, as a process does that is stopped, and go on."""

    def __init__(self, name: str) -> None:
        self.name, self.goes_on = name, asyncio.Event()
        self.goes_on.set()
        self.answer_s = 0.0
        self.num_asked = 0
        app = web.Application()
        app.router.add_post(PATH, self._answer)
        app.router.add_get("/health", self._health)
        self.server = TestServer(app)

    async def _health(self, _: web.Request) -> web.StreamResponse:
        await self.goes_on.wait()
        return web.Response()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.num_asked += 1
        await self.goes_on.wait()
        await asyncio.sleep(self.answer_s)
        if not (await request.json()).get("stream"):
            return web.json_response({"from": self.name})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(4):
            await response.write(b"data: %d\n\n" % number)
            await asyncio.sleep(0.05)
            await self.goes_on.wait()
        return response


@asynccontextmanager
async def _routed(*names: str) -> AsyncIterator[tuple[TestClient, dict[str, Replica]]]:
    replicas = {name: Replica(name) for name in names}
    targets = []
    for name, replica in replicas.items():
        await replica.server.start_server()
        url = str(replica.server.make_url("")).rstrip("/")
        targets.append(RoutedReplica(name, url, {"x": 1.0}))
    routing = RequestRouter(targets, QUICK)
    async with TestClient(TestServer(routing.application())) as client:
        yield client, replicas
        for replica in replicas.values():
            replica.goes_on.set()
    for replica in replicas.values():
        await replica.server.close()


async def _ask(client: TestClient, **body: object) -> tuple[int, str]:
    async with client.post(PATH, json=body) as answer:
        return answer.status, await answer.text()


def test_a_replica_that_stops_gives_its_requests_up_to_others_and_may_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router, "_AVOIDED_S", 0.0)

    async def run() -> None:
        async with _routed("a", "b") as (client, replicas):
            replicas["a"].goes_on.clear()
            found = await asyncio.gather(*(_ask(client) for _ in range(6)))
            assert {status for status, _ in found} == {200}
            assert {json.loads(text)["from"] for _, text in found} == {"b"}
            asked = replicas["a"].num_asked
            assert asked == 3
            # Nobody else waits for it, and the router says which one it is.
            for _ in range(4):
                await asyncio.wait_for(_ask(client), 0.5)
            assert replicas["a"].num_asked == asked
            health = await (await client.get("/health")).json()
            assert health["failed"] == ["a"]
            # It goes on: a sign of life brings it back.
            replicas["a"].goes_on.set()
            await asyncio.sleep(0.8)
            found = [await _ask(client) for _ in range(4)]
            assert {json.loads(text)["from"] for _, text in found} == {"a", "b"}

    asyncio.run(run())


def test_an_answer_that_takes_long_is_waited_for() -> None:
    async def run() -> None:
        async with _routed("a") as (client, replicas):
            replicas["a"].answer_s = 2.0
            assert await _ask(client) == (200, '{"from": "a"}')

    asyncio.run(run())


def test_a_stream_that_stops_ends_with_an_error() -> None:
    async def run() -> None:
        async with _routed("a") as (client, replicas):
            async with client.post(PATH, json={"stream": True}) as answer:
                assert await answer.content.readuntil(b"\n\n") == b"data: 0\n\n"
                replicas["a"].goes_on.clear()
                rest = (await asyncio.wait_for(answer.read(), 10)).decode()
            error = json.loads(rest.split("data: ")[-1])["error"]
            assert error["type"] == "server_error"
            assert (
                "a broke off: it has answered 2 requests for /health in a row" in error["message"]
            )
            # As long as no replica shows a sign of life nobody has to wait.
            status, text = await asyncio.wait_for(_ask(client), 0.5)
            assert (status, json.loads(text)["error"]["message"]) == (
                503, "no replica shows a sign of life"
            )  # fmt: skip

    asyncio.run(run())


def test_a_replica_without_health_lives_as_long_as_it_answers() -> None:
    """Any answer is a sign of life: of 404, and of 503 while ranks start."""

    async def slow(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(2.0)
        return web.json_response({})

    async def run() -> None:
        app = web.Application()
        app.router.add_post(PATH, slow)
        async with TestServer(app) as server:
            url = str(server.make_url("")).rstrip("/")
            routing = RequestRouter([RoutedReplica("a", url, {"x": 1.0})], QUICK)
            async with TestClient(TestServer(routing.application())) as client:
                assert (await _ask(client))[0] == 200

    asyncio.run(run())
