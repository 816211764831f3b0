"""The start of a large job without its machines: communicators, calls, and the store's work.

    python tools/bench start [--ranks 64 256 1024]

For each number of ranks a plan of unlike replicas, as many as they make.  What one rank does to
make its groups runs as it is, over a backend that sends nothing; the slowest of a few counts.
"Before": a group for each set of ranks that the code names, sets of one rank and sets that are the
whole job among them, as the runtime made them once.  The meeting of all communicators through a
store is simulated: a real TCPStore, a client for each rank, and in the order of making what NCCL
does for each communicator at its first use (one rank sets an id, the others get it).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch.distributed as dist

from megatron_hetero.cost.sync.communicators import by_rank, job_communicators
from megatron_hetero.cost.sync.holders import gradient_holders
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.communication.communicators import (
    last_stage_ranks,
    model_communicators,
    stage_ranks,
)
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from tools.bench.show import Columns, option

PAIR = "tp4:20,tp2:12 @2 | tp1:16,tp1:16 @1"
RANKS_OF_PAIR = 8
MODEL = (
    "--num-layers=32", "--hidden-size=4096", "--num-attention-heads=32", "--seq-length=2048",
    "--max-position-embeddings=2048", "--vocab-size=50304", "--micro-batch-size=1",
)  # fmt: skip
NUM_CLIENT_PROCESSES = 4
_TIMEOUT = timedelta(minutes=5)


def _row(number: int) -> list[str]:
    plan, workload = _job(number)
    ranks = by_rank(plan, workload)
    communicators = [c.ranks for c in job_communicators(plan, workload)]
    before, now = _sets_before(plan, workload), _sets_now(plan, workload)
    some = sorted({0, 4, 6, number // 2, number - 1})
    slowest = [
        max(_in_process(_make, sets, number, rank) for rank in some) for sets in (before, now)
    ]
    messages = sum(map(len, communicators))
    seconds, mib = _meet(communicators, number)
    return [
        str(number),
        str(max(len(rank.uses) for rank in ranks)),
        str(len(communicators)),
        f"{max(rank.bytes_per_channel for rank in ranks) / 2**20:.0f} MiB",
        *(f"{len(sets):,}" for sets in (before, now)),
        *(f"{found[0]:.3f}" for found in slowest),
        f"{slowest[1][1]:.1f}",
        f"{messages:,}",
        f"{seconds:.2f}",
        f"{mib:.1f}",
    ]


def _job(number: int) -> tuple[Plan, Workload]:
    pairs = number // RANKS_OF_PAIR
    layout = parse_layout(" | ".join([PAIR] * pairs))
    workload = load_workload(None, (*MODEL, f"--global-batch-size={3 * pairs}"))
    return plan_from_layout(layout, workload), workload


def _sets_now(plan: Plan, workload: Workload) -> list[tuple[int, ...]]:
    """Return all groups in the order in which every rank asks torch for them."""
    alone = [(rank,) for rank in range(plan.layout.num_devices)]
    return [
        *alone,
        *(c.ranks for c in model_communicators(plan)),
        *gradient_holders(plan, workload),
    ]


def _sets_before(plan: Plan, workload: Workload) -> list[tuple[int, ...]]:
    """The same with a tensor-parallel group for each stage, and one of the last stages always."""
    narrow = [ranks for ranks in stage_ranks(plan).values() if len(ranks) == 1]
    losses = (
        [] if len(last_stage_ranks(plan)) < plan.layout.num_devices else [last_stage_ranks(plan)]
    )
    return [*_sets_now(plan, workload), *narrow, *losses]


def _make(sets: Sequence[tuple[int, ...]], size: int, rank: int) -> tuple[float, float]:
    """Measure seconds and MiB of one rank's making of groups, with nobody at the other end."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    held = _resident_mib()
    start = time.perf_counter()
    for ranks in sets:
        dist.new_group(list(ranks), timeout=_TIMEOUT)
    return time.perf_counter() - start, _resident_mib() - held


def _in_process(
    function: Callable[..., tuple[float, float]], *given: object
) -> tuple[float, float]:
    """Return what `function` finds in a process of its own."""
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=lambda: theirs.send(function(*given))
    )
    process.start()
    found: tuple[float, float] = ours.recv()
    process.join()
    return found


def _meet(communicators: Sequence[tuple[int, ...]], size: int) -> tuple[float, float]:
    """Measure the seconds until all have met, and the MiB by which the store's process has
    grown."""
    held = _resident_mib()
    server = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    together = context.Barrier(NUM_CLIENT_PROCESSES + 1, timeout=_TIMEOUT.total_seconds())
    clients = [
        context.Process(
            target=_clients,
            args=(communicators, range(first, size, NUM_CLIENT_PROCESSES), server.port, together),
        )
        for first in range(NUM_CLIENT_PROCESSES)
    ]
    for client in clients:
        client.start()
    together.wait()  # all are forked
    together.wait()  # all have connected
    start = time.perf_counter()
    together.wait()
    for client in clients:
        client.join()
    seconds = time.perf_counter() - start
    if any(client.exitcode for client in clients):
        raise RuntimeError("a process of clients failed")
    return seconds, _resident_mib() - held


def _clients(
    communicators: Sequence[tuple[int, ...]], ranks: range, port: int, together: Barrier
) -> None:
    """Run the ranks of one process, a thread with a connection for each."""
    # The server's thread asks glibc for the name of each client, under a lock: a process forked
    # meanwhile would inherit the lock as held, and hang at its own connection.
    together.wait()
    stores = {
        rank: dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        for rank in ranks
    }
    of_rank: dict[int, list[int]] = {rank: [] for rank in ranks}
    for number, members in enumerate(communicators):
        for rank in members:
            if rank in of_rank:
                of_rank[rank].append(number)
    done: list[int] = []

    def meet(rank: int) -> None:
        for number in of_rank[rank]:
            if communicators[number][0] == rank:
                stores[rank].set(f"{number}", "x" * 128)
            elif len(stores[rank].get(f"{number}")) != 128:
                raise RuntimeError(f"rank {rank} got another id of communicator {number}")
        done.append(rank)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in ranks]
    together.wait()
    together.wait()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(len(done) != len(ranks))


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


COLUMNS = (
    "ranks", "communicators of a rank", "of the job", "NCCL buffers a channel",
    "calls of a rank, before", "calls, now", "seconds, before", "seconds, now", "MiB of a rank",
    "store messages", "seconds", "MiB",
)  # fmt: skip


OPTIONS = (option("--ranks", type=int, nargs="+", default=(64, 256, 1024)),)


def run(given: argparse.Namespace) -> Iterator[Columns | list[str]]:
    """Make and meet the communicators of each size."""
    for number in given.ranks:
        if number % RANKS_OF_PAIR:
            raise SystemExit(f"--ranks {number}: a multiple of {RANKS_OF_PAIR}")
    yield Columns.of(COLUMNS)
    yield from map(_row, given.ranks)
