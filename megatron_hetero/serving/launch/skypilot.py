"""A fleet as a SkyServe service: replicas of one machine and one GPU type each.

SkyServe's instance-aware policy routes by what each type of accelerator serves, and its autoscaler
counts in the same figures (`sky/serve/load_balancing_policies.py`).  One service has one task, so
that all replicas run the same command: the plan's shapes may differ in the GPU type alone.
"""

from __future__ import annotations

import shlex

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.flags.launchers.job import LaunchFile
from megatron_hetero.flags.launchers.sky_names import accelerator_name
from megatron_hetero.serving.fleet.plan import ServingPlan
from megatron_hetero.serving.launch.processes import processes_of
from megatron_hetero.serving.launch.vllm import vllm_command

_SERVICE = """\
# sky serve up service.yaml
service:
  readiness_probe: /health
  load_balancing_policy: instance_aware_least_load
  replica_policy:
    min_replicas: {count}
    max_replicas: {count}
    target_qps_per_replica:
{rates}
resources:
  ports: {port}
  any_of:
{resources}
run: |
  {command}
"""


def skypilot_service(plan: ServingPlan) -> LaunchFile:
    """Return the service of a fleet.

    Raises:
        UnsupportedError: prefill is apart, or shapes differ in more than the GPU type.
    """
    if plan.has_prefill_apart or any(len(r.stages) > 1 for r in plan.replicas):
        raise UnsupportedError(
            "a SkyServe service has one command for all replicas: prefill apart, and pipelines, "
            "are not written for it; launch this plan --for vllm"
        )
    if len({replica.width for replica in plan.replicas}) > 1 or plan.engine.name != "vllm":
        raise UnsupportedError(
            "a SkyServe service has one command for all replicas, of vLLM and of one width; this "
            "plan has others: launch it --for vllm, or --for ssh"
        )
    # Accelerator -> requests per second of each of its replicas.
    by_kind: dict[str, list[float]] = {}
    for replica in plan.replicas:
        name = f"{accelerator_name(replica.stages[0].gpu)}:{replica.width}"
        by_kind.setdefault(name, []).append(sum(replica.rates))
    # All replicas have the command of the first, but the address.
    process = processes_of(plan)[0]
    argv = list(vllm_command(plan, process).argv)
    argv[argv.index("--host") + 1] = "0.0.0.0"
    # The load balancer knows kinds of machines: each gets the mean of its replicas.
    rates = [f'      "{kind}": {sum(each) / len(each):.6g}' for kind, each in by_kind.items()]
    text = _SERVICE.format(
        count=len(plan.replicas),
        rates="\n".join(rates),
        port=process.port,
        resources="\n".join(f"    - accelerators: {kind}" for kind in by_kind),
        command=shlex.join(argv),
    )
    return LaunchFile("service.yaml", text)
