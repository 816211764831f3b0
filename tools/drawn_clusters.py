"""Clusters and jobs drawn from a hash: nobody chose them, and nobody saw them before.

A commit's hash is known only once its code is written, so what is drawn from it cannot have been
looked at while the code was.  Machines, networks, models and batches are those that users have:
desktops, workstations and servers of a lab, rented machines, two sites with a line between them.
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.files import canonical_json
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload

ROOT = Path(__file__).resolve().parents[1]
PLANNER = "megatron_hetero/planner/"
MAX_GPUS = 24


@dataclass(frozen=True)
class _Place:
    """Where machines stand: their GPUs with the bandwidth between two in GB/s, how many machines
    and GPUs in each, and the network's choices in Gb/s, microseconds."""

    types: dict[str, tuple[int, ...]]
    num_nodes: tuple[int, int]
    per_node: tuple[int, ...]
    networks: tuple[tuple[float, int], ...]


_PLACES = {
    "desktops": _Place(
        {
            "RTX-3060": (6, 12), "RTX-3080": (6, 12), "RTX-3090": (12, 50), "RTX-4070-Ti": (12,),
            "RTX-4080": (12, 20), "RTX-4090": (12, 20), "RTX-5090": (25, 45),
        },
        (2, 6), (1, 1, 1, 2, 2, 3), ((0.94, 200), (2.4, 150), (9.4, 60)),
    ),
    "lab": _Place(
        {
            "RTX-3090": (12,), "RTX-A5000": (20,), "RTX-A6000": (20, 50), "RTX-6000-Ada": (22,),
            "A40": (20,), "A100-40GB": (240,), "A100-80GB-PCIe": (20,), "L40S": (24,),
            "RTX-4090": (20,), "H100-PCIe": (45,),
        },
        (2, 6), (1, 2, 2, 3, 4, 4, 5, 8), ((9.4, 50), (9.4, 200), (25, 30), (100, 10)),
    ),
    "cloud": _Place(
        {
            "A10": (22,), "L4": (20,), "L40S": (24,), "A100-40GB": (240,), "A100-80GB": (235,),
            "H100-80GB": (400,), "RTX-4090": (18,), "RTX-A6000": (22,),
        },
        (2, 6), (1, 2, 4, 4, 8), ((10, 40), (25, 30), (50, 20), (200, 8)),
    ),
}  # fmt: skip
_LINES = ((1, 20), (2.5, 9), (5, 15), (10, 4))
"""Between two sites, in Gb/s and milliseconds."""

MODELS = {
    "355M": (24, 1024, 4096, 16, 16, 50257, False),
    "774M": (36, 1280, 5120, 20, 20, 50257, False),
    "1.1B": (22, 2048, 5632, 32, 4, 32000, True),
    "1.5B": (28, 1536, 8960, 12, 2, 151936, True),
    "2.7B": (32, 2560, 10240, 32, 32, 50257, False),
    "3.2B": (28, 3072, 8192, 24, 8, 128256, True),
    "6.7B": (32, 4096, 11008, 32, 32, 32000, True),
    "8B": (32, 4096, 14336, 32, 8, 128256, True),
    "13B": (40, 5120, 13824, 40, 40, 32000, True),
    "33B": (60, 6656, 17920, 52, 52, 32000, True),
}
"""Layers, hidden size, MLP columns, heads, query groups, words, whether it is like Llama."""
_BYTES_OF_STATE = 18
"""Of each parameter, at most: weight, gradient, main weight and two moments."""


@dataclass(frozen=True)
class DrawnJob:
    """One question: a cluster, and what is trained on it."""

    place: str
    cluster_data: dict[str, Any]
    model: str
    flags: tuple[str, ...]

    def load(self) -> tuple[Cluster, Workload]:
        """Return it as a user's files are read."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cluster.yaml"
            path.write_text(canonical_json(self.cluster_data))  # JSON is YAML
            return load_cluster(path), load_workload(None, self.flags)

    @property
    def machines(self) -> str:
        """The GPUs of each machine, in words."""
        of_nodes = [
            "+".join(f"{part['count']} {part['type']}" for part in node["gpus"])
            if "gpus" in node
            else f"{node['count']} {node['gpu']}"
            for node in self.cluster_data["nodes"]
        ]
        return ", ".join(of_nodes)


def planner_commit() -> str:
    """Return the hash of the last commit that changed the planner."""
    command = ["git", "log", "-1", "--format=%H", "--", PLANNER]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def random_of(commit: str, kind: str, number: int) -> Random:
    """Return what a hash's cluster of a kind is drawn by, by its number."""
    text = f"{commit}/{kind}/{number}"
    return Random(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))


