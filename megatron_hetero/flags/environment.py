"""Environment variables of a launch, by node, each with its reason.

NCCL reads its settings once for a process, so each node gets its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_hetero.plan.plan import Host, Plan

NODE_VARIABLE = "MEGATRON_HETERO_NODE"
"""Says which node of the plan a machine is, where its host name cannot."""

_NO_PEER_TO_PEER = ("RTX-40", "RTX-50")


@dataclass(frozen=True)
class Setting:
    """One variable, its value, and why it is set."""

    name: str
    value: str
    reason: str


def has_no_peer_to_peer(gpu_type: str) -> bool:
    """GeForce cards whose driver offers none (NVIDIA/nccl-tests#117)."""
    return gpu_type.startswith(_NO_PEER_TO_PEER)


def job_settings(plan: Plan) -> Iterator[Setting]:
    """The same on every node."""
    if plan.hosts:
        yield Setting(
            "CUDA_DEVICE_ORDER",
            "PCI_BUS_ID",
            "number the GPUs as nvidia-smi does, which the plan's indices follow",
        )
    if plan.layout.tensor_parallel_widths[-1] > 1:
        yield Setting(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "1",
            "Megatron wants it with tensor parallelism on GPUs before Blackwell: kernels start in "
            "the order of their launches",
        )
    if len({host.gpu_type for host in plan.hosts}) > 1:
        # NVIDIA/nccl#1136, #1110, #794.
        reason = (
            "unlike nodes may settle on unlike algorithms and hang: one for all (check the values "
            "that come back with `megatron-hetero doctor`)"
        )
        yield Setting("NCCL_ALGO", "Ring", reason)
        yield Setting("NCCL_PROTO", "Simple", reason)


def node_settings(host: Host) -> Iterator[Setting]:
    """What one node alone needs."""
    if len(host.gpu_indices) > 1 and has_no_peer_to_peer(host.gpu_type):
        yield Setting(
            "NCCL_P2P_DISABLE",
            "1",
            f"{host.gpu_type} has no peer-to-peer, and some drivers hang where NCCL tries it",
        )
    yield Setting(
        "CUDA_VISIBLE_DEVICES",
        ",".join(map(str, host.gpu_indices)),
        "the plan's GPUs of this node, in rank order",
    )
