"""Deadlines that a pool of unlike GPUs keeps, with unlike pipelines and without: HexGen's setting.

    python tools/bench serving-pool [--out FILE]

Llama-2-70B in 16 bits on the 58 GPUs of HexGen (ICML 2024): 2 x 8 and 2 x 3 RTX 3090 Ti, 2 x 8
RTX A5000, 2 x 8 RTX A6000, 4 A40.  Which stand together says the table of delays of its scheduler
(`communication_matrix.txt`, Relaxed-System-Lab/HexGen at `04000f5`): four sites of 28, 16, 8 and 6
GPUs, so the A6000, A40 and eight A5000 are one.  Between sites the middle of its bandwidths
(0.65 Gb/s) and latencies (95 ms) is taken.  Requests are 128 tokens in and 64 out, a Poisson
process.

The deadline scale is the 99th of a hundred of the seconds of whole requests in simulation, over
the seconds of a request that 8 A100 serve alone: the tightest deadline, in its unit, that 99 % of
the requests keep.  Two ways of serving: `continuous batching`, as vLLM does; and `one at a time`,
as HexGen's engine does, whose scheduler has one request on each stage.  Fleets: `in turn`: all
machines in their order in replicas of one symmetric shape that get equally many requests, which is
what HexGen calls symmetric (`serving_in_order.py`); `in order`: the same, each by its speed and
load; `one shape`: all replicas have the same width and number of even stages, each on one kind of
machine; `even`: each replica has one width, even layers and one kind of machine, but replicas
differ; `vllm`: what vLLM runs, uneven layers and two kinds of machines in a pipeline; `any`: unlike
widths too.  For each kind of fleet the programme's answers for several deadlines between tokens are
simulated, and the best one counts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.serving.compose.milp import serve_most
from megatron_hetero.serving.compose.problem import ROUTES
from megatron_hetero.serving.fleet.api import planned_fleet
from megatron_hetero.serving.fleet.forecast import simulate
from megatron_hetero.serving.fleet.offers import Fleet, OfferedReplica, make_fleet
from megatron_hetero.serving.fleet.shapes import Shape
from megatron_hetero.serving.prices.engine import ENGINES, Engine, EngineName
from megatron_hetero.serving.prices.rates import NOTHING, PhaseRates
from megatron_hetero.serving.prices.served import ServedModel, load_served
from megatron_hetero.serving.prices.steps import PipelinePrice, ReplicaPipeline, ReplicaStage
from megatron_hetero.serving.prices.work import StepWork
from megatron_hetero.serving.simulate.router import Policy
from megatron_hetero.serving.workload.requests import RequestClass, RequestMix, TokenLengths
from tools.bench.show import Columns, option
from tools.serving_in_order import dealt, fleets_in_order

MACHINES = (
    ("RTX-A6000", 8, 2, "d"), ("RTX-A5000", 8, 1, "d"), ("A40", 4, 1, "d"),
    ("RTX-3090-Ti", 8, 2, "a"), ("RTX-3090-Ti", 3, 2, "b"), ("RTX-A5000", 8, 1, "c"),
)  # fmt: skip
"""GPU, number in a machine, machines, site, in the order of HexGen's `genetic_algorithm.py`."""
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192,
    "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float16",
    "tie_word_embeddings": False,
}  # fmt: skip
INPUT, OUTPUT = 128, 64
RATES = {"continuous batching": (4.0, 12.0, 20.0), "one at a time": (0.5, 1.0, 2.0, 3.0, 4.0)}
ENGINE_NAMES: tuple[EngineName, ...] = ("vllm", "any")
KINDS = ("one shape", "even", "vllm", "any")
IN_ORDER: dict[str, Policy] = {"in turn": "turns", "in order": "least-load"}
BETWEEN_SCALES = (2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 11.0, 15.0, 30.0)
"""Deadlines between tokens of the fleets that are tried, over those of 8 A100."""
ALONE = ROUTES[:1]
_GAP = 5e-3


