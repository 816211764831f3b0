"""Two unlike replicas behind the router, over HTTP: streams, hostile and slow clients, and the
death of a rank."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

aiohttp = pytest.importorskip("aiohttp")

from megatron_hetero.errors import UsageError  # noqa: E402
from megatron_hetero.lab.serve.endpoint import _Service  # noqa: E402
from megatron_hetero.lab.serve.engine import ServingEngine  # noqa: E402
from megatron_hetero.lab.serve.protocol import parse_request  # noqa: E402
from megatron_hetero.lab.serve.rank import ServeOptions  # noqa: E402
from megatron_hetero.lab.serve.scheduler import Capacity  # noqa: E402
from tests.lab.serve.replicas import MODELS, make_checkpoint, reference, requests  # noqa: E402
from tests.lab.serve.services import free_port, started, until_it_serves  # noqa: E402
from tests.serving.route.plans import two_replicas  # noqa: E402

LAYOUTS = ("tp2:3,tp1:1", "tp1:4")


async def _ask(client: Any, url: str, index: int, stream: bool) -> tuple[str, bool]:
    """Ask one of the reference's requests; return its text, and whether it came whole."""
    asked = requests()[index]
    body = {
        "model": "tiny", "prompt": list(asked.prompt), "max_tokens": asked.max_new,
        "temperature": asked.sampling.temperature, "top_p": asked.sampling.top_p,
        "top_k": asked.sampling.top_k, "seed": asked.sampling.seed, "stream": stream,
    }  # fmt: skip
    try:
        async with client.post(f"{url}/v1/completions", json=body) as answer:
            if not stream:
                data = await answer.json()
                if answer.status != 200:
                    assert data["error"]["message"]
                    return "", False
                return data["choices"][0]["text"], True
            if answer.status != 200:
                assert (await answer.json())["error"]["message"]
                return "", False
            text, done = "", False
            async for line in answer.content:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        assert event["error"]["message"]
                        return text, False
                    text += event["choices"][0]["text"]
            assert done, "a stream ended as if it were whole"
            return text, True
    except aiohttp.ClientError:
        return "", False


def _expected(folder: Path) -> list[str]:
    eod = 60
    texts = []
    for answer in reference(folder):
        tokens = answer["tokens"]
        if eod in tokens:
            tokens = tokens[: tokens.index(eod)]
        # The space is between the prompt's last number and the first one.
        texts.append("".join(f" {token}" for token in tokens))
    return texts


