"""What sharded layers bring on small machines of unlike cards: steps, and the largest models.

    python tools/bench sharded [--only TEXT ...] [--batch 32] [--overlap]

For each machine of `benchmarks/sharded` and models of 1.3, 2.7 and 6.7 billion parameters, with the
distributed optimizer: the step of the best plan with whole layers and of the best with sharded ones
allowed (`plan --shard-layers`); the largest number of layers of that width that trains either way;
and both steps at nine tenths of the largest with whole layers.  A number of layers trains where
`plan_cluster` finds a plan.  With --overlap the jobs have `--overlap-grad-reduce` and
`--overlap-param-gather`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.model.training import TrainingSpec
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.objective import Objective
from tools.bench.jobs import ROOT, plan_or_none, step_s
from tools.bench.show import Columns, is_chosen, only, option

FOLDER = ROOT / "benchmarks" / "sharded"
MODELS = {"1.3B": (24, 2048, 16), "2.7B": (32, 2560, 32), "6.7B": (32, 4096, 32)}
"""Layers, width, heads."""
QUICK = "symmetric"
"""The strategy that is asked first whether so many layers train."""
TITLES = (
    "machine and model",
    "whole s",
    "sharded s",
    "gain",
    "most layers whole",
    "most layers sharded",
    "whole s at 0.9",
    "sharded s at 0.9",
    "gain at 0.9",
    "sharded plan at 0.9",
)


def workload_of(
    num_layers: int, hidden: int, heads: int, batch: int, *, overlap: bool = False
) -> Workload:
    """Return a GPT in bf16 with the distributed optimizer."""
    model = ModelSpec(
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        vocab_size=50257,
        seq_length=2048,
        max_position_embeddings=2048,
    )
    training = TrainingSpec(
        global_batch_size=batch,
        micro_batch_size=1,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    return Workload(model, training, (), "tools/bench sharded")


def planned(cluster: Cluster, workload: Workload, *, shards: bool, **options: str) -> Plan | None:
    """Return the best plan; None where nothing fits."""
    return plan_or_none(
        cluster, workload, objective=Objective(shards_layers=shards), **options
    )


def most_layers(cluster: Cluster, workload: Workload, *, shards: bool, least: int) -> int:
    """Return the largest number of layers that some plan trains.

    A quick strategy comes near it, and the whole search goes on from there.

    Args:
        shards: whether layers may be sharded.
        least: layers that are known to train.
    """

    def trains(strategy: str) -> Callable[[int], bool]:
        def fits(num_layers: int) -> bool:
            model = replace(workload.model, num_layers=num_layers)
            at = replace(workload, model=model)
            return planned(cluster, at, shards=shards, strategy=strategy) is not None

        return fits

    near = largest(trains(QUICK), least, max(1, workload.model.num_layers - least))
    return largest(trains("auto"), near, 1)


def largest(fits: Callable[[int], bool], low: int, step: int) -> int:
    """Return the largest number that fits, if all below it do: up in growing steps, then by
    bisection.

    Args:
        low: a number that fits, or 0.
        step: the first one up.
    """
    while fits(low + step):
        low, step = low + step, 2 * step
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def seconds(plan: Plan | None) -> str:
    return "does not fit" if plan is None else f"{step_s(plan):.3f}"


def gain(whole: Plan | None, sharded: Plan | None) -> str:
    return "" if whole is None or sharded is None else f"{step_s(whole) / step_s(sharded):.3f}x"


def row(name: str, cluster: Cluster, model: str, batch: int, *, overlap: bool) -> list[str]:
    """Plan one machine and model all ways."""
    workload = workload_of(*MODELS[model], batch, overlap=overlap)
    pair = [planned(cluster, workload, shards=shards) for shards in (False, True)]
    own = 0 if pair[0] is None else workload.model.num_layers
    whole = most_layers(cluster, workload, shards=False, least=own)
    sharded = most_layers(cluster, workload, shards=True, least=whole)
    near: list[Plan | None] = [None, None]
    if whole:
        smaller = replace(workload.model, num_layers=max(1, whole * 9 // 10))
        at = replace(workload, model=smaller)
        near = [planned(cluster, at, shards=shards) for shards in (False, True)]
    return [
        *(f"{name} {model}", *map(seconds, pair), gain(*pair), str(whole), str(sharded)),
        *(*map(seconds, near), gain(*near), sharded_layout(near[1])),
    ]


def sharded_layout(plan: Plan | None) -> str:
    """Return the layout of a plan that has sharded layers, equal replicas once."""
    if plan is None or not plan.layout.has_sharded_layers:
        return ""
    replicas = Counter(str(plan.layout).split(" | "))
    return ", ".join(
        f"{n} times `{text}`" if n > 1 else f"`{text}`" for text, n in replicas.items()
    )


OPTIONS = (
    only("rows"),
    option("--batch", type=int, default=32, help="sequences of a step (32)"),
    option("--overlap", action="store_true", help="exchanges beside computations"),
)


def run(given: argparse.Namespace) -> Iterator[Columns | list[str]]:
    """Plan each machine and model all ways."""
    yield Columns.of(TITLES)
    for path in sorted(FOLDER.glob("*.yaml")):
        cluster = load_cluster(path)
        for model in MODELS:
            if is_chosen(f"{path.stem} {model}", given.only):
                yield row(path.stem, cluster, model, given.batch, overlap=given.overlap)
