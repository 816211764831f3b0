"""Environment variables of a launch, by node, each with its reason.

NCCL reads its settings once for a process, so each node gets its own.  RCCL reads the same names
(`NCCL_*`, rocm.docs.amd.com/projects/rccl, environment variables); what belongs to CUDA itself has
other names on ROCm, or none (rocm.docs.amd.com/projects/HIP, environment variables).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_hetero.cluster.makers import Library
from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.model.script import OF_LIBRARIES
from megatron_hetero.plan.communication.libraries import library_of
from megatron_hetero.plan.plan import Host, Plan

TIGHT_PART = 0.02
"""Part of a GPU's memory left beside the reserve; allocators lose as much to fragmentation."""
CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
_NO_FRAGMENTS = "expandable_segments:True"
NODE_VARIABLE = "MEGATRON_HETERO_NODE"
"""Environment variable with the plan's node, for a machine not known by host name."""

_OF_ONE_MACHINE = re.compile(
    "IFNAME|HCA|GID|FILE|PATH|PLUGIN|DIR|VISIBLE_DEVICES|HOST|ADDR|_NET$|TUNER|PROFILER|INJECTION"
)
_PLAIN_VALUE = re.compile(r"[A-Za-z0-9_.,:^+=-]{0,200}", re.ASCII)
_NO_PEER_TO_PEER = ("RTX-40", "RTX-50")


@dataclass(frozen=True)
class EnvironmentSetting:
    """Environment variable, its value, and the reason for the setting."""

    name: str
    value: str
    reason: str


def visible_devices_variable(library: Library) -> str:
    """Return the variable that limits a process to some GPUs of a machine.

    Every release of HIP reads HIP_VISIBLE_DEVICES; not every one reads CUDA's name.
    """
    return "HIP_VISIBLE_DEVICES" if library == "RCCL" else "CUDA_VISIBLE_DEVICES"


def has_no_peer_to_peer(gpu_type: str) -> bool:
    """Tell if the driver offers no peer-to-peer for a GeForce card (NVIDIA/nccl-tests#117)."""
    return gpu_type.startswith(_NO_PEER_TO_PEER)


def connections_wanted(plan: Plan) -> Literal["one", "several"] | None:
    """Tell which CUDA_DEVICE_MAX_CONNECTIONS Megatron insists on: 1, any other, or either (None).

    FSDP refuses 1 on every GPU; tensor and context parallelism refuse others on GPUs before
    Blackwell, unless FSDP or the overlap of experts' messages asks for several connections
    (`megatron.training.arguments.validate_args`).
    """
    given = () if plan.workload is None else plan.workload.megatron_args
    switches = {option.flag.names[0] for option in flag_table().split(given)}
    if switches & {"--use-torch-fsdp2", "--use-megatron-fsdp"}:
        return "several"
    if "--overlap-moe-expert-parallel-comm" in switches:
        return None
    # Widths are ascending, so that a last width of 1 means no tensor parallelism.
    layout = plan.layout
    return "one" if layout.tensor_parallel_widths[-1] > 1 or layout.has_context_parallel else None


def job_settings(plan: Plan) -> Iterator[EnvironmentSetting]:
    """Yield the variables that are the same on every node: the plan's, then the script's."""
    own = tuple(_own_settings(plan))
    yield from own
    # The plan's settings win over the script's.
    decided = {s.name for s in (*own, *(s for host in plan.hosts for s in node_settings(host)))}
    for name, value in script_exports(plan):
        # What may differ from machine to machine, or loads a file, stays behind.
        if name not in decided and is_for_every_machine(name, value):
            yield EnvironmentSetting(name, value, "the job's own script sets it")


