"""Layers of each stage whose weights the replicas divide: how many, beside what recompute.

All replicas gather a sharded layer together, so replicas of equal depth become one pipeline: of
each stage a micro-batch lasts as long as on the slowest, and every number of layers has one best
number of sharded ones.  The layers of that pipeline follow as of any other (`refit.minimax`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from megatron_hetero.cost.memory.device import (
    StageMemory,
    state_bytes,
    with_sharded_layers,
    with_some_layers_recomputed,
)
from megatron_hetero.cost.placement import Recompute
from megatron_hetero.cost.sync.sharded import exchange_times, slowest_layer
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.planner.completion.stage_options import StageOption, StageOptions, StagePlace


@dataclass(frozen=True, slots=True)
class SharedOption:
    """One number of layers on the stages of all replicas: how many are sharded, and the option of
    each replica, whose times are those of the slowest with the exchanges."""

    num_sharded: int
    options: tuple[StageOption, ...]

    @property
    def time_s(self) -> float:
        """There and back, of every replica."""
        return self.options[0].time_s


class ShardedOptions:
    """The fastest options with sharded layers that fit.

    Args:
        options: tables of the micro-batch size, with prices among as many holders.
        num_holders: replicas.
        is_cut_alike: all stages have one width.
    """

    def __init__(self, options: StageOptions, num_holders: int, *, is_cut_alike: bool) -> None:
        self._options = options
        self._part = 1 / num_holders
        self._is_cut_alike = is_cut_alike
        training = options.costs.workload.training
        self._sums_apart = state_bytes(training).gradient < 4
        self._overlaps = training.overlap_param_gather
        self._found: dict[tuple[Hashable, int, int], StageOption | None] = {}
        self._shared: dict[Hashable, tuple[SharedOption, ...]] = {}

    def shared(
        self, places: Sequence[StagePlace], gather_s: float, reduce_s: float
    ) -> tuple[SharedOption, ...]:
        """Return options with 1, 2, ... layers, as many as fit on all replicas.

        Args:
            places: the stage in each replica.
            gather_s, reduce_s: of one layer (`CostModel.layer_exchange_s`).
        """
        key = (*[self._options.key(place) for place in places], gather_s, reduce_s)
        if key not in self._shared:
            self._shared[key] = self._look(places, gather_s, reduce_s)
        return self._shared[key]

    def _look(
        self, places: Sequence[StagePlace], gather_s: float, reduce_s: float
    ) -> tuple[SharedOption, ...]:
        found = []
        recompute = self._options.choices[0]
        ends = [
            self._options.pieces(recompute, place).stage(0, place.first, place.last)
            for place in places
        ]
        for num_layers in range(1, self._options.costs.workload.model.num_layers + 1):
            best: SharedOption | None = None
            for num_sharded in range(num_layers + 1):
                own = self._own(places, num_layers, num_sharded)
                if own is None:
                    continue
                passes = [PassTimes(option.forward_s, option.backward_s) for option in own]
                waits = exchange_times(
                    num_sharded,
                    gather_s,
                    reduce_s,
                    slowest_layer(passes, ends, num_layers),
                    overlaps=self._overlaps,
                )
                made = _together(own, num_sharded, waits)
                if best is None or made.time_s < best.time_s:
                    best = made
                if all(self._keeps_all(option) for option in made.options):
                    break  # more sharded layers cost more, and there is nothing left to save
            if best is None:
                break
            found.append(best)
        return tuple(found)

    def _keeps_all(self, option: StageOption) -> bool:
        of = self._options
        return (option.recompute or of.own) == "none" or "none" not in of.choices

    def _own(
        self, places: Sequence[StagePlace], num_layers: int, num_sharded: int
    ) -> list[StageOption] | None:
        found = [self.option(place, num_layers, num_sharded) for place in places]
        own = [option for option in found if option is not None]
        return own if len(own) == len(found) else None

    def option(self, place: StagePlace, num_layers: int, num_sharded: int) -> StageOption | None:
        """Return the fastest option of one stage, without exchanges; None where it does not fit.

        Args:
            num_layers: of the stage.
            num_sharded: layers of them that are sharded.
        """
        key = self._options.key(place), num_layers, num_sharded
        if key not in self._found:
            best: StageOption | None = None
            # The least recompute comes first; where nothing is recomputed, nothing is faster.
            for recompute in self._options.choices:
                made = self._option(recompute, place, num_layers, num_sharded)
                if made is not None and (best is None or made.time_s < best.time_s):
                    best = made
                if best is not None and recompute == "none":
                    break
            self._found[key] = best
        return self._found[key]

    def _option(
        self, recompute: Recompute, place: StagePlace, num_layers: int, num_sharded: int
    ) -> StageOption | None:
        of = self._options
        memories = of.memories(recompute, place)
        pieces = of.pieces(recompute, place)
        ends = pieces.stage(0, place.first, place.last)
        if recompute != "full" or "none" not in of.choices:
            if not self._fits(memories, num_layers, num_sharded):
                return None
            times = ends + pieces.layer.times(num_layers)
            return StageOption(
                times.forward_s, times.backward_s, None if recompute == of.own else recompute, None
            )
        # As few layers as will do: what it takes falls with each.
        kept = of.memories("none", place)

        def fits(num: int) -> bool:
            some = [
                with_some_layers_recomputed(one, other, num)
                for one, other in zip(kept, memories, strict=True)
            ]
            return self._fits(some, num_layers, num_sharded)

        if not fits(num_layers):
            return None
        low, high = 0, num_layers
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)
        if low == 0:
            return None  # "none" does
        plain = of.pieces("none", place)
        times = ends + pieces.layer.times(low) + plain.layer.times(num_layers - low)
        if low < num_layers:
            return StageOption(times.forward_s, times.backward_s, "full", low)
        kind: Recompute | None = None if of.own == "full" else "full"
        return StageOption(times.forward_s, times.backward_s, kind, None)

    def _fits(self, memories: Sequence[StageMemory], num_layers: int, num_sharded: int) -> bool:
        for memory in memories:
            if num_sharded:
                memory = with_sharded_layers(
                    memory,
                    num_sharded,
                    num_layers,
                    self._part,
                    is_cut_alike=self._is_cut_alike,
                    sums_apart=self._sums_apart,
                    overlaps=self._overlaps,
                )
            if memory.peak_bytes(num_layers) > memory.capacity_bytes:
                return False
        return True


def _together(own: Sequence[StageOption], num_sharded: int, waits: PassTimes) -> SharedOption:
    """Return the options of all replicas, each with the passes of the slowest and what they wait
    for."""
    forward_s = max(o.forward_s for o in own) + waits.forward_s
    backward_s = max(o.backward_s for o in own) + waits.backward_s
    made = [StageOption(forward_s, backward_s, o.recompute, o.num_recomputed) for o in own]
    return SharedOption(num_sharded, tuple(made))
