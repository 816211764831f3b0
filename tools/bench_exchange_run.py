"""Run exchanges by groups of machines beside `all_reduce`, behind network cards of a given rate.

    sudo python tools/bench_exchange_run.py [--mbit 100] [--mib 4] [--turns 15]

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
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from shaped_links import shaped_links  # noqa: E402

from megatron_hetero.cluster.node_links import Link  # noqa: E402
from megatron_hetero.exchange.groups.by_group import plan_by_group  # noqa: E402
from megatron_hetero.exchange.groups.pairs import pair_sums  # noqa: E402
from megatron_hetero.runtime import backend  # noqa: E402
from megatron_hetero.runtime.gradients.groups.pair_group import PairGroup  # noqa: E402
from megatron_hetero.runtime.gradients.groups.rounds import HolderRounds, RoundsEngine  # noqa: E402
from megatron_hetero.runtime.job.local_launch import LocalJob, run_jobs  # noqa: E402
from megatron_hetero.runtime.job.world import World  # noqa: E402
from tools.random_trees import two_levels  # noqa: E402
from tools.referees.gentree.price import ExchangeLoads  # noqa: E402

CASES = ((4, 4), (2, 2, 2, 2), (3, 1), (1, 1))
WAYS = ("all_reduce", "rounds", "pairs", "by hand")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mbit", type=float, default=100.0, help="rate of each node's card")
    parser.add_argument("--mib", type=float, default=4.0, help="of the buffer, fp32")
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    print("| ranks of each node | all_reduce s | rounds s | with pairs s | by hand s | predicted s "
          "| all_reduce / jobs | by hand / jobs | predicted / jobs |")  # fmt: skip
    print("| --- | --: | --: | --: | --: | --: | --: | --: | --: |")
    size = int(options.mib * 2**18)
    for counts in CASES:
        found = run_case(counts, options.mbit, size, options.turns)
        jobs = found.get("pairs", found["rounds"])
        found["predicted"] = [predicted_s(counts, options.mbit, size)] * len(jobs)
        seconds = [_text(found.get(way), 3) for way in (*WAYS, "predicted")]
        ratios = [
            _text([a / b for a, b in zip(found[way], jobs, strict=True)] if way in found else None)
            for way in ("all_reduce", "by hand", "predicted")
        ]
        print(f"| {' + '.join(map(str, counts))} | {' | '.join((*seconds, *ratios))} |", flush=True)
    return 0


def _text(values: Sequence[float] | None, digits: int = 2) -> str:
    return "-" if values is None else f"{statistics.median(values):.{digits}f}"


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
    names = machines_of(counts)
    with (
        tempfile.TemporaryDirectory(prefix="bench-exchange-") as name,
        shaped_links(len(counts), mbit) as enter,
    ):
        folder = Path(name)

        def run(rank: int) -> None:
            enter(int(names[rank][1:]))
            backend.activate_cpu_backend()
            torch.set_num_threads(1)
            world = World.from_environment()
            dist.init_process_group(
                "gloo", store=world.store(), rank=world.rank, world_size=world.size
            )
            ways = make_ways(counts, size)
            expected = torch.full((size,), float(sum(range(world.size))))
            found: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(turns + 1):
                for way, action in ways.items():
                    flat = torch.full((size,), float(rank))
                    seconds = _timed(action, flat)
                    if not torch.equal(flat, expected):
                        raise RuntimeError(f"{way}: wrong sums")
                    if turn:
                        found[way].append(seconds)
            if rank == 0:
                (folder / "found.json").write_text(json.dumps(found))
            dist.barrier()

        run_jobs([LocalJob("exchange", len(names), run, folder)], 900)
        return dict(json.loads((folder / "found.json").read_text()))


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


def _timed(action: Callable[[torch.Tensor], Any], flat: torch.Tensor) -> float:
    """Return the seconds until the last rank is done."""
    dist.barrier()
    start = time.perf_counter()
    action(flat)
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


if __name__ == "__main__":
    raise SystemExit(main())
