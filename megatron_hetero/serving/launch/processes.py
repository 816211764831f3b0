"""Processes of a fleet.

A replica of one machine is one process.  Of several machines, or of stages that share machines
unevenly, each stage is a node of the engine's own launcher: all of them have equally many GPUs,
which both engines ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_hetero.cluster.names import device_place
from megatron_hetero.errors import UnsupportedError
from megatron_hetero.serving.fleet.plan import PlannedReplica, ServingPlan

FIRST_PORT, FIRST_SIDE_PORT, FIRST_MASTER_PORT = 8100, 5600, 29600
ROUTER_PORT = 8000


@dataclass(frozen=True)
class EngineProcess:
    """One process of an engine.

    Attributes:
        name: unique; of the replica, and of the stage where there are several.
        host: its machine's address.
        gpus: places on the machine's bus.
        rank, num_ranks: of the engine's launcher; 0 of 1 for a replica of one process.
        port: of its HTTP interface (rank 0).
        side_port: over which keys and values are agreed on.
        master: host and port at which its ranks meet.
    """

    name: str
    replica: PlannedReplica
    host: str
    gpus: tuple[int, ...]
    rank: int
    num_ranks: int
    port: int
    side_port: int
    master: tuple[str, int]

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the layers of each stage of the replica."""
        return tuple(stage.num_layers for stage in self.replica.stages)


@dataclass(frozen=True)
class EngineCommand:
    """Command line with its environment."""

    environment: Mapping[str, str]
    argv: tuple[str, ...]


def processes_of(plan: ServingPlan, with_ours: bool = False) -> tuple[EngineProcess, ...]:
    """Return the processes of all replicas.

    Args:
        plan: the fleet.
        with_ours: take replicas that `megatron-hetero serve` runs too.
    Raises:
        UnsupportedError: a replica that nothing of these runs.
    """
    found = []
    for index, replica in enumerate(plan.replicas):
        # A replica of unlike widths is refused here, or else runs in one process on one machine.
        if replica.width is None and not with_ours:
            raise UnsupportedError(
                f"{replica.name} ({replica.shape}) has stages of unlike tensor-parallel widths, "
                "which neither vLLM nor SGLang runs; --for ssh starts `megatron-hetero serve` for "
                "it, or plan with --engine vllm or --engine sglang"
            )
        if replica.width is None and len({stage.host for stage in replica.stages}) > 1:
            raise UnsupportedError(
                f"{replica.name} ({replica.shape}) has unlike widths on several machines; start "
                "its ranks by `torchrun -m megatron_hetero.lab.serve.rank` (docs/serving.md), or "
                "plan with --engine vllm or --engine sglang"
            )
        # A replica on one machine is one process, else each stage is one, in order.
        hosts = [stage.host for stage in replica.stages]
        is_one = len(set(hosts)) == 1
        parts = [replica.stages] if is_one else [(stage,) for stage in replica.stages]
        for rank, stages in enumerate(parts):
            gpus = tuple(device_place(d)[1] for stage in stages for d in stage.devices)
            found.append(
                EngineProcess(
                    replica.name if is_one else f"{replica.name}-{rank}",
                    replica,
                    hosts[rank],
                    gpus,
                    rank,
                    len(parts),
                    # Every replica has ports of its own, as several may share a machine.
                    FIRST_PORT + index,
                    FIRST_SIDE_PORT + index,
                    (hosts[0], FIRST_MASTER_PORT + index),
                )
            )
    return tuple(found)


def address(process: EngineProcess) -> str:
    """Return the URL of a replica's interface, of its first process."""
    return f"http://{process.host}:{process.port}"


def entries(processes: tuple[EngineProcess, ...], phase: str) -> list[EngineProcess]:
    """Return the first processes of the replicas of a phase."""
    return [p for p in processes if p.rank == 0 and p.replica.phase == phase]


def apart_groups(
    plan: ServingPlan, processes: tuple[EngineProcess, ...]
) -> dict[str, dict[str, list[EngineProcess]]]:
    """Return the first processes of replicas that prefill and that decode, by phase, in a group for
    each part of the fleet that hands nothing over to the others, as places far apart do: a router
    of all would.  The name of the first is "prefill", of others "prefill-2" and so on."""
    every = {phase: entries(processes, phase) for phase in ("prefill", "decode")}
    return {
        f"prefill-{number}" if number > 1 else "prefill": {
            phase: [p for p in side if (phase, p.replica.place) in group]
            for phase, side in every.items()
        }
        for number, group in enumerate(plan.hand_over_groups, 1)
    }


def visible_gpus(process: EngineProcess) -> Mapping[str, str]:
    """Return the variables that make GPUs visible to a process, by place on the PCI bus."""
    gpus = ",".join(map(str, process.gpus))
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpus}
