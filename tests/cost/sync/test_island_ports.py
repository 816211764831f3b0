"""Machines of several islands: every card has a port of its own, and the machine one price."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cost.sync.gradients import GradientExchangePrices
from megatron_hetero.model.load import load_workload
from megatron_hetero.planner.objectives.node_pools import node_pools
from megatron_hetero.planner.problem import make_problem

BOX = """
version: 1
nodes:
  - name: box
    gpus: [{type: RTX-3090, count: 1}, {type: RTX-A6000, count: 2}, {type: RTX-3090, count: 1}]
    link: {bandwidth: 12 GB/s, latency: 12 us}
    price_per_hour: 3.0
"""
FLAGS = (
    "--num-layers=4", "--hidden-size=256", "--num-attention-heads=4", "--seq-length=128",
    "--max-position-embeddings=128", "--vocab-size=512", "--micro-batch-size=1",
    "--global-batch-size=8", "--bf16",
)  # fmt: skip


def test_ports_are_distinct_and_the_price_is_paid_once(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(BOX, encoding="utf-8")
    cluster, workload = load_cluster(path), load_workload(None, FLAGS)
    assert len(cluster.nodes) == 2
    ports = GradientExchangePrices(cluster, workload.model, 4, None)._port_of
    assert sorted(ports) == sorted(cluster.devices)
    assert sorted(ports.values()) == [min(ports.values()) + 2 * i for i in range(4)]
    pools = node_pools(make_problem(cluster, workload))
    prices = [pool.price_per_hour(pool.num_gpus) for pool in pools]
    assert sum(price or 0 for price in prices) == pytest.approx(3.0)
