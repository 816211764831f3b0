"""SGLang's command lines (`sglang.launch_server`, `sglang_router.launch_router`)."""

from __future__ import annotations

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.serving.fleet.plan import ServingPlan
from megatron_hetero.serving.launch.processes import (
    ROUTER_PORT,
    EngineCommand,
    EngineProcess,
    address,
    apart_groups,
    entries,
    visible_gpus,
)

_RANK_PORTS = 1000
"""Between the ports of a replica's ranks: each rank listens, and several may share a machine."""


def sglang_command(plan: ServingPlan, process: EngineProcess) -> EngineCommand:
    """Return the command of one process.

    Raises:
        UnsupportedError: keys and values would go between replicas of several processes.
    """
    replica, settings = process.replica, plan.engine
    environment = dict(visible_gpus(process))
    argv = [
        "python3", "-m", "sglang.launch_server", "--model-path", plan.model.source,
        "--host", process.host, "--port", str(process.port + _RANK_PORTS * process.rank),
        "--tp-size", str(replica.width), "--pp-size", str(len(replica.stages)),
        "--mem-fraction-static", f"{settings.memory_part:g}",
        "--page-size", str(settings.block_tokens),
        "--chunked-prefill-size", str(settings.max_batched_tokens),
        "--max-running-requests", str(replica.max_sequences),
    ]  # fmt: skip
    if plan.model.is_made_fp8:
        argv += ["--quantization", "fp8"]
    if plan.model.keys_values == "fp8":
        argv += ["--kv-cache-dtype", "fp8_e5m2"]
    # SGLang divides layers evenly unless it is told.
    if len(replica.stages) > 1:
        environment["SGLANG_PP_LAYER_PARTITION"] = ",".join(map(str, process.layers))
    if process.num_ranks > 1:
        if replica.phase != "both":
            raise UnsupportedError(
                f"{replica.name} spans several machines and only {replica.phase}s: its launch for "
                "SGLang is not written yet; use --engine vllm"
            )
        host, port = process.master
        argv += ["--nnodes", str(process.num_ranks), "--node-rank", str(process.rank)]
        argv += ["--dist-init-addr", f"{host}:{port}"]
    # The bootstrap port is where decode asks prefill for keys and values.
    if replica.phase != "both":
        argv += ["--disaggregation-mode", replica.phase]
        argv += ["--disaggregation-transfer-backend", "nixl"]
        argv += ["--disaggregation-bootstrap-port", str(process.side_port)]
    return EngineCommand(environment, tuple(argv))


def sglang_routers(
    plan: ServingPlan, processes: tuple[EngineProcess, ...]
) -> dict[str, tuple[str, ...]]:
    """Return the command of the router of each route, by phase of its first replica, and of
    each group of hand-overs."""
    start = ("python3", "-m", "sglang_router.launch_router", "--host", "127.0.0.1")
    found: dict[str, tuple[str, ...]] = {}
    whole = entries(processes, "both")
    if whole:
        urls = [address(p) for p in whole]
        found["both"] = (*start, "--port", str(ROUTER_PORT), "--worker-urls", *urls)
    # Prefill apart has routers of its own, on the next ports.
    if plan.has_prefill_apart:
        for number, (name, group) in enumerate(apart_groups(plan, processes).items(), 1):
            argv = [*start, "--port", str(ROUTER_PORT + number), "--pd-disaggregation"]
            for process in group["prefill"]:
                argv += ["--prefill", address(process), str(process.side_port)]
            for process in group["decode"]:
                argv += ["--decode", address(process)]
            found[name] = tuple(argv)
    return found