def cluster_of(lost: int, folder: Path) -> Cluster:
    """Return the pool, with some GPUs of the first machine of RTX A6000 lost."""
    nodes, number = [], 0
    for gpu, count, machines, site in MACHINES:
        for index in range(machines):
            left = count - (lost if gpu == "RTX-A6000" and index == 0 else 0)
            nodes.append(f"  - {{name: n{number}, gpu: {gpu}, count: {left}, site: {site}}}\n")
            number += 1
    sites = sorted({site for *_, site in MACHINES})
    between = "".join(
        f"    - {{sites: [{one}, {other}], bandwidth: 0.65 Gb/s, latency: 95 ms}}\n"
        for place, one in enumerate(sites) for other in sites[place + 1 :]
    )  # fmt: skip
    inside = "".join(
        f"    {gpu}: {{bandwidth: 20 GB/s, latency: 15 us}}\n"
        for gpu in dict.fromkeys(gpu for gpu, *_ in MACHINES)
    )  # fmt: skip
    path = folder / "cluster.yaml"
    path.write_text(
        f"version: 1\nnodes:\n{''.join(nodes)}links:\n  inside_node:\n{inside}"
        f"  between_nodes: {{bandwidth: 5 Gb/s, latency: 1 ms}}\n  between_sites:\n{between}",
        encoding="utf-8",
    )
    return load_cluster(path)


def served_model(folder: Path) -> ServedModel:
    """Return Llama-2-70B in 16 bits."""
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA_70B), encoding="utf-8")
    return load_served(path, "16-bit", "16-bit")


def mix_of(rate: float, first_s: float = inf, between_s: float = inf) -> RequestMix:
    """Return the requests with their deadlines."""
    lengths = TokenLengths(((INPUT, 1.0),)), TokenLengths(((OUTPUT, 1.0),))
    return RequestMix((RequestClass("chat", rate, *lengths, first_s, between_s),), attainment=0.99)


def served_by(way: str, engine: EngineName) -> Engine:
    """Return an engine that serves in a way of `RATES`."""
    most = 1 if way == "one at a time" else ENGINES[engine].max_sequences
    return replace(ENGINES[engine], max_sequences=most)


def alone(served: ServedModel) -> tuple[float, float]:
    """Return the seconds to the first token, and between tokens, of a request alone on 8 A100."""
    link = Link(bytes_per_s=300e9, latency_s=5e-6)
    stage = ReplicaStage(gpu_type("A100-40GB"), 8, served.model.num_layers, link)
    price = PipelinePrice(ReplicaPipeline((stage,)), served, ENGINES["vllm"])
    first_s = PhaseRates(price).first_token_s(mix_of(1.0).classes[0])
    return first_s, price.times(StepWork(1.0, 1.0, 0.0, INPUT + OUTPUT / 2))[0]


