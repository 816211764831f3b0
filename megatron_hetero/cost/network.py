"""Seconds of communication: alpha-beta (`latency_s + bytes / bytes_per_s`) on the slowest link.

A link inside a node belongs to each GPU; the path between two nodes is one network card, shared by
all GPUs of the node that use it at the same moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from megatron_hetero.cluster.spec import Cluster, Device, Link


@dataclass(frozen=True)
class BoundaryTime:
    """One crossing of a stage boundary in one direction: the link is busy for `serialisation_s`,
    the tensor is usable `latency_s` after that."""

    serialisation_s: float
    latency_s: float

    @property
    def total_s(self) -> float:
        """From the first byte sent to the tensor's use."""
        return self.serialisation_s + self.latency_s


def ring_all_reduce_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """2 (n - 1) rounds of 1/n of the buffer over the slowest link of the ring."""
    return 2 * ring_all_gather_s(num_bytes, num_ranks, link)


def ring_all_gather_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """(n - 1) rounds of 1/n of the whole buffer; a reduce-scatter takes the same time."""
    if num_ranks == 1:
        return 0.0
    rounds = num_ranks - 1
    return rounds * (link.latency_s + num_bytes / num_ranks / link.bytes_per_s)


def boundary_time(
    cluster: Cluster,
    senders: Sequence[Device],
    receivers: Sequence[Device],
    num_bytes: float,
    sequence_parallel: bool,
) -> BoundaryTime:
    """Carry an activation of `num_bytes` from one TP group to the next, each byte once.

    Each of the senders holds, and each of the receivers takes, an equal piece; pieces travel in
    parallel inside a node and share the card between nodes.  Without sequence parallelism the
    receivers then gather the whole tensor among themselves (part of `latency_s`: it delays the
    receiver, not the link).  A message is as late as it is at a high quantile (`Link.jitter_s`): a
    pipeline waits for the late ones, and its launch counts have to hide them.
    """
    pieces = [
        (sender, receiver, overlap * num_bytes)
        for i, sender in enumerate(senders)
        for j, receiver in enumerate(receivers)
        if (overlap := _overlap(i, len(senders), j, len(receivers))) > 0
    ]
    carried: dict[tuple[str, str], float] = {}
    for sender, receiver, size in pieces:
        for path in _paths(sender, receiver):
            carried[path] = carried.get(path, 0.0) + size
    busy_s = latency_s = 0.0
    for sender, receiver, _ in pieces:
        link = cluster.link(sender, receiver)
        busiest_bytes = max(carried[path] for path in _paths(sender, receiver))
        busy_s = max(busy_s, busiest_bytes / link.bytes_per_s)
        latency_s = max(latency_s, link.latency_s + link.jitter_s)
    gather_s = 0.0
    if len(receivers) > 1 and not sequence_parallel:
        gather_s = ring_all_gather_s(num_bytes, len(receivers), slowest_link(cluster, receivers))
    return BoundaryTime(busy_s, latency_s + gather_s)


def _overlap(i: int, num_senders: int, j: int, num_receivers: int) -> float:
    """The part of a tensor that sender i holds and receiver j takes."""
    stop = min((i + 1) * num_receivers, (j + 1) * num_senders)
    start = max(i * num_receivers, j * num_senders)
    return max(0, stop - start) / (num_senders * num_receivers)


def _paths(sender: Device, receiver: Device) -> tuple[tuple[str, str], ...]:
    """What a message takes up: inside a node both GPUs' links, between nodes their one card."""
    if sender.node == receiver.node:
        return (sender.name, "out"), (receiver.name, "in")
    return ((sender.node, receiver.node),)


def slowest_link(cluster: Cluster, devices: Sequence[Device]) -> Link:
    """Least bandwidth and most latency between any two of a group."""
    if len({device.node for device in devices}) == 1:
        return cluster.node_by_name[devices[0].node].link
    links = [cluster.link(a, b) for a, b in permutations(devices, 2)]
    return Link(min(k.bytes_per_s for k in links), max(k.latency_s for k in links))


@dataclass(frozen=True)
class TensorParallelTimes:
    """Communication inside one TP group for one micro-batch, seconds."""

    layer_forward_s: float
    layer_backward_s: float
    embedding_s: float
    head_forward_s: float
    head_backward_s: float


def tensor_parallel_times(
    num_bytes: float, width: int, link: Link | None, sequence_parallel: bool, num_tokens: int
) -> TensorParallelTimes:
    """Collectives of Megatron's tensor-parallel layers on an activation of `num_bytes`.

    A layer takes two all-reduces forward and two backward (Shoeybi et al. 2019).  With sequence
    parallelism each becomes a reduce-scatter and an all-gather of the same volume, and backward
    gathers the inputs of both column-parallel products again (Korthikanti et al. 2022).
    The cross entropy all-reduces three fp32 values of each token.
    """
    if width == 1 or link is None:
        return TensorParallelTimes(0.0, 0.0, 0.0, 0.0, 0.0)
    reduce_s = ring_all_reduce_s(num_bytes, width, link)
    gather_s = ring_all_gather_s(num_bytes, width, link)
    loss_s = 3 * ring_all_reduce_s(4.0 * num_tokens, width, link)
    if sequence_parallel:
        return TensorParallelTimes(
            2 * reduce_s, 2 * reduce_s + 2 * gather_s, gather_s, gather_s + loss_s, reduce_s
        )
    return TensorParallelTimes(2 * reduce_s, 2 * reduce_s, reduce_s, loss_s, reduce_s)
