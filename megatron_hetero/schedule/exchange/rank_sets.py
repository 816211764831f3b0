"""Sets of ranks with the same slices of a divided bucket, which a set exchanges.

A bucket of stages (`cost.sync.buckets`) stands for one of each set of ranks.  With the distributed
optimizer the sets take turns on a path and each rank has its own few buffers, so that one set is
through with its buckets before another is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.placement import PlacedStage, Placement
from megatron_hetero.cost.sync.buckets import StageBucket, StageId


@dataclass(frozen=True)
class Member:
    """A rank: its stage, its place among the ranks of the stage, its GPU."""

    stage: StageId
    place: int
    device: Device


@dataclass(frozen=True)
class RankSet:
    """Ranks with the same part of a bucket, and the number of parameters in it."""

    members: tuple[Member, ...]
    num_params: float

    @property
    def places(self) -> dict[StageId, tuple[int, ...]]:
        """Group the ranks that take part by stage."""
        found: dict[StageId, tuple[int, ...]] = {}
        for member in self.members:
            found[member.stage] = (*found.get(member.stage, ()), member.place)
        return found


def rank_sets(placement: Placement, bucket: StageBucket) -> Iterator[RankSet]:
    """Yield the sets of a bucket, in the order of the slices of a parameter."""
    stages = {holder: placement.replicas[holder[0]].stages[holder[1]] for holder in bucket.holders}
    # All ranks of all holders have the whole of it: they are one set.
    if bucket.is_whole:
        yield RankSet(
            tuple(
                Member(holder, place, device)
                for holder, stage in stages.items()
                for place, device in enumerate(stage.devices)
            ),
            bucket.num_params,
        )
        return
    # Between two edges of any holder each stage has the slice on one tensor rank.
    edges = {edge for stage in stages.values() for edge in _edges(stage)}
    for start, end in pairwise(sorted({Fraction(0), *edges})):
        members = []
        for holder, stage in stages.items():
            # Tensor rank with the slice, then the same one in every context-parallel group.
            rank = sum(edge <= start for edge in _edges(stage))
            for place in range(rank, len(stage.devices), stage.width):
                members.append(Member(holder, place, stage.devices[place]))
        yield RankSet(tuple(members), bucket.num_params * float(end - start))


def _edges(stage: PlacedStage) -> Sequence[Fraction]:
    """Return the ends of the parts of a group's ranks."""
    shares = stage.shares or (1,) * stage.width
    return [Fraction(end, sum(shares)) for end in accumulate(shares)]
