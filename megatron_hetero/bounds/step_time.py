"""A lower bound on the step time of every plan of the space, by the same cost model.

Replicas, each as fast as the fastest chain of stages, are packed into the GPUs of the cluster
(`launches`).  The larger of this bound and the bound by work alone counts; docs/bound.md has the
proofs.  Cost models with other pipelines bring a proof of their own (`Prove`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from megatron_hetero.bounds.chains.kinds import GpuClass, gpu_classes
from megatron_hetero.bounds.effort import QUICK, THOROUGH, ProofEffort
from megatron_hetero.bounds.launches import launch_bound_s
from megatron_hetero.bounds.sites import SiteBounds, rates_of
from megatron_hetero.bounds.space import relaxed
from megatron_hetero.cost.choices import may_mix_sizes, micro_batch_sizes, recomputes
from megatron_hetero.cost.model import CostModel

WORK_BOUND_RELAXES = (
    "memory, whole layers and micro-batches, pipeline fill, stage boundaries, gradient exchange, "
    "update"
)

_LONGEST = 1000.0
"""The bound is looked for up to this many times the bound by work."""
_MAX_LAYER_OPTIONS = 4000
"""Most layers times ways to hold the layers; beyond, the bound is by work alone."""


@dataclass(frozen=True)
class Bound:
    """No plan of the space takes less than `step_time_s`; `relaxes` says what it leaves out."""

    step_time_s: float
    relaxes: str


class Prove(Protocol):
    """What finds the bound of a job: `step_time_bound` with some effort."""

    def __call__(self, costs: CostModel, enough_s: float, *, uneven: bool) -> Bound:
        """See `step_time_bound`."""


def step_time_bound_s(costs: CostModel) -> float:
    """Return seconds that no placement of the space beats; see `step_time_bound`."""
    return step_time_bound(costs).step_time_s


def thorough_bound(costs: CostModel, enough_s: float = inf, *, uneven: bool = False) -> Bound:
    """Return the bound of a plan: `step_time_bound` with more effort."""
    return step_time_bound(costs, enough_s, THOROUGH, uneven=uneven)


def bound_by_work(
    costs: CostModel, enough_s: float = inf, *, uneven: bool = False, proved_s: float = 0.0
) -> Bound:
    """Return what is known at once: `work_bound_s`, or `proved_s` seconds that are proved
    already."""
    return Bound(max(work_bound_s(costs, uneven=uneven), proved_s), WORK_BOUND_RELAXES)


def step_time_bound(
    costs: CostModel,
    enough_s: float = inf,
    effort: ProofEffort = QUICK,
    progress: Callable[[float], None] | None = None,
    *,
    uneven: bool = False,
) -> Bound:
    """Return the best bound known: that of the work, made longer as far as prices prove it.

    The space has every micro-batch size and every recompute that plans may choose
    (`cost.choices`).

    Args:
        enough_s: a longer step need not be proved.
        effort: how far it is proved; less in clusters that are too large for it.
        progress: called with the step proved impossible so far, while replicas are packed.
        uneven: the space also has groups of one node in widths that do not divide the model, in
            shares as equal as can be.
    """
    # A price list that no plan's prices are below.
    costs = relaxed(costs)
    classes = gpu_classes(costs, uneven=uneven)
    sizes = [costs.variant(micro_batch_size=size) for size in micro_batch_sizes(costs)]
    # All work over all GPUs, size by size, or in any mixture.
    works_s = [_work_bound_s([of_size], classes) for of_size in sizes]
    work_s = _work_bound_s(sizes, classes) if may_mix_sizes(costs) else min(works_s)
    # Prove more only as far as the cluster's size allows.
    num_gpus = sum(c.num_gpus for c in classes)
    num_options = sum(len(c.widths) for c in classes)
    too_large = costs.workload.model.num_layers * num_options > _MAX_LAYER_OPTIONS
    possible = next((one for one in (effort, QUICK) if num_gpus <= one.max_gpus), None)
    if not classes or possible is None or too_large:
        return Bound(work_s, WORK_BOUND_RELAXES)
    # Work between sites is limited by their lines.
    work_s = max(work_s, _site_bound_s(sizes, classes, is_mixed=may_mix_sizes(costs)))
    most_s = min(enough_s, _LONGEST * work_s)
    return Bound(
        *launch_bound_s(sizes, works_s, classes, work_s, most_s, possible, progress, uneven=uneven)
    )


def _site_bound_s(
    sizes: Sequence[CostModel], classes: Sequence[GpuClass], *, is_mixed: bool
) -> float:
    """Bound by what the lines between sites let through; 0 where there are none."""
    if is_mixed:
        return SiteBounds(sizes, classes).least_s()
    return min(SiteBounds([costs], classes).least_s() for costs in sizes)


def _size(costs: CostModel) -> int:
    return costs.workload.training.micro_batch_size


def work_bound_s(
    costs: CostModel, *, in_parts: bool = False, uneven: bool = False, divided: bool = False
) -> float:
    """Return seconds that no placement of the space beats, by the work alone: known at once.

    Args:
        in_parts: also of stages in chunks and with split backward passes, of which a micro-batch's
            weight gradients need not be on its way through the model.
        uneven: as of `step_time_bound`.
        divided: also of stages whose groups divide sequences, on any nodes; one micro-batch's way
            through the model is left out.
    """
    costs = relaxed(costs)
    classes = gpu_classes(costs, uneven=uneven)
    sizes = [costs.variant(micro_batch_size=size) for size in micro_batch_sizes(costs)]
    most_groups = sum(c.num_gpus for c in classes) if divided else 1
    asked = classes, in_parts or divided, most_groups
    if may_mix_sizes(costs):
        return _work_bound_s(sizes, *asked)
    return min(_work_bound_s([of_size], *asked) for of_size in sizes)


def _work_bound_s(
    sizes: Sequence[CostModel],
    classes: Sequence[GpuClass],
    in_parts: bool = False,
    most_groups: int = 1,
) -> float:
    """Return all work, perfectly divided over all GPUs, in micro-batches of any of the sizes.

    A device that spends all of a step of T seconds on layers completes at most T / y of them for
    one sequence, y being its GPU-seconds at the best width, size and recompute.  A head costs at
    least `ratio` layers on any device, so num_sequences * (num_layers + ratio) <= sum T / y.  A
    step also lasts at least one micro-batch's way through the model on the fastest stages.
    """
    training, model = sizes[0].workload.training, sizes[0].workload.model
    rates = rates_of(sizes, classes, most_groups)
    if not rates.layers_per_s:
        return 0.0
    # Fastest way of one micro-batch through the model, by size.
    way_s: dict[int, tuple[float, float]] = {}
    for costs in sizes:
        all_pieces = [
            costs.variant(recompute=r).pieces(c.node, width, model.vocab_size)
            for c in classes
            for width in c.widths
            for r in recomputes(costs)
        ]
        layer_s = min(pieces.layer.total_s for pieces in all_pieces)
        # Layer and head are each at their fastest, even if no plan has both at once.
        way_s[_size(costs)] = layer_s, min(pieces.head.total_s for pieces in all_pieces)
    fastest_s = min(model.num_layers * layer_s + head_s for layer_s, head_s in way_s.values())
    # All work at the speed of all GPUs together.
    work_s = (
        training.global_batch_size * (model.num_layers + rates.head_layers) / rates.layers_per_s
    )
    return work_s if in_parts else max(work_s, fastest_s)
