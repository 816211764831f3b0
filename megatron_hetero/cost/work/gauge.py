"""Times between and beyond measured ones: the analytic model, scaled to the nearest measurement.

A probe measures a few widths, micro-batch sizes and one recomputation; a search compares more.
Were a measured time compared with a modelled one, the setting whose modelled time is too short
would win, and not the faster setting.  So the model only says by how much a setting differs from
the measured one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.placement import Recompute
from megatron_hetero.cost.share import TensorShare, even_share_or_none
from megatron_hetero.cost.work.compute import PassTimes, slowest
from megatron_hetero.cost.work.profile import Piece, Profile
from megatron_hetero.cost.work.under_products import Member
from megatron_hetero.model.spec import Workload


class Modelled(NamedTuple):
    """A piece as the analytic model has it, communication beside the computing."""

    computing: PassTimes
    communication: PassTimes

    @property
    def total(self) -> PassTimes:
        """Return both, as a probe measures them."""
        return self.computing + self.communication


Model = Callable[[Workload, Piece, TensorShare], Modelled]
"""The analytic model of a piece on one type of GPU."""


class Gauged(NamedTuple):
    """Times of a piece; `is_measured` where a point of the profile itself says so."""

    times: PassTimes
    is_measured: bool


def gauged_group(
    workload: Workload,
    profile: Profile,
    piece: Piece,
    members: Sequence[Member],
    model: Callable[[Workload, Piece, Sequence[Member]], Modelled],
) -> Gauged | None:
    """Time a piece by the profile as the slowest member of a group; None where the profile does not
    know every GPU of the group.

    Args:
        profile: the measured points.
        piece: embedding, decoder layer or head.
        members: type and share of each GPU of the group.
        model: the analytic model of a group.
    """
    found = []
    for gpu, share in members:

        def of_type(
            workload: Workload, piece: Piece, share: TensorShare, gpu: GpuType = gpu
        ) -> Modelled:
            return model(workload, piece, [(gpu, share)])

        gauged = gauged_times(workload, profile, gpu.name, share, piece, of_type)
        # One member without a measurement leaves the whole group to the model.
        if gauged is None:
            return None
        found.append(gauged)
    return Gauged(slowest([g.times for g in found]), all(g.is_measured for g in found))


def gauged_times(
    workload: Workload,
    profile: Profile,
    gpu_name: str,
    share: TensorShare,
    piece: Piece,
    model: Model,
) -> Gauged | None:
    """Return a piece as measured, or the model's time multiplied by the ratio measured / modelled
    at the nearest point; None where the profile knows nothing of this model on this type.

    Recomputation is priced as the forward computing that it is.  Communication is in what was
    measured; between unlike widths it is the model's, because computing says nothing of links.

    Args:
        profile: the measured points.
        gpu_name: type of the GPU.
        share: the GPU's part of its tensor-parallel group.
        piece: embedding, decoder layer or head.
        model: the analytic model of that type.
    """
    training = workload.training
    # The measured point that is nearest in width, then in settings, then in size.
    near = profile.nearest(workload, gpu_name, share.width, piece)
    if near is None:
        return None
    even = even_share_or_none(workload.model, near.width)
    # A measured width that does not divide the model has no equal share to compare with.
    if even is None:
        return None
    # Nothing was hidden under products where it was measured.
    seen = _with_training(
        _without_overlap(workload), near.micro_batch_size, near.recompute, near.sequence_parallel
    )
    if near.recompute == "selective" and near.recompute_modules != training.recompute_modules:
        of_point = replace(seen.training, recompute_modules=near.recompute_modules)
        seen = replace(seen, training=of_point)
    is_measured = seen.training == workload.training and near.width == share.width
    if is_measured and share == even:
        return Gauged(near.times, True)
    # Measured over modelled at the point; then the model of the asked setting times that.
    forward, backward = _ratios(near.times, model, seen, piece, even)
    own, own_again = _without_recompute(model, workload, piece, share)
    # Of equal width, communication is in the measured ratio; else it is added unscaled.
    if near.width == share.width:
        computed, more = own.total, PassTimes(0.0, 0.0)
    else:
        computed, more = own.computing, own.communication
    times = PassTimes(
        forward * computed.forward_s, backward * computed.backward_s + forward * own_again
    )
    return Gauged(times + more, is_measured)


def _ratios(
    measured: PassTimes, model: Model, workload: Workload, piece: Piece, share: TensorShare
) -> tuple[float, float]:
    """Return measured over modelled, forward and backward."""
    # What recompute adds is a forward pass: its seconds follow the forward ratio.
    plain, again = _without_recompute(model, workload, piece, share)
    forward = measured.forward_s / plain.total.forward_s
    backward_s = measured.backward_s - forward * again
    if backward_s <= 0:  # what is recomputed ran faster the second time
        return forward, measured.backward_s / (plain.total.backward_s + again)
    return forward, backward_s / plain.total.backward_s


def _without_recompute(
    model: Model, workload: Workload, piece: Piece, share: TensorShare
) -> tuple[Modelled, float]:
    """Return a piece's model without recompute, and the seconds added to the backward pass by
    recompute."""
    training = workload.training
    # The same job but for recompute.
    plain = model(
        _with_training(workload, training.micro_batch_size, "none", training.sequence_parallel),
        piece,
        share,
    )
    whole_s = model(workload, piece, share).total.backward_s
    return plain, whole_s - plain.total.backward_s


def _without_overlap(workload: Workload) -> Workload:
    """Return the job without exchanges under products."""
    if not workload.training.tp_comm_overlap:
        return workload
    return replace(workload, training=replace(workload.training, tp_comm_overlap=()))


def _with_training(
    workload: Workload, micro_batch_size: int, recompute: Recompute, sequence_parallel: bool
) -> Workload:
    training = replace(
        workload.training,
        micro_batch_size=micro_batch_size,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
    )
    return replace(workload, training=training)
