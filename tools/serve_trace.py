"""Replays a trace on two unlike replicas behind the router, and holds the simulator against it.

    python tools/serve_trace.py [--seconds 600] [--rate 1.5] [--json FILE]

A tiny model runs as `tp2:3,tp1:1` and as `tp1:4` on this machine's CPU, behind `route` with the
weights of a plan; the `openai` client streams.  The trace comes as it was drawn, in real time.
Every second request tells how long steps took at which moment: the seconds between its tokens.
With these steps and the router's turns the simulator serves all requests, and the others are held
against it.  Deadlines are the simulator's 90th of a hundred to the first token and between tokens,
so that neither all requests keep them nor none.  At last the beginning of the trace comes once
more, and a rank of the larger replica is killed under it.  Needs `openai`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import openai
import psutil

from megatron_hetero.serving.prices.steps import StepWork
from megatron_hetero.serving.simulate.outcome import FleetOutcome, quantiles
from megatron_hetero.serving.simulate.queue import ReplicaQueue
from megatron_hetero.serving.simulate.router import Router
from megatron_hetero.serving.simulate.run import FleetRun, SimulatedReplica
from megatron_hetero.serving.workload.requests import (
    Request,
    RequestClass,
    RequestMix,
    TokenLengths,
)
from tests.lab.serve.replicas import MODELS, VOCAB, make_checkpoint
from tests.lab.serve.services import free_port, started, until_it_serves
from tests.serving.route.plans import two_replicas

LAYOUTS, LANES, WEIGHTS = ("tp2:3,tp1:1", "tp1:4"), (2, 1), (2.0, 1.0)
KV_TOKENS, STEP_TOKENS, MOST_SEQUENCES = 2048, 64, 16
CLASSES = (
    ("short", 2 / 3, ((4, 1.0), (10, 1.0)), ((8, 1.0), (16, 1.0))),
    ("long", 1 / 3, ((20, 1.0), (30, 1.0)), ((6, 1.0), (16, 1.0))),
)
"""Name, part of the requests, input, output; a request has at most 48 tokens."""


@dataclass
class Answered:
    """How a request ended: "whole", "error", or "silent", which must not be."""

    index: int
    how: str
    tokens: int = 0
    moments: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        """Return the moment of its first token."""
        return self.moments[0] if self.moments else inf

    @property
    def between_s(self) -> float:
        """Return the mean seconds between its later tokens."""
        told = self.moments
        return (told[-1] - told[0]) / (len(told) - 1) if len(told) > 1 else 0.0


class MeasuredSteps:
    """Seconds of a replica's steps: those that were measured nearest to the moment.

    Args:
        samples: (moment, seconds), at least one.
        lanes: stages, which work at the same time.
    """

    def __init__(self, samples: Sequence[tuple[float, float]], lanes: int) -> None:
        self._samples = sorted(samples)
        self._moments = [moment for moment, _ in self._samples]
        self._lanes = lanes
        self.now = 0.0

    def times(self, work: StepWork) -> tuple[float, float]:
        """Return the seconds of a step, and those until the next batch may start."""
        place = min(bisect_left(self._moments, self.now), len(self._samples) - 1)
        step_s = self._samples[place][1]
        return step_s, step_s / self._lanes


class TimedQueue(ReplicaQueue):
    """A replica's queue whose steps know when they start."""

    price: MeasuredSteps

    def start(self, now: float) -> list[float]:
        """Start steps, as the queue does."""
        self.price.now = now
        return super().start(now)


async def ask(
    client: openai.AsyncOpenAI, index: int, prompt: int, output: int, kind: str, origin: float
) -> Answered:
    """Stream one request; all moments are from `origin`."""
    answer = Answered(index, "silent")
    tokens = [(7 * index + 3 * i) % (VOCAB - 1) for i in range(prompt)]
    try:
        stream = await client.completions.create(
            model="tiny", prompt=tokens, max_tokens=output, temperature=0.8, seed=index,
            stream=True, stream_options={"include_usage": True},
            extra_headers={"X-Request-Class": kind},
        )  # fmt: skip
        async for part in stream:
            now = time.monotonic() - origin
            if part.usage is not None:
                answer.tokens = part.usage.completion_tokens
            for choice in part.choices:
                answer.moments.append(now)
                if choice.finish_reason:
                    answer.how = "whole"
    except openai.APIError:
        answer.how = "error"
    return answer