def drawn_job(random: Random) -> DrawnJob:
    """Draw a cluster of 2 to 24 GPUs of two to four types, and a job whose states its memory
    holds."""
    while True:
        place = random.choice(list(_PLACES))
        data = _cluster(random, _PLACES[place])
        memory = _memory_bytes(data)
        fitting = [name for name in MODELS if 0.08 < _state_bytes(name) / memory < 0.75]
        if fitting:
            model = random.choice(fitting)
            return DrawnJob(place, data, model, _flags(random, model))


def _cluster(random: Random, place: _Place) -> dict[str, Any]:
    """Draw the content of cluster.yaml."""
    types = random.sample(sorted(place.types), random.choice((2, 2, 3, 3, 4)))
    least, most = place.num_nodes
    num_nodes = random.randint(max(least, len(types)), most)
    of_nodes = [*types, *random.choices(types, k=num_nodes - len(types))]
    sites = ["east", "west"] if num_nodes > 2 and random.random() < 0.25 else ["main"]
    nodes: list[dict[str, Any]] = []
    left = MAX_GPUS
    for i, gpu in enumerate(of_nodes):
        count = min(random.choice(place.per_node), left - (num_nodes - i - 1))
        left -= count
        node: dict[str, Any] = {"name": f"n{i}", "site": sites[i % len(sites)]}
        other = random.choice(types)
        if count > 1 and other != gpu and random.random() < 0.15:
            node["gpus"] = [{"type": gpu, "count": count - 1}, {"type": other, "count": 1}]
            node["link"] = {"bandwidth": "12 GB/s", "latency": "14 us"}
        else:
            node |= {"gpu": gpu, "count": count}
        nodes.append(node)
    inside = {
        gpu: {"bandwidth": f"{random.choice(place.types[gpu])} GB/s", "latency": "10 us"}
        for gpu in types
    }
    links: dict[str, Any] = {"inside_node": inside}
    networks = {site: random.choice(place.networks) for site in sites}
    links["between_nodes"] = {
        site: {"bandwidth": f"{rate} Gb/s", "latency": f"{late} us"}
        for site, (rate, late) in networks.items()
    }
    if len(sites) > 1:
        rate, late = random.choice(_LINES)
        line = {"sites": sites, "bandwidth": f"{rate} Gb/s", "latency": f"{late} ms"}
        links["between_sites"] = [line]
    return {"version": 1, "nodes": nodes, "links": links}


def _flags(random: Random, model: str) -> tuple[str, ...]:
    """Draw the job: what users write beside the model."""
    layers, hidden, columns, heads, groups, words, is_llama = MODELS[model]
    seq = random.choice((1024, 2048, 2048, 4096))
    flags = (
        f"--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {columns} "
        f"--num-attention-heads {heads} --seq-length {seq} --max-position-embeddings {seq} "
        f"--vocab-size {words} --bf16 --lr 3.0e-4 --attention-dropout 0 --hidden-dropout 0 "
        f"--micro-batch-size {random.choice((1, 1, 1, 2, 4))} "
        f"--global-batch-size {random.choice((32, 64, 96, 128, 256))} "
    )
    if is_llama:
        flags += (
            "--position-embedding-type rope --swiglu --normalization RMSNorm "
            "--disable-bias-linear --untie-embeddings-and-output-weights "
        )
    if groups != heads:
        flags += f"--group-query-attention --num-query-groups {groups} "
    for often, more in (
        (0.5, "--use-distributed-optimizer"),
        (0.3, "--sequence-parallel"),
        (0.2, "--overlap-grad-reduce"),
        (0.7, "--use-flash-attn"),
        (0.2, "--calculate-per-token-loss"),
        (0.2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    ):
        if random.random() < often:
            flags += f"{more} "
    return tuple(flags.split())


def _state_bytes(model: str) -> float:
    """Return about the bytes that training the model keeps, whatever the batch."""
    layers, hidden, columns, heads, groups, words, is_llama = MODELS[model]
    attention = hidden * hidden * (2 + 2 * groups / heads)
    own = attention + (3 if is_llama else 2) * hidden * columns
    return _BYTES_OF_STATE * (layers * own + (2 if is_llama else 1) * words * hidden)


def _memory_bytes(data: dict[str, Any]) -> float:
    parts = [part for node in data["nodes"] for part in node.get("gpus", ())]
    parts += [
        {"type": node["gpu"], "count": node["count"]} for node in data["nodes"] if "gpu" in node
    ]
    return float(sum(gpu_type(part["type"]).memory_bytes * part["count"] for part in parts))
