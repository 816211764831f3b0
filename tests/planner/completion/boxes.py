"""Three nodes far apart, chains of their GPUs, and a small job."""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.planner.units import Chain, Unit
from tests.cost.builders import AS_GIVEN, FAST, FREE, SLOW, make_cluster, make_workload

WORKLOAD = make_workload(num_layers=6, global_batch_size=8, seq_length=1024)
FAR = Link(1e9, 10e-3)


def chain(*names: str) -> Chain:
    """Units written as `a0`, or `a01` for a group of two GPUs."""
    return tuple(Unit(name[0], tuple(map(int, name[1:]))) for name in names)


def boxes(memory_bytes: int = 1 << 40, between: Link = FAR, free: bool = True) -> Cluster:
    fast, slow = (replace(gpu, memory_bytes=memory_bytes) for gpu in (FAST, SLOW))
    return make_cluster(
        ("a", fast, 2),
        ("b", slow, 2),
        ("c", slow, 2),
        between=between,
        limits=FREE if free else AS_GIVEN,
    )
