"""Our simulator and our prices beside Helix's artifact: its measured steps, its placements.

    python tools/referees/helix.py CHECKOUT [--json FILE]

Source: `Thesys-lab/Helix-ASPLOS25` at `148b733` (Apache-2.0); CHECKOUT is its folder, and nothing
of it is kept but the figures that are printed.  Three things are compared.

* The simulator, in the places of its pipelines of Llama-30B (4 A100, 8 L4 and 12 T4, a pipeline of
  each, as `layout_llama30b` has them): its tables are the prices, its lengths the requests, its
  limits the limits, and tokens a second are held against its simulated and its real runs
  (`artifact_evaluation/ae_readme.md`).  Its machines take every request that waits, so that all
  requests behind a prompt come together in a batch, and nothing parts a batch again: one batch is
  under way (`num_lanes=1`), and not one for each stage as in vLLM.
* Swarm's placement serves some layers by several machines, among which every request is routed for
  itself.  Our simulator has pipelines only; that row is left out.
* Our prices of a layer beside its measured ones: two models, four cards, of which the A100 alone
  has a table here.  How long the contexts of its decode steps were is not said; its constant
  `DECODE_PER_TOKEN_MAX_CONTEXT`, 1,000, is taken.  The same with measured steps (`serve-plan
  --profile`): every second row of a table is given, or its first, middle and last row, and the
  prices are held against the rows that were not given.
"""

from __future__ import annotations

import argparse
import csv
import json
import pickle
import random
import sys
from bisect import bisect_left
from collections.abc import Sequence
from configparser import ConfigParser
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.model.load import load_workload
from megatron_hetero.serving.prices.cache import CachePool
from megatron_hetero.serving.prices.engine import ENGINES
from megatron_hetero.serving.prices.measured import EngineStep, profile_for
from megatron_hetero.serving.prices.served import ServedModel
from megatron_hetero.serving.prices.steps import ReplicaStage, stage_prices
from megatron_hetero.serving.prices.work import StepWork
from megatron_hetero.serving.simulate.queue import ReplicaQueue, Running
from megatron_hetero.serving.simulate.run import FleetRun, SimulatedReplica
from megatron_hetero.serving.workload.requests import (
    Request,
    RequestClass,
    RequestMix,
    TokenLengths,
)

Table = tuple[tuple[int, float], ...]
CARDS = {"a100": "A100-40GB", "l4": "L4", "t4": "T4", "v100": "V100-16GB"}
MODELS = {"llama1_30b": "llama30b", "llama2_70b": "llama70b"}
ACTIVATION_BYTES = 2 * 6656
"""A token's hidden state of Llama-30B."""
LINK_BYTES_PER_S, LINK_LATENCY_S = 1e9, 1e-3
COPIED_S = 1 / 4e9 + 1 / 5e9
"""Seconds in which a machine copies a byte that arrives (`compute_node.get_inference_statistics`);
`1000 * mbps` are 1e9 bytes a second in its units."""
MOST_PROMPT, BLOCK = 2048, 16
DECODE_CONTEXT, MEAN_PROMPT = 1000, 763
PROMPTS = {"a100": 3, "l4": 3, "t4": 1}
"""Prompts that a machine takes at once (`prompt_max_requests_dict`)."""
SEPARATE = {"a100": (30, 500.0), "l4": (25, 150.0), "t4": (25, 150.0)}
"""Separate pipelines: requests under way offline, tokens that arrive a second online
(`step3_simulation.py`)."""
MAX_FLOW = {"a100": 600.0, "l4": 200.0, "t4": 170.0}
"""Helix online: tokens that arrive a second."""
PUBLISHED = {
    "helix offline": (339.6, 321.2), "separate offline": (309.0, 295.1),
    "helix online": (216.7, 198.0), "separate online": (189.8, 173.1),
}  # fmt: skip
"""Decoded tokens a second: simulated there, and of its real run."""
SEEDS = (0, 1, 2)


