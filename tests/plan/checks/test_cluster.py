"""Invariants of a plan against its cluster, on plans in chunks."""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.plan.checks.cluster import data_parallel_stays_in_sites
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import LayerRange, Plan
from tests.plan.edits import with_stage
from tests.plan.strategies import cluster_of, node, place


def test_sites_of_a_layer_are_those_of_its_chunk() -> None:
    """The first replica holds layers 0 and 2 on a, 1 and 3 on b; the second 0-1 and 2-3."""
    shapes = parse_layout("tp1:2,tp1:2 @4 | tp1:2,tp1:2 @4").replicas
    plan = Plan(place(list(shapes), ["a:0", "b:0", "a:1", "b:1"]))
    for s in (0, 1):
        chunks = (LayerRange(s, 1), LayerRange(2 + s, 1))
        plan = with_stage(plan, 0, s, first_layer=s, chunks=chunks)
    cluster = replace(
        cluster_of(node("a", 2), node("b", 2, site="cloud")),
        limits=Limits(no_data_parallel_across_sites=True),
    )
    (violation,) = data_parallel_stays_in_sites(plan, cluster)
    assert "replicas hold layer 1 on sites cloud, main (2 layers in all)" in violation.message
