"""Seconds of messages: alpha-beta (`latency_s + bytes / bytes_per_s`) on the slowest link, and what
`cost.network.link_terms` adds to it; and the link that a group's collectives wait for.

A link inside a node belongs to each GPU; the path between two nodes is shared by all GPUs of the
node that use it at the same moment, and the lines that it leads over (`Cluster.lines`) by all paths
over them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations
from math import lcm

import numpy as np

from megatron_hetero.cluster.node_links import Link, NodePair
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.network.collectives import all_gather_s
from megatron_hetero.cost.network.lines import line_seconds
from megatron_hetero.cost.network.link_terms import FanIn, transfer_s
from megatron_hetero.cost.network.nics import message_seconds
from megatron_hetero.hashed import value
from megatron_hetero.plan.sharding.stage_ranges import StageRanks, pieces

Tokens = tuple[int, ...] | None
"""Tokens of a sequence on the context-parallel ranks of a stage; None where they are equal."""


@value(frozen=True)
class BoundaryTime:
    """A crossing of a stage boundary in one direction: the link is busy for `serialisation_s`, and
    `latency_s` later the tensor is usable.

    `parts`: (sender, receiver, bytes) of what goes between nodes, sums over pairs of nodes; each is
    the place in its group of the first GPU of its node.
    Where machines have several NICs, the message takes the path between the nodes for `path_s`
    (None: for as long as it lasts), and `nics`: (whether of the senders, the place in its group of
    the first GPU near it, seconds).
    """

    serialisation_s: float
    latency_s: float
    parts: tuple[tuple[int, int, float], ...] = ()
    path_s: float | None = None
    nics: tuple[tuple[bool, int, float], ...] = ()

    @property
    def on_path_s(self) -> float:
        """Return the seconds for which the path between two nodes is taken."""
        return self.serialisation_s if self.path_s is None else self.path_s

    @property
    def total_s(self) -> float:
        """Return the seconds from the first byte sent to the tensor's use."""
        return self.serialisation_s + self.latency_s


def boundary_time(
    cluster: Cluster,
    senders: Sequence[Device],
    receivers: Sequence[Device],
    num_bytes: float,
    sequence_parallel: bool,
    context_parallel: tuple[int, int] = (1, 1),
    tokens: tuple[Tokens, Tokens] = (None, None),
) -> BoundaryTime:
    """Time an activation of `num_bytes` from one stage to the next, each byte sent once.

    Each of the senders holds, and each of the receivers takes, an equal piece; pieces travel in
    parallel inside a node and share the NIC between nodes.  Without sequence parallelism the
    receivers of a TP group then gather its tensor among themselves (part of `latency_s`: it delays
    the receiver, not the link).  A message is as late as it is at a high quantile
    (`Link.jitter_s`): a pipeline waits for the late ones, and its launch counts have to hide them.

    Args:
        senders, receivers: GPUs of the two stages, in rank order.
        num_bytes: of the whole activation.
        sequence_parallel: `--sequence-parallel`, under which nothing is gathered.
        context_parallel: TP groups of the senders and of the receivers, among which they divide
            the sequence as `plan.sharding.stage_ranges` says.
        tokens: of a sequence, of each of these groups, where they are unlike.
    """
    # Pieces from each sender to each receiver.
    here, there = (
        StageRanks(tuple(range(len(devices))), *division)
        for devices, division in zip(
            (senders, receivers), zip(context_parallel, tokens, strict=True), strict=True
        )
    )
    messages = [
        (senders[i], receivers[j], part * num_bytes) for i, j, part in _messages(here, there)
    ]
    # Sum the bytes on every port and path.
    carried: dict[tuple[str, str], float] = {}
    for sender, receiver, size in messages:
        for path in _paths(sender, receiver):
            carried[path] = carried.get(path, 0.0) + size
    # The busiest shared line, path, port or NIC is the message's time on the link.
    parts = _parts(messages, senders, receivers)
    busy_s = max(line_seconds(cluster, between(parts, senders, receivers)).values(), default=0.0)
    latency_s = 0.0
    for sender, receiver, _ in messages:
        link = cluster.path(sender, receiver)
        busiest_bytes = max(carried[path] for path in _paths(sender, receiver))
        fan_in = _num_senders(cluster, messages, sender, receiver) if link.incast else 1
        busy_s = max(busy_s, transfer_s(busiest_bytes, link, fan_in))
        latency_s = max(latency_s, link.latency_s + link.jitter_s)
    path_s, nics = busy_s, message_seconds(cluster, messages)
    busy_s = max(busy_s, *nics.values()) if nics else busy_s
    # Without sequence parallelism the receivers gather the whole tensor.
    gather_s = 0.0
    width = there.width
    if width > 1 and not sequence_parallel:
        gather_s = max(
            all_gather_s(num_bytes * there.part(rank), width, slowest_link(cluster, group))
            for rank, group in enumerate(groups_of(receivers, width))
        )
    # With NICs, the message takes each of them for its own time.
    if not nics:
        return BoundaryTime(busy_s, latency_s + gather_s, parts)
    near = {True: [*map(cluster.nic_of, senders)], False: [*map(cluster.nic_of, receivers)]}
    placed = tuple((sends, near[sends].index(nic), s) for (nic, sends), s in nics.items())
    return BoundaryTime(busy_s, latency_s + gather_s, parts, path_s, placed)


