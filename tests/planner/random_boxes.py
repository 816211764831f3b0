"""Random machines with unlike cards, as cluster files: the same for the same seed."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import yaml

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.file.bridges import bridge_fault
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.units import parse_bandwidth

NUM_BOXES = 20
_TYPES = (
    "A100-40GB", "A10", "A40", "L40S", "RTX-2080-Ti", "RTX-3060", "RTX-3080", "RTX-3090",
    "RTX-4090", "RTX-A6000",
)  # fmt: skip


def box_data(seed: int) -> dict[str, Any]:
    """Two to eight cards of two to four types; bridges, slow slots and a root complex in some."""
    random = Random(seed)
    num_types = random.randint(2, 4)
    types = random.sample(_TYPES, num_types)
    num_cards = random.randint(num_types, 8)
    counts = [1] * num_types
    for _ in range(num_cards - num_types):
        counts[random.randrange(num_types)] += 1
    node: dict[str, Any] = {
        "name": "box",
        "gpus": [{"type": t, "count": n} for t, n in zip(types, counts, strict=True)],
        "link": _link(random, 6, 25),
    }
    if random.random() < 0.5:
        node["gpus"][random.randrange(num_types)]["reserve"] = "1 GiB"
    if random.random() < 0.5:
        cards = sorted(random.sample(range(num_cards), 2))
        link = _link(random, 3, 100)
        of_cards = [t for t, n in zip(types, counts, strict=True) for _ in range(n)]
        if bridge_fault(
            *(gpu_type(of_cards[i]) for i in cards), parse_bandwidth(link["bandwidth"])
        ):
            link["bandwidth"] = "15 GB/s"  # what the slots carry
        node["pairs"] = [{"cards": cards, **link}]
    if random.random() < 0.5:
        node["root_complex"] = f"{random.randint(16, 40)} GB/s"
    return {"version": 1, "nodes": [node]}


def write_box(seed: int, path: Path) -> Cluster:
    """Write the file of a box, and read it as a user's."""
    path.write_text(yaml.safe_dump(box_data(seed), sort_keys=False), encoding="utf-8")
    return load_cluster(path)


def _link(random: Random, least: int, most: int) -> dict[str, str]:
    return {
        "bandwidth": f"{random.randint(least, most)} GB/s",
        "latency": f"{random.randint(5, 20)} us",
    }
