"""Latency and bandwidth between every two cards of a machine, for its place in cluster.yaml.

    python -m megatron_hetero.lab.probe.pairs RESULT.json

is one rank of it: rank r stands for the r-th card.  Pairs are measured one after the other; what
all of them share (`root_complex`) shows only when they send at the same time, and is not measured.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from megatron_hetero.cluster.inventory.measurements import LinkFit
from megatron_hetero.files import read_json
from megatron_hetero.lab.probe import machine
from megatron_hetero.lab.probe.cards import ProbedCard, only
from megatron_hetero.lab.probe.processes import run_ranks
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.one_machine import LOCAL_STORE

Pair = tuple[int, int]

_ALIKE = 1.25
"""Largest ratio of bandwidths within a kind of path: measurements scatter so much."""
_PATIENCE = timedelta(minutes=5)


def measure_pairs(cards: Sequence[ProbedCard], num_processes: int) -> dict[Pair, LinkFit]:
    """Measure each two cards, by their places on the bus; without cards processes on the CPU.

    Raises:
        CheckFailedError: a process ended badly or not at all; carries the end of its log.
    """
    places = [card.place for card in cards] or list(range(num_processes))
    with tempfile.TemporaryDirectory(prefix="megatron-hetero-probe-") as name:
        folder = Path(name)
        result = folder / "result.json"
        run_ranks(__name__, [str(result)], len(places), folder, only(cards))
        found = read_json(result).data
    pairs = combinations(places, 2)
    return {pair: LinkFit(**fit) for pair, fit in zip(pairs, found, strict=True)}


def machine_lines(found: Mapping[Pair, LinkFit]) -> Iterator[str]:
    """Lines of cluster.yaml for this machine: `link` as most pairs have it, `pairs` for the others.

    Paths of about one bandwidth are written with one, so that equal cards stay equal.
    """
    kinds = _kinds(found)
    # The kind of most pairs is the machine's `link`; every other pair stands by itself.
    usual = max(kinds, key=len)
    yield f"link: {{{_link_words([found[pair] for pair in usual])}}}"
    others = [kind for kind in kinds if kind is not usual]
    if others:
        yield "pairs:"
    for kind in others:
        words = _link_words([found[pair] for pair in kind])
        for pair in sorted(kind):
            yield f"  - {{cards: {list(pair)}, {words}}}"


def _kinds(found: Mapping[Pair, LinkFit]) -> list[list[Pair]]:
    """The pairs by kind of path, slow ones first."""
    kinds: list[list[Pair]] = []
    for pair in sorted(found, key=lambda pair: (found[pair].bytes_per_s, pair)):
        # Pairs come in the order of bandwidth, so that a kind begins with its slowest pair.
        slowest = found[kinds[-1][0]].bytes_per_s if kinds else 0.0
        if slowest and found[pair].bytes_per_s < _ALIKE * slowest:
            kinds[-1].append(pair)
        else:
            kinds.append([pair])
    return kinds


def _link_words(fits: Sequence[LinkFit]) -> str:
    gb_per_s = median(fit.bytes_per_s for fit in fits) / 1e9
    latency_us = max(median(fit.latency_s for fit in fits) * 1e6, 0.1)
    return f"bandwidth: {gb_per_s:.3g} GB/s, latency: {latency_us:.3g} us"


def main(result_path: Path) -> None:
    """Measure as one rank; rank 0 writes the fits, in the order of `combinations`."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    has_cuda = backend.cuda_is_usable()
    if has_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(os.environ[LOCAL_STORE], size)
    dist.init_process_group(
        "nccl" if has_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=_PATIENCE,
    )
    # Pair by pair, with all other ranks waiting: nothing is shared meanwhile.
    fits = [machine.link_between(one, other) for one, other in combinations(range(size), 2)]
    if rank == 0:
        result_path.write_text(json.dumps([asdict(fit) for fit in fits]), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
