"""Faults in a fleet's files that would stop or slow the fleet."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.preflight.finding import Finding
from megatron_hetero.serving.fleet.plan import PlannedReplica, ServingPlan
from megatron_hetero.serving.prices.served import LEAST_FP8

_FLASH = 8.0
"""Least compute capability for FlashAttention."""
# 10 Gb/s: a hand-over of keys and values over a slower link is worth a warning.
_SLOW_HAND_OVER = 1.25e9


def check_fleet(plan: ServingPlan, cluster: Cluster) -> tuple[Finding, ...]:
    """Check a serving plan on its cluster: GPUs that are there, formats and kernels of each card,
    and whether engines hand keys and values over between its replicas."""
    found = [
        finding
        for replica in plan.replicas
        for finding in (*_devices(replica, cluster), *_widths(replica))
    ]
    # Device -> type, of the GPUs that are there; a missing one is a finding already.
    gpus = {
        device: cluster.node_of(device).gpu_type
        for replica in plan.replicas
        for stage in replica.stages
        for device in stage.devices
        if device in cluster.device_by_name
    }
    # One finding for each type of GPU, not for each GPU.
    for name in sorted({gpu.name for gpu in gpus.values()}):
        gpu = next(g for g in gpus.values() if g.name == name)
        found += _formats(plan, gpu)
    found += _hand_over(plan, gpus)
    found += _hand_over_links(plan, cluster)
    # Errors first; `sorted` keeps the order otherwise.
    return tuple(sorted(found, key=lambda f: f.severity != "error"))


def _devices(replica: PlannedReplica, cluster: Cluster) -> Iterator[Finding]:
    for stage in replica.stages:
        for device in stage.devices:
            if device not in cluster.device_by_name:
                yield Finding(
                    "serve-gpu-missing", "error", replica.name,
                    f"{device} is not in the cluster",
                    "plan again with serve-plan --from, which keeps what can stay",
                )  # fmt: skip
            elif cluster.node_of(device).gpu_type.name != stage.gpu:
                yield Finding(
                    "serve-gpu-type", "error", replica.name,
                    f"{device} is a {cluster.node_of(device).gpu_type.name}; the plan has "
                    f"{stage.gpu}",
                    "plan again with this cluster",
                )  # fmt: skip


def _widths(replica: PlannedReplica) -> Iterator[Finding]:
    if replica.width is None:
        yield Finding(
            "serve-unlike-widths", "error", replica.name,
            f"{replica.shape}: stages of unlike tensor-parallel widths run in no engine",
            "launch --for ssh starts `serve` for it, on one machine; or plan with --engine vllm or "
            "--engine sglang",
        )  # fmt: skip


def _formats(plan: ServingPlan, gpu: GpuType) -> Iterator[Finding]:
    # AMD's cards have no such number, and nothing is said of these.
    capability = gpu.capability
    if capability is None:
        return
    if plan.model.weights == "fp8" and capability < LEAST_FP8:
        yield Finding(
            "serve-fp8-weights", "warning", gpu.name,
            f"compute capability {capability:g} has no fp8 products; engines keep fp8 weights and "
            "compute in 16 bits (Marlin)",
            "time is priced so; int4 weights take half the memory on this card",
        )  # fmt: skip
    if plan.model.keys_values == "fp8" and capability < LEAST_FP8:
        yield Finding(
            "serve-fp8-kv", "error", gpu.name,
            f"compute capability {capability:g}: attention kernels read an fp8 KV cache from "
            f"{LEAST_FP8:g} on",
            "plan with --kv 16-bit",
        )  # fmt: skip
    if capability < _FLASH:
        yield Finding(
            "serve-attention", "warning", gpu.name,
            f"compute capability {capability:g} has no FlashAttention; engines take another "
            "backend, which is slower than planned",
            "measure the engine on this card before the plan counts on it",
        )  # fmt: skip


def _hand_over(plan: ServingPlan, gpus: dict[str, GpuType]) -> Iterator[Finding]:
    sides = {
        phase: [r for r in plan.replicas if r.phase == phase] for phase in ("prefill", "decode")
    }
    # Any prefill replica may hand over to any decode replica.
    for sender in sides["prefill"]:
        for receiver in sides["decode"]:
            pair = f"{sender.name} to {receiver.name}"
            one, other = sender.width or 0, receiver.width or 0
            # Each rank of the wider side talks to whole ranks of the other only at whole ratios.
            if one and other and max(one, other) % min(one, other):
                yield Finding(
                    "serve-kv-widths", "error", pair,
                    f"widths {one} and {other}: NIXL and Mooncake hand keys and values over at "
                    "whole ratios",
                    "give both sides widths that divide each other",
                )  # fmt: skip
            stages = len(sender.stages), len(receiver.stages)
            if stages[0] != stages[1] and 1 not in stages:
                yield Finding(
                    "serve-kv-stages", "error", pair,
                    f"{stages[0]} and {stages[1]} stages: connectors want equally many, or one on "
                    "a side",
                    "plan again; serve-plan keeps to it",
                )  # fmt: skip
            # Without bf16 a card computes in fp16.
            formats = {
                gpus[d].peak_flops.get("bf16") is not None
                for r in (sender, receiver)
                for s in r.stages
                for d in s.devices
                if d in gpus
            }
            if len(formats) > 1:
                yield Finding(
                    "serve-kv-format", "error", pair,
                    "one side computes in bf16 and the other in fp16: keys and values differ",
                    "keep cards without bf16 to replicas that do both phases",
                )  # fmt: skip


def _hand_over_links(plan: ServingPlan, cluster: Cluster) -> Iterator[Finding]:
    """Yield each slow link from a machine for prefill to a machine for decode."""
    # A replica hands over from, and to, the machine of its first stage.  A router pairs any two
    # replicas of its group.
    pairs = set()
    for group in plan.hand_over_groups:
        machines = {
            phase: {
                cluster.node_of(r.stages[0].devices[0]).name
                for r in plan.replicas
                if r.phase == phase
                and (phase, r.place) in group
                and r.stages[0].devices[0] in cluster.device_by_name
            }
            for phase in ("prefill", "decode")
        }
        pairs |= {(a, b) for a in machines["prefill"] for b in machines["decode"] if a != b}
    slow = [
        pair for pair in sorted(pairs) if cluster.node_links[pair].bytes_per_s < _SLOW_HAND_OVER
    ]  # fmt: skip
    if slow:
        a, b = slow[0]
        rate = cluster.node_links[a, b].bytes_per_s * 8e-9
        yield Finding(
            "serve-kv-link", "warning", f"{a} to {b}",
            f"keys and values go over {rate:.3g} Gb/s ({len(slow)} such pairs of machines)",
            "see to it that the router pairs replicas that are near each other",
        )  # fmt: skip