class StepTables:
    """A pipeline's prices from measured steps: of prompts by tokens, of decode by requests.

    Args:
        stages: tables of prompts and decode of a layer, and layers, by stage.
    """

    def __init__(self, stages: Sequence[tuple[Table, Table, int]]) -> None:
        self._stages = stages
        self._known: dict[tuple[float, float], tuple[float, float]] = {}

    def times(self, work: StepWork) -> tuple[float, float]:
        """Return the seconds of a step, and those until the next batch may start."""
        # A step that ends a prompt samples one token more than it decodes.
        decoding = max(0.0, work.sampled - 1 if work.pairs else work.sampled)
        key = decoding, work.tokens - decoding
        if key not in self._known:
            num_bytes = work.tokens * ACTIVATION_BYTES
            parts = [
                layers * (between(prompts, key[1]) + between(decode, decoding))
                + num_bytes * COPIED_S
                for prompts, decode, layers in self._stages
            ]
            hop_s = num_bytes / LINK_BYTES_PER_S
            # Between stages; and from the last one over the coordinator to the first one.
            hops = (len(parts) - 1) * (hop_s + LINK_LATENCY_S) + 2 * LINK_LATENCY_S
            self._known[key] = sum(parts) + hops, max([*parts, hop_s])
        return self._known[key]


