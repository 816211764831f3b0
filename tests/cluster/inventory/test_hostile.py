"""Lists with pieces torn out, doubled and replaced: read, or refused by a typed error; and what is
read is written as a file that says just that."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.inventory.draft import Inventory
from megatron_hetero.cluster.inventory.kubernetes import nodes_from_kubernetes
from megatron_hetero.cluster.inventory.skypilot import nodes_from_skypilot
from megatron_hetero.cluster.inventory.slurm import nodes_from_slurm
from megatron_hetero.cluster.inventory.text import cluster_yaml
from megatron_hetero.errors import ClusterError, HeteroError
from tests.cluster.inventory.test_kubernetes import node
from tests.cluster.inventory.test_slurm import A100, NODES

KUBERNETES = json.dumps(
    {
        "items": [
            node("a", "NVIDIA-A100-SXM4-80GB", "8", "81920"),
            node("b", "NVIDIA-L40S-SHARED", "16", labels={"nvidia.com/gpu.count": "2"}),
        ]
    }
)
SKYPILOT = """\
name: x
num_nodes: 2
resources:
  infra: aws/us
  any_of:
    - accelerators: {A100: 8}
    - accelerators: L4:2
"""
JUNK = [
    *("", " ", "\n", '"', "{", "}", "[", "]", ":", ",", "=", "null", "true", "-1", "1e9", "9" * 30),
    *("\0", "\u202e", "é", "gpu:", "NodeName=", "&a", "*a", "!!x", "\t", "0.5", "#", "'"),
]
READERS: dict[str, tuple[str, Callable[[Path], Inventory]]] = {
    "slurm": (NODES, lambda path: nodes_from_slurm(path, A100)),
    "kubernetes": (KUBERNETES, lambda path: nodes_from_kubernetes(path, {})),
    "skypilot": (SKYPILOT, lambda path: nodes_from_skypilot([path], {})),
}


def torn(text: str, draw: random.Random) -> str:
    for _ in range(draw.randint(1, 3)):
        start = draw.randrange(len(text) + 1)
        stop = min(len(text), start + draw.choice((0, 1, 3, 20)))
        piece = draw.choice(JUNK)
        if draw.random() < 0.3:
            from_here = draw.randrange(len(text) + 1)
            piece = text[from_here : from_here + draw.randint(1, 30)]
        text = text[:start] + piece + text[stop:]
    return text


@pytest.mark.parametrize("reader", READERS)
def test_torn_lists_are_read_or_refused(reader: str, tmp_path: Path) -> None:
    draw, (text, read) = random.Random(7), READERS[reader]
    path, output = tmp_path / "list", tmp_path / "cluster.yaml"
    num_read = num_refused = 0
    for _ in range(200):
        path.write_text(torn(text, draw))
        try:
            nodes = read(path).nodes
        except HeteroError as error:
            assert str(path) in str(error)
            num_refused += 1
            continue
        num_read += 1
        output.write_text(cluster_yaml(nodes, "from a test"))
        if any(c.described is not None for n in nodes for c in n.cards):
            continue
        try:
            loaded = load_cluster(output)
        except ClusterError as error:  # two nodes of one name, more GPUs than a node may have
            assert (
                "rename" in str(error)
                or "less than or equal" in str(error)
                or ("greater than or equal" in str(error))
            ), error
            continue
        assert [(d.name, loaded.gpu_type(d).name) for d in loaded.devices] == [
            (f"{n.name}:{i}", gpu)
            for n in nodes
            for i, gpu in enumerate(c.gpu for c in n.cards for _ in range(c.count))
        ]
    assert num_read > 20 and num_refused > 20
