"""How the lower bound counts the GPUs of a cluster: by prices, which is quick, or one by one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Literal

from megatron_hetero.bounds.chains.axes import Axes, by_number
from megatron_hetero.bounds.chains.kinds import GpuClass, gpu_classes
from megatron_hetero.bounds.chains.stages import MANY_IN_FLIGHT, StageOptionMaker
from megatron_hetero.cost.model import CostModel

RELAXES = "launch counts, shared network paths, part of the gradient exchange and the update"
_SHARING = "which GPUs share a node"
_MAX_STATES = 120_000
"""GPUs of each class, times kinds of stages and layers: above it GPUs have prices first."""
_MAX_COUNTED = 4_000
"""GPUs of each class: above it they are counted by price alone."""


class Counting:
    """GPU classes and their options, of a job.

    Args:
        is_deep: many micro-batches in flight are told apart where GPUs have prices, too.
        uneven: the classes have widths that do not divide the model.
    """

    def __init__(
        self, costs: CostModel, classes: Sequence[GpuClass], is_deep: bool, uneven: bool
    ) -> None:
        # None where even classes by type alone are too many to count.
        small = _small_classes(costs, uneven)
        self.classes = classes if small is None else small
        self.is_small = small is not None
        self.is_deep = is_deep or self.is_small
        self.few = StageOptionMaker(self.classes)
        self.relaxes = RELAXES
        if small is None:
            # Words for people: what the bound leaves out beyond `RELAXES`.
            self.relaxes = f"whole GPUs and replicas, {_SHARING}, {RELAXES}"
        elif any(len(c.nodes) > 1 for c in small):
            self.relaxes = f"{_SHARING}, {RELAXES}"

    @cached_property
    def many(self) -> StageOptionMaker:
        """Tells apart many micro-batches in flight."""
        return StageOptionMaker(self.classes, MANY_IN_FLIGHT)

    @cached_property
    def numbers(self) -> Axes | None:
        """GPUs by number, unless they are too many."""
        axes = by_number(self.classes)
        return axes if self.is_small or prod(axes.shape) <= _MAX_COUNTED else None


def _small_classes(costs: CostModel, uneven: bool) -> list[GpuClass] | None:
    """Return classes of few enough GPUs to count: by node if not too many, else by site, else by
    type alone; None if all are too many."""
    num_layers = costs.workload.model.num_layers
    options: tuple[Literal["node", "site", ""], ...] = ("node", "site", "")
    for apart in options:
        classes = gpu_classes(costs, apart, uneven)
        states = prod(c.num_gpus + 1 for c in classes)
        if states * sum(len(c.widths) for c in classes) * num_layers <= _MAX_STATES:
            return classes
    return None