def _parts(
    messages: Sequence[tuple[Device, Device, float]],
    senders: Sequence[Device],
    receivers: Sequence[Device],
) -> tuple[tuple[int, int, float], ...]:
    """Build `BoundaryTime.parts`."""
    # The place of the first GPU of a node names the node, whatever cluster the message is priced
    # on.
    here = [device.node for device in senders]
    there = [device.node for device in receivers]
    found: dict[tuple[int, int], float] = {}
    for sender, receiver, size in messages:
        if sender.node != receiver.node:
            place = here.index(sender.node), there.index(receiver.node)
            found[place] = found.get(place, 0.0) + size
    return tuple((i, j, size) for (i, j), size in found.items())


def between(
    parts: Iterable[tuple[int, int, float]],
    senders: Sequence[Device],
    receivers: Sequence[Device],
) -> Iterator[tuple[NodePair, float]]:
    """Translate `BoundaryTime.parts` to the names of the nodes."""
    return (((senders[i].node, receivers[j].node), size) for i, j, size in parts)


def _num_senders(
    cluster: Cluster,
    messages: Sequence[tuple[Device, Device, float]],
    sender: Device,
    receiver: Device,
) -> int:
    """Count the senders to the receiver's port or, from other nodes, to the node's NIC, at the time
    of a message."""
    is_inside = sender.node == receiver.node
    # Who sends to the same port, or to the same NIC, at this time.
    heard = [a for a, b, _ in messages if (b == receiver if is_inside else b.node == receiver.node)]
    link = cluster.link(sender, receiver)
    return FanIn(cluster, {*heard, receiver}).num_senders(sender.node, receiver.node, link)


def groups_of(devices: Sequence[Device], width: int) -> Iterator[Sequence[Device]]:
    """Yield the TP groups of a stage, one for each context-parallel rank."""
    for first in range(0, len(devices), width):
        yield devices[first : first + width]


def _messages(here: StageRanks, there: StageRanks) -> Iterator[tuple[int, int, float]]:
    """Yield (sender, receiver, part of the tensor) of each pair that has something to exchange."""
    num_senders, num_receivers = len(here.ranks), len(there.ranks)
    # Equal ranges on both sides: the overlap of two ranges.
    if here.context == there.context == 1:
        for i in range(num_senders):
            for j in range(num_receivers):
                if (part := _overlap(i, num_senders, j, num_receivers)) > 0:
                    yield i, j, part
        return
    if here == there and here.tokens is None:
        for i in range(num_senders):  # each has what its like takes
            yield i, i, 1 / num_senders
        return
    # So many elements that no range of either stage is cut short.
    whole = 4 * num_senders * num_receivers
    whole *= lcm(*(sum(side.tokens) for side in (here, there) if side.tokens))
    for i in range(num_senders):
        # Parts in elements, by receiver, summed over both chunks of a rank.
        parts: dict[int, int] = {}
        for piece in pieces(whole, here, i, there):
            parts[piece.peer] = parts.get(piece.peer, 0) + piece.stop - piece.start
        for j, size in parts.items():
            yield i, j, size / whole


def _overlap(i: int, num_senders: int, j: int, num_receivers: int) -> float:
    """Return the part of a tensor that sender i holds and receiver j takes."""
    # In units of 1 / (senders * receivers) of the tensor.
    stop = min((i + 1) * num_receivers, (j + 1) * num_senders)
    start = max(i * num_receivers, j * num_senders)
    return max(0, stop - start) / (num_senders * num_receivers)


def _paths(sender: Device, receiver: Device) -> tuple[tuple[str, str], ...]:
    """Return the resources that a message occupies: inside a node both GPUs' links, between nodes
    their one NIC."""
    if sender.node == receiver.node:
        return (sender.name, "out"), (receiver.name, "in")
    return ((sender.node, receiver.node),)


def slowest_link(cluster: Cluster, devices: Sequence[Device]) -> Link:
    """Return the least bandwidth and the most latency between any two of a group."""
    # One node: its own link, whoever is in the group.
    if len({device.node for device in devices}) == 1:
        return cluster.node_by_name[devices[0].node].link
    if cluster.has_nics:
        return worst_link([cluster.link(a, b) for a, b in permutations(devices, 2)])
    classes = cluster.link_classes
    # Links come in few classes, so classes are compared in place of pairs of GPUs.
    counts = Counter(classes.node_number[device.node] for device in devices)
    nodes = [*counts]
    of_pairs = classes.of_pairs[np.ix_(nodes, nodes)]
    # A node with a single member of the group takes no link inside.
    is_path = np.ones_like(of_pairs, dtype=bool)
    np.fill_diagonal(is_path, [count > 1 for count in counts.values()])
    kinds = np.flatnonzero(np.bincount(of_pairs[is_path]))
    return worst_link([classes.links[kind] for kind in kinds.tolist()])


def worst_link(links: Sequence[Link]) -> Link:
    """Return the least bandwidths and the most latency of some links, for rings, in which nobody
    hears from two."""
    # Group sizes for which any of the links has a rate of its own.
    sizes = sorted({size for link in links for size, _ in link.group_bytes_per_s})
    # Groups over NVLink wait for the one with the least of it; a link without tables has no terms.
    least = min(links, key=lambda link: link.bytes_per_s)
    return Link(
        min(k.bytes_per_s for k in links),
        max(k.latency_s for k in links),
        reduce_bytes_per_s=min(k.reduce_bytes_per_s for k in links),
        group_bytes_per_s=tuple((n, min(k.ring_bytes_per_s(n) for k in links)) for n in sizes),
        nvlink=least.nvlink if all(k.nvlink for k in links) else None,
    )
