"""Exchange plans made for a tree of links, beside those that libraries have.

    python tools/bench exchange [--trees 50]

Three tables.  `kinds`: trees on which something binds, and how many times as long the best of ring,
hierarchical ring, halving and doubling, parameter servers and double binary tree takes (each with
its best number of chunks), by GenModel and by a simulation of flows that knows nothing of it; and
the chosen plan over the lower bound by bytes.  `trees`: the same over random trees, with the rank
correlation of prices and simulated seconds over all plans of a tree.  `clusters`: cluster files
with one holder on each node.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.node_links import Incast, Link
from megatron_hetero.exchange.plan import ExchangePlan
from tools.bench.jobs import ROOT
from tools.bench.show import Columns, option
from tools.flow_simulation import FlowSimulation
from tools.random_trees import random_tree, star, two_levels
from tools.referees.gentree.baselines import baselines
from tools.referees.gentree.from_cluster import cluster_tree
from tools.referees.gentree.generate import CHUNKS, Generator
from tools.referees.gentree.least import least_all_reduce_s
from tools.referees.gentree.price import ExchangeLoads
from tools.referees.gentree.tree import LinkTree

BYTES = 4
_ALIKE = 0.02
"""Seconds that differ by less count as equal in the ranking."""
LARGE, SMALL = 64 << 20, 64 << 10

KINDS: dict[str, tuple[Callable[[], LinkTree], int]] = {
    "8 alike, bandwidth": (lambda: star([1e9] * 8, 2e-5), LARGE),
    "8 uplinks 1:4, half slow": (lambda: star([1e9, 4e9] * 4, 2e-5), LARGE),
    "4 uplinks 1:4, three slow": (lambda: star([1e9, 1e9, 1e9, 4e9], 2e-5), LARGE),
    "12 uplinks 1:2:4": (lambda: star([1e9, 2e9, 4e9] * 4, 2e-5), LARGE),
    "12 alike, incast": (lambda: star([1e9] * 12, 2e-5, Incast(2, 0.5)), SMALL),
    "24 alike, incast": (lambda: star([1e9] * 24, 1e-4, Incast(3, 1.0)), 1 << 20),
    "24 alike, latency": (lambda: star([1e9] * 24, 1e-3), 1 << 20),
    "2 sites of 8, latency": (
        lambda: two_levels([8, 8], Link(10e9, 1e-5), [Link(1.25e9, 1e-2)] * 2),
        1 << 20,
    ),
    "4 nodes of 4, uplinks 1:4": (
        lambda: two_levels(
            [4] * 4, Link(20e9, 1e-5), [Link(s, 2e-5) for s in (1e9, 1e9, 4e9, 4e9)]
        ),
        LARGE,
    ),
    "3 nodes of 1, 4, 8": (
        lambda: two_levels([1, 4, 8], Link(20e9, 1e-5), [Link(2e9, 2e-5)] * 3),
        LARGE,
    ),
}
CLUSTERS = (
    "examples/two-sites/cluster.yaml",
    "benchmarks/invented/racks/cluster.yaml",
    "benchmarks/invented/forty-nodes/cluster.yaml",
)


def usual_plans(tree: LinkTree, size: int) -> list[ExchangePlan]:
    """Return the baselines, each with its best number of chunks."""
    found = []
    for plan in baselines(size, tree):
        best = ExchangeLoads(plan, tree).num_chunks(BYTES, CHUNKS)
        found.append(replace(plan, num_chunks=best[1] if best else 1))
    return found


def gains(tree: LinkTree, size: int, with_simulation: bool) -> dict[str, float | str]:
    """Compare the chosen plan with the best baseline and with the bound."""
    chosen = Generator(tree, size, BYTES).choose()
    row: dict[str, float | str] = {
        "plan": f"{chosen.plan.name}, {chosen.plan.num_chunks} chunks",
        "beside": chosen.baseline.name,
        "seconds": chosen.price.total_s,
        "latency": chosen.price.latency_s,
        "gain": chosen.gain,
        "over bound": chosen.price.total_s / least_all_reduce_s(tree, size * BYTES),
    }
    if with_simulation:
        ours = FlowSimulation(chosen.plan, tree, BYTES).run()
        others = [FlowSimulation(p, tree, BYTES).run() for p in usual_plans(tree, size)]
        row["simulated"] = min(others) / ours
    return row


def ranks(values: Sequence[float]) -> list[float]:
    """Return the ranks of times, the mean one for those that are alike."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    found = [0.0] * len(values)
    first = 0
    for end in range(1, len(order) + 1):
        if end < len(order) and values[order[end]] <= values[order[first]] * (1 + _ALIKE):
            continue
        for place in order[first:end]:
            found[place] = (first + end - 1) / 2
        first = end
    return found


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's; 1 where either has all plans alike."""
    a, b = ranks(one), ranks(other)
    da, db = [x - mean(a) for x in a], [x - mean(b) for x in b]
    scale = (sum(x * x for x in da) * sum(x * x for x in db)) ** 0.5
    return sum(x * y for x, y in zip(da, db, strict=True)) / scale if scale else 1.0


