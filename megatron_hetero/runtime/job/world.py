"""Place of a process in its job, and the process group of all."""

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
from megatron_hetero.runtime.job.one_machine import LOCAL_STORE, store_file


@dataclass(frozen=True)
class World:
    """Place of this process in the job, as `torchrun` or the local launcher gives it.

    `store_path` is a file through which the ranks meet, instead of a TCP port.  `is_local`: forked
    processes of one machine (`job.local`) stand for the plan's devices, wherever these are.
    """

    rank: int
    size: int
    store_path: str | None = None
    is_local: bool = False

    @staticmethod
    def from_environment() -> World:
        """Read the place that the launcher wrote into the environment."""
        return World(
            int(os.environ.get("RANK", "0")),
            int(os.environ.get("WORLD_SIZE", "1")),
            os.environ.get(LOCAL_STORE) or store_file(),
            is_local=bool(os.environ.get(LOCAL_STORE)),
        )

    def store(self) -> dist.Store | None:
        """Return the store through which the ranks meet; None for torch's own rendezvous."""
        return dist.FileStore(self.store_path, self.size) if self.store_path else None


def check_world(plan: Plan, world: World) -> Position:
    """Check the processes of a job against the plan; return this process's place.

    Raises:
        EnvironmentMismatchError: the number of processes, the host or the GPU is not the plan's.
    """
    table = rank_table(plan)
    if world.size != len(table):
        raise EnvironmentMismatchError(
            f"the plan has {len(table)} devices, one process each, but the job has {world.size} "
            f"(WORLD_SIZE). Start {len(table)} processes in all, as `megatron-hetero flags` "
            "prints them, or plan for the machines that are there."
        )
    if not world.is_local:
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
