"""Deals of sequences of unlike length: beside their bounds, fixed degrees and Megatron's scheduler.

    python tools/bench sequences [--seeds 3] [--text FOLDER] [--only TABLES]

First and second table: steps of 512 sequences on 64 GPUs, priced by the constants that the authors
of FlexSP published for GPT-7B and 384K tokens; lengths from the distributions of
`megatron_hetero.sequences.lengths`, and of Python files (of the standard library, or below FOLDER).
Third: one sequence on a whole mixed cluster in equal and in unlike shares, and a step of eight of
them on all groups, on groups of one type, and with equal shares.  With `--only exchanges`: steps of
256 sequences on groups that only gather, that exchange heads too, and that have rings besides.  All
step times are simulated; CPU seconds are of one core of this machine.
"""

from __future__ import annotations

import argparse
import random
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.load import load_workload
from megatron_hetero.sequences.cluster_groups import ClusterGroups, cluster_groups
from megatron_hetero.sequences.deal.batch import deal_batch
from megatron_hetero.sequences.deal.dealt import Deal
from megatron_hetero.sequences.deal.micro_batch import deal_micro_batch
from megatron_hetero.sequences.deal.price_table import price_table
from megatron_hetero.sequences.deal.static import static_deals
from megatron_hetero.sequences.price.modelled import EVERY, TRAINED
from megatron_hetero.sequences.tree import GroupTree
from tools.bench.show import Columns, option
from tools.drawn_lengths import DISTRIBUTIONS, lengths_of
from tools.referees.flexsp import published_tree

K = 1024
NUM_GPUS, NUM_SEQUENCES = 64, 512
TOKEN = re.compile(r"\w+|[^\w\s]")
MODEL = (
    "--num-layers 24 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --vocab-size 32000 --tokenizer-type NullTokenizer "
    "--seq-length 8192 --max-position-embeddings 1048576 --micro-batch-size 1 "
    "--global-batch-size 64 --bf16 --use-flash-attn --use-distributed-optimizer "
    "--attention-dropout 0 --hidden-dropout 0 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1"
)
LENGTHS = tuple(2**i * K for i in range(3, 11))


def text_lengths(folder: Path, longest: int) -> list[int]:
    """Return the words and signs of every Python file below a folder, of at most `longest`."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        count = len(TOKEN.findall(text))
        if 0 < count <= longest:
            found.append(count)
    return found


def megatron_seconds(tree: GroupTree, lengths: Sequence[int]) -> tuple[float, float]:
    """Price the deal of Megatron's own balanced scheduler: with the launch for every sample that
    it makes, and as if a rank's launches in a group of samples were paid once."""
    import_module("megatron_hetero.runtime")  # hides a Transformer Engine without its library
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    class Group:
        @staticmethod
        def size() -> int:
            return tree.num_ranks

    prices = {price.size: price for _, price in tree.options}
    scheduler = BalancedCPScheduler(int(prices[1].room[0]), Group())
    _, made = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    each = once = 0.0
    for samples in made:
        sizes = Counter(k for own in samples for k in own)
        busy = []
        for own in samples:
            seconds = [
                float(prices[sizes[k]].seconds(np.array([float(lengths[k])]))[0]) for k in own
            ]
            launch_s = prices[1].fixed_s
            busy.append((sum(seconds) + launch_s * len(own), sum(seconds) + launch_s * bool(own)))
        each += max(b for b, _ in busy)
        once += max(b for _, b in busy)
    return each, once


def slowest_micro_batch_s(tree: GroupTree, lengths: Sequence[int], deal: Deal) -> float:
    """Return the most CPU seconds that the deal of one of its micro-batches takes."""
    table = price_table(tree, lengths)
    found = []
    for micro_batch in deal.micro_batches:
        before = time.process_time()
        deal_micro_batch(table, micro_batch.sequences)
        found.append(time.process_time() - before)
    return max(found)


