"""The machines of a launch: the GPUs that each contributes, in rank order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.plan.communication.libraries import stated
from megatron_hetero.plan.plan import Host


def hosts_of(devices: Iterable[str], cluster: Cluster) -> tuple[Host, ...]:
    """Group devices by machine, machines by first appearance; in each its devices in the order
    given.

    `devices` ("machine:index") are of `cluster`.
    """
    found: dict[str, list[Device]] = {}
    # Machine -> its devices; a dict keeps the order of first appearance.
    for name in devices:
        device = cluster.device_by_name[name]
        found.setdefault(cluster.node_by_name[device.node].machine, []).append(device)
    return tuple(_host(machine, own, cluster) for machine, own in found.items())


def _host(machine: str, devices: Sequence[Device], cluster: Cluster) -> Host:
    types = tuple(cluster.gpu_type(device).name for device in devices)
    are_alike = len(set(types)) == 1
    # A machine with GPUs of several kinds lists the type of each.
    return Host(
        machine,
        cluster.machines[machine][0].host,
        types[0] if are_alike else None,
        tuple(device.index for device in devices),
        () if are_alike else types,
        stated(cluster.gpu_type(devices[0])),
    )
