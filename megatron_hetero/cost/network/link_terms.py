"""Costs of a link beside latency and bandwidth: the two terms of GenModel (arXiv 2409.04202).

GenModel prices a collective at `A alpha + B beta + C gamma + D delta + max(w - w_t, 0) B eps`: A
rounds, B bytes on the critical link, C additions, D memory accesses of a rank, w senders to one
receiver at once.  alpha is a link's latency, beta one over its bandwidth.  `adding_s` is
C gamma + D delta at one rate, that of the memory, for which adding waits on GPUs and CPUs alike.
`transfer_s` is B beta with the last term, of the path from one sender: eps is a multiple
(`Incast.slowdown`) of beta, 1 from one sender on where a NIC is shared fairly by all who send to
it.  Links that do not say either cost neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megatron_hetero.cluster.node_links import Incast, Link
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster


def adding_s(num_bytes: float, num_received: int, link: Link) -> float:
    """Return the seconds in which a rank adds `num_received` pieces of `num_bytes` each to its own
    piece: a single pass reads all pieces and writes the sum.

    A round of a ring adds one piece, 3 accesses a byte: (n - 1) / n of the buffer in (n - 1)
    rounds.  An owner adds (n - 1) at once: n + 1 accesses, for an n-th of the buffer.

    Args:
        num_bytes: of one piece.
        num_received: pieces added at once.
        link: its `reduce_bytes_per_s` is the rate of memory traffic.
    """
    return (num_received + 2) * num_bytes / link.reduce_bytes_per_s


def transfer_s(num_bytes: float, link: Link, num_senders: int = 1) -> float:
    """Return the seconds for which bytes occupy a path to a receiver with `num_senders` senders at
    once.

    Args:
        num_bytes: sent over the path.
        num_senders: that the receiver hears from at once, this one included.

    >>> from megatron_hetero.cluster.node_links import Incast
    >>> transfer_s(1e9, Link(1e9, 0.0, incast=Incast(num_senders=1, slowdown=1.0)), 3)
    3.0
    """
    # Senders beyond those that a receiver hears at full speed slow every one of them.
    seconds = num_bytes / link.bytes_per_s
    if link.incast is None:
        return seconds
    too_many = max(0, num_senders - link.incast.num_senders)
    return seconds * (1 + link.incast.slowdown * too_many)


class FanIn:
    """Numbers of senders to a receiver at once, where each of some GPUs sends to all the rest.

    What other nodes send arrives on a node's NIC, from one NIC each: those count together whose
    links have the same `incast`.  What a GPU's neighbours send arrives on its own port, from a port
    each.
    """

    def __init__(self, cluster: Cluster, devices: Iterable[Device]) -> None:
        self._links = cluster.node_links
        self._num_ports = Counter(device.node for device in devices)
        self._num_cards: dict[str, Counter[Incast | None]] = {}

    def num_senders(self, here: str, there: str, link: Link) -> int:
        """Count the senders to a receiver on node `there` at the time of a sender on node `here`,
        itself included.

        Args:
            here, there: names of the sender's and the receiver's node.
            link: between them; without `incast` one sender counts.
        """
        # Without incast the number does not matter.
        if link.incast is None:
            return 1
        # Neighbours: all others of the node, on ports of their own.
        if here == there:
            return self._num_ports[here] - 1
        # From outside: one card of each other node, by kind of incast.
        if there not in self._num_cards:
            nodes = (node for node in self._num_ports if node != there)
            self._num_cards[there] = Counter(self._links[node, there].incast for node in nodes)
        return self._num_cards[there][link.incast]