def script_exports(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Return the variables of NCCL, gloo and the like that the job's script sets."""
    given = () if plan.workload is None else plan.workload.exports
    pairs = (text.partition("=") for text in given)
    return tuple((name, value) for name, _, value in pairs if OF_LIBRARIES.fullmatch(name))


def is_for_every_machine(name: str, value: str) -> bool:
    """Tell if a variable means the same on machines that the script never saw, and loads no file:
    a plan may be a stranger's."""
    return not _OF_ONE_MACHINE.search(name) and bool(_PLAIN_VALUE.fullmatch(value))


def exports_left(plan: Plan) -> Iterator[str]:
    """Say which variables of the script the launch does not carry over, and why."""
    nodes = (setting for host in plan.hosts for setting in node_settings(host))
    decided = {s.name: s.value for s in (*_own_settings(plan), *nodes)}
    for name, value in script_exports(plan):
        # Only another value is worth a line, and never the numbers of GPUs.
        if name in decided:
            if decided[name] != value and "VISIBLE_DEVICES" not in name:
                yield f"{name}={value} of the script gives way to the plan's {decided[name]}"
        elif not is_for_every_machine(name, value):
            remedy = "give it in the environment of the machines where it holds"
            # An interface has an option of `launch`.
            if name.endswith("SOCKET_IFNAME"):
                remedy = "launch --interface NAME sets it, or --interface MACHINE=NAME on one"
            yield (
                f"{name}={value} of the script is not carried over: it may be another on each "
                f"machine; {remedy}"
            )


def _own_settings(plan: Plan) -> Iterator[EnvironmentSetting]:
    """Yield the plan's own variables that are the same on every node."""
    # The first host's maker stands for all.
    on_rocm = bool(plan.hosts) and library_of(plan.hosts[0]) == "RCCL"
    if plan.hosts and not on_rocm:  # HIP has one order alone
        yield EnvironmentSetting(
            "CUDA_DEVICE_ORDER",
            "PCI_BUS_ID",
            "number the GPUs as nvidia-smi does, which the plan's indices follow",
        )
    if connections_wanted(plan) == "one":
        wide = plan.layout.tensor_parallel_widths[-1] > 1
        what = "tensor parallelism" if wide else "context parallelism"
        yield EnvironmentSetting(
            CONNECTIONS_VARIABLE,
            "1",
            f"Megatron wants it with {what} on GPUs that torch numbers below 10, as those of "
            "ROCm; HIP itself does not read it"
            if on_rocm
            else f"Megatron wants it with {what} on GPUs before Blackwell: kernels start in the "
            "order of their launches",
        )
    # A bare layout has no hosts and runs on one machine, too.
    if len(plan.hosts) < 2:
        yield EnvironmentSetting(
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
            "1",
            "one machine meets through a file: torchrun opens no port",
        )
    if _is_tight(plan) and not on_rocm:  # torch has such segments on CUDA
        yield EnvironmentSetting(
            ALLOCATOR_VARIABLE,
            _NO_FRAGMENTS,
            "the plan fills a GPU to within 2 %, which fragments of the allocator would take",
        )
    if len(set(plan.type_by_device.values())) > 1:
        # NVIDIA/nccl#1136, #1110, #794.
        reason = (
            "unlike nodes may settle on unlike algorithms and hang: one for all (check the values "
            "that come back with `megatron-hetero doctor`)"
        )
        yield EnvironmentSetting("NCCL_ALGO", "Ring", reason)
        yield EnvironmentSetting("NCCL_PROTO", "Simple", reason)


def interface_settings(interface: str | None) -> Iterator[EnvironmentSetting]:
    """Yield the variables that keep the ranks on a network interface, if `interface` is given."""
    if interface is not None:
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            yield EnvironmentSetting(
                name, interface, "the private interface that the job was given: --interface"
            )


def wastes_no_memory(allocator: str | None) -> bool:
    """Tell if the value of `ALLOCATOR_VARIABLE` gives torch's allocator expandable segments."""
    return allocator is not None and _NO_FRAGMENTS in allocator


def _is_tight(plan: Plan) -> bool:
    if plan.estimates is None:
        return False
    # Bytes of each GPU; the peak includes the reserve.
    devices = plan.estimates.devices.values()
    return any(d.capacity_bytes - d.peak_bytes < TIGHT_PART * d.capacity_bytes for d in devices)


def peer_to_peer_settings(host: Host) -> Iterator[EnvironmentSetting]:
    """Yield the variable that keeps NCCL from peer-to-peer if a card of the host lacks support.

    `NCCL_P2P_DISABLE` switches NVLink off too. `NCCL_P2P_LEVEL=NVL` allows peer-to-peer over NVLink
    only, and so keeps it between the other cards (NCCL's documentation, environment variables).
    """
    types = list(host.type_by_device.values())
    without = [t for t in dict.fromkeys(types) if has_no_peer_to_peer(t)]
    if len(types) < 2 or not without:
        return
    verb = "have" if len(without) > 1 else "has"
    reason = (
        f"{' and '.join(without)} {verb} no peer-to-peer, and some drivers hang where NCCL tries it"
    )
    # Two other cards or more may have NVLink between them.
    if sum(not has_no_peer_to_peer(t) for t in types) > 1:
        yield EnvironmentSetting(
            "NCCL_P2P_LEVEL", "NVL", f"{reason}; NVLink between other cards stays"
        )
    else:
        yield EnvironmentSetting("NCCL_P2P_DISABLE", "1", reason)


def node_settings(host: Host) -> Iterator[EnvironmentSetting]:
    """Yield the variables of one node."""
    yield from peer_to_peer_settings(host)
    yield EnvironmentSetting(
        visible_devices_variable(library_of(host)),
        ",".join(map(str, host.gpu_indices)),
        "the plan's GPUs of this node, in rank order",
    )
