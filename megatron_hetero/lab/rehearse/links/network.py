"""The cluster's links between the ranks of a rehearsal.

The route of a message comes from the cluster's description only; no code is shared with the
simulation, so that the two may be compared link by link (`rehearsal.LineLoad`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, prod

from megatron_hetero.cluster.names import machine_of
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import UsageError
from megatron_hetero.exchange.plan import ExchangePlan


@dataclass(frozen=True)
class SlowLink:
    """A fault: messages between nodes `a` and `b` are `factor` times slower, both ways.

    Equal nodes mean the links inside one node.
    """

    a: str
    b: str
    factor: float

    def slows(self, here: str, there: str) -> bool:
        """Tell if the fault is between these two nodes."""
        return {self.a, self.b} == {here, there}


@dataclass(frozen=True)
class RankHop:
    """Route from rank to rank, with the cost.

    `paths` are (numbers of paths, their bandwidth in bytes/s); paths of equal bandwidth stand
    together.
    """

    paths: tuple[tuple[tuple[int, ...], float], ...]
    latency_s: float

    def taken(self, num_bytes: float) -> tuple[tuple[tuple[int, ...], float], ...]:
        """Return the paths, and the seconds for which a message takes each."""
        return tuple((numbers, num_bytes / bytes_per_s) for numbers, bytes_per_s in self.paths)


@dataclass(frozen=True)
class CollectiveHops:
    """Hops of a collective, each with the seconds for which the paths are taken.

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
        names = set(cluster.machines)
        for link in slow_links:
            for name in (link.a, link.b):
                if name not in names:
                    raise UsageError(
                        f"--slow-link {link.a}:{link.b}:{link.factor:g}: the cluster has no node "
                        f"{name}; its nodes are {', '.join(sorted(names))}"
                    )
        # Every path that any two ranks use, numbered for the board.
        pairs = [(a, b) for a in self._devices for b in self._devices if a != b]
        self.path_names = sorted({name for a, b in pairs for name, _ in self._speeds(a, b)})
        self.between_nodes = frozenset(
            name for a, b in pairs if a.node != b.node for name, _ in self._speeds(a, b)
        )
        self._numbers = {name: number for number, name in enumerate(self.path_names)}

    def hop(self, sender: int, receiver: int) -> RankHop:
        """Return the hop from one rank to another."""
        here, there = self._devices[sender], self._devices[receiver]
        # Paths of one bandwidth take a message for equally long.
        ways: dict[float, list[int]] = {}
        for name, bytes_per_s in self._speeds(here, there):
            if bytes_per_s < inf:
                ways.setdefault(bytes_per_s, []).append(self._numbers[name])
        paths = tuple((tuple(numbers), bytes_per_s) for bytes_per_s, numbers in ways.items())
        return RankHop(paths, self._cluster.link(here, there).latency_s * self._factor(here, there))

    def _factor(self, here: Device, there: Device) -> float:
        return prod(
            slow.factor
            for slow in self._slow
            if slow.slows(machine_of(here.node), machine_of(there.node))
        )

    def _speeds(self, here: Device, there: Device) -> list[tuple[str, float]]:
        """Return the name and bandwidth of everything on the route of a message.

        Inside a node these are the ports of the two GPUs; otherwise the path between the two nodes,
        every line on it, and of machines with several NICs those near the GPUs.  The path comes
        first, infinite where NICs are all that a message waits for.
        """
        path = self._cluster.path(here, there)
        bytes_per_s = path.bytes_per_s / self._factor(here, there)
        # Inside a node no NIC and no line takes part.
        if here.node == there.node:
            return [(f"{here.name} out", bytes_per_s), (f"{there.name} in", bytes_per_s)]
        lines = self._cluster.lines_beside_nics(here.node, there.node)
        # A path whose bandwidth is that of its NICs must not count twice.
        has_limit = not self._cluster.is_path_of_nics(here.node, there.node)
        own = (f"{here.node} -> {there.node}", bytes_per_s if has_limit else inf)
        slower = self._factor(here, there)
        nics = [
            (
                f"{self._cluster.nic_of(end)} {way}",
                self._cluster.nic_bytes_per_s(end, path) / slower,
            )
            for end, way in ((here, "out"), (there, "in"))
            if self._cluster.nic_number(end) is not None
        ]
        return [own, *((line.name, line.bytes_per_s) for line in lines), *nics]

    def ring(self, ranks: Sequence[int], hop_bytes: float, num_passes: int) -> CollectiveHops:
        """Build a collective in which every rank sends `hop_bytes` to the next rank of a ring.

        In each pass a piece of the buffer travels from rank to rank, over every hop but one.  A
        library makes such a ring out of several, which leave and enter a node beside each of its
        ranks in turn: NICs near more ranks carry more.
        """
        order = self._around(ranks)
        pairs = [*zip(order, order[1:] + order[:1], strict=True)]
        hops = [self.hop(sender, receiver) for sender, receiver in pairs]
        taken = [part for hop in hops for part in hop.taken(hop_bytes)]
        if self._cluster.has_nics:
            taken = [part for pair in pairs for part in self._taken_by_all(*pair, ranks, hop_bytes)]
        return CollectiveHops(
            tuple(taken),
            num_passes * (sum(h.latency_s for h in hops) - min(h.latency_s for h in hops)),
        )

    def _taken_by_all(
        self, sender: int, receiver: int, ranks: Sequence[int], num_bytes: float
    ) -> Iterator[tuple[tuple[int, ...], float]]:
        """Yield the seconds of a hop on the lines between two nodes, and on the NICs near any of
        `ranks` there; inside a node on the hop's own route."""
        here, there = self._devices[sender], self._devices[receiver]
        if here.node == there.node:
            yield from self.hop(sender, receiver).taken(num_bytes)
            return
        # Lines between the nodes carry the whole hop; NICs near any rank carry their part.
        nics = {f"{self._cluster.nic_of(here)} out", f"{self._cluster.nic_of(there)} in"}
        for name, bytes_per_s in self._speeds(here, there):
            if name not in nics and bytes_per_s < inf:
                yield (self._numbers[name],), num_bytes / bytes_per_s
        for end, is_sender in ((here, True), (there, False)):
            own = [d for d in (self._devices[rank] for rank in ranks) if d.node == end.node]
            for device in own:
                pair = (device, there) if is_sender else (here, device)
                port = f"{self._cluster.nic_of(device)} {'out' if is_sender else 'in'}"
                for name, bytes_per_s in self._speeds(*pair):
                    if name == port:
                        yield (self._numbers[name],), num_bytes / len(own) / bytes_per_s

    def _around(self, ranks: Sequence[int]) -> list[int]:
        """Sort ranks node by node, in the order of each node's first rank.

        A library that knows ranks and hosts, but not the planner's sites, builds its ring in this
        order.
        """
        # The lowest rank of each node.
        first: dict[str, int] = {}
        for rank in sorted(ranks):
            first.setdefault(self._devices[rank].node, rank)
        return sorted(ranks, key=lambda rank: (first[self._devices[rank].node], rank))

    def all_reduce(self, ranks: Sequence[int], num_bytes: float) -> CollectiveHops:
        """Build a reduce-scatter and an all-gather, each (n - 1) / n of a buffer a hop."""
        size = len(ranks)
        return self.ring(ranks, 2 * (size - 1) / size * num_bytes, 2)

    def one_pass(self, ranks: Sequence[int], num_bytes: float) -> CollectiveHops:
        """Build a reduce-scatter or an all-gather by itself."""
        size = len(ranks)
        return self.ring(ranks, (size - 1) / size * num_bytes, 1)

    def to_owners(self, ranks: Sequence[int], part_bytes: Sequence[float]) -> CollectiveHops:
        """Build direct messages from every rank to each owner of a part."""
        # Every rank sends each owner that owner's part, all at once.
        hops = [
            (self.hop(sender, owner), num_bytes)
            for sender in ranks
            for owner, num_bytes in zip(ranks, part_bytes, strict=True)
            if sender != owner
        ]
        return CollectiveHops(
            tuple(taken for hop, num_bytes in hops for taken in hop.taken(num_bytes)),
            max(hop.latency_s for hop, _ in hops),
        )

    def rounds(
        self, ranks: Sequence[int], plan: ExchangePlan, bytes_per_element: float
    ) -> CollectiveHops:
        """Build the messages of an exchange plan; a round waits for the one before it.

        A node sends and receives no faster than its fastest link in the exchange, on all its paths
        together.
        """
        # Bytes between each pair, and the latency of each round.
        latest_s: dict[int, float] = {}
        sent: dict[tuple[int, int], float] = {}
        for t in plan.transfers():
            ends = ranks[t.source], ranks[t.destination]
            sent[ends] = sent.get(ends, 0.0) + (t.stop - t.start) * bytes_per_element
            latency_s = self.hop(*ends).latency_s
            latest_s[t.round] = max(latest_s.get(t.round, 0.0), latency_s)
        # Bytes of each path and each node's card, and the card's fastest link.
        carried: dict[tuple[str, str], float] = {}
        cards: dict[tuple[str, int], tuple[float, float]] = {}
        for (one, other), num_bytes in sent.items():
            here, there = self._devices[one], self._devices[other]
            if here.node == there.node:
                continue
            speed = self._speeds(here, there)[0][1]
            carried[here.node, there.node] = carried.get((here.node, there.node), 0.0) + num_bytes
            for end in ((here.node, 0), (there.node, 1)):
                total, fastest = cards.get(end, (0.0, 0.0))
                cards[end] = total + num_bytes, max(fastest, speed)
        # Inside a node its own route; between nodes the path, the cards or the lines, the slowest.
        hops: list[tuple[tuple[int, ...], float]] = []
        for (one, other), num_bytes in sent.items():
            here, there = self._devices[one], self._devices[other]
            own, *lines = self._speeds(here, there)
            if here.node == there.node:
                hops += self.hop(one, other).taken(num_bytes)
                continue
            part = num_bytes / carried[here.node, there.node]
            ends_s = [total / speed for total, speed in (cards[here.node, 0], cards[there.node, 1])]
            seconds = max(num_bytes / own[1], *(part * end_s for end_s in ends_s))
            if own[1] < inf:
                hops.append(((self._numbers[own[0]],), seconds))
            hops += [((self._numbers[line],), num_bytes / speed) for line, speed in lines]
        return CollectiveHops(tuple(hops), sum(latest_s.values()))

    def broadcast(self, ranks: Sequence[int], root: int, num_bytes: float) -> CollectiveHops:
        """Build a broadcast from the root along the ring to the last rank."""
        order = self._around(ranks)
        first = order.index(root)
        # From the root on around the ring; the last hop back is not needed.
        chain = order[first:] + order[:first]
        hops = [self.hop(sender, receiver) for sender, receiver in pairwise(chain)]
        return CollectiveHops(
            tuple(taken for hop in hops for taken in hop.taken(num_bytes)),
            sum(hop.latency_s for hop in hops),
        )
