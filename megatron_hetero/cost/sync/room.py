"""Memory for gradients under way: how many buckets a rank exchanges at a time.

A bucket under way takes memory beside the gradients.  It is packed, unless it is a range of
Megatron's own gradient buffer; and what other holders send arrives beside it, unless a library
reduces it in place.  While a bucket waits for latency the links are free for others, so the more
are under way, the less latency counts.

The *room* of a rank is what its card has left while gradients are exchanged: what the plan does not
use, and what activations took, which the last backward pass has given back.  With
`--overlap-grad-reduce` exchanges begin within that pass, so activations' memory is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_hetero.cost.memory.stage import StageMemory
from megatron_hetero.cost.sync.buckets import StageId
from megatron_hetero.rounding import ROUNDING

LEAST_AT_ONCE = 2
"""Buckets that are under way whatever the room: one is packed while another travels.  The memory
that plans leave free has them (`cost.memory.libraries`)."""

MOST_AT_ONCE = 128
"""Buckets under way at most: a GPU runs as many kernels at a time (resident grids of a device in
NVIDIA's CUDA C++ programming guide), and each bucket has one."""


def room_bytes(
    capacity_bytes: int, peak_bytes: int, activation_bytes: int, *, overlaps: bool
) -> int:
    """Return the room of a device.

    Args:
        capacity_bytes: of the card.
        peak_bytes: predicted, with what the plan leaves free.
        activation_bytes: of the peak.
        overlaps: exchanges begin within backward passes (`--overlap-grad-reduce`).
    """
    return capacity_bytes - peak_bytes + (0 if overlaps else activation_bytes)


def room_of(memory: StageMemory, num_layers: int, *, overlaps: bool) -> int:
    """Return the room of a stage's devices, as `room_bytes`."""
    activations = memory.base["activations"] + num_layers * memory.per_layer["activations"]
    peak = memory.peak_bytes(num_layers)
    return room_bytes(memory.capacity_bytes, peak, activations, overlaps=overlaps)


def num_copies(*, is_packed: bool, is_received: bool) -> int:
    """Count the copies of a bucket under way: packed, and received."""
    return is_packed + is_received


def part_of_room(num_bytes: float, room: float) -> float:
    """Return the part of a rank's room for a bucket under way, 0 to 1/2.

    Args:
        num_bytes: it takes beside the gradients.
        room: of the rank, bytes.
    """
    if not num_bytes:
        return 0.0
    # The part stays between those of the most and of the fewest buckets at a time.
    part = num_bytes / room if room > 0 else 1.0
    return min(max(part, 1 / MOST_AT_ONCE), 1 / LEAST_AT_ONCE)


class EarlyRoom:
    """Room for buckets that start within the last backward passes of first stages.

    Those that find none on some rank start after the passes, and so do all behind them, on all
    ranks (`runtime.gradients.sync`).
    """

    def __init__(self) -> None:
        self._taken: dict[tuple[StageId, int], float] = {}
        self._is_full = False

    def take(self, parts: Mapping[StageId, float], num_buckets: int = 1, place: int = 0) -> int:
        """Take room for buckets; return how many may start early.

        Args:
            parts: of each holder's room for one bucket.
            num_buckets: of that size.
            place: of the rank in each holder.
        """
        # Once a bucket has found no room, all later ones wait for the end of the passes.
        num = 0 if self._is_full else num_buckets
        for holder, part in parts.items():
            key = holder, place
            # Only first stages start early, so only their ranks' room counts.
            if part and not holder[1]:
                left = 1 + ROUNDING - self._taken.get(key, 0.0)
                num = min(num, int(left / min(part, 1.0)))
        # Buckets that start early keep their room until the passes end.
        for holder, part in parts.items():
            self._taken[holder, place] = self._taken.get((holder, place), 0.0) + num * min(part, 1)
        self._is_full |= num < num_buckets
        return num


def least_rooms(rooms: Mapping[StageId, int], witnesses: Sequence[int]) -> dict[StageId, int]:
    """Return the least room of the stages that come to exchanges together, by the first of the
    stages.

    Args:
        witnesses: [replica] -> the first one of its kind (`cost.sync.groups.witness_of`).
    """
    found: dict[StageId, int] = {}
    # Replicas of a kind wait for the one with the least room.
    for (r, s), room in rooms.items():
        first = witnesses[r], s
        found[first] = min(room, found.get(first, room))
    return found