def steps_of(
    requests: Sequence[Request], found: Sequence[Answered]
) -> tuple[tuple[MeasuredSteps, ...], float]:
    """Return the steps of both replicas from every second request, and the seconds that a first
    token takes beside its step (HTTP, the router, its prompt's further tokens)."""
    turns = Router([[weight] * len(CLASSES) for weight in WEIGHTS], "turns", 0)
    samples: list[list[tuple[float, float]]] = [[] for _ in WEIGHTS]
    beside = []
    for request, answer in zip(requests, found, strict=True):
        replica = turns.choose(request.class_index, ())
        if answer.index % 2 or replica is None or answer.how != "whole":
            continue
        samples[replica] += [(one, other - one) for one, other in pairwise(answer.moments)]
        beside.append(answer.first_s - request.arrival_s - answer.between_s)
    steps = tuple(MeasuredSteps(s, lanes) for s, lanes in zip(samples, LANES, strict=True))
    return steps, max(0.0, median(beside))


def mix_of(rate: float, first_s: float, between_s: float) -> RequestMix:
    """Return the workload with one pair of deadlines."""
    return RequestMix(tuple(
        RequestClass(name, part * rate, TokenLengths(i), TokenLengths(o), first_s, between_s)
        for name, part, i, o in CLASSES
    ))  # fmt: skip


def simulated(
    requests: Sequence[Request], steps: Sequence[MeasuredSteps], mix: RequestMix
) -> FleetOutcome:
    """Serve requests with measured steps and the router's turns."""
    parts = [part for _, part, *_ in CLASSES]
    replicas = [
        SimulatedReplica(
            TimedQueue(step, KV_TOKENS, 16, STEP_TOKENS, MOST_SEQUENCES, lanes),
            "both", "here", tuple(weight * part for part in parts),
        )
        for step, lanes, weight in zip(steps, LANES, WEIGHTS, strict=True)
    ]  # fmt: skip
    return FleetRun(replicas, mix, policy="turns").run(requests)


async def replay(client: openai.AsyncOpenAI, requests: Sequence[Request]) -> list[Answered]:
    """Send each request at its moment."""
    origin = time.monotonic()

    async def one(index: int, request: Request) -> Answered:
        await asyncio.sleep(max(0.0, request.arrival_s - (time.monotonic() - origin)))
        kind = CLASSES[request.class_index][0]
        return await ask(
            client, index, request.input_tokens, request.output_tokens, kind, origin
        )  # fmt: skip

    return await asyncio.gather(*(one(i, r) for i, r in enumerate(requests)))


def kept(judged: Sequence[tuple[Request, Answered]], mix: RequestMix) -> float:
    """Return the part of the requests that kept both deadlines."""
    return mean(
        answer.how == "whole"
        and answer.first_s - request.arrival_s <= mix.classes[request.class_index].first_token_s
        and answer.between_s <= mix.classes[request.class_index].between_tokens_s
        for request, answer in judged
    )


