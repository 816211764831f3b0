"""Seconds and bytes of a stage as straight lines: in its layers, and in what it has to keep."""

from __future__ import annotations

from dataclasses import field

from megatron_hetero.cost.placement import Recompute
from megatron_hetero.hashed import value


@value(frozen=True, slots=True)
class StageOption:
    """One number of layers on a stage: seconds of a micro-batch there and back, what it recomputes
    and how its experts lie, in the terms of `PlacedStage`."""

    forward_s: float
    backward_s: float
    recompute: Recompute | None
    num_recomputed: int | None
    expert_shares: tuple[int, ...] | None = None
    expert_groups: tuple[int, int] | None = None

    @property
    def time_s(self) -> float:
        """There and back."""
        return self.forward_s + self.backward_s


Rooms = tuple[tuple[int, int, int, int], ...]
"""Memory of each unlike device of a stage, at each moment that may be its peak, in bytes: free
without layers; of a layer; free without layers if some recompute; saved by a recomputing layer."""


@value(frozen=True)
class StageTimes:
    """One kind of recompute on a stage, with times as straight lines in the layers."""

    recompute: Recompute
    own: Recompute
    partly: bool
    """True if only as many layers recompute as memory requires."""
    ends_s: tuple[float, float]
    """Forward and backward without layers."""
    layer_s: tuple[float, float]
    plain_s: tuple[float, float]
    """Seconds of a layer without recompute."""
    expert_shares: tuple[int, ...] | None
    expert_groups: tuple[int, int] | None = None
    known: dict[tuple[int, int], StageOption] = field(default_factory=dict, compare=False)
    whole: list[StageOption] = field(default_factory=list, compare=False)
    """With 1, 2, ... layers, of which none has to recompute for the sake of memory."""

    def within(self, num_layers: int, rooms: Rooms) -> StageOption | None:
        """Return it with so many layers; None where they do not fit."""
        num = 0
        for free, per_layer, free_of_some, saved in rooms:
            # All layers fit without any recompute at this moment.
            if num_layers * per_layer <= free:
                continue
            # Nothing to save, and too much to hold.
            if saved <= 0:
                return None
            # Rounded up: as many recomputing layers as save what is missing.
            num = max(num, -(-(num_layers * per_layer - free_of_some) // saved), 1)
            if num > num_layers:
                return None
        return self.option(num_layers, num if self.partly else num_layers)

    def all_within(self, most_layers: int, rooms: Rooms) -> list[StageOption | None]:
        """Return `within` for 1, 2, ... layers, up to `most_layers` or to the last that fits."""
        # As many as fit without any recompute are the same in every room.
        whole = most_layers
        for free, per_layer, _, _ in rooms:
            if most_layers * per_layer > free:
                whole = min(whole, free // per_layer if per_layer else 0)
        for num_layers in range(len(self.whole) + 1, whole + 1):
            self.whole.append(self.option(num_layers, 0 if self.partly else num_layers))
        found: list[StageOption | None] = [*self.whole[: max(whole, 0)]]
        # With recompute; a layer that takes more than it saves fits no better behind others.
        is_last = all(saved <= per_layer for _, per_layer, _, saved in rooms)
        for num_layers in range(len(found) + 1, most_layers + 1):
            option = self.within(num_layers, rooms)
            if option is None and is_last:
                break
            found.append(option)
        return found

    def option(self, num_layers: int, num_recomputed: int) -> StageOption:
        """Return the stage's option with this many layers, some recomputed."""
        key = num_layers, num_recomputed
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self._made(num_layers, num_recomputed)
        return found

    def _made(self, num_layers: int, num: int) -> StageOption:
        (forward_s, backward_s), plain = self.ends_s, num_layers - num
        forward_s += self.layer_s[0] * num + self.plain_s[0] * plain
        backward_s += self.layer_s[1] * num + self.plain_s[1] * plain
        recompute: Recompute = self.recompute
        if self.partly and 0 < num < num_layers:
            # In between, the stage says so itself; all or none is a kind of recompute.
            return StageOption(forward_s, backward_s, "full", num, *self._dealt)
        if self.partly and num == 0:
            recompute = "none"
        # None is the job's own kind, so that a plan names only what differs.
        own = None if recompute == self.own else recompute
        return StageOption(forward_s, backward_s, own, None, *self._dealt)

    @property
    def _dealt(self) -> tuple[tuple[int, ...] | None, tuple[int, int] | None]:
        return self.expert_shares, self.expert_groups


@value(frozen=True, slots=True)
class StageLine:
    """One kind of recompute on a stage: times, and memory by what the stage keeps.

    `rooms` are those with one micro-batch and no messages; the others what one micro-batch more,
    and one message more, adds to them.
    """

    times: StageTimes
    rooms: Rooms
    by_in_flight: Rooms = ()
    by_sends: Rooms = ()

    def rooms_with(self, num_in_flight: int, num_sends_kept: int) -> Rooms:
        """Return the memory where so many micro-batches and messages are kept."""
        more = num_in_flight - 1
        return tuple(
            [
                (
                    free + more * a + num_sends_kept * x,
                    layer + more * b + num_sends_kept * y,
                    some + more * c + num_sends_kept * z,
                    saved + more * d + num_sends_kept * w,
                )
                for (free, layer, some, saved), (a, b, c, d), (x, y, z, w) in zip(
                    self.rooms, self.by_in_flight, self.by_sends, strict=True
                )
            ]
        )


def difference(more: Rooms, rooms: Rooms) -> Rooms:
    """Return what `more` has beyond `rooms`, device by device."""
    return tuple(
        [
            (a - free, b - layer, c - some, d - saved)
            for (a, b, c, d), (free, layer, some, saved) in zip(more, rooms, strict=True)
        ]
    )
