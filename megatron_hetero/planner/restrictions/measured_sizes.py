"""Micro-batch sizes that a profile speaks for.

Two measured sizes show how the time of a pass grows with the size; one does not.  In the public
tables of layer times a size scaled by the cost model from one other size is 7.6 % off in the mean
and 42 % at worst, and 2.7 % off where two sizes are known.  So sizes beyond a single one are
compared only on request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import UsageError
from megatron_hetero.model.spec import Workload
from megatron_hetero.units import format_duration

_SETTING = "micro_batch_size"
_FAR_OFF = 10
"""Measured over predicted seconds, or the inverse, that no card explains."""


class HeldCluster(NamedTuple):
    """A cluster whose plans keep the job's micro-batch size; `words` says why, or is empty."""

    cluster: Cluster
    words: str


def held_to_measured_sizes(
    cluster: Cluster, workload: Workload, profile: Profile | None
) -> HeldCluster:
    """Keep plans to the job's micro-batch size where a profile knows no other of some GPU type.

    Raises:
        UsageError: that size is not the job's.
    """
    if profile is None or _SETTING in cluster.limits.as_given:
        return HeldCluster(cluster, "")
    found = _single_sizes(cluster, workload, profile)
    if not found:
        return HeldCluster(cluster, "")
    own = workload.training.micro_batch_size
    # The profile's only size has to be the job's, or nothing is known of the job's.
    other = {gpu: size for gpu, size in found.items() if size != own}
    if other:
        raise UsageError(
            f"--micro-batch-size {own}, but the profile has only {_sizes(other.items())}, and one "
            "size does not say how long another takes; measure more "
            f"(probe --micro-batch-sizes {own},{2 * own}), or --scale-profile lets the cost model "
            "say how they differ"
        )
    limits = replace(cluster.limits, as_given=(*cluster.limits.as_given, _SETTING))
    return HeldCluster(
        cluster.limited(limits),
        f"Only micro-batch size {own} was compared: the profile has no other of "
        f"{', '.join(sorted(found))}. Measure more (probe --micro-batch-sizes {own},{2 * own}), or "
        "--scale-profile lets the cost model say how they differ",
    )


def profile_words(cluster: Cluster, workload: Workload, profile: Profile | None) -> tuple[str, ...]:
    """Say what is missing in a profile for a job in its precision, and what cannot be right."""
    said = (words(cluster, workload, profile) for words in (unmeasured_words, far_off_words))
    return tuple(filter(None, said))


def unmeasured_words(cluster: Cluster, workload: Workload, profile: Profile | None) -> str:
    """Say which GPU types have no measured layer of a job, and what the profile has of them; empty
    where all have one, or without a profile."""
    if profile is None:
        return ""
    found = []
    layers = [key for key in profile.points if key.piece == "decoder_layer"]
    for name in dict.fromkeys(node.gpu_type.name for node in cluster.nodes):
        if profile.layer_sizes(workload, name):
            continue
        # Layers of the type in other precisions, else of other models, else none at all.
        own = [key for key in layers if key.gpu_name == name]
        others = sorted({key.precision for key in own} - {workload.training.precision})
        if not own:
            types = sorted({key.gpu_name for key in layers})
            found.append(f"{name} (it has {', '.join(types) or 'none'})")
        elif others:
            found.append(f"{name} (it has its layers in {', '.join(others)})")
        else:
            found.append(f"{name} (it has layers of another model)")
    if not found:
        return ""
    return (
        f"The profile has no layer of this model in {workload.training.precision} of "
        f"{', '.join(found)}: the catalogue prices it. Measure it (probe --gpu)"
    )


def far_off_words(cluster: Cluster, workload: Workload, profile: Profile | None) -> str:
    """Say which measured layers take far more or less than the cost model predicts, as times in
    another unit do; empty where none does."""
    if profile is None:
        return ""
    found, (measured, modelled) = [], (CostModel(cluster, workload, p) for p in (profile, None))
    for node in {node.gpu_type.name: node for node in cluster.nodes}.values():
        if not profile.layer_sizes(workload, node.gpu_type.name):
            continue
        is_s, would_s = (
            costs.pieces(node, 1, workload.model.vocab_size).layer.total_s
            for costs in (measured, modelled)
        )
        if not would_s / _FAR_OFF <= is_s <= would_s * _FAR_OFF:
            found.append(
                f"{node.gpu_type.name} ({format_duration(is_s)}, predicted "
                f"{format_duration(would_s)})"
            )
    if not found:
        return ""
    return (
        f"The profile's layer, forward and backward, is over {_FAR_OFF} times off the prediction "
        f"on {', '.join(found)}: are its times seconds, and of this model on this card?"
    )


def _single_sizes(cluster: Cluster, workload: Workload, profile: Profile) -> dict[str, int]:
    """Return the micro-batch size of each GPU type with a single profiled size, for layers of the
    job."""
    names = {node.gpu_type.name for node in cluster.nodes}
    sizes = {name: profile.layer_sizes(workload, name) for name in names}
    return {name: min(known) for name, known in sizes.items() if len(known) == 1}


def _sizes(found: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"size {size} of {gpu}" for gpu, size in sorted(found))
