"""Seconds for which messages take the NICs of machines with several NICs.

A GPU sends over the NIC near it, and receives over the NIC near it.  Machines without NICs of their
own have one, the path between two nodes (`cost.network.seconds`), and nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster

Port = tuple[str, bool]
"""Name of a NIC, and True if the NIC sends."""


def port_name(port: Port) -> str:
    """Return the name of one direction of a NIC: `NIC 0 of a out`."""
    return f"{port[0]} {'out' if port[1] else 'in'}"


def message_seconds(
    cluster: Cluster, messages: Iterable[tuple[Device, Device, float]]
) -> dict[Port, float]:
    """Return the seconds for which some messages between GPUs take NICs, in each direction.

    Args:
        messages: sender, receiver and bytes; those inside a node take none.
    """
    found: dict[Port, float] = {}
    if not cluster.has_nics:
        return found
    # Both ends carry the message, each at its NIC's own speed.
    for sender, receiver, num_bytes in messages:
        if sender.node == receiver.node:
            continue
        link = cluster.path(sender, receiver)
        for end, sends in ((sender, True), (receiver, False)):
            speed = cluster.nic_bytes_per_s(end, link)
            # A machine with one NIC for all is the path itself.
            if speed < inf:
                port = cluster.nic_of(end), sends
                found[port] = found.get(port, 0.0) + num_bytes / speed
    return found


def group_seconds(
    cluster: Cluster, senders: Sequence[Device], receivers: Sequence[Device], num_bytes: float
) -> dict[str, float]:
    """Return {NIC name: seconds} taken by bytes between two groups: each GPU sends, or receives, an
    equal part.

    Args:
        senders, receivers: GPUs of two nodes.
        num_bytes: of all together.
    """
    if not cluster.has_nics or senders[0].node == receivers[0].node:
        return {}
    # Only the ends' own NICs are kept: senders' out, then receivers' in.
    sent = [(one, receivers[0], num_bytes / len(senders)) for one in senders]
    received = [(senders[0], one, num_bytes / len(receivers)) for one in receivers]
    found = {port: s for port, s in message_seconds(cluster, sent).items() if port[1]}
    found |= {port: s for port, s in message_seconds(cluster, received).items() if not port[1]}
    return {port_name(port): seconds for port, seconds in found.items()}
