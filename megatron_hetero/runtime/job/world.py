"""Where a process stands in its job, and how the processes of a job meet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.errors import EnvironmentMismatchError
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import Position, rank_table
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.checks import machine


@dataclass(frozen=True)
class World:
    """Where this process stands in the job, as `torchrun` tells it (or the local launcher).

    `store_path`: a file through which the ranks meet, instead of a TCP port.
    """

    rank: int
    size: int
    store_path: str | None = None

    @staticmethod
    def from_environment() -> World:
        """The place that the launcher wrote into the environment."""
        return World(
            int(os.environ.get("RANK", "0")),
            int(os.environ.get("WORLD_SIZE", "1")),
            os.environ.get("MEGATRON_HETERO_STORE"),
        )

    def store(self) -> dist.Store | None:
        """Where the ranks meet; None for torch's own rendezvous."""
        return dist.FileStore(self.store_path, self.size) if self.store_path else None


def check_world(plan: Plan, world: World) -> Position:
    """The plan's place for this process.

    Raises:
        EnvironmentMismatchError: another number of processes, another host, another GPU.
    """
    table = rank_table(plan)
    if world.size != len(table):
        raise EnvironmentMismatchError(
            f"the plan has {len(table)} devices, one process each, but the job has {world.size} "
            f"(WORLD_SIZE). Start {len(table)} processes in all, as `megatron-hetero flags` "
            "prints them, or plan for the machines that are there."
        )
    machine.check_binding(plan, world.rank, table[world.rank])
    return table[world.rank]


def join(world: World, args: Any, timeout: timedelta) -> None:
    """Create the process group of the whole job, on this process's own GPU.

    Megatron chooses the GPU only where it creates the process group itself.
    """
    if backend.cuda_is_usable():
        torch.cuda.set_device(args.local_rank)
    dist.init_process_group(
        backend=args.distributed_backend,
        store=world.store(),
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
    )
