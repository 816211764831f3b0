"""Run exchanges by groups of machines beside `all_reduce`, behind network cards of a given rate.

    sudo python tools/bench exchange-run [--mbit 100] [--mib 4] [--turns 15]

Each row is nodes of so many ranks, every node behind a card of its own (`tools/shaped_links.py`).
Exchanges of one buffer, in turns in one run: `all_reduce` of all ranks; the rounds of
`runtime.gradients.groups.rounds`, once of messages alone and, where ranks of two nodes sum two by
two, once with the library's sums of pairs, as jobs run them; and the same composed of collectives
by hand (inside each node a reduce-scatter, all-reduces between the nodes, an all-gather), where
nodes are alike.  `predicted` is GenModel's price of the rounds for the cards' rate; the ranks' own
links count nothing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.exchange.groups.by_group import plan_by_group
from megatron_hetero.exchange.groups.pairs import pair_sums
from megatron_hetero.runtime.gradients.groups.pair_group import PairGroup
from megatron_hetero.runtime.gradients.groups.rounds import HolderRounds, RoundsEngine
from tools.bench.ranks import on_ranks, timed
from tools.bench.show import Columns, option
from tools.random_trees import two_levels
from tools.referees.gentree.price import ExchangeLoads

CASES = ((4, 4), (2, 2, 2, 2), (3, 1), (1, 1))
WAYS = ("all_reduce", "rounds", "pairs", "by hand")


def machines_of(counts: tuple[int, ...]) -> list[str]:
    """Return [rank] -> the name of its node."""
    return [f"n{node}" for node, count in enumerate(counts) for _ in range(count)]


def predicted_s(counts: tuple[int, ...], mbit: float, size: int) -> float:
    """Price the rounds on the cards alone."""
    names = machines_of(counts)
    plan = plan_by_group(names, [[f"n{i}"] for i in range(len(counts))], size, "all_reduce")
    if plan is None:
        raise ValueError("a case has several nodes")
    tree = two_levels(list(counts), Link(1e12, 0.0), [Link(mbit * 1e6 / 8, 0.0)] * len(counts))
    return ExchangeLoads(plan, tree).price(4.0).total_s


def run_case(counts: tuple[int, ...], mbit: float, size: int, turns: int) -> dict[str, list[float]]:
    """Return the seconds of each way, by turns."""

    def measure() -> dict[str, list[float]]:
        torch.set_num_threads(1)
        ways = make_ways(counts, size)
        expected = torch.full((size,), float(sum(range(dist.get_world_size()))))
        found: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(turns + 1):
            for way, action in ways.items():
                flat = torch.full((size,), float(dist.get_rank()))
                seconds = timed(partial(action, flat))
                if not torch.equal(flat, expected):
                    raise RuntimeError(f"{way}: wrong sums")
                if turn:
                    found[way].append(seconds)
        return found

    node_of = [int(name[1:]) for name in machines_of(counts)]
    return dict(on_ranks(node_of, measure, mbit))


def make_ways(counts: tuple[int, ...], size: int) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Make the exchanges of this rank; each writes the sums into its buffer."""
    names, rank = machines_of(counts), dist.get_rank()
    group, engine = dist.group.WORLD, RoundsEngine()
    plan = plan_by_group(names, [[f"n{i}"] for i in range(len(counts))], size, "all_reduce")
    if plan is None or group is None:
        raise ValueError("a case has several nodes")
    rounds = HolderRounds(plan, rank)
    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "all_reduce": lambda flat: dist.all_reduce(flat),
        "rounds": lambda flat: engine.start(rounds, flat, group).wait(),
    }
    groups = {
        pair: PairGroup(dist.new_group(list(pair)))
        for pair in sorted({sums.holders for sums in pair_sums(plan).values()})
    }
    if rank in pair_sums(plan):
        with_pairs = HolderRounds(plan, rank, groups[pair_sums(plan)[rank].holders])
        ways["pairs"] = lambda flat: engine.start(with_pairs, flat, group).wait()
    if len(set(counts)) > 1:
        return ways
    each, num = counts[0], len(counts)
    inside = [dist.new_group(list(range(n * each, (n + 1) * each))) for n in range(num)]
    across = [dist.new_group(list(range(i, each * num, each))) for i in range(each)]
    own, between = inside[rank // each], across[rank % each]

    def by_hand(flat: torch.Tensor) -> None:
        parts = list(flat.chunk(each))
        received = [torch.empty_like(parts[rank % each]) for _ in range(each)]
        dist.all_to_all(received, parts, group=own)
        part = torch.stack(received).sum(0)
        dist.all_reduce(part, group=between)
        dist.all_gather(parts, part, group=own)

    if size % each == 0:
        ways["by hand"] = by_hand
    return ways


COLUMNS = (
    "ranks of each node", "all_reduce s", "rounds s", "with pairs s", "by hand s", "predicted s",
    "all_reduce / jobs", "by hand / jobs", "predicted / jobs",
)  # fmt: skip


OPTIONS = (
    option("--mbit", type=float, default=100.0, help="rate of each node's card"),
    option("--mib", type=float, default=4.0, help="of the buffer, fp32"),
    option("--turns", type=int, default=15),
)


def run(given: argparse.Namespace) -> Iterator[Columns | list[str]]:
    """Run the exchanges of each case in turns."""
    yield Columns.of(COLUMNS)
    size = int(given.mib * 2**18)
    for counts in CASES:
        found = run_case(counts, given.mbit, size, given.turns)
        jobs = found.get("pairs", found["rounds"])
        found["predicted"] = [predicted_s(counts, given.mbit, size)] * len(jobs)
        seconds = [_text(found.get(way), 3) for way in (*WAYS, "predicted")]
        ratios = [
            _text([a / b for a, b in zip(found[way], jobs, strict=True)] if way in found else None)
            for way in ("all_reduce", "by hand", "predicted")
        ]
        yield [" + ".join(map(str, counts)), *seconds, *ratios]


def _text(values: Sequence[float] | None, digits: int = 2) -> str:
    return "-" if values is None else f"{statistics.median(values):.{digits}f}"
