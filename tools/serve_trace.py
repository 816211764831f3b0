"""Replays a trace on two unlike replicas behind the router, and holds the simulator against it.

    python tools/serve_trace.py [--seconds 600] [--rate 1.5] [--json FILE]

A tiny model runs as `tp2:3,tp1:1` and as `tp1:4` on this machine's CPU, behind `route` with the
weights of a plan; the `openai` client streams.  The trace comes as it was drawn, in real time.
Every second request tells how long steps took at which moment: the seconds between its tokens; and,
if its replica was idle when it came, what its first token took beside a step: the client, HTTP, the
router, the prompt's further tokens.  With these and the router's turns the simulator serves all
requests, and the others, which told nothing, are held against what it says of them.  Deadlines are
the simulator's 90th of a hundred to the first token and between tokens, so that neither all
requests keep them nor none.  At last the beginning of the trace comes once more, and a rank of the
larger replica is killed under it.  Needs `openai`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import openai
import psutil

from megatron_hetero.serving.prices.cache import CachePool
from megatron_hetero.serving.prices.work import StepWork
from megatron_hetero.serving.simulate.outcome import quantiles
from megatron_hetero.serving.simulate.queue import ReplicaQueue, Running
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
WARM_UP = 3
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


class Nearest:
    """Measured seconds by the moment: those of the nearest moment, before or after.

    Args:
        samples: (moment, seconds), at least one.
    """

    def __init__(self, samples: Sequence[tuple[float, float]]) -> None:
        self._samples = sorted(samples)
        self._moments = [moment for moment, _ in self._samples]

    def at(self, moment: float) -> float:
        """Return the seconds at a moment."""
        place = bisect_left(self._moments, moment)
        near = self._samples[max(0, place - 1) : place + 1]
        return min(near, key=lambda sample: abs(sample[0] - moment))[1]


class MeasuredSteps:
    """Seconds of a replica's steps, as they were measured.

    Args:
        seconds: by the moment of the step's start.
        lanes: stages, which work at the same time.
    """

    def __init__(self, seconds: Nearest, lanes: int) -> None:
        self._seconds, self._lanes = seconds, lanes
        self.now = 0.0

    def times(self, work: StepWork) -> tuple[float, float]:
        """Return the seconds of a step, and those until the next batch may start."""
        step_s = self._seconds.at(self.now)
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


def measured_of(
    requests: Sequence[Request], found: Sequence[Answered]
) -> tuple[tuple[MeasuredSteps, ...], Nearest]:
    """Return the steps of both replicas, and what a first token takes beside its step, from every
    second request.

    Raises:
        RuntimeError: too few requests to tell.
    """
    turns = Router([[weight] * len(CLASSES) for weight in WEIGHTS], "turns", 0)
    served_by = [turns.choose(request.class_index, ()) for request in requests]
    samples: list[list[tuple[float, float]]] = [[] for _ in WEIGHTS]
    beside = []
    # Moments until which each replica has had work.
    busy_until = [0.0] * len(WEIGHTS)
    for request, answer, replica in zip(requests, found, served_by, strict=True):
        assert replica is not None
        was_idle = request.arrival_s > busy_until[replica]
        busy_until[replica] = max(busy_until[replica], *answer.moments, request.arrival_s)
        if answer.index % 2 or answer.how != "whole" or len(answer.moments) < 2:
            continue
        samples[replica] += [(one, other - one) for one, other in pairwise(answer.moments)]
        if was_idle:
            waited_s = answer.first_s - request.arrival_s
            beside.append((request.arrival_s, max(0.0, waited_s - answer.between_s)))
    if not all(samples) or not beside:
        raise RuntimeError("too few requests were answered whole; give more --seconds or --rate")
    steps = tuple(MeasuredSteps(Nearest(s), n) for s, n in zip(samples, LANES, strict=True))
    return steps, Nearest(beside)


def mix_of(rate: float) -> RequestMix:
    """Return the workload."""
    return RequestMix(tuple(
        RequestClass(name, part * rate, TokenLengths(i), TokenLengths(o))
        for name, part, i, o in CLASSES
    ))  # fmt: skip


def simulated(requests: Sequence[Request], steps: Sequence[MeasuredSteps]) -> list[Running]:
    """Serve requests with measured steps and the router's turns; return them in their order."""
    parts = [part for _, part, *_ in CLASSES]
    replicas = [
        SimulatedReplica(
            TimedQueue(step, CachePool.of_tokens(KV_TOKENS), STEP_TOKENS, MOST_SEQUENCES, lanes),
            "both", "here", tuple(weight * part for part in parts),
        )
        for step, lanes, weight in zip(steps, LANES, WEIGHTS, strict=True)
    ]  # fmt: skip
    run = FleetRun(replicas, mix_of(1.0), policy="turns")
    run.run(requests)
    place = {id(request): index for index, request in enumerate(requests)}
    return sorted(run.finished, key=lambda running: place[id(running.request)])


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


