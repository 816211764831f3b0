"""Seconds of the embedding and the head on a tensor-parallel group, by the analytic model."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cost.network.collectives import end_exchanges
from megatron_hetero.cost.work.compute import PassTimes, slowest
from megatron_hetero.cost.work.ends import embedding_times, head_times, tied_gradient_s
from megatron_hetero.cost.work.gauge import Modelled
from megatron_hetero.cost.work.profile import Piece
from megatron_hetero.cost.work.under_products import Member, exchanged_bytes, head_exchange_s
from megatron_hetero.model.spec import Workload


def modelled_end(
    workload: Workload, piece: Piece, members: Sequence[Member], link: Link, vocab_rows: int
) -> Modelled:
    """Time an end of the model as its slowest member computes it, and the exchanges of the group.

    Args:
        piece: the embedding or the head.
        members: type and share of each GPU of the group.
        link: the slowest inside the group.
        vocab_rows: rows of the padded vocabulary.
    """
    model, training = workload.model, workload.training
    # Tokens of one group; all members see the same ones.
    width, num_tokens = members[0][1].width, members[0][1].num_tokens(model, training)
    # Each member prices a vocabulary of which an even share is what it holds.
    of = embedding_times if piece == "embedding" else head_times
    computing = slowest(
        [
            of(workload, gpu, width, share.rows_as_if_even(model, vocab_rows), None, num_tokens)
            for gpu, share in members
        ]
    )
    if width == 1:
        return Modelled(computing, PassTimes(0.0, 0.0))
    num_bytes = exchanged_bytes(workload, members)
    ends = num_bytes, width, link, training.sequence_parallel, num_tokens
    embedding_s, head_s = end_exchanges(*ends)
    if piece == "embedding":
        return Modelled(computing, PassTimes(embedding_s, 0.0))
    backward_s = head_exchange_s(workload, members, num_bytes, link, vocab_rows)
    return Modelled(computing, PassTimes(head_s, backward_s))


def group_tied_s(workload: Workload, members: Sequence[Member], vocab_rows: int) -> float:
    """Time what a stage with both ends of a tied model does more backward (`tied_gradient_s`), on
    its slowest member; arguments as of `modelled_end`."""
    return max(
        tied_gradient_s(
            workload, gpu, share.width, share.rows_as_if_even(workload.model, vocab_rows), None
        )
        for gpu, share in members
    )
