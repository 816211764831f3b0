"""Moving from one plan to another: the pieces that each device fetches, their holders, the seconds.

Every device of the new plan fetches what it does not keep already, each piece from the holder in
the old plan that is nearest and, of equals, has sent least; what no device keeps any more, or all
of it if a checkpoint store is named, comes from the store.  Nodes fetch beside each other; a node
sends and receives one piece after the other, in both directions at a time, and what crosses a line
that nodes share adds up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from megatron_hetero.cluster.names import machine_of
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.memory.holdings import Holdings, Interval, StateSizes, Tensor, without
from megatron_hetero.cost.network.lines import line_seconds


@dataclass(frozen=True)
class Movement:
    """Bytes and seconds of going from one plan to another."""

    moved_bytes: float
    lost_bytes: float
    time_s: float | None


class Mover:
    """The movements from one plan to any new plan.

    Args:
        kept: what the old plan's devices keep, of those that can still be asked.
        store_bytes_per_s: what one node reads of the checkpoint store; None if pieces come from the
            other devices.
    """

    def __init__(
        self,
        cluster: Cluster,
        sizes: StateSizes,
        kept: Holdings,
        store_bytes_per_s: float | None = None,
    ) -> None:
        self.cluster = cluster
        self.sizes = sizes
        self.kept = kept
        self.store_bytes_per_s = store_bytes_per_s
        self._devices = {device.name: device for device in cluster.devices}
        # Who keeps which part of each tensor; sorted, so that equal holders are met in one order.
        self._holders: dict[Tensor, list[tuple[Interval, str]]] = {}
        for device, tensors in sorted(kept.items()):
            for tensor, intervals in tensors.items():
                found = self._holders.setdefault(tensor, [])
                found += [(interval, device) for interval in intervals]

    def to(self, wanted: Holdings) -> Movement:
        """Price the movement to devices that keep `wanted`."""
        load = _Load()
        moved = lost = 0.0
        for device, tensors in sorted(wanted.items()):
            own = self.kept.get(device, {})
            # What the device does not keep yet, in pieces that each have a set of holders of their
            # own.
            for tensor, intervals in tensors.items():
                size = self.sizes.bytes_of(tensor)
                missing = [m for i in intervals for m in without(i, own.get(tensor, ()))]
                for part in missing:
                    for (start, stop), sources in self._pieces(tensor, part):
                        num_bytes = (stop - start) * size
                        moved += num_bytes
                        # A piece that no device keeps can come from the store alone.
                        if not sources:
                            lost += num_bytes
                        self._fetch(load, device, sources, num_bytes)
        # Without a store the movement cannot be made, so it has no time.
        if lost and self.store_bytes_per_s is None:
            return Movement(moved, lost, None)
        return Movement(moved, lost, load.time_s)

    def _fetch(self, load: _Load, device: str, sources: list[str], num_bytes: float) -> None:
        receiver = self._devices[device]
        # From the store: machines read beside each other, each at the rate of one node.
        if self.store_bytes_per_s is not None:
            seconds = num_bytes / self.store_bytes_per_s
            load.add(load.received_s, machine_of(receiver.node), seconds)
            return
        if not sources:
            return

        def rank(source: str) -> tuple[float, float, str]:
            sender = self._devices[source]
            seconds = num_bytes / self.cluster.link(sender, receiver).bytes_per_s
            return seconds, load.sent_s.get(_end(sender, receiver), 0.0), source

        # The nearest holder, then the one that has sent least, then the first by name.
        best = min(sources, key=rank)
        sender, seconds = self._devices[best], rank(best)[0]
        load.add(load.sent_s, _end(sender, receiver), seconds)
        load.add(load.received_s, _end(receiver, sender), seconds)
        # Lines that several nodes share add up over all of them.
        carried = [((sender.node, receiver.node), num_bytes)]
        for name, line_s in line_seconds(self.cluster, carried).items():
            load.add(load.shared_s, name, line_s)

    def _pieces(self, tensor: Tensor, interval: Interval) -> Iterator[tuple[Interval, list[str]]]:
        """Cut an interval where its holders' parts end; yield each piece with all who have it."""
        start, stop = interval
        holders = self._holders.get(tensor, [])
        cuts = {start, stop}
        cuts |= {edge for ends, _ in holders for edge in ends if start < edge < stop}
        edges = sorted(cuts)
        # Edges are fractions of a tensor: shorter pieces are rounding.
        for a, b in pairwise(edges):
            if b - a > 1e-12:
                yield (a, b), [name for (i, j), name in holders if i <= a and b <= j]


@dataclass
class _Load:
    """Seconds of use of each machine's network, of each device inside a machine, and of each shared
    line."""

    sent_s: dict[str, float] = field(default_factory=dict)
    received_s: dict[str, float] = field(default_factory=dict)
    shared_s: dict[str, float] = field(default_factory=dict)

    def add(self, seconds_of: dict[str, float], where: str, seconds: float) -> None:
        seconds_of[where] = seconds_of.get(where, 0.0) + seconds

    @property
    def time_s(self) -> float:
        # All ends work side by side: the busiest one decides.
        loads = (self.sent_s, self.received_s, self.shared_s)
        return max((seconds for load in loads for seconds in load.values()), default=0.0)


def _end(one: Device, other: Device) -> str:
    """Return where a device's traffic with another is counted: inside a machine at the device,
    otherwise at the machine's network, which all its cards share."""
    machine = machine_of(one.node)
    return one.name if machine == machine_of(other.node) else machine


def surviving(kept: Holdings, alive: frozenset[str]) -> Holdings:
    """Keep only the holdings of devices that can still be asked."""
    return {device: tensors for device, tensors in kept.items() if device in alive}