def shapes(deal: Deal) -> str:
    """Write the groups of a step: sizes with their numbers, micro-batches apart."""
    return "; ".join(
        " ".join(f"{count}x{size}" for size, count in sorted(Counter(m.sizes).items())[::-1])
        for m in deal.micro_batches
    )


STEPS = (
    "lengths, seed", "below 8K", "longest", "step, s", "over the bound", "over any cut", "balance",
    "best fixed degree", "Megatron's scheduler", "launches once", "CPU, s", "a micro-batch",
)  # fmt: skip


def steps(num_seeds: int, folder: Path) -> Iterator[Columns | list[str]]:
    """Yield the tables of steps under the published constants."""
    yield Columns.of(STEPS)
    tree = published_tree("GPT-7B", NUM_GPUS, 384 * K)
    text = text_lengths(folder, tree.longest_sequence)
    forms = []
    for name in (*DISTRIBUTIONS, "Python files"):
        for seed in range(num_seeds):
            if name in DISTRIBUTIONS:
                lengths = DISTRIBUTIONS[name].drawn(NUM_SEQUENCES, seed)
            else:
                lengths = random.Random(seed).sample(text, NUM_SEQUENCES)
            before = time.process_time()
            deal = deal_batch(tree, lengths)
            cpu_s = time.process_time() - before
            fixed = min(
                static_deals(tree, lengths).items(),
                key=lambda item: (item[1].seconds, item[0]),
                default=None,
            )
            each, once = megatron_seconds(tree, lengths)
            counted = lengths_of(lengths, name)
            yield [
                f"{name} {seed}", f"{counted.part_below(8 * K):.0%}", f"{counted.longest:,}",
                f"{deal.seconds:.2f}", f"{deal.seconds / deal.bound_s - 1:.1%}",
                f"{deal.seconds / deal.least_s - 1:.1%}", f"{deal.balance:.3f}",
                f"{fixed[1].seconds / deal.seconds:.2f} ({fixed[0]})" if fixed else "-",
                f"{each / deal.seconds:.2f}", f"{once / deal.seconds:.2f}", f"{cpu_s:.1f}",
                f"{slowest_micro_batch_s(tree, lengths, deal):.2f}",
            ]  # fmt: skip
            forms.append([f"{name} {seed}", shapes(deal)])
    yield Columns.of(("lengths, seed", "groups of each micro-batch"))
    yield from forms


@dataclass(frozen=True)
class Mixed:
    """A cluster of two types of GPU on one or two nodes each."""

    name: str
    cluster: Cluster


def mixed_clusters() -> Iterator[Mixed]:
    """Yield the three clusters of the third table."""
    h100, a100 = gpu_type("H100"), gpu_type("A100-80GB")
    ada, ampere = gpu_type("RTX 4090"), gpu_type("RTX 3090")
    nvlink, pcie = Link(300e9, 5e-6), Link(20e9, 1e-5)
    fabric, ethernet, wide = Link(50e9, 1e-5), Link(12.5e9, 2e-5), Link(1.25e9, 1e-2)
    for name, nodes, between in (
        ("8 H100 + 8 A100", [("a", h100, 8, "x", nvlink), ("b", a100, 8, "x", nvlink)], fabric),
        ("4 RTX 4090 + 8 RTX 3090",
         [("a", ada, 4, "x", pcie), ("b", ampere, 8, "x", pcie)], ethernet),
        ("two sites, 8 H100 and 8 A100",
         [("a", h100, 8, "x", nvlink), ("b", a100, 8, "y", nvlink)], wide),
    ):  # fmt: skip
        made = tuple(
            Node(node, gpu, count, site, node, link) for node, gpu, count, site, link in nodes
        )
        pairs = {(a.name, b.name): between for a in made for b in made if a != b}
        yield Mixed(name, Cluster(made, pairs))


MIXED = (
    "cluster", "tokens", "one, equal shares, s", "unlike shares, s", "gain",
    "eight, all groups, s", "over equal shares", "over groups of one type",
)  # fmt: skip


