"""vLLM's command lines (`vllm serve`, `vllm-router`)."""

from __future__ import annotations

import json

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


def vllm_command(plan: ServingPlan, process: EngineProcess) -> EngineCommand:
    """Return the command of one process."""
    replica, settings = process.replica, plan.engine
    environment = dict(visible_gpus(process))
    argv = [
        "vllm", "serve", plan.model.source,
        "--tensor-parallel-size", str(replica.width),
        "--pipeline-parallel-size", str(len(replica.stages)),
        "--gpu-memory-utilization", f"{settings.memory_part:g}",
        "--block-size", str(settings.block_tokens),
        "--max-num-batched-tokens", str(settings.max_batched_tokens),
        "--max-num-seqs", str(replica.max_sequences),
        # Where the model's positions are more than keys and values have room for, vLLM would not
        # start.
        "--max-model-len", "auto",
    ]  # fmt: skip
    # A quantised checkpoint says so itself, and vLLM refuses a name beside it that differs.
    if plan.model.is_made_fp8:
        argv += ["--quantization", "fp8"]
    if plan.model.keys_values == "fp8":
        argv += ["--kv-cache-dtype", "fp8"]
    # vLLM divides layers evenly unless it is told.
    if len(replica.stages) > 1:
        environment["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, process.layers))
    if process.num_ranks > 1:
        host, port = process.master
        environment["VLLM_HOST_IP"] = process.host
        argv += ["--distributed-executor-backend", "mp", "--nnodes", str(process.num_ranks)]
        argv += ["--node-rank", str(process.rank), "--master-addr", host]
        argv += ["--master-port", str(port)]
    # Only rank 0 has the HTTP interface.
    if process.rank:
        argv.append("--headless")
    else:
        argv += ["--host", process.host, "--port", str(process.port)]
    # Both sides of a hand-over take the role `kv_both`; the router says who sends.
    if replica.phase != "both":
        environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = process.host
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(process.side_port)
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        argv += ["--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))]
    return EngineCommand(environment, tuple(argv))


def vllm_routers(
    plan: ServingPlan, processes: tuple[EngineProcess, ...]
) -> dict[str, tuple[str, ...]]:
    """Return the command of the router of each route, by phase of its first replica, and of
    each group of hand-overs."""
    found: dict[str, tuple[str, ...]] = {}
    whole = entries(processes, "both")
    if whole:
        urls = [address(p) for p in whole]
        found["both"] = (
            "vllm-router", "--policy", "power_of_two", "--host", "127.0.0.1",
            "--port", str(ROUTER_PORT), "--worker-urls", *urls,
        )  # fmt: skip
    # Prefill apart has routers of its own, on the next ports.
    if plan.has_prefill_apart:
        for number, (name, group) in enumerate(apart_groups(plan, processes).items(), 1):
            argv = ["vllm-router", "--policy", "power_of_two", "--vllm-pd-disaggregation"]
            for phase, side in group.items():
                for process in side:
                    argv += [f"--{phase}", address(process)]
            argv += ["--host", "127.0.0.1", "--port", str(ROUTER_PORT + number)]
            found[name] = tuple(argv)
    return found