@dataclass(frozen=True)
class Artifact:
    """A checkout of the artifact."""

    folder: Path

    def table(self, model: str, card: str, phase: str) -> Table:
        """Return the seconds of a layer by tokens (`prompt`) or requests (`decode`)."""
        path = self.folder / "simulator" / "model_manager" / model / card / f"{phase}_bs2time.csv"
        with path.open(encoding="utf-8") as lines:
            return tuple((int(size), float(ms) / 1e3) for size, ms in csv.reader(lines))

    def pipeline(self, card: str) -> tuple[StepTables, int]:
        """Return the prices of a card's pipeline of Llama-30B, and the tokens that it holds."""
        folder = self.folder / "artifact_evaluation" / "single_cluster" / "layout_llama30b"
        placed = _read(folder / "ilp" / card / "ilp_sol.ini")["Solution"]
        limits = _read(folder / "ilp" / card / "simulator_cluster.ini")
        layers = {name: len(json.loads(listed)) for name, listed in placed.items()}
        held = [int(limits[name]["kv_cache_capacity"]) // number for name, number in layers.items()]
        tables = [self.table("llama1_30b", card, phase) for phase in ("prompt", "decode")]
        return StepTables([(tables[0], tables[1], n) for n in layers.values()]), min(held)

    def lengths(self) -> list[tuple[int, int]]:
        """Return input and output tokens of its requests (Azure's conversations)."""
        folder = self.folder / "simulator" / "trace_generator" / "length_data"
        columns = [_numbers(folder / f"azure_conv_{end}.pkl") for end in ("input", "output")]
        return [(int(i), int(o)) for i, o in zip(*columns, strict=True)]

    def arrival_rates(self) -> list[float]:
        """Return arrivals of its trace, in parts of three seconds."""
        folder = self.folder / "simulator" / "trace_generator" / "arrival_rate"
        return _numbers(folder / "azure_conv_arrive_time.pkl")


class _NumbersOnly(pickle.Unpickler):
    """A reader of pickled lists of numbers, which builds no objects."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}: only lists of numbers are read")


def _numbers(path: Path) -> list[float]:
    with path.open("rb") as file:
        return list(_NumbersOnly(file).load())


def _read(path: Path) -> ConfigParser:
    parser = ConfigParser()
    parser.read_string(path.read_text(encoding="utf-8"))
    return parser


def between(table: Table, size: float) -> float:
    """Return the seconds of a size, on the line between its neighbours in a table."""
    place = min(max(1, bisect_left(table, (size,))), len(table) - 1)
    (left, left_s), (right, right_s) = table[place - 1], table[place]
    return left_s + (right_s - left_s) * (size - left) / (right - left)


class _Counted(ReplicaQueue):
    """A replica that notes when it gives decoded tokens out."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.given: list[tuple[float, int]] = []

    def finish(self, now: float) -> list[Running]:
        """End the steps that end now."""
        # Tokens behind each request's first one.
        given = [
            running for lane in self.lanes if lane.ends_s == now for running in lane.running
            if running.chunk and running.is_prefilled and running.said
        ]  # fmt: skip
        self.given.append((now, len(given)))
        return super().finish(now)


def decoded_per_s(
    pipeline: tuple[StepTables, int],
    prompts: int,
    requests: Sequence[Request],
    most: int,
    span: tuple[float, float],
) -> float:
    """Return the decoded tokens a second of a pipeline within a span of seconds.

    Args:
        pipeline: its prices, and the tokens that it holds.
        prompts: that a machine takes at once.
        requests: those that arrive.
        most: requests under way at once.
        span: seconds from and to which tokens count.
    """
    price, held = pipeline
    queue = _Counted(
        price, CachePool.of_tokens(held, BLOCK), prompts * MOST_PROMPT, most, num_lanes=1
    )
    lengths = TokenLengths(((1, 1.0),))
    mix = RequestMix((RequestClass("all", 1.0, lengths, lengths),))
    FleetRun([SimulatedReplica(queue, "both", "one", (1.0,))], mix).run(requests)
    return sum(n for when, n in queue.given if span[0] <= when <= span[1]) / (span[1] - span[0])


def most_under_way(held: int, part: float, output: float, lengths: list[tuple[int, int]]) -> int:
    """Return the requests that max-flow scheduling lets in: those whose inputs and expected
    outputs fill a part of the memory (`kv_expectation.py`)."""
    return int(part * held / (mean(i for i, _ in lengths) + output))


def offline(artifact: Artifact, scheduler: str, seed: int) -> float:
    """Return decoded tokens a second of all pipelines, with requests without end."""
    rng, lengths = random.Random(seed), artifact.lengths()
    total = 0.0
    for card, (number, _) in SEPARATE.items():
        pipeline = artifact.pipeline(card)
        # It feeds below 0.8, and one request goes over it; expected outputs are 240 tokens.
        feeding = most_under_way(pipeline[1], 0.8, 240.0, lengths) + 1
        most = number if scheduler == "separate" else feeding
        requests = [Request(0.0, 0, *rng.choice(lengths)) for _ in range(2000)]
        total += decoded_per_s(pipeline, PROMPTS[card], requests, most, (60.0, 660.0))
    return total


def online(artifact: Artifact, scheduler: str, seed: int) -> float:
    """Return decoded tokens a second of half an hour of arrivals."""
    rng, lengths, rates = random.Random(seed), artifact.lengths(), artifact.arrival_rates()
    total = 0.0
    for card, (_, separate) in SEPARATE.items():
        pipeline = artifact.pipeline(card)
        is_flow = scheduler == "helix"
        tokens_per_s = MAX_FLOW[card] if is_flow else separate
        admitted = most_under_way(pipeline[1], 0.9, 0.6 * 240.0, lengths)
        requests = arrivals(tokens_per_s, lengths, rates, rng)
        most = admitted if is_flow else len(requests)
        total += decoded_per_s(pipeline, PROMPTS[card], requests, most, (0.0, 1800.0))
    return total


def arrivals(
    tokens_per_s: float, lengths: list[tuple[int, int]], rates: list[float], rng: random.Random
) -> list[Request]:
    """Return half an hour of requests, in parts of three seconds (`trace_generator.py`)."""
    size = mean(i + o for i, o in lengths)
    scale = 3 * tokens_per_s / size / mean(rates)
    found, left = [], 0.0
    for part in range(600):
        raw = scale * rng.choice(rates) + left
        number, left = round(raw), raw - round(raw)
        moments = sorted(3 * (part + rng.random()) for _ in range(number))
        found += [Request(moment, 0, *rng.choice(lengths)) for moment in moments]
    return found


def price_errors(artifact: Artifact) -> list[dict[str, Any]]:
    """Return, by model, card and phase, how far our price of a layer is from its measured one: by
    tables, and with some rows as measured steps from the rows that were not given."""
    rows = []
    for model, name in MODELS.items():
        folder = artifact.folder / "artifact_evaluation" / "single_cluster" / "models" / name
        job = ["--micro-batch-size", "1", "--global-batch-size", "1", "--seq-length", "2048"]
        served = ServedModel(load_workload(folder / "config.json", job).model, name)
        for card, gpu in CARDS.items():
            for phase in ("prompt", "decode"):
                steps = [
                    layer_step(gpu, name, phase, size, measured_s)
                    for size, measured_s in artifact.table(model, card, phase)[1:]
                ]
                few = [steps[0], steps[len(steps) // 2], steps[-1]]
                apart = errors_of_steps(served, steps, [])
                rows.append({
                    "model": name, "card": gpu, "phase": phase, "rows": len(steps),
                    "mean_error": _mean_size(apart), "bias": round(mean(apart), 4),
                    "all_measured": _mean_size(errors_of_steps(served, steps, steps)),
                    "every_second_measured": _mean_size(
                        errors_of_steps(served, steps[1::2], steps[::2])
                    ),
                    "three_measured": _mean_size(
                        errors_of_steps(served, [s for s in steps if s not in few], few)
                    ),
                })  # fmt: skip
    return rows


def layer_step(gpu: str, model: str, phase: str, size: int, seconds: float) -> EngineStep:
    """Return a row of a table as a measured step of one layer.

    Args:
        gpu, model: whose table it is.
        phase: "prompt" or "decode".
        size: tokens of prompts, or requests that decode.
        seconds: of the layer.
    """
    # Its prompts have 763 tokens on average.
    batch = max(1, round(size / MEAN_PROMPT)) if phase == "prompt" else size
    kind = "prefill" if phase == "prompt" else "decode"
    tokens, context = (size // batch, 0.0) if phase == "prompt" else (1, float(DECODE_CONTEXT))
    return EngineStep(
        gpu, "vllm", "Helix", model, 1, "16-bit", "16-bit", kind,  # type: ignore[arg-type]
        tokens, context, batch, 1, seconds, f"{model}/{gpu}/{phase}",
    )  # fmt: skip


def errors_of_steps(
    served: ServedModel, steps: Sequence[EngineStep], given: Sequence[EngineStep]
) -> list[float]:
    """Return our prices of steps over their measured seconds, less 1.

    Args:
        served: the model.
        steps: of one layer on one GPU type.
        given: measured steps that the prices may use; none: tables.
    """
    engine = replace(ENGINES["vllm"], profile=profile_for(given, "vllm", served))
    # The first stage of two has no head.
    stage = ReplicaStage(gpu_type(steps[0].gpu), 1, 1)
    price = stage_prices((stage, stage), served, engine)[0]
    return [price.seconds(step.work) / step.seconds - 1 for step in steps]


def _mean_size(apart: Sequence[float]) -> float:
    return round(mean(map(abs, apart)), 4)


def main() -> int:
    """Print both comparisons."""
    parser = argparse.ArgumentParser(description="Compare with Helix's artifact.")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    artifact = Artifact(given.checkout)
    runs = {}
    for name, (simulated, real) in PUBLISHED.items():
        scheduler, mode = name.split()
        run = offline if mode == "offline" else online
        ours = mean(run(artifact, scheduler, seed) for seed in SEEDS)
        runs[name] = {
            "ours": round(ours, 1), "simulated_there": simulated, "real": real,
            "over_simulated": round(ours / simulated - 1, 4),
            "over_real": round(ours / real - 1, 4),
        }  # fmt: skip
        print(name, runs[name], flush=True)
    errors = price_errors(artifact)
    for row in errors:
        print(row)
    means = {
        way: {
            phase: round(mean(r[way] for r in errors if r["phase"] == phase), 4)
            for phase in ("prompt", "decode")
        }
        for way in ("mean_error", "all_measured", "every_second_measured", "three_measured")
    }
    print(means)
    if given.json:
        told = {
            "source": "Thesys-lab/Helix-ASPLOS25 at 148b733, Apache-2.0", "tokens_per_s": runs,
            "mean_error_of_layers": means, "errors_of_layers": errors,
        }  # fmt: skip
        given.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
