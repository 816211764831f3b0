"""Links between two cards of a machine that the cards cannot have."""

from __future__ import annotations

from megatron_hetero.cluster.catalogue import SheetLink, sheet_link
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.errors import ClusterError
from megatron_hetero.units import format_bandwidth


def bridge_fault(one: GpuType, other: GpuType, bytes_per_s: float) -> str | None:
    """Say why two cards cannot have a link of so many bytes/s in one direction; None if they can.

    What the slots carry is possible, and an NVLink bridge between two cards of one type that have
    the connectors.  Of types that the catalogue lacks, or that are joined by NVLink as they are
    built, nothing is known.
    """
    links = _sheet(one), _sheet(other)
    slots = [link for link in links if link is not None and link.kind.startswith("PCIe")]
    # Nothing can be said where the catalogue lacks a card, or NVLink joins the cards as built.
    if None in links or not slots:
        return None
    # The slower slot limits the path over PCIe.
    slot = min(slots, key=lambda link: link.bytes_per_s)
    if bytes_per_s <= slot.bytes_per_s:
        return None
    # A bridge joins two cards of one type that have the connector.
    if one.name != other.name:
        why = f"no bridge joins {one.name} and {other.name}"
    elif slot.bridge_bytes_per_s is None:
        why = f"{one.name} has no connector for an NVLink bridge"
    else:
        return None
    return (
        f"{format_bandwidth(bytes_per_s)} is more than {slot.kind} carries in one direction "
        f"({format_bandwidth(slot.bytes_per_s)}), and {why}"
    )


def _sheet(gpu: GpuType) -> SheetLink | None:
    try:
        return sheet_link(gpu.name)
    except ClusterError:
        return None
