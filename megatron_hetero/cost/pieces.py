"""Times of the model's pieces on one tensor-parallel group, modelled or measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hetero.cluster.spec import GpuType, Link
from megatron_hetero.cost.compute import (
    ELEMENT_BYTES,
    PassTimes,
    embedding_times,
    group_layer_times,
    head_times,
    slowest,
)
from megatron_hetero.cost.network import tensor_parallel_times
from megatron_hetero.cost.profile import Piece, Profile
from megatron_hetero.cost.share import TensorShare, even_share_or_none
from megatron_hetero.model.spec import Workload

Member = tuple[GpuType, TensorShare]
"""A GPU of a group and what it holds."""


@dataclass(frozen=True)
class PieceTimes:
    """Embedding, one decoder layer and head at one width, TP communication included.

    `communication` is the part of `layer` that is communication (zero when it was measured whole).
    """

    embedding: PassTimes
    layer: PassTimes
    head: PassTimes
    communication: PassTimes
    measured: bool

    def stage(self, num_layers: int, first: bool, last: bool) -> PassTimes:
        """Times of `num_layers` layers with the ends of the model that the stage holds."""
        times = self.layer.times(num_layers)
        times = times + self.embedding if first else times
        return times + self.head if last else times


def activation_bytes(workload: Workload) -> int:
    """Size of the tensor that crosses a stage boundary for one micro-batch."""
    model, training = workload.model, workload.training
    tokens = training.micro_batch_size * model.seq_length
    return tokens * model.hidden_size * ELEMENT_BYTES[training.precision]


def price_pieces(
    workload: Workload,
    profile: Profile | None,
    members: Sequence[Member],
    link: Link,
    vocab_rows: int,
) -> PieceTimes:
    """Times of the model's pieces on a group of GPUs.

    Args:
        members: type and share of each GPU, in rank order.
        link: the slowest among them.
    """
    training = workload.training
    width = members[0][1].width
    comm = tensor_parallel_times(
        activation_bytes(workload),
        width,
        link if width > 1 else None,
        training.sequence_parallel,
        training.micro_batch_size * workload.model.seq_length,
    )
    layer_comm = PassTimes(comm.layer_forward_s, comm.layer_backward_s)
    if training.recompute == "full":
        layer_comm = PassTimes(comm.layer_forward_s, comm.layer_backward_s + comm.layer_forward_s)
    # Each member prices a vocabulary of which an even share is what it holds.
    rows_of = [share.rows_as_if_even(workload.model, vocab_rows) for _, share in members]
    priced = list(zip(members, rows_of, strict=True))
    analytic: dict[Piece, PassTimes] = {
        "embedding": slowest(
            [embedding_times(workload, gpu, width, rows) for (gpu, _), rows in priced]
        )
        + PassTimes(comm.embedding_s, 0.0),
        "decoder_layer": group_layer_times(workload, members) + layer_comm,
        "head": slowest([head_times(workload, gpu, width, rows) for (gpu, _), rows in priced])
        + PassTimes(comm.head_forward_s, comm.head_backward_s),
    }
    found = {piece: _measured(workload, profile, piece, members) for piece in analytic}
    times = {piece: found[piece] or analytic[piece] for piece in analytic}
    is_even = len({share for _, share in members}) == 1
    return PieceTimes(
        times["embedding"],
        times["decoder_layer"],
        times["head"],
        PassTimes(0.0, 0.0) if found["decoder_layer"] else layer_comm,
        is_even and all(value is not None for value in found.values()),
    )


def _measured(
    workload: Workload, profile: Profile | None, piece: Piece, members: Sequence[Member]
) -> PassTimes | None:
    """A piece from the profile, where it has it for every GPU of the group.

    A layer was measured in equal shares; a member with a share of its own takes as much longer
    or shorter as the analytic model says.
    """
    found = []
    for gpu, share in members:
        even = even_share_or_none(workload.model, share.width)
        measured = profile and profile.times(workload, gpu.name, share.width, piece)
        if not measured:
            return None
        if piece == "decoder_layer" and share != even:
            if even is None:
                return None
            own = group_layer_times(workload, [(gpu, share)])
            usual = group_layer_times(workload, [(gpu, even)])
            measured = PassTimes(
                measured.forward_s * own.forward_s / usual.forward_s,
                measured.backward_s * own.backward_s / usual.backward_s,
            )
        found.append(measured)
    return slowest(found)
