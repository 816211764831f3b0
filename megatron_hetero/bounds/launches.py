"""The longest step proved impossible where pipelines may launch ahead: branch and bound over
micro-batch sizes and numbers of replicas.

The whole bound is that of the branch with the least one, so this branch is always treated next.  It
is bounded, then divided by micro-batch sizes, then by numbers of replicas; a branch that cannot be
divided is bounded more finely.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from megatron_hetero.bounds.chains.axes import Axes, by_pace, by_speed
from megatron_hetero.bounds.chains.ends import EndsCase, ends_cases
from megatron_hetero.bounds.chains.kinds import GpuClass
from megatron_hetero.bounds.chains.levels import chain_times
from megatron_hetero.bounds.chains.stages import ChainStageOptions, Floats
from megatron_hetero.bounds.counting import Counting
from megatron_hetero.bounds.effort import ProofEffort
from megatron_hetero.bounds.packing import ReplicaTimes, least_packed_s
from megatron_hetero.bounds.sites import SiteBounds
from megatron_hetero.cost.choices import may_mix_sizes
from megatron_hetero.cost.model import CostModel

_RATIOS = (2.0, 1.5, 1.2, 1.05)
"""Numbers of sequences this near to each other are taken together: in a branch of several sizes, of
many numbers of replicas, of few, of few where GPUs are counted finely."""
_SMALL = 4
"""Replicas of a number of sequences that is so many times smaller than the mean count roughly."""
_ROUNDS = 3
"""Prices are mended so often."""
_GAIN = 1.004
"""As long as the bound grows by more than this."""
_CHANGES = (0.75, 1.3)
"""By which a price is changed."""
_MUCH = 0.05
"""Part of the step beyond which the exchange of the word embedding is split into cases first."""
_GROUP = 4
"""Ratio of the largest to the smallest number in a group of ranges; all options for the smallest
are tabulated."""


def launch_bound_s(
    sizes: Sequence[CostModel],
    works_s: Sequence[float],
    classes: Sequence[GpuClass],
    least_s: float,
    enough_s: float,
    effort: ProofEffort,
    progress: Callable[[float], None] | None = None,
    *,
    uneven: bool = False,
) -> tuple[float, str]:
    """Return the longest step proved impossible from `least_s` to `enough_s`, and words for
    everything left out.

    Args:
        sizes: the prices at every micro-batch size that plans may choose.
        works_s: bounds by work alone, size by size.
        classes: GPUs that are alike, wherever they are.
        effort: how far it is proved.
        progress: called with the longest step proved so far.
        uneven: the classes have widths that do not divide the model.
    """
    # One branch for a single replica, one for several, unless the number is given.
    counting = Counting(sizes[0], classes, effort.is_deep, uneven)
    batch = sizes[0].workload.training.global_batch_size
    most = min(batch // min(map(_size, sizes)), sum(c.num_gpus for c in classes))
    wanted = sizes[0].cluster.limits.num_replicas
    ranges = [(1, 1), (2, most)] if wanted is None else [(wanted, wanted)]
    is_mixed = may_mix_sizes(sizes[0])
    work_of = dict(zip(map(_size, sizes), works_s, strict=True))
    # Best first: the branch with the least step proved so far.
    heap = [
        (least_s, number, _LaunchBranch(sizes, is_mixed, numbers, counting))
        for number, numbers in enumerate(ranges)
        if numbers[0] <= numbers[1]
    ]
    # `number` also breaks ties in the heap, because branches have no order.
    number, work, proved_s = len(heap), 0, enough_s
    # Every branch in the heap takes at least `proved_s`, so this is proved.
    while heap:
        proved_s, _, branch = heapq.heappop(heap)
        if proved_s >= enough_s or work > effort.max_work:
            break
        if progress is not None:
            progress(proved_s)
        # Price a branch first; split it once its own bound is reached.
        pieces = [branch]
        if not branch.is_bounded:
            before = branch.work
            proved_s = branch.proved_s(proved_s, enough_s)
            work += branch.work - before
        else:
            pieces = branch.parts(proved_s)
            if not pieces:
                # Nothing finer is left of the least branch, so that its bound is the whole bound.
                break
        # No branch takes less than its work.
        for piece in pieces:
            of_work_s = least_s
            if not is_mixed:
                of_work_s = min(work_of[_size(costs)] for costs in piece.sizes)
            heapq.heappush(heap, (max(proved_s, of_work_s), number, piece))
            number += 1
        # An empty heap means that every branch is proved up to `enough_s`.
        proved_s = enough_s
    return min(proved_s, enough_s), counting.relaxes


@dataclass(eq=False)
class _LaunchBranch:
    """Plans of so many replicas, whose micro-batches have any of the sizes.

    `is_mixed`: replicas of one plan may have unlike sizes.  `is_fine`: bounded as finely as it
    goes.
    """

    sizes: Sequence[CostModel]
    is_mixed: bool
    num_replicas: tuple[int, int]
    counting: Counting
    case: EndsCase | None = None
    """The place of the first and last stages, if only some plans are meant."""
    is_fine: bool = False
    is_bounded: bool = False
    work: int = 0
    """Numbers looked at."""
    best_axes: Axes | None = None
    """The best proving prices of this branch or the parent."""
    own_s: float = field(init=False, default=0.0)
    """Proved without what the case adds."""
    left: Iterator[Axes] | None = field(init=False, default=None)
    """Prices not tried yet."""

    def parts(self, proved_s: float) -> list[_LaunchBranch]:
        """Return halves of the sizes, then of the numbers of replicas, then the places of the
        embedding (first where they say much), then the same more finely; empty where there is no
        more."""
        fewest, most = self.num_replicas
        if self.is_fine:
            return []
        # Cases of the ends are used where GPUs are counted, not where GPUs have prices.
        places = []
        if self.case is None and self.counting.is_small:
            sites = SiteBounds(self.sizes, self.counting.classes)
            cases = ends_cases(
                self.sizes[0], self.counting.classes, self.num_replicas, sites.least_inside_s
            )
            places = [replace(self, case=case, is_bounded=False, work=0) for case in cases]
            if max((case.extra_s for case in cases), default=0.0) > _MUCH * proved_s:
                return places
        # Where one plan may mix sizes, no half of the sizes has all replicas of such a plan.
        if len(self.sizes) > 1 and not self.is_mixed:
            middle = (len(self.sizes) + 1) // 2
            parts = (self.sizes[:middle], self.sizes[middle:])
            return [self._part(sizes, self.num_replicas) for sizes in parts]
        if most > fewest:
            # Few replicas first: many have less memory each and exchange more.
            middle = min(2 * fewest - 1, (fewest + most) // 2)
            return [self._part(self.sizes, r) for r in ((fewest, middle), (middle + 1, most))]
        # Everything is divided: the same branch comes again, bounded more finely.
        return places or [replace(self, is_fine=True, is_bounded=False, work=0)]

    def _part(self, sizes: Sequence[CostModel], num_replicas: tuple[int, int]) -> _LaunchBranch:
        return replace(self, sizes=sizes, num_replicas=num_replicas, is_bounded=False, work=0)

    @property
    def ratio(self) -> float:
        """Numbers of sequences this near to each other are taken together."""
        if len(self.sizes) > 1 and not self.is_mixed:
            return _RATIOS[0]
        if self.is_fine and self.counting.is_small:
            return _RATIOS[3]
        return _RATIOS[1 if self.num_replicas[1] >= 2 * self.num_replicas[0] else 2]

    def proved_s(self, least_s: float, enough_s: float) -> float:
        """Return the longest step proved impossible by the next prices, from `least_s` to
        `enough_s`; more prices are tried only while this branch has the least bound."""
        if self.left is None:
            self.left = self._axes()
        case = self.case or EndsCase(frozenset())
        # What the case adds comes after pipelines and update, of which the tables are.
        self.own_s, most_s = (max(0.0, end_s - case.extra_s) for end_s in (least_s, enough_s))
        axes = next(self.left, None)
        if axes is not None:
            proved_s = self._proved_by(axes, self.own_s, most_s, enough_s)
            if proved_s > self.own_s:
                self.own_s, self.best_axes = proved_s, axes
        self.is_bounded = axes is None or self.own_s >= most_s
        # The largest of three proofs holds: by tables, by the case alone, and what was known
        # already.
        return max(self.own_s + case.extra_s, case.least_s, least_s)

    def _axes(self) -> Iterator[Axes]:
        """Yield axes to count GPUs by, in turn, while the bound grows."""
        numbers = self.counting.numbers
        if numbers is not None and (self.is_fine or self.counting.is_small):
            yield numbers
            return
        tried: set[Axes] = set()
        for _ in range(_ROUNDS):
            before_s = self.own_s
            for axes in self._changed_prices() if self.is_fine else self._prices(self.own_s):
                if axes not in tried:
                    tried.add(axes)
                    yield axes
            if self.own_s < before_s * _GAIN:
                break

    def _prices(self, step_s: float) -> Iterator[Axes]:
        """Yield prices that may prove a step longer than this impossible."""
        classes = self.counting.classes
        yield self.best_axes or by_speed(self.sizes, classes)
        batch = self.sizes[0].workload.training.global_batch_size
        options = self._options(self.sizes)
        for deep in (False, True):
            axes = by_pace(options, classes, batch / self.num_replicas[0], step_s * _GAIN, deep)
            if axes is not None:
                yield axes

    def _changed_prices(self) -> Iterator[Axes]:
        """Yield the best prices so far with a single price changed."""
        best = self.best_axes or by_speed(self.sizes, self.counting.classes)
        for index in range(len(self.counting.classes)):
            for factor in _CHANGES:
                yield best.changed(self.counting.classes, index, factor)

    def _options(self, sizes: Sequence[CostModel]) -> ChainStageOptions:
        counting = self.counting
        maker = counting.many if self.is_fine and counting.is_deep else counting.few
        options = maker.options(sizes, self.num_replicas)
        return options if self.case is None else self.case.limited(options)

    def _proved_by(self, axes: Axes, least_s: float, enough_s: float, cut_s: float) -> float:
        # Sizes of one plan are tabulated one by one, those of different plans at their best.
        together = [[costs] for costs in self.sizes] if self.is_mixed else [self.sizes]
        tables = [self._times(costs, axes, cut_s) for costs in together]
        known = [table for table in tables if table is not None]
        if not known:
            return enough_s
        batch = self.sizes[0].workload.training.global_batch_size
        return least_packed_s(known, batch, self.num_replicas, least_s, enough_s)

    def _times(self, sizes: Sequence[CostModel], axes: Axes, cut_s: float) -> ReplicaTimes | None:
        fewest, most = self.num_replicas
        options = self._options(sizes)
        batch = sizes[0].workload.training.global_batch_size
        # All other replicas do one micro-batch of the smallest size at least.
        largest = batch - (fewest - 1) * min(map(_size, self.sizes))
        # A replica does whole micro-batches; of several sizes any number of sequences.
        each = options.least_size if len(sizes) == 1 else 1
        if largest < each:
            return None
        small = batch / (_SMALL * most * each)
        ranges = each * np.array(
            [(largest // each,) * 2] if most == 1 else _ranges(largest // each, self.ratio, small)
        )
        found = [
            self._chains(options, axes, [(int(a), int(b)) for a, b in ranges[part]], cut_s)
            for part in _grouped([int(a) for a in ranges[:, 0]])
        ]
        return ReplicaTimes(ranges, each, np.concatenate(found))

    def _chains(
        self, options: ChainStageOptions, axes: Axes, ranges: list[tuple[int, int]], cut_s: float
    ) -> Floats:
        num_layers = self.sizes[0].workload.model.num_layers
        found_s, work = chain_times(options, num_layers, axes, ranges, cut_s)
        self.work += work
        return found_s


def _size(costs: CostModel) -> int:
    return costs.workload.training.micro_batch_size


def _grouped(least: Sequence[int]) -> list[slice]:
    """Return runs of rising numbers, each up to `_GROUP` times the run's first."""
    starts = [0]
    for index, number in enumerate(least):
        if number > _GROUP * least[starts[-1]]:
            starts.append(index)
    return [slice(a, b) for a, b in pairwise([*starts, len(least)])]


def _ranges(largest: int, ratio: float, small: float) -> list[tuple[int, int]]:
    """Return least and most of each range of numbers, from one to `largest`; below `small` they
    are wide."""
    starts = [1]
    while starts[-1] < largest:
        factor = ratio if starts[-1] >= small else _RATIOS[0]
        starts.append(min(largest, max(starts[-1] + 1, int(starts[-1] * factor))))
    return [*((a, b - 1) for a, b in pairwise(starts)), (largest, largest)]
