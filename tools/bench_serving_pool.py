"""Deadlines that a pool of unlike GPUs keeps, with unlike pipelines and without: HexGen's setting.

    python tools/bench_serving_pool.py [--json FILE]

Llama-2-70B in 16 bits on the 58 GPUs of HexGen (ICML 2024): 2 x 8 and 2 x 3 RTX 3090 Ti, 2 x 8
RTX A5000, 2 x 8 RTX A6000, 4 A40.  Which machines stand together is not published in a form that we
have read: four sites are assumed, with the middle of its bandwidths (0.65 Gb/s) and latencies
(95 ms) between them.  Requests are 128 tokens in and 64 out, a Poisson process.

The deadline scale is the smallest multiple of what 8 A100 take for a request alone (first token,
and between tokens) that the planned fleet keeps for 99 % of the requests in simulation.  Fleets:
`one shape`: all replicas have the same width and number of even stages, each on one kind of
machine; `even`: each replica has one width, even layers and one kind of machine, but replicas
differ; `vllm`: what vLLM runs, uneven layers and two kinds of machines in a pipeline; `any`: unlike
widths too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster, Link
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.serving.compose.milp import serve_most
from megatron_hetero.serving.compose.problem import ROUTES
from megatron_hetero.serving.fleet.api import planned_fleet
from megatron_hetero.serving.fleet.forecast import simulate
from megatron_hetero.serving.fleet.offers import Fleet, OfferedReplica, make_fleet
from megatron_hetero.serving.fleet.shapes import Shape
from megatron_hetero.serving.prices.engine import ENGINES, EngineName
from megatron_hetero.serving.prices.rates import NOTHING, PhaseRates
from megatron_hetero.serving.prices.served import ServedModel, load_served
from megatron_hetero.serving.prices.steps import (
    PipelinePrice,
    ReplicaPipeline,
    ReplicaStage,
    StepWork,
)
from megatron_hetero.serving.workload.requests import RequestClass, RequestMix, TokenLengths

MACHINES = (
    ("RTX-3090-Ti", 8, 2, "a"), ("RTX-3090-Ti", 3, 2, "b"), ("RTX-A5000", 8, 1, "c"),
    ("RTX-A6000", 8, 2, "d"), ("RTX-A5000", 8, 1, "d"), ("A40", 4, 1, "d"),
)  # fmt: skip
"""GPU, number in a machine, machines, site."""
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192,
    "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float16",
    "tie_word_embeddings": False,
}  # fmt: skip
INPUT, OUTPUT = 128, 64
RATES = (4.0, 12.0, 20.0)
STEP, MOST = 1.05, 60
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


def mix_of(rate: float, first_s: float, between_s: float) -> RequestMix:
    """Return the requests with their deadlines."""
    lengths = (TokenLengths(((tokens, 1.0),)) for tokens in (INPUT, OUTPUT))
    return RequestMix((RequestClass("chat", rate, *lengths, first_s, between_s),), attainment=0.99)


def alone(served: ServedModel) -> tuple[float, float]:
    """Return the seconds to the first token, and between tokens, of a request alone on 8 A100."""
    link = Link(bytes_per_s=300e9, latency_s=5e-6)
    stage = ReplicaStage(gpu_type("A100-40GB"), 8, served.model.num_layers, link)
    price = PipelinePrice(ReplicaPipeline((stage,)), served, ENGINES["vllm"])
    first_s = PhaseRates(price).first_token_s(mix_of(1.0, 1e9, 1e9).classes[0])
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
        if own is not NOTHING and rates.kv_tokens > 0:
            made = Shape(pipeline, shape.pools)
            kept[f"both: {made.name}"] = OfferedReplica(made, "both", rates, (own,))
    return replace(fleet, offered=kept)


def choices(
    kind: str, cluster: Cluster, served: ServedModel, mix: RequestMix
) -> Iterator[Fleet]:
    """Yield the sets of choices of a kind of fleet: each kind has those of the kinds before it."""
    vllm = make_fleet(cluster, served, ENGINES["vllm"], mix)
    depths = sorted({
        (len(stages), stages[0].width)
        for stages in (offered.shape.pipeline.stages for offered in vllm.offered.values())
    })  # fmt: skip
    for depth in depths:
        yield evened(vllm, *depth)
    if kind == "one shape":
        return
    yield evened(vllm)
    if kind == "even":
        return
    yield vllm
    if kind == "any":
        yield make_fleet(cluster, served, ENGINES["any"], mix)


def keeps(kind: str, cluster: Cluster, served: ServedModel, mix: RequestMix) -> bool:
    """Tell if a fleet of some kind, the best of its choices, keeps the deadlines in simulation."""
    for fleet in choices(kind, cluster, served, mix):
        if not fleet.offered:
            continue
        try:
            found = serve_most(fleet.composing(routes=ALONE), _GAP)
        except InfeasiblePlanError:
            continue
        if found.scale >= 1.0 and simulate(fleet, found, 1.0)[0].holds(mix.attainment):
            return True
    return False


def deadline_scales(cluster: Cluster, served: ServedModel, rate: float) -> dict[str, float | None]:
    """Return the smallest deadline scale of each kind of fleet; None where none up to 18 keeps
    the deadlines."""
    first_s, between_s = alone(served)
    found: dict[str, float | None] = {}
    high = MOST
    # A kind with more choices keeps what the kind before it keeps.
    for name in ("one shape", "even", "vllm", "any"):
        low = 0
        # The smallest power of the step that holds.
        while low < high:
            middle = (low + high) // 2
            scale = STEP**middle
            mix = mix_of(rate, scale * first_s, scale * between_s)
            if keeps(name, cluster, served, mix):
                high = middle
            else:
                low = middle + 1
        found[name] = STEP**low if low < MOST else None
    return found


def main() -> int:
    """Print scales by rate, and the seconds of planning again."""
    parser = argparse.ArgumentParser(description="Plan HexGen's pool of 58 GPUs.")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        served, cluster = served_model(folder), cluster_of(0, folder)
        rows = []
        for rate in RATES:
            scales = deadline_scales(cluster, served, rate)
            rows.append({"requests_per_s": rate, "deadline_scale": scales})
            print(rows[-1], flush=True)
        replanned = {}
        engines: tuple[EngineName, ...] = ("vllm", "any")
        for engine in engines:
            begin = time.process_time()
            mix = mix_of(4.0, 5.0, 0.2)
            plan, *_ = planned_fleet(cluster_of(4, folder), served, mix, "goodput", engine)
            replanned[engine] = {
                "processor_s": round(time.process_time() - begin, 1),
                "replicas": [replica.shape for replica in plan.replicas],
            }
        print(replanned)
    if given.json:
        told = {"base_s": alone(served), "rates": rows, "four_gpus_lost": replanned}
        given.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