def compare_tree(random: Random, most_holders: int) -> tuple[float, float]:
    """Return (rank correlation over plans, simulated gain) of a random tree."""
    tree = random_tree(random, most_holders)
    size = random.choice((10_000, 1_000_000, 30_000_000))
    chosen = Generator(tree, size, BYTES).choose()
    plans = [chosen.plan, *usual_plans(tree, size), *baselines(size, tree)]
    prices = [ExchangeLoads(p, tree).price(BYTES, p.num_chunks).total_s for p in plans]
    seconds = [FlowSimulation(p, tree, BYTES).run() for p in plans]
    return correlation(prices, seconds), min(seconds[1:6]) / seconds[0]


_OF_TREES = Columns({
    "tree": "{name}", "chosen": "{plan}", "best of the usual": "{beside}",
    "gain, priced": "{gain:.2f}", "gain, simulated": "{simulated:.2f}",
    "over the bound": "{over bound:.2f}",
})  # fmt: skip
_OF_CLUSTERS = Columns({
    "cluster": "{name}", "chosen": "{plan}", "best of the usual": "{beside}",
    "seconds": "{seconds:.4f}", "of these latency": "{latency:.4f}", "gain": "{gain:.2f}",
})  # fmt: skip


OPTIONS = (option("--trees", type=int, default=50, metavar="N"),)


def run(given: argparse.Namespace) -> Iterator[Columns | dict[str, Any] | list[str]]:
    """Compare on trees of each kind, on random ones and on clusters."""
    yield _OF_TREES
    for name, (make, size) in KINDS.items():
        yield {"name": name, **gains(make(), size, True)}
    random = Random(23)
    found = [compare_tree(random, 14) for _ in range(given.trees)]
    rho, gain = ([entry[i] for entry in found] for i in range(2))
    yield Columns.of(("random trees", "of 2 to 14 holders"))
    yield ["trees", str(given.trees)]
    yield ["rank correlation, mean", f"{mean(rho):.3f}"]
    yield ["rank correlation, median", f"{median(rho):.3f}"]
    yield ["rank correlation, least", f"{min(rho):.3f}"]
    yield ["trees with 0.9 or more", str(sum(r >= 0.9 for r in rho))]
    yield ["gain over the best of the usual, simulated, least", f"{min(gain):.3f}"]
    yield ["gain, median", f"{median(gain):.2f}"]
    yield ["gain, most", f"{max(gain):.2f}"]
    yield _OF_CLUSTERS
    for path in CLUSTERS:
        cluster = load_cluster(ROOT / path)
        tree = cluster_tree(cluster, [node.devices for node in cluster.nodes]).tree
        yield {"name": Path(path).parent.name, **gains(tree, LARGE, False)}