async def story(
    urls: Sequence[str], kill: Callable[[], None], seconds: float, rate: float, seed: int
) -> dict[str, Any]:
    """Replay, simulate, kill; return what is reported."""
    clients = [
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        for url in urls
    ]
    trace = mix_of(rate, inf, inf).arrivals(seconds, seed)
    found = await replay(clients[2], trace)
    steps, beside_s = steps_of(trace, found)
    # The same requests with the tokens that were drawn: some answers end by themselves.
    drawn = [replace(r, output_tokens=max(1, a.tokens)) for r, a in zip(trace, found, strict=True)]
    free = simulated(drawn, steps, mix_of(rate, inf, inf)).overall
    first_s, between_s = free.first_token_s.p90, free.between_tokens_s.p90
    predicted = simulated(drawn, steps, mix_of(rate, first_s, between_s)).overall.attainment
    judged = [(r, a) for r, a in zip(trace, found, strict=True) if a.index % 2]
    seen = kept(judged, mix_of(rate, first_s + beside_s, between_s))
    head = [r for r in trace if r.arrival_s < min(60.0, seconds)]
    killing = asyncio.create_task(_later(kill, min(60.0, seconds) / 3))
    after = await replay(clients[2], head)
    await killing
    return {
        "seconds": seconds, "rate_per_s": rate, "seed": seed, "requests": len(trace),
        "beside_steps_s": beside_s,
        "whole": _count(found, "whole"), "errors": _count(found, "error"),
        "lost_silently": _count(found, "silent"),
        "first_token_s": {
            "measured": asdict(quantiles([a.first_s - r.arrival_s for r, a in judged])),
            "simulated": asdict(free.first_token_s),
        },
        "between_tokens_s": {
            "measured": asdict(quantiles([a.between_s for _, a in judged])),
            "simulated": asdict(free.between_tokens_s),
        },
        "deadlines_s": {"first_token": first_s + beside_s, "between_tokens": between_s},
        "attainment": {"measured": seen, "simulated": predicted},
        "killed": {"requests": len(head), "whole": _count(after, "whole"),
                   "errors": _count(after, "error"), "lost_silently": _count(after, "silent")},
    }  # fmt: skip


def _count(found: Sequence[Answered], how: str) -> int:
    return sum(answer.how == how for answer in found)


async def _later(kill: Callable[[], None], seconds: float) -> None:
    await asyncio.sleep(seconds)
    kill()


def run(folder: Path, seconds: float, rate: float, seed: int) -> dict[str, Any]:
    """Start both replicas and the router, and tell the story."""
    make_checkpoint("gqa", folder)
    model = folder / "model.sh"
    model.write_text(" ".join(MODELS["gqa"]) + "\n", encoding="utf-8")
    plan = two_replicas(folder / "serve.json")
    ports = [free_port() for _ in range(3)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    common = ["--model", str(model), "--load", str(folder / "checkpoint"), "--name", "tiny",
              "--kv-tokens", str(KV_TOKENS), "--step-tokens", str(STEP_TOKENS),
              "--max-sequences", str(MOST_SEQUENCES), "--answer-limit", "60"]  # fmt: skip
    words = [["serve", *common, "--layout", layout, "--port", str(port)]
             for layout, port in zip(LAYOUTS, ports, strict=False)]  # fmt: skip
    words.append(["route", str(plan), "--port", str(ports[2]),
                  "--replica", f"a={urls[0]}", "--replica", f"b={urls[1]}"])  # fmt: skip
    logs = [folder / f"{name}.log" for name in ("a", "b", "router")]
    with (
        started(words[0], logs[0]) as first,
        started(words[1], logs[1]) as second,
        started(words[2], logs[2]) as router,
    ):
        for url, process, log in zip(urls, (first, second, router), logs, strict=True):
            asyncio.run(until_it_serves(url, process, log))
        return asyncio.run(
            story(urls, psutil.Process(first.pid).children()[-1].kill, seconds, rate, seed)
        )


def main() -> int:
    """Run, print, write; fail if a request was lost silently."""
    parser = argparse.ArgumentParser(description="Replay a trace on two unlike replicas.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rate", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        told = run(Path(folder), arguments.seconds, arguments.rate, arguments.seed)
    text = json.dumps(told, indent=2) + "\n"
    print(text, end="")
    if arguments.json:
        arguments.json.write_text(text, encoding="utf-8")
    lost = told["lost_silently"] + told["errors"] + told["killed"]["lost_silently"]
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