@pytest.mark.slow
def test_two_unlike_replicas_behind_the_router(tmp_path: Path) -> None:
    make_checkpoint("gqa", tmp_path)
    model = tmp_path / "model.sh"
    model.write_text(" ".join(MODELS["gqa"]) + "\n")
    ports = [free_port() for _ in range(3)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    plan = two_replicas(tmp_path / "serve.json")
    common = ["--model", str(model), "--load", str(tmp_path / "checkpoint"), "--name", "tiny",
              "--kv-tokens", "1024", "--answer-limit", "20"]  # fmt: skip
    with (
        started(["serve", *common, "--layout", LAYOUTS[0], "--port", str(ports[0])],
                 tmp_path / "a.log") as first,
        started(["serve", *common, "--layout", LAYOUTS[1], "--port", str(ports[1])],
                 tmp_path / "b.log") as second,
        started(["route", str(plan), "--port", str(ports[2]),
                  "--replica", f"a={urls[0]}", "--replica", f"b={urls[1]}"],
                 tmp_path / "router.log") as router,
    ):  # fmt: skip
        asyncio.run(_story(urls, (first, second, router), tmp_path))


async def _story(
    urls: list[str], processes: tuple[subprocess.Popen[bytes], ...], folder: Path
) -> None:
    for url, process, name in zip(urls, processes, ("a", "b", "router"), strict=True):
        await until_it_serves(url, process, folder / f"{name}.log")
    wanted = _expected(folder)
    through = urls[2]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as client:
        # Side by side, whole and as streams: all as one process has answered.
        tries = [(i % 6, bool(i % 2)) for i in range(12)]
        found = await asyncio.gather(*(_ask(client, through, i, s) for i, s in tries))
        assert found == [(wanted[i], True) for i, _ in tries]
        async with client.get(f"{through}/health") as answer:
            counts = (await answer.json())["requests"]
        # Two of three requests go to a (and the one to /health to neither).
        assert counts == {"a": 8, "b": 4}

        # Hostile bodies, and a client that sends and reads nothing: others are served.
        slow = await asyncio.open_connection("127.0.0.1", int(urls[0].rsplit(":", 1)[1]))
        slow[1].write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n")
        for body in (b"\xff", b"[" * 5000, b"{}", b'{"model":"tiny","prompt":[99]}'):
            async with client.post(f"{urls[0]}/v1/completions", data=body) as answer:
                assert answer.status == 400, await answer.text()
        async with client.post(f"{urls[0]}/v1/completions", data=b"x" * (2 << 20)) as answer:
            assert answer.status == 413
        gone = asyncio.create_task(_ask(client, urls[0], 5, True))
        await asyncio.sleep(0.05)
        gone.cancel()
        assert await _ask(client, urls[0], 1, True) == (wanted[1], True)
        slow[1].close()

        # A rank of the first replica dies under load: each request ends, whole or with an error.
        ranks = psutil.Process(processes[0].pid).children()
        assert len(ranks) == 3
        tries = [(i % 6, bool(i % 2)) for i in range(30)]
        asked = [asyncio.create_task(_ask(client, through, i, s)) for i, s in tries]
        await asyncio.sleep(0.1)
        begin = time.monotonic()
        ranks[-1].kill()
        found = await asyncio.gather(*asked)
        assert time.monotonic() - begin < 60
        for (text, whole), (index, _) in zip(found, tries, strict=True):
            assert text == wanted[index] if whole else wanted[index].startswith(text)
        # All that come later are served, by the other one.
        for index in range(6):
            assert await _ask(client, through, index, True) == (wanted[index], True)
    assert processes[0].wait(60) == 6
    # SIGTERM ends a replica with its ranks.
    ranks = psutil.Process(processes[1].pid).children()
    processes[1].terminate()
    assert processes[1].wait(30) == 130
    assert ranks and not any(rank.is_running() for rank in ranks)


def test_a_seed_of_chance_differs() -> None:
    body = b'{"model": "m", "prompt": [1]}'
    one, other = (parse_request(body, is_chat=False).sampling.seed for _ in range(2))
    assert one != other


class _Words:
    """A tokenizer of numbers, with a template that answers as newer ones of Hugging Face do."""

    vocab_size, eod = 100, 60

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    def apply_chat_template(
        self, messages: list[dict[str, str]], chat_template: str | None, **_: bool
    ) -> dict[str, list[int]]:
        if messages[0]["role"] != "user":
            raise ValueError("roles must alternate\nat line 3")
        tokens = self.tokenize(messages[0]["content"])
        return {"input_ids": tokens, "attention_mask": [1] * len(tokens)}


def test_a_chat_may_fill_the_model_and_ends_when_its_client_leaves() -> None:
    async def run() -> None:
        engine = ServingEngine(Capacity(1024, 4, 16, 200, 1, 1))
        service = _Service(engine, _Words(), ServeOptions(port=0))
        runner = await service.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/chat/completions"
        message = {"role": "user", "content": "1 2 3"}
        async with aiohttp.ClientSession() as client:
            asked = asyncio.create_task(
                client.post(url, json={"model": "m", "messages": [message]})
            )
            request = await asyncio.to_thread(engine._news.get, timeout=10)
            assert (request.prompt, request.max_new) == ((1, 2, 3), 197)
            asked.cancel()
            assert await asyncio.to_thread(engine._news.get, timeout=10) == request.number
            # A template's refusal is told in its words, and never as a fault of the server.
            message["role"] = "system"
            body = {"model": "m", "messages": [message]}
            async with client.post(url, json=body) as answer:
                assert answer.status == 400
                assert "roles must alternate)" in (await answer.json())["error"]["message"]
        await runner.cleanup()

    asyncio.run(run())


def test_stops_are_bounded() -> None:
    for stop in ("x" * 300, ["x"] * 17):
        body = json.dumps({"model": "m", "prompt": [1], "stop": stop}).encode()
        with pytest.raises(UsageError, match="stop"):
            parse_request(body, is_chat=False)
