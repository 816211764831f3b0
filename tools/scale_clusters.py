"""Made-up clusters of any size for benchmarks: the same ones on every machine and every run.

Up to 4,096 GPUs one site of three types; above that a hundred sites of six types in five regions.
Links are those of common hardware: NVLink or PCIe inside a node, InfiniBand or Ethernet between the
nodes of a site, leased fibre between sites.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

from megatron_hetero.files import canonical_json

GPUS_PER_NODE = 8
MAX_GPUS_OF_ONE_SITE = 4096
NUM_SITES = 100
NUM_REGIONS = 5

INSIDE_NODE = {
    "H100-80GB": {"bandwidth": "400 GB/s", "latency": "3 us"},
    "H200": {"bandwidth": "400 GB/s", "latency": "3 us"},
    "A100-80GB": {"bandwidth": "240 GB/s", "latency": "5 us"},
    "A100-40GB": {"bandwidth": "240 GB/s", "latency": "5 us"},
    "L40S": {"bandwidth": "25 GB/s", "latency": "12 us"},
    "RTX-4090": {"bandwidth": "20 GB/s", "latency": "12 us"},
}
THREE_TYPES = ("H100-80GB", "A100-80GB", "L40S")
BETWEEN_NODES = {
    "H100-80GB": {"bandwidth": "400 Gb/s", "latency": "8 us"},
    "H200": {"bandwidth": "400 Gb/s", "latency": "8 us"},
    "A100-80GB": {"bandwidth": "200 Gb/s", "latency": "8 us"},
    "A100-40GB": {"bandwidth": "100 Gb/s", "latency": "10 us"},
    "L40S": {"bandwidth": "100 Gb/s", "latency": "15 us"},
    "RTX-4090": {"bandwidth": "25 Gb/s", "latency": "30 us"},
}
"""By the first type of a site; a site of several types has the network of the first."""

MODEL_FLAGS = """\
--num-layers 40
--hidden-size 5120
--ffn-hidden-size 13824
--num-attention-heads 40
--seq-length 4096
--max-position-embeddings 4096
--position-embedding-type rope
--swiglu
--normalization RMSNorm
--disable-bias-linear
--untie-embeddings-and-output-weights
--vocab-size 32000
--micro-batch-size 1
--lr 3.0e-4
--bf16
--use-flash-attn
"""
"""The Llama shape of 13B."""


def model_flags(num_gpus: int) -> str:
    """Write the job as a file of Megatron flags: a 13B model, two sequences for each GPU (the next
    power of two)."""
    return f"{MODEL_FLAGS}--global-batch-size {2 ** (2 * num_gpus - 1).bit_length()}\n"


def cluster_data(num_gpus: int) -> dict[str, Any]:
    """Return the content of cluster.yaml.

    Raises:
        ValueError: `num_gpus` is no multiple of three nodes' worth up to one site, or of a node's.
    """
    if num_gpus % GPUS_PER_NODE or num_gpus < GPUS_PER_NODE * len(THREE_TYPES):
        raise ValueError(f"{num_gpus} GPUs: take a multiple of {GPUS_PER_NODE} from 24 on")
    if num_gpus <= MAX_GPUS_OF_ONE_SITE:
        return _one_site(num_gpus // GPUS_PER_NODE)
    return _many_sites(num_gpus // GPUS_PER_NODE)


def _one_site(num_nodes: int) -> dict[str, Any]:
    """Make a site of a quarter H100, three eighths A100, the rest L40S."""
    num_h100, num_a100 = max(1, num_nodes // 4), max(1, 3 * num_nodes // 8)
    types = ["H100-80GB"] * num_h100 + ["A100-80GB"] * num_a100
    types += ["L40S"] * (num_nodes - len(types))
    return {
        "version": 1,
        "nodes": [_node(i, gpu, "main") for i, gpu in enumerate(types)],
        "links": {
            "inside_node": {name: INSIDE_NODE[name] for name in THREE_TYPES},
            "between_nodes": {"bandwidth": "200 Gb/s", "latency": "8 us"},
        },
    }


def _many_sites(num_nodes: int) -> dict[str, Any]:
    """Make sites of one to three types each, and two speeds of the paths between them."""
    random = Random(10_240)
    nodes, between_nodes = [], {}
    for number in range(NUM_SITES):
        site = f"site-{number:02}"
        types = random.sample(sorted(INSIDE_NODE), random.choice((1, 1, 2, 2, 3)))
        between_nodes[site] = BETWEEN_NODES[types[0]]
        size = num_nodes * (number + 1) // NUM_SITES - num_nodes * number // NUM_SITES
        nodes += [(types[i * len(types) // size], site) for i in range(size)]
    return {
        "version": 1,
        "nodes": [_node(i, gpu, site) for i, (gpu, site) in enumerate(nodes)],
        "links": {
            "inside_node": INSIDE_NODE,
            "between_nodes": between_nodes,
            "between_sites": _between_sites(sorted(between_nodes)),
        },
    }


def _between_sites(sites: list[str]) -> list[dict[str, Any]]:
    """Make short paths inside a region, long ones between two; each two nodes have one of their
    own."""
    regions = [sites[i::NUM_REGIONS] for i in range(NUM_REGIONS)]
    links: list[dict[str, Any]] = [
        {"sites": region, "bandwidth": "400 Gb/s", "latency": "2 ms"} for region in regions
    ]
    for (i, one), (j, other) in combinations(enumerate(regions), 2):
        latency = {"latency": f"{15 + 20 * (j - i)} ms"}
        links.append({"sites": [*one, *other], "bandwidth": "100 Gb/s", **latency})
    return [{**link, "shared": "none"} for link in links]


def _node(number: int, gpu: str, site: str) -> dict[str, Any]:
    return {"name": f"n{number:04}", "gpu": gpu, "count": GPUS_PER_NODE, "site": site}


def write_case(num_gpus: int, folder: Path) -> tuple[Path, Path]:
    """Write cluster.yaml and model.flags of a size."""
    cluster, flags = folder / f"cluster-{num_gpus}.yaml", folder / f"model-{num_gpus}.flags"
    cluster.write_text(canonical_json(cluster_data(num_gpus)))  # JSON is YAML
    flags.write_text(model_flags(num_gpus))
    return cluster, flags
