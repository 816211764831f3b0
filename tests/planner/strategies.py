"""Hypothesis strategies: random clusters and models."""

from __future__ import annotations

import os
from dataclasses import replace
from math import inf

from hypothesis import strategies as st

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.node_links import Incast, Link, mapped_links
from megatron_hetero.cluster.nodes import GpuType, Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.spec import Workload
from tests.cost.builders import AS_GIVEN, FAST, SLOW, make_workload

MIB = 1 << 20


def cases(share: int) -> int:
    """Examples of a property: a share in CI, `PLANNER_CASES` with `tools/prove_planner.py`."""
    return int(os.environ.get("PLANNER_CASES", share))


@st.composite
def gpu_types(draw: st.DrawFn) -> list[GpuType]:
    """Two types, from roomy to so small that plans may not fit."""
    memory = st.sampled_from([60 * MIB, 100 * MIB, 200 * MIB, 1 << 40])
    return [replace(gpu, memory_bytes=draw(memory)) for gpu in (FAST, SLOW)]


@st.composite
def clusters(draw: st.DrawFn, max_gpus: int, limits: Limits = AS_GIVEN) -> Cluster:
    """One to four nodes, unlike links, together at most `max_gpus` GPUs."""
    types = draw(gpu_types())
    nodes: list[Node] = []
    for index in range(draw(st.integers(1, 4))):
        left = max_gpus - sum(node.num_gpus for node in nodes)
        if left:
            inside = Link(draw(st.sampled_from([1e9, 2e10, 3e11])), 3e-6)
            count = draw(st.integers(1, left))
            name = f"n{index}"
            nodes.append(Node(name, draw(st.sampled_from(types)), count, "main", name, inside))
    links = {}
    for a in nodes:
        for b in nodes:
            if a.name < b.name:
                link = Link(draw(st.sampled_from([1e8, 3e9, 5e10])), draw(st.floats(0, 1e-3)))
                links[a.name, b.name] = links[b.name, a.name] = link
    return Cluster(tuple(nodes), links, limits)


@st.composite
def link_terms(draw: st.DrawFn, cluster: Cluster) -> Cluster:
    """The cluster with what adding costs, and many senders to one receiver, on some of its links:
    of two classes inside nodes and two between them."""
    rates = st.sampled_from([inf, 1e11, 1e9])
    incasts = st.sampled_from([None, Incast(1, 1.0), Incast(2, 0.3)])
    inside, between = ([(draw(rates), draw(incasts)) for _ in range(2)] for _ in range(2))

    def changed(link: Link, terms: tuple[float, Incast | None]) -> Link:
        return replace(link, reduce_bytes_per_s=terms[0], incast=terms[1])

    return replace(
        cluster,
        nodes=tuple(
            replace(node, link=changed(node.link, inside[i % 2]))
            for i, node in enumerate(cluster.nodes)
        ),
        node_links=mapped_links(
            cluster.node_links, lambda link: changed(link, between[link.bytes_per_s < 1e9])
        ),
    )


@st.composite
def workloads(draw: st.DrawFn, max_layers: int, max_micro_batches: int) -> Workload:
    """A small GPT of about 3 million parameters a layer."""
    return make_workload(
        num_layers=draw(st.integers(1, max_layers)),
        global_batch_size=draw(st.integers(1, max_micro_batches)),
        seq_length=draw(st.sampled_from([64, 2048])),
        tied_embeddings=draw(st.booleans()),
        sequence_parallel=draw(st.booleans()),
    )


@st.composite
def expert_workloads(draw: st.DrawFn, max_layers: int) -> Workload:
    """A small model of experts, with a shared one or without."""
    return make_workload(
        num_layers=draw(st.integers(1, max_layers)),
        global_batch_size=draw(st.sampled_from([1, 2, 4])),
        seq_length=draw(st.sampled_from([64, 2048])),
        sequence_parallel=True,
        num_experts=draw(st.sampled_from([4, 6])),
        moe_router_topk=draw(st.integers(1, 3)),
        moe_ffn_hidden_size=draw(st.sampled_from([128, 1024])),
        moe_shared_expert_intermediate_size=draw(st.sampled_from([0, 256])),
        add_bias_linear=False,
    )
