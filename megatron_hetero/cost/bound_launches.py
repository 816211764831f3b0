"""The longest step proved impossible where pipelines may launch ahead: branch and bound over
micro-batch sizes and numbers of replicas.

The branch with the least bound is the one that holds the whole bound down: it is bounded, then its
sizes are told apart, then its numbers of replicas.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Literal

import numpy as np

from megatron_hetero.cost.bound_chains import ChainTimes
from megatron_hetero.cost.bound_kinds import GpuClass, gpu_classes
from megatron_hetero.cost.bound_packing import ReplicaTimes, least_packed_s
from megatron_hetero.cost.bound_share import replica_ranges
from megatron_hetero.cost.bound_stages import Ints, StageWayMaker
from megatron_hetero.cost.choices import may_mix_sizes
from megatron_hetero.cost.model import CostModel

RELAXES = "launch counts, shared network paths, part of the gradient exchange and the update"
_SHARING = "which GPUs share a node"
_RATIOS = (2.0, 1.5, 1.2)
"""Numbers of sequences this near to each other are taken together: in a branch of several sizes, of
many numbers of replicas, of few."""
_MAX_STATES = 120_000
"""GPUs of each class, times kinds of stages and layers: above it GPUs are counted by price."""
_MAX_WORK = 1_000_000_000
"""Numbers looked at: after that nothing more is proved."""
_PRICE = 160
"""What all GPUs together are priced at, about."""


def launch_bound_s(
    sizes: Sequence[CostModel],
    works_s: Sequence[float],
    classes: Sequence[GpuClass],
    least_s: float,
    enough_s: float,
) -> tuple[float, str]:
    """The longest step proved impossible from `least_s` to `enough_s`, and what it leaves out.

    Args:
        sizes: the prices at every micro-batch size that plans may choose.
        works_s: bounds by work alone, size by size.
        classes: GPUs that are alike, wherever they are.
    """
    small = _small_classes(sizes[0])
    relaxes = RELAXES
    if small is None:
        relaxes = f"whole GPUs and replicas, {_SHARING}, {RELAXES}"
        maker, axes = StageWayMaker(classes), _by_price(sizes, classes)
    else:
        maker, axes = StageWayMaker(small), _by_number(small)
        if any(len(c.nodes) > 1 for c in small):
            relaxes = f"{_SHARING}, {RELAXES}"
    batch = sizes[0].workload.training.global_batch_size
    most = min(batch // min(map(_size, sizes)), sum(c.num_gpus for c in classes))
    wanted = sizes[0].cluster.limits.num_replicas
    ranges = [(1, 1), (2, most)] if wanted is None else [(wanted, wanted)]
    is_mixed = may_mix_sizes(sizes[0])
    work_of = dict(zip(map(_size, sizes), works_s, strict=True))
    heap = [
        (least_s, number, _Branch(sizes, is_mixed, numbers, maker, axes))
        for number, numbers in enumerate(ranges)
        if numbers[0] <= numbers[1]
    ]
    number, work = len(heap), 0
    while heap:
        proved_s, _, branch = heapq.heappop(heap)
        if proved_s >= enough_s or work > _MAX_WORK:
            return min(proved_s, enough_s), relaxes
        pieces = [branch]
        if not branch.is_bounded:
            proved_s = branch.proved_s(proved_s, enough_s)
            work += branch.work
        else:
            pieces = branch.parts()
            if not pieces:
                return proved_s, relaxes
        for piece in pieces:
            of_work_s = least_s if len(piece.sizes) > 1 else work_of[_size(piece.sizes[0])]
            heapq.heappush(heap, (max(proved_s, of_work_s), number, piece))
            number += 1
    return enough_s, relaxes


def _small_classes(costs: CostModel) -> list[GpuClass] | None:
    """Classes of so few GPUs that they can be counted: by node if that is not too many, else by
    site, else by type alone; None where all are too many."""
    num_layers = costs.workload.model.num_layers
    ways: tuple[Literal["node", "site", ""], ...] = ("node", "site", "")
    for apart in ways:
        classes = gpu_classes(costs, apart)
        states = prod(c.num_gpus + 1 for c in classes)
        if states * sum(len(c.widths) for c in classes) * num_layers <= _MAX_STATES:
            return classes
    return None


@dataclass(frozen=True)
class _Axes:
    """What a GPU of each class takes along each axis, [class, axis], and all there is."""

    steps: Ints
    shape: tuple[int, ...]


def _by_number(classes: Sequence[GpuClass]) -> _Axes:
    return _Axes(np.eye(len(classes), dtype=np.int64), tuple(c.num_gpus + 1 for c in classes))


def _by_price(sizes: Sequence[CostModel], classes: Sequence[GpuClass]) -> _Axes:
    """One axis: a whole price for each GPU, by its speed.  Any prices make a bound."""
    rows = sizes[0].workload.model.vocab_size
    speeds = np.array(
        [
            max(
                _size(costs) / (width * costs.pieces(c.node, width, rows).layer.total_s)
                for costs in sizes
                for width in c.widths
            )
            for c in classes
        ]
    )
    numbers = np.array([c.num_gpus for c in classes])
    # The scale whose rounding is least, so that prices stay in proportion.
    scales = [total / float(speeds @ numbers) for total in range(_PRICE // 2, 3 * _PRICE // 2)]

    def loss(scale: float) -> float:
        prices = np.maximum(np.rint(speeds * scale), 1.0)
        ratios = prices / (speeds * scale)
        return float(ratios.max() / ratios.min())

    scale = min(scales, key=loss)
    prices = np.maximum(np.rint(speeds * scale), 1.0).astype(np.int64)
    return _Axes(prices[:, None], (int(prices @ numbers) + 1,))


class _Branch:
    """Plans of so many replicas, whose micro-batches have any of the sizes.

    Args:
        is_mixed: replicas of one plan may have unlike sizes.
    """

    def __init__(
        self,
        sizes: Sequence[CostModel],
        is_mixed: bool,
        num_replicas: tuple[int, int],
        maker: StageWayMaker,
        axes: _Axes,
    ) -> None:
        self.sizes = sizes
        self.is_mixed = is_mixed
        self.num_replicas = num_replicas
        self.maker = maker
        self.axes = axes
        self.is_bounded = False
        self.work = 0
        """Numbers looked at."""

    def parts(self) -> list[_Branch]:
        """Each size by itself, then numbers of replicas; empty where no more can be told apart."""
        fewest, most = self.num_replicas
        if len(self.sizes) > 1 and not self.is_mixed:
            return [
                _Branch([costs], False, self.num_replicas, self.maker, self.axes)
                for costs in self.sizes
            ]
        if fewest == 1 or most < 2 * fewest:
            return []
        ranges = replica_ranges(most, None)[1:]
        return [_Branch(self.sizes, self.is_mixed, r, self.maker, self.axes) for r in ranges]

    @property
    def ratio(self) -> float:
        """Numbers of sequences this near to each other are taken together."""
        if len(self.sizes) > 1 and not self.is_mixed:
            return _RATIOS[0]
        return _RATIOS[1 if self.num_replicas[1] >= 2 * self.num_replicas[0] else 2]

    def proved_s(self, least_s: float, enough_s: float) -> float:
        """The longest step proved impossible, from `least_s` to `enough_s`."""
        # Sizes of one plan are tabulated one by one, those of different plans at their best.
        together = [[costs] for costs in self.sizes] if self.is_mixed else [self.sizes]
        tables = [self._times(costs, enough_s) for costs in together]
        self.is_bounded = True
        known = [table for table in tables if table is not None]
        if not known:
            return enough_s
        batch = self.sizes[0].workload.training.global_batch_size
        return least_packed_s(known, batch, self.num_replicas[1], least_s, enough_s)

    def _times(self, sizes: Sequence[CostModel], enough_s: float) -> ReplicaTimes | None:
        fewest, most = self.num_replicas
        ways = self.maker.ways(sizes, self.num_replicas)
        batch = sizes[0].workload.training.global_batch_size
        largest = batch - (fewest - 1) * min(map(_size, self.sizes))
        # A replica does whole micro-batches; of several sizes any number of sequences.
        each = ways.least_size if len(sizes) == 1 else 1
        if largest < each:
            return None
        steps = self.axes.steps[ways.gpu_class] * ways.width[:, None]
        num_layers = sizes[0].workload.model.num_layers
        chains = ChainTimes(ways, num_layers, self.axes.shape, steps)
        ranges = each * np.array(_ranges(largest // each, self.ratio, is_one=most == 1))
        found_s = chains.least_s([(int(a), int(b)) for a, b in ranges], enough_s)
        self.work += chains.work
        return ReplicaTimes(ranges, each, found_s)


def _size(costs: CostModel) -> int:
    return costs.workload.training.micro_batch_size


def _ranges(largest: int, ratio: float, *, is_one: bool) -> list[tuple[int, int]]:
    """Least and most of each range of numbers, from one to `largest`."""
    starts = [largest if is_one else 1]
    while starts[-1] < largest:
        starts.append(min(largest, max(starts[-1] + 1, int(starts[-1] * ratio))))
    return [*((a, b - 1) for a, b in pairwise(starts)), (largest, largest)]