def evened(fleet: Fleet, num_stages: int | None = None, width: int | None = None) -> Fleet:
    """Return the choices with replicas of one kind of machine, one width and even layers.

    Args:
        fleet: all choices.
        num_stages, width: of every replica; None for any.
    """
    kept: dict[str, OfferedReplica] = {}
    for offered in fleet.offered.values():
        stages, shape = offered.shape.pipeline.stages, offered.shape
        if len(set(shape.pools)) > 1 or offered.phase != "both":
            continue
        if num_stages not in (None, len(stages)) or width not in (None, stages[0].width):
            continue
        total, parts = fleet.served.model.num_layers, len(stages)
        layers = [total // parts + (place < total % parts) for place in range(parts)]
        even = tuple(replace(s, num_layers=n) for s, n in zip(stages, layers, strict=True))
        pipeline = replace(shape.pipeline, stages=even)
        rates = PhaseRates(PipelinePrice(pipeline, fleet.served, fleet.engine))
        own = rates.rate("both", fleet.mix.classes[0])
        if own is not NOTHING and rates.pool.num_blocks:
            made = Shape(pipeline, shape.pools)
            kept[f"both: {made.name}"] = OfferedReplica(made, "both", rates, (own,))
    return replace(fleet, offered=kept)


def choices(kind: str, vllm: Fleet, unlike: Fleet) -> Iterator[Fleet]:
    """Yield the sets of choices that a kind of fleet has beside those of the kinds before it.

    Args:
        kind: one of `KINDS`.
        vllm, unlike: all choices of vLLM, and with stages of unlike widths.
    """
    if kind == "one shape":
        stages = [offered.shape.pipeline.stages for offered in vllm.offered.values()]
        for depth, width in sorted({(len(s), s[0].width) for s in stages}):
            yield evened(vllm, depth, width)
    else:
        yield {"even": evened(vllm), "vllm": vllm, "any": unlike}[kind]


def with_mix(fleet: Fleet, mix: RequestMix) -> Fleet:
    """Return the choices that are left for other requests."""
    offered = {}
    for name, replica in fleet.offered.items():
        by_class = tuple(replica.rates.rate(replica.phase, kind) for kind in mix.classes)
        if any(rate is not NOTHING for rate in by_class):
            offered[name] = replace(replica, by_class=by_class)
    return replace(fleet, mix=mix, offered=offered)


def p99_s(fleet: Fleet, rate: float, between_s: float) -> tuple[float, list[str]]:
    """Return the 99th of a hundred of the seconds of whole requests, and the replicas; infinite
    where no fleet has the rate.

    Args:
        fleet: the choices.
        rate: requests per second.
        between_s: deadline between tokens that replicas are chosen for.
    """
    left = with_mix(fleet, mix_of(rate, inf, between_s))
    try:
        found = serve_most(left.composing(routes=ALONE), _GAP)
    except InfeasiblePlanError:
        return inf, []
    if found.scale < 1.0:
        return inf, []
    outcome, _ = simulate(left, found, 1.0)
    names = [f"{count} x {name}" for name, count in sorted(found.counts.items())]
    return outcome.overall.total_s.p99, names


def p99_in_order_s(fleets: list[Fleet], rate: float, kind: str) -> float:
    """Return the same of the best of the fleets in the order of machines; infinite where none of
    them has the rate.

    Args:
        fleets: one for each shape.
        rate: requests per second.
        kind: one of `IN_ORDER`.
    """
    best = inf
    for fleet in fleets:
        left = with_mix(fleet, mix_of(rate))
        found = dealt(left, rate, by_speed=kind == "in order")
        if found is not None:
            outcome, _ = simulate(left, found, 1.0, policy=IN_ORDER[kind])
            best = min(best, outcome.overall.total_s.p99)
    return best


def deadline_scales(
    cluster: Cluster, served: ServedModel, way: str
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield, for each rate, the deadline scale of each kind of fleet, None where none has the rate,
    and the replicas of the best one."""
    first_s, between_s = alone(served)
    whole_s = first_s + (OUTPUT - 1) * between_s
    vllm, unlike = (
        make_fleet(cluster, served, served_by(way, name), mix_of(1.0)) for name in ENGINE_NAMES
    )
    sets = {kind: list(choices(kind, vllm, unlike)) for kind in KINDS}
    in_order = list(fleets_in_order(vllm))
    for rate in RATES[way]:
        found: dict[str, float | None] = {}
        for kind in IN_ORDER:
            theirs_s = p99_in_order_s(in_order, rate, kind)
            found[kind] = round(theirs_s / whole_s, 3) if theirs_s < inf else None
        # A kind with more choices has those of the kinds before it too.
        best: tuple[float, list[str]] = inf, []
        for kind in KINDS:
            tried = (
                p99_s(fleet, rate, scale * between_s)
                for fleet in sets[kind] for scale in BETWEEN_SCALES
            )  # fmt: skip
            best = min(best, *tried, key=lambda pair: pair[0])
            found[kind] = round(best[0] / whole_s, 3) if best[0] < inf else None
        yield {"requests_per_s": rate, "deadline_scale": found, "best": best[1]}


COLUMNS = Columns(
    {"way of serving": "{way}", "requests/s": "{requests_per_s:g}"}
    | {kind: f"{{deadline_scale[{kind}]}}" for kind in (*IN_ORDER, *KINDS)}
    | {"best": lambda row: ", ".join(row["best"])}
)


OPTIONS = (option("--out", type=Path, metavar="FILE", help="all of it as JSON"),)


def run(given: argparse.Namespace) -> Iterator[Columns | dict[str, Any] | str]:
    """Yield the scales by rate, and the seconds of planning again."""
    yield COLUMNS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        served, cluster = served_model(folder), cluster_of(0, folder)
        rows: dict[str, list[dict[str, Any]]] = {way: [] for way in RATES}
        for way, told_rows in rows.items():
            for row in deadline_scales(cluster, served, way):
                told_rows.append(row)
                yield {"way": way, **row}
        replanned = {}
        for engine in ENGINE_NAMES:
            begin = time.process_time()
            mix = mix_of(4.0, 5.0, 0.2)
            plan, *_ = planned_fleet(cluster_of(4, folder), served, mix, "goodput", engine)
            replanned[engine] = {
                "processor_s": round(time.process_time() - begin, 1),
                "replicas": [replica.shape for replica in plan.replicas],
            }
        yield str(replanned)
    if given.out:
        told = {"base_s": alone(served), "ways": rows, "four_gpus_lost": replanned}
        given.out.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
