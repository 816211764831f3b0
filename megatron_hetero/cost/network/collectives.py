"""Seconds of collectives of a group: by measured constants over NVLink (`cluster.nvlink`), and as
rounds of a ring over any other link.

NCCL chooses between protocols.  Small buffers are sent with flags beside the data (LL, LL128):
a step takes about a microsecond, at a part of the bandwidth.  Large ones (Simple) wait for whole
chunks: the first arrive late, the rest at full speed.  The quicker one counts, as NCCL means to
choose.  In steps and bytes both count as rings, whatever algorithm NCCL takes.
"""

from __future__ import annotations

from megatron_hetero.cluster.node_links import Link, NvlinkCurve
from megatron_hetero.cost.network.link_terms import adding_s


def ring_all_reduce_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Time a ring all-reduce: 2 (n - 1) rounds of 1/n of the buffer over the slowest link of the
    ring.

    Args:
        num_bytes: of the whole buffer.
        num_ranks: in the ring.
        link: the slowest of the ring.

    >>> ring_all_reduce_s(4e9, 4, Link(bytes_per_s=1e9, latency_s=0.0))  # 6 rounds of 1 s
    6.0
    """
    gather_s = ring_all_gather_s(num_bytes, num_ranks, link)
    return ring_reduce_scatter_s(num_bytes, num_ranks, link) + gather_s


def ring_reduce_scatter_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Time a ring reduce-scatter: the rounds of an all-gather, and in each round every rank adds
    what it has received.

    Args:
        num_bytes: of the whole buffer.
        num_ranks: in the ring.
        link: the slowest of the ring.
    """
    return ring_all_gather_s(num_bytes, num_ranks, link) + _added_s(num_bytes, num_ranks, link)


def ring_all_gather_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Time a ring all-gather: (n - 1) rounds of 1/n of the whole buffer.

    Args:
        num_bytes: of the whole buffer.
        num_ranks: in the ring.
        link: the slowest of the ring.
    """
    # Nobody to gather from.
    if num_ranks == 1:
        return 0.0
    rounds = num_ranks - 1
    return rounds * (link.latency_s + num_bytes / num_ranks / link.ring_bytes_per_s(num_ranks))


def all_reduce_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Time an all-reduce.

    Args:
        num_bytes: of the whole buffer.
        num_ranks: in the group.
        link: the slowest of the group.
    """
    if link.nvlink is None or num_ranks == 1:
        return ring_all_reduce_s(num_bytes, num_ranks, link)
    moved_s = _quicker_s(link.nvlink, num_bytes, num_ranks, link, num_passes=2)
    return moved_s + _added_s(num_bytes, num_ranks, link)


def all_gather_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Time an all-gather.

    Args:
        num_bytes: of the whole buffer.
        num_ranks: in the group.
        link: the slowest of the group.
    """
    if link.nvlink is None or num_ranks == 1:
        return ring_all_gather_s(num_bytes, num_ranks, link)
    return _quicker_s(link.nvlink, num_bytes, num_ranks, link, num_passes=1)


def reduce_scatter_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Time a reduce-scatter.

    Args:
        num_bytes: of the whole buffer.
        num_ranks: in the group.
        link: the slowest of the group.
    """
    if link.nvlink is None or num_ranks == 1:
        return ring_reduce_scatter_s(num_bytes, num_ranks, link)
    moved_s = _quicker_s(link.nvlink, num_bytes, num_ranks, link, num_passes=1)
    return moved_s + _added_s(num_bytes, num_ranks, link)


def all_to_all_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Time an all-to-all of equal parts, which NCCL sends side by side.

    Args:
        num_bytes: on each rank, with the part that stays there.
        num_ranks: in the group.
        link: the slowest of the group.
    """
    sent = num_bytes * (num_ranks - 1) / num_ranks
    return link.latency_s + sent / link.ring_bytes_per_s(num_ranks) if sent else 0.0


def _added_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Time the adding of a reduction: each rank adds (n - 1) / n of the buffer in all rounds
    together.  Over NVLink the adding hides, unless the file says otherwise."""
    return adding_s((num_ranks - 1) / num_ranks * num_bytes, 1, link)


def _quicker_s(
    curve: NvlinkCurve, num_bytes: float, num_ranks: int, link: Link, num_passes: int
) -> float:
    """Time a collective by the quicker protocol, without adding.

    Args:
        curve: constants of the link.
        num_bytes: of the whole buffer.
        num_ranks: in the group.
        link: the slowest of the group.
        num_passes: times that the buffer goes round: two in an all-reduce.
    """
    # Steps and bytes of a ring; an all-reduce goes round twice.
    steps = num_passes * (num_ranks - 1)
    sent_bytes = steps * num_bytes / num_ranks
    small_s = curve.small_call_s + steps * curve.small_step_s
    small_s += sent_bytes / (curve.small_part * link.bytes_per_s)
    # A group's own bandwidth, where the file has one, is what it reaches.
    bytes_per_s = link.ring_bytes_per_s(num_ranks)
    if bytes_per_s == link.bytes_per_s:
        bytes_per_s *= curve.group_part(num_ranks)
    if num_passes == 1:
        bytes_per_s *= curve.gather_part
    large_s = curve.large_call_s + steps * curve.large_step_s + sent_bytes / bytes_per_s
    return min(small_s, large_s)


def end_exchanges(
    num_bytes: float, width: int, link: Link, sequence_parallel: bool, num_tokens: int
) -> tuple[float, float]:
    """Time the collectives of the model's ends in the forward pass: of the embedding, which sums
    its output, and of the head with the loss.

    The cross entropy all-reduces three fp32 values of each token.  With sequence parallelism the
    sum is scattered, and the head gathers its input (Korthikanti et al. 2022).

    Args:
        num_bytes: of the activation of one micro-batch.
        width: of the tensor-parallel group.
        link: the slowest inside the group.
        sequence_parallel: `--sequence-parallel`.
        num_tokens: of a micro-batch, for the cross entropy.
    """
    loss_s = 3 * all_reduce_s(4.0 * num_tokens, width, link)
    if not sequence_parallel:
        return all_reduce_s(num_bytes, width, link), loss_s
    gather_s = all_gather_s(num_bytes, width, link)
    return reduce_scatter_s(num_bytes, width, link), gather_s + loss_s


def context_parallel_times(
    num_bytes: float, num_ranks: int, link: Link | None, is_ring: bool
) -> tuple[float, float]:
    """Time the exchange of keys and values among all ranks of a stage, forward and backward.

    A ring (Transformer Engine's `--cp-comm-type p2p`; Liu et al. 2023) hands the blocks on from
    rank to rank, backward once more and their gradients with them.  Where they are gathered
    (`runtime.parallel.context_attention`) they are kept, and backward only reduces their gradients.

    Args:
        num_ranks: context-parallel ranks of the stage.
        link: the slowest between them; None of one rank.
        is_ring: blocks go round in a ring; else they are gathered.
        num_bytes: keys and values of a layer for the whole sequence, as one rank of the TP group
            has them.
    """
    if num_ranks == 1 or link is None:
        return 0.0, 0.0
    if not is_ring:
        gathered_s = all_gather_s(num_bytes, num_ranks, link)
        return gathered_s, reduce_scatter_s(num_bytes, num_ranks, link)
    # Blocks travel as messages, not as NCCL's collectives.
    once_s = ring_all_gather_s(num_bytes, num_ranks, link)
    return once_s, once_s + ring_reduce_scatter_s(num_bytes, num_ranks, link)
