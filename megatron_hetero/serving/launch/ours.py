"""Command lines of `megatron-hetero serve` and `route`, for replicas that no engine runs."""

from __future__ import annotations

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.serving.fleet.plan import ServingPlan
from megatron_hetero.serving.launch.processes import (
    ROUTER_PORT,
    EngineCommand,
    EngineProcess,
    address,
    entries,
)

PLAN_NAME = "serve.json"
"""The plan, beside the scripts."""


def is_ours(process: EngineProcess) -> bool:
    """Tell if no engine runs a process's replica: its stages have unlike widths."""
    return process.replica.width is None


def own_command(plan: ServingPlan, process: EngineProcess) -> EngineCommand:
    """Return the command of a replica, whose ranks take the plan's GPUs themselves.

    Raises:
        UnsupportedError: prefill is apart, or the replica spans machines.
    """
    replica = process.replica
    if replica.phase != "both":
        raise UnsupportedError(
            f"{replica.name} ({replica.shape}) serves the {replica.phase} phase alone, and "
            "`megatron-hetero serve`, which runs unlike widths, hands no keys and values over; "
            "plan with --engine vllm or --engine sglang"
        )
    argv = (
        "megatron-hetero", "serve", "--model", plan.model.source, "--plan", PLAN_NAME,
        "--replica", replica.name, "--host", process.host, "--port", str(process.port),
    )  # fmt: skip
    return EngineCommand({}, argv)


def own_router(plan: ServingPlan, processes: tuple[EngineProcess, ...]) -> tuple[str, ...]:
    """Return the command of the router that gives each replica the plan's part."""
    words = ["megatron-hetero", "route", PLAN_NAME, "--port", str(ROUTER_PORT)]
    for process in entries(processes, "both"):
        words += ["--replica", f"{process.replica.name}={address(process)}"]
    return tuple(words)
