"""Memory of this rank for buckets that are under way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_hetero.cost.sync.room import part_of_room, room_bytes
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.rounding import ROUNDING
from megatron_hetero.runtime.gradients.reduction import Reduction


def room_of_rank(plan: Plan, rank: int, *, overlaps: bool) -> int:
    """Return the bytes that the plan predicts to be free on a rank while gradients are exchanged.

    A plan without estimates of the device (`--hetero-layout`) predicts none. Two buckets are under
    way even then (`LEAST_AT_ONCE` of `cost.sync.room`).

    Args:
        plan: the plan.
        rank: of the job.
        overlaps: exchanges begin within backward passes (`--overlap-grad-reduce`).
    """
    device = rank_table(plan)[rank].device
    found = plan.estimates and device and plan.estimates.devices.get(device)
    if not found:
        return 0
    activations = found.parts_bytes["activations"]
    return room_bytes(found.capacity_bytes, found.peak_bytes, activations, overlaps=overlaps)


class RoomUnderWay:
    """Part of a rank's free memory that each of its buckets takes while it is under way.

    Args:
        room: bytes of free memory.
        reductions: all of the rank's, in the order in which they start.
        sizes: elements of each.
    """

    def __init__(self, room: int, reductions: Sequence[Reduction], sizes: Sequence[int]) -> None:
        self._parts = {
            reduction: part_of_room(reduction.num_copies * size * _element_bytes(reduction), room)
            for reduction, size in zip(reductions, sizes, strict=True)
        }

    def fits(self, reduction: Reduction, under_way: Iterable[Reduction]) -> bool:
        """Tell if a bucket has room beside others; one that takes no memory always has."""
        own = self._parts[reduction]
        return not own or own + sum(self._parts[other] for other in under_way) <= 1 + ROUNDING

    @property
    def first_without(self) -> int | None:
        """Return the index of the first bucket that has no room beside all before it."""
        before: list[Reduction] = []
        # The dictionary has the order in which buckets start.
        for place, reduction in enumerate(self._parts):
            if not self.fits(reduction, before):
                return place
            before.append(reduction)
        return None


def _element_bytes(reduction: Reduction) -> int:
    return next(iter(reduction.parameters)).main_grad.element_size()