def mixed_rows() -> Iterator[Columns | list[str]]:
    """Yield the table of mixed clusters."""
    workload = load_workload(None, tuple(MODEL.split()))
    yield Columns.of(MIXED)
    for mixed in mixed_clusters():
        unlike = cluster_groups(mixed.cluster, workload)
        equal = cluster_groups(mixed.cluster, workload, rule="equal")
        alike = cluster_groups(mixed.cluster, workload, only_alike=True)
        for tokens in LENGTHS:
            one, other = _whole(equal, tokens), _whole(unlike, tokens)
            cells = [_seconds(one), _seconds(other), _ratio(one, other)]
            yield [mixed.name, f"{tokens // K}K", *cells, *_of_eight(unlike, equal, alike, tokens)]


def _whole(groups: ClusterGroups, tokens: int) -> float | None:
    """Return the seconds of one sequence on all GPUs; None where it does not fit."""
    found = [
        price.fixed_s + float(price.seconds(np.array([float(tokens)]))[0])
        for price in groups.tree.kinds[0].prices
    ]
    return min((s for s in found if np.isfinite(s)), default=None)


def _of_eight(
    unlike: ClusterGroups, equal: ClusterGroups, alike: ClusterGroups, tokens: int
) -> list[str]:
    steps = [
        deal_batch(groups.tree, [tokens] * 8).seconds
        if groups.tree.longest_sequence >= tokens
        else None
        for groups in (unlike, equal, alike)
    ]
    return [
        _seconds(steps[0]),
        *(_ratio(s, steps[0]) for s in steps[1:]),
    ]


def exchanges() -> Iterator[Columns | list[str]]:
    """Yield the table of exchanges inside groups, of a model with as many query groups as heads and
    one with four."""
    nvlink = Link(300e9, 5e-6)
    nodes = [Node(name, gpu_type("H100"), 8, "x", name, nvlink) for name in "ab"]
    pairs = {(a.name, b.name): Link(50e9, 1e-5) for a in nodes for b in nodes if a != b}
    alike = [
        Mixed("8 H100", Cluster((nodes[0],), {})),
        Mixed("16 H100", Cluster(tuple(nodes), pairs)),
    ]
    lengths = DISTRIBUTIONS["books-and-web"].drawn(256, 0)
    heads = "cluster", "query groups", "gathers, s", "heads too, s", "gain", "rings too, s"
    yield Columns.of(heads)
    for mixed in (*alike, *mixed_clusters()):
        for groups in (16, 4):
            flags = f"{MODEL} --group-query-attention --num-query-groups {groups}"
            workload = load_workload(None, tuple(flags.split()))
            gathers, too, rings = (
                _step_s(cluster_groups(mixed.cluster, workload, exchanges=kinds), lengths)
                for kinds in (("gather",), TRAINED, EVERY)
            )
            cells = [_seconds(gathers), _seconds(too), _ratio(gathers, too), _seconds(rings)]
            yield [mixed.name, str(groups), *cells]


def _step_s(groups: ClusterGroups, lengths: Sequence[int]) -> float | None:
    """Return the seconds of a step; None where its longest sequence does not fit."""
    if groups.tree.longest_sequence < max(lengths):
        return None
    return deal_batch(groups.tree, lengths).seconds


def _seconds(seconds: float | None) -> str:
    return "does not fit" if seconds is None else f"{seconds:.3g}"


def _ratio(one: float | None, other: float | None) -> str:
    return "-" if one is None or other is None else f"{one / other:.2f}"


OPTIONS = (
    option("--seeds", type=int, default=3, help="steps of each distribution"),
    option("--text", type=Path, metavar="FOLDER", help="of Python files"),
    option("--only", choices=("steps", "mixed", "exchanges"), help="some of the tables"),
)


def run(given: argparse.Namespace) -> Iterator[Columns | list[str]]:
    """Yield the tables that are asked for."""
    if given.only == "exchanges":
        yield from exchanges()
        return
    if given.only != "mixed":
        yield from steps(given.seeds, given.text or Path(sysconfig.get_paths()["stdlib"]))
    if given.only != "steps":
        yield from mixed_rows()