def kept(times: Sequence[tuple[float, float]], first_s: float, between_s: float) -> float:
    """Return the part of some requests that keep both deadlines.

    Args:
        times: seconds to the first token and between tokens.
        first_s, between_s: the deadlines.
    """
    return mean(one <= first_s and other <= between_s for one, other in times)


async def story(
    urls: Sequence[str], kill: Callable[[], None], seconds: float, rate: float, seed: int
) -> dict[str, Any]:
    """Replay, simulate, kill; return what is reported."""
    clients = [
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        for url in urls
    ]
    # The first steps of a process take long; replicas have them behind them, past the router.
    for client in clients[:2]:
        for index in range(WARM_UP):
            await ask(client, index, 30, 16, CLASSES[0][0], time.monotonic())
    trace = mix_of(rate).arrivals(seconds, seed)
    found = await replay(clients[2], trace)
    steps, beside = measured_of(trace, found)
    # The same requests with the tokens that were drawn: some answers end by themselves.
    drawn = [replace(r, output_tokens=max(1, a.tokens)) for r, a in zip(trace, found, strict=True)]
    expected, seen = [], []
    for request, answer, running in zip(trace, found, simulated(drawn, steps), strict=True):
        # Those that told how long steps took say nothing about the simulator.
        if answer.index % 2 == 0:
            continue
        waits_s = running.first_s - request.arrival_s + beside.at(request.arrival_s)
        later = max(1, running.said - 1)
        expected.append((waits_s, (running.last_s - running.first_s) / later))
        # A request that is not whole keeps no deadline.
        is_whole = answer.how == "whole"
        seen.append((answer.first_s - request.arrival_s, answer.between_s if is_whole else inf))
    first, between = (quantiles(times) for times in zip(*expected, strict=True))
    deadlines = first.p90, between.p90
    head = [r for r in trace if r.arrival_s < min(60.0, seconds)]
    killing = asyncio.create_task(_later(kill, min(60.0, seconds) / 3))
    after = await replay(clients[2], head)
    await killing
    return {
        "seconds": seconds, "rate_per_s": rate, "seed": seed, "requests": len(trace),
        "judged": len(seen),
        "whole": _count(found, "whole"), "errors": _count(found, "error"),
        "lost_silently": _count(found, "silent"),
        "first_token_s": {
            "measured": asdict(quantiles([one for one, _ in seen])), "simulated": asdict(first),
        },
        "between_tokens_s": {
            "measured": asdict(quantiles([other for _, other in seen])),
            "simulated": asdict(between),
        },
        "deadlines_s": {"first_token": deadlines[0], "between_tokens": deadlines[1]},
        "attainment": {
            "measured": kept(seen, *deadlines), "simulated": kept(expected, *deadlines),
        },
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
    # The client would write a line for each request, on the cores that are measured.
    logging.disable(logging.INFO)
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
