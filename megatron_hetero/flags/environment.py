"""Environment variables of a launch, by node, each with its reason.

NCCL reads its settings once for a process, so each node gets its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_hetero.plan.plan import Host, Plan

TIGHT_PART = 0.02
"""Of a GPU's memory, left beside the reserve; allocators lose as much to fragmentation."""
ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
_NO_FRAGMENTS = "expandable_segments:True"
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
    if _is_tight(plan):
        yield Setting(
            ALLOCATOR_VARIABLE,
            _NO_FRAGMENTS,
            "the plan fills a GPU to within 2 %, which fragments of the allocator would take",
        )
    if len({host.gpu_type for host in plan.hosts}) > 1:
        # NVIDIA/nccl#1136, #1110, #794.
        reason = (
            "unlike nodes may settle on unlike algorithms and hang: one for all (check the values "
            "that come back with `megatron-hetero doctor`)"
        )
        yield Setting("NCCL_ALGO", "Ring", reason)
        yield Setting("NCCL_PROTO", "Simple", reason)


def wastes_no_memory(allocator: str | None) -> bool:
    """Whether torch's allocator, as `ALLOCATOR_VARIABLE` sets it, lets its blocks grow."""
    return allocator is not None and _NO_FRAGMENTS in allocator


def _is_tight(plan: Plan) -> bool:
    if plan.estimates is None:
        return False
    devices = plan.estimates.devices.values()
    return any(d.capacity_bytes - d.peak_bytes < TIGHT_PART * d.capacity_bytes for d in devices)


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
