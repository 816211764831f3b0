"""Seconds of communication: alpha-beta (`latency_s + bytes / bytes_per_s`) on the slowest link.

A link inside a node belongs to each GPU; the path between two nodes is one network card, shared by
all GPUs of the node that use it at the same moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    receiver, not the link).
    """
    link = cluster.link(senders[0], receivers[0])
    if senders[0].node == receivers[0].node:
        busiest_bytes = num_bytes / min(len(senders), len(receivers))
    else:
        busiest_bytes = num_bytes
    gather_s = 0.0
    if len(receivers) > 1 and not sequence_parallel:
        gather_s = ring_all_gather_s(
            num_bytes, len(receivers), cluster.link(receivers[0], receivers[1])
        )
    return BoundaryTime(busiest_bytes / link.bytes_per_s, link.latency_s + gather_s)


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
