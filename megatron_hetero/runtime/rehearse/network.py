"""The cluster's links between the ranks of a rehearsal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_hetero.cluster.spec import Cluster, Device
from megatron_hetero.cost.ring import ring_key
from megatron_hetero.errors import UsageError
from megatron_hetero.schedule.simulator_network import paths


@dataclass(frozen=True)
class SlowLink:
    """A fault: what goes between nodes `a` and `b` (or inside `a`, if they are one) takes `factor`
    times as long as described, in both directions."""

    a: str
    b: str
    factor: float

    def slows(self, here: str, there: str) -> bool:
        """Whether it lies between these two nodes."""
        return {self.a, self.b} == {here, there}


@dataclass(frozen=True)
class Hop:
    """The way from one rank to another: numbers of the paths it takes, and what it costs."""

    paths: tuple[int, ...]
    bytes_per_s: float
    latency_s: float

    def seconds(self, num_bytes: float) -> float:
        """For which its paths are taken."""
        return num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Ring:
    """A collective's hops, each with the seconds for which it takes its paths.

    They need not form a ring (`Network.to_owners`, `Network.broadcast`).
    """

    hops: tuple[tuple[tuple[int, ...], float], ...]
    latency_s: float


class Network:
    """Hops between ranks; `devices` is [rank].

    Raises:
        UsageError: a slow link names a node that the cluster lacks.
    """

    def __init__(
        self, cluster: Cluster, devices: Sequence[Device], slow_links: Sequence[SlowLink] = ()
    ) -> None:
        self._cluster = cluster
        self._devices = tuple(devices)
        self._slow = tuple(slow_links)
        names = {node.name for node in cluster.nodes}
        for link in slow_links:
            for name in (link.a, link.b):
                if name not in names:
                    raise UsageError(
                        f"--slow-link {link.a}:{link.b}:{link.factor:g}: the cluster has no node "
                        f"{name}; its nodes are {', '.join(sorted(names))}"
                    )
        pairs = [(a, b) for a in self._devices for b in self._devices if a != b]
        self.path_names = sorted({name for a, b in pairs for name in paths(cluster, [a], [b])})
        self._numbers = {name: number for number, name in enumerate(self.path_names)}

    def hop(self, sender: int, receiver: int) -> Hop:
        """From one rank to another."""
        here, there = self._devices[sender], self._devices[receiver]
        link = self._cluster.link(here, there)
        factor = 1.0
        for slow in self._slow:
            if slow.slows(here.node, there.node):
                factor *= slow.factor
        taken = tuple(self._numbers[name] for name in paths(self._cluster, [here], [there]))
        return Hop(taken, link.bytes_per_s / factor, link.latency_s * factor)

    def ring(self, ranks: Sequence[int], hop_bytes: float, num_passes: int) -> Ring:
        """A collective in which every rank hands `hop_bytes` in all to the next of a ring.

        In each pass a piece of the buffer is handed on from rank to rank, over every hop but one.
        """
        order = sorted(ranks, key=lambda rank: ring_key(self._cluster, self._devices[rank]))
        hops = [
            self.hop(sender, receiver)
            for sender, receiver in zip(order, order[1:] + order[:1], strict=True)
        ]
        return Ring(
            tuple((hop.paths, hop.seconds(hop_bytes)) for hop in hops),
            num_passes * (sum(h.latency_s for h in hops) - min(h.latency_s for h in hops)),
        )

    def all_reduce(self, ranks: Sequence[int], num_bytes: float) -> Ring:
        """A reduce-scatter and an all-gather, each (n - 1) / n of a buffer over every hop."""
        size = len(ranks)
        return self.ring(ranks, 2 * (size - 1) / size * num_bytes, 2)

    def one_pass(self, ranks: Sequence[int], num_bytes: float) -> Ring:
        """A reduce-scatter or an all-gather by itself."""
        size = len(ranks)
        return self.ring(ranks, (size - 1) / size * num_bytes, 1)

    def to_owners(self, ranks: Sequence[int], part_bytes: Sequence[float]) -> Ring:
        """Every rank sends every other one the part that it owns, directly."""
        hops = [
            (self.hop(sender, owner), num_bytes)
            for sender in ranks
            for owner, num_bytes in zip(ranks, part_bytes, strict=True)
            if sender != owner
        ]
        return Ring(
            tuple((hop.paths, hop.seconds(num_bytes)) for hop, num_bytes in hops),
            max(hop.latency_s for hop, _ in hops),
        )

    def broadcast(self, ranks: Sequence[int], root: int, num_bytes: float) -> Ring:
        """From the root along the ring to the last."""
        order = sorted(ranks, key=lambda rank: ring_key(self._cluster, self._devices[rank]))
        first = order.index(root)
        chain = order[first:] + order[:first]
        hops = [self.hop(sender, receiver) for sender, receiver in pairwise(chain)]
        return Ring(
            tuple((hop.paths, hop.seconds(num_bytes)) for hop in hops),
            sum(hop.latency_s for hop in hops),
        )
