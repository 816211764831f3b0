"""Ranks over gloo on this machine, and the seconds that their exchanges take."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.job.world import World
from tools.bench.show import Option, option
from tools.shaped_links import shaped_links

Action = Callable[[], object]


def on_ranks(
    node_of: Sequence[int],
    measure: Callable[[], Any],
    mbit: float | None,
    delay_ms: float = 0.0,
    timeout_s: float = 900,
) -> Any:
    """Return what rank 0 measures among ranks that have met over gloo, as JSON has it.

    Args:
        node_of: [rank] -> number of its node, each behind a network card of its own.
        measure: runs on every rank.
        mbit: rate of each card, which needs root; None for the loopback interface.
        delay_ms: of each packet between nodes.
        timeout_s: for all of it.
    """
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as name,
        shaped_links(max(node_of) + 1, mbit, delay_ms) as enter,
    ):
        path = Path(name) / "found.json"

        def run(rank: int) -> None:
            enter(node_of[rank])
            backend.activate_cpu_backend()
            world = World.from_environment()
            dist.init_process_group(
                "gloo", store=world.store(), rank=world.rank, world_size=world.size
            )
            found = measure()
            if rank == 0:
                path.write_text(json.dumps(found))
            dist.barrier()

        run_jobs([LocalJob("bench", len(node_of), run, Path(name))], timeout_s)
        return json.loads(path.read_text())


def timed(action: Action) -> float:
    """Return the seconds until the last rank is done."""
    dist.barrier()
    start = time.perf_counter()
    action()
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def links(node: str) -> list[Option]:
    """Return the options of the network cards of nodes, which stand for what is named."""
    return [
        option("--mbit", type=float, help=f"rate of each {node}'s card; needs root"),
        option("--delay-ms", type=float, default=0.0, help=f"of each packet between {node}s"),
    ]
