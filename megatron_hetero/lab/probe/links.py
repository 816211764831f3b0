"""A sweep of exchanges over the links between ranks, and the resulting entries of a cluster file.

    python -m megatron_hetero.lab.probe.links RESULT.json SECONDS

is one rank of it.  Rings, recursive halving and owners that all others send to at once, each as
reduce-scatter, all-gather and all-reduce, run as training runs them
(`runtime.gradients.groups.rounds`) among the first 2, 3, 4, ... ranks, for buffers of growing size.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.exchange.baselines import halving_doubling, parameter_servers, ring
from megatron_hetero.exchange.plan import ExchangePlan, Purpose
from megatron_hetero.exchange.terms import TermCounts, term_counts
from megatron_hetero.files import read_json
from megatron_hetero.lab.probe.cards import ProbedCard, only
from megatron_hetero.lab.probe.link_fit import MeasuredExchange
from megatron_hetero.lab.probe.processes import run_ranks
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.gradients.groups.rounds import HolderRounds
from megatron_hetero.runtime.job.one_machine import LOCAL_STORE

SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
"""Bytes of the buffers; every second size is held out in turn."""
_PURPOSES: tuple[Purpose, ...] = ("reduce_scatter", "all_gather", "all_reduce")
_FEWEST, _MOST = 3, 50
"""Repeats of an exchange, beside the warm-up."""
_PATIENCE = timedelta(minutes=5)


def measure_links(
    cards: Sequence[ProbedCard], num_processes: int, seconds: float
) -> tuple[MeasuredExchange, ...]:
    """Measure exchanges among the cards of this machine; without cards processes on the CPU.

    Args:
        cards: two or more, or none.
        num_processes: where there are no cards.
        seconds: about how long each exchange is repeated.

    Raises:
        CheckFailedError: a process ended badly or not at all; carries the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-hetero-probe-") as name:
        folder = Path(name)
        result = folder / "result.json"
        words = [str(result), str(seconds)]
        run_ranks(__name__, words, len(cards) or num_processes, folder, only(cards))
        return tuple(_measured(row) for row in read_json(result).data)


def measure_in_world(seconds: float) -> tuple[MeasuredExchange, ...] | None:
    """Measure among the processes started by `torchrun`, including this process; return None on all
    but the first.

    With one process on each machine these are the links between the machines.
    """
    _begin(None)
    found = tuple(sweep(SIZES, seconds))
    return found if _end() else None


def _measured(row: dict[str, Any]) -> MeasuredExchange:
    return MeasuredExchange(**{**row, "counts": TermCounts(**row["counts"])})


def exchanges(num_holders: int, size: int) -> Iterator[ExchangePlan]:
    """Yield the exchanges of a buffer of `size` elements that a sweep measures."""
    for purpose in _PURPOSES:
        yield ring(size, num_holders, purpose)
        # Two holders send the same messages in every algorithm.
        if num_holders > 2:
            yield parameter_servers(size, num_holders, purpose)
        if num_holders > 3:
            yield halving_doubling(size, num_holders, purpose)


def sweep(sizes: Sequence[int], seconds: float) -> Iterator[MeasuredExchange]:
    """Measure among the first 2, 3, ... ranks of the world; all ranks get the same result.

    Collective over the world.

    Args:
        sizes: bytes of the buffers.
        seconds: about how long each exchange is repeated.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if _has_cuda() else None
    # Every rank makes every group, as torch requires; ranks outside only meet at the barriers.
    for num_holders in range(2, dist.get_world_size() + 1):
        group = dist.new_group(list(range(num_holders)))
        for num_bytes in sizes:
            for plan in exchanges(num_holders, num_bytes // 4):
                flat = torch.zeros(num_bytes // 4, device=device)
                took_s = _median_s(plan, flat, group, seconds)
                name = f"{plan.name}, {plan.purpose}"
                yield MeasuredExchange(name, num_holders, num_bytes, term_counts(plan), took_s)


def _median_s(
    plan: ExchangePlan, flat: torch.Tensor, group: dist.ProcessGroup, seconds: float
) -> float:
    """Return the median over repeats of the longest time of any holder."""
    rank, is_holder = dist.get_rank(), dist.get_rank() < plan.num_holders
    rounds = HolderRounds(plan, rank) if is_holder else None
    times: list[float] = []
    # The first repeat is the warm-up, in which NCCL connects.
    count = 1 + _FEWEST
    while len(times) < count:
        dist.barrier()
        start = time.perf_counter()
        # Ranks outside of the exchange take part in the barrier and the maximum only.
        if rounds is not None:
            rounds.run(flat, group, len(times))
            if flat.is_cuda:
                torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - start if is_holder else 0.0], device=flat.device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        times.append(float(took.item()))
        if len(times) == 1 + _FEWEST:
            # One number on all ranks, since all have the same times.
            count = 1 + max(_FEWEST, min(_MOST, round(seconds / max(median(times), 1e-6))))
    return median(times[1:])


def _has_cuda() -> bool:
    return backend.cuda_is_usable()


def _begin(store: dist.Store | None) -> None:
    """Join the other ranks: through `store`, or as `torchrun` says."""
    if _has_cuda():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    given = {} if store is None else {"store": store, "rank": rank, "world_size": size}
    dist.init_process_group("nccl" if _has_cuda() else "gloo", timeout=_PATIENCE, **given)


def _end() -> bool:
    """Leave the other ranks; return whether this is the first."""
    is_first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    return is_first


def main(result_path: Path, seconds: float) -> None:
    """Measure as one rank; rank 0 writes what was found."""
    name, size = os.environ[LOCAL_STORE], int(os.environ["WORLD_SIZE"])
    _begin(dist.FileStore(name, size))
    found = [asdict(each) for each in sweep(SIZES, seconds)]
    if _end():
        result_path.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
