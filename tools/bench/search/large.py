"""Plans for made-up clusters of 264 to 1,024 GPUs of two or three types: how fast a step, how long
the search.

    python tools/bench large [--jobs 16] [--seed 1] [--against FILE] [--json]

The jobs of a seed are the same everywhere: types, their numbers of nodes, the network, a model of
1.3 to 70 billion parameters and a batch of one to four sequences for each GPU are drawn.  What a
change of the search brings shows in `--against`, the `--json` of a run before it: `ratio` is the
step then over the step now.  Seconds are the processor's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.files import canonical_json
from megatron_hetero.model.load import load_workload
from megatron_hetero.planner import plan_cluster
from tools.bench.jobs import step_s
from tools.bench.show import Columns, option
from tools.scale_clusters import BETWEEN_NODES, GPUS_PER_NODE, INSIDE_NODE, MODEL_FLAGS

NUM_NODES = (33, 40, 48, 64, 96, 128)
TYPES = (
    ("H100-80GB", "A100-80GB", "L40S"),
    ("A100-40GB", "RTX-4090", "L40S"),
    ("A100-80GB", "RTX-4090"),
    ("H200", "A100-40GB", "RTX-4090"),
)
MODELS = {
    "1.3B": (24, 2048, 8192, 16),
    "7B": (32, 4096, 11008, 32),
    "30B": (60, 6656, 17920, 52),
    "70B": (80, 8192, 28672, 64),
}
"""Layers, hidden size, MLP columns, heads."""


@dataclass(frozen=True)
class LargeJob:
    """One question: nodes of each type, the network between them, and what is trained."""

    counts: dict[str, int]
    network: dict[str, str]
    model: str
    global_batch_size: int

    @property
    def num_gpus(self) -> int:
        """Count the GPUs of the whole cluster."""
        return GPUS_PER_NODE * sum(self.counts.values())

    def cluster_data(self) -> dict[str, Any]:
        """Return the content of cluster.yaml."""
        nodes = [
            {"name": f"{gpu.lower()}-{i}", "gpu": gpu, "count": GPUS_PER_NODE}
            for gpu, count in self.counts.items()
            for i in range(count)
        ]
        inside = {gpu: INSIDE_NODE[gpu] for gpu in self.counts}
        links = {"inside_node": inside, "between_nodes": self.network}
        return {"version": 1, "nodes": nodes, "links": links}

    def flags(self) -> tuple[str, ...]:
        """Return the model and the job as Megatron's flags."""
        layers, hidden, columns, heads = MODELS[self.model]
        own = (
            f"--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {columns} "
            f"--num-attention-heads {heads} --use-distributed-optimizer "
            f"--global-batch-size {self.global_batch_size}"
        )
        return (*MODEL_FLAGS.split(), *own.split())  # of a flag that comes twice the last counts


def large_jobs(seed: int) -> Iterator[LargeJob]:
    """Yield the jobs of a seed, without end."""
    random = Random(seed)
    while True:
        num_nodes, types = random.choice(NUM_NODES), random.choice(TYPES)
        cuts = sorted(random.sample(range(1, num_nodes), len(types) - 1))
        sizes = [end - start for start, end in zip([0, *cuts], [*cuts, num_nodes], strict=True)]
        sequences = random.choice((1, 2, 4)) * num_nodes * GPUS_PER_NODE
        yield LargeJob(
            dict(zip(types, sizes, strict=True)),
            random.choice(list(BETWEEN_NODES.values())),
            random.choice(list(MODELS)),
            2 ** (sequences - 1).bit_length(),
        )


def result_of(job: LargeJob, folder: Path) -> dict[str, Any]:
    """Make one row of the table."""
    path = folder / "cluster.yaml"
    path.write_text(canonical_json(job.cluster_data()))  # JSON is YAML
    cluster, workload = load_cluster(path), load_workload(None, job.flags())
    started = time.process_time()
    plan = plan_cluster(cluster, workload)
    search_s = time.process_time() - started
    return {
        "nodes": job.counts,
        "gpus": job.num_gpus,
        "model": job.model,
        "step_time_s": step_s(plan),
        "search_s": search_s,
        "strategy": plan.made_by.rpartition(" ")[2],
    }


COLUMNS = Columns({
    "nodes": lambda row: " + ".join(f"{count} {gpu}" for gpu, count in row["nodes"].items()),
    "GPUs": "{gpus}", "model": "{model}", "step s": "{step_time_s:.4f}",
    "search s": "{search_s:.1f}", "found by": "{strategy}", "ratio": "{ratio:.3f}",
})  # fmt: skip


OPTIONS = (
    option("--jobs", type=int, default=16, metavar="N"),
    option("--seed", type=int, default=1),
    option("--against", type=Path, metavar="FILE", help="--json of another run"),
)


def run(given: argparse.Namespace) -> Iterator[Columns | dict[str, Any]]:
    """Plan the first jobs of the seed."""
    before = json.loads(given.against.read_text()) if given.against else []
    yield COLUMNS
    with tempfile.TemporaryDirectory() as folder:
        for number, job in zip(range(given.jobs), large_jobs(given.seed), strict=False):
            row = result_of(job, Path(folder))
            then = before[number] if number < len(before) else None
            if then and (then["nodes"], then["model"]) != (row["nodes"], row["model"]):
                raise SystemExit(f"{given.against}: its job {number} is another one; same --seed?")
            yield row | {"ratio": then and then["step_time_s"] / row["step_time_s"]}
