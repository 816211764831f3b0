"""Layers of each stage whose weights the replicas divide: how many, beside what recompute.

All replicas gather a sharded layer together, so replicas of equal depth become one pipeline: of
each stage a micro-batch lasts as long as on the slowest, and every number of layers has one best
number of sharded ones.  The layers of that pipeline follow as of any other (`layers.minimax`).

What a stage takes is a straight line in its layers, in those that are sharded and in those that
recompute, so all numbers of layers and of sharded ones are looked at in one array, exactly.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hetero.cost.memory.sharded import sharded_memory
from megatron_hetero.cost.memory.stage import StageMemory, with_some_layers_recomputed
from megatron_hetero.cost.placement import Recompute
from megatron_hetero.cost.sync.sharded import waits_s
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.planner.completion.stage_lines import StageOption
from megatron_hetero.planner.completion.stage_options import StageOptions
from megatron_hetero.planner.completion.stage_places import StagePlace

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Truths = npt.NDArray[np.bool_]


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


@dataclass(frozen=True, slots=True)
class _Ways:
    """The fastest way to run a stage for each number of layers and sharded layers, shape [layers -
    1, sharded]; without exchanges."""

    forward_s: Floats
    """Infinite where nothing fits."""
    backward_s: Floats
    kind: Ints
    """Index of the recompute among `StageOptions.choices`."""
    num_recomputed: Ints
    """Layers that recompute, where only some have to."""


class ShardedOptions:
    """The fastest options with sharded layers that fit.

    Args:
        options: tables of the micro-batch size, with prices among as many holders.
        num_holders: replicas.
        is_cut_alike: all stages have one width.
    """

    def __init__(self, options: StageOptions, num_holders: int, *, is_cut_alike: bool) -> None:
        self._options = options
        self._memory = sharded_memory(
            options.costs.workload.training, num_holders, is_cut_alike=is_cut_alike
        )
        num_layers = options.costs.workload.model.num_layers
        self._layers: Ints = np.arange(1, num_layers + 1, dtype=np.int64)[:, None]
        self._sharded: Ints = np.arange(num_layers + 1, dtype=np.int64)[None, :]
        self._shared: dict[Hashable, tuple[SharedOption, ...]] = {}

    def shared(
        self, places: Sequence[StagePlace], gather_s: float, reduce_s: float
    ) -> tuple[SharedOption, ...]:
        """Return options with 1, 2, ... layers, as many as fit on all replicas.

        Args:
            places: the stage in each replica.
            gather_s, reduce_s: of one layer (`CostModel.layer_exchange_s`).
        """
        keys = [self._options.key(place) for place in places]
        key = (*keys, gather_s, reduce_s)
        if key not in self._shared:
            self._shared[key] = tuple(self._look(places, keys, gather_s, reduce_s))
        return self._shared[key]

    def _look(
        self,
        places: Sequence[StagePlace],
        keys: Sequence[Hashable],
        gather_s: float,
        reduce_s: float,
    ) -> Iterator[SharedOption]:
        # Alike stages are looked at once.
        unlike = dict(zip(keys, places, strict=True))
        ways = {key: self._ways(place) for key, place in unlike.items()}
        ends = {key: self._ends(place) for key, place in unlike.items()}
        forward_s = self._slowest(
            [(ways[key].forward_s, ends[key].forward_s) for key in unlike], gather_s
        )
        backward_s = self._slowest(
            # Forward passes gather weights; backward passes gather them again and reduce gradients.
            [(ways[key].backward_s, ends[key].backward_s) for key in unlike], gather_s + reduce_s
        )
        best = np.argmin(forward_s + backward_s, axis=1).tolist()  # of equals the fewest sharded
        for index, number in enumerate(best):
            times = float(forward_s[index, number]), float(backward_s[index, number])
            # More layers do not fit either.
            if times[0] == np.inf:
                return
            made = [self._option(ways[key], index, number, times) for key in keys]
            yield SharedOption(number, tuple(made))

    def _slowest(self, passes: Sequence[tuple[Floats, float]], exchange_s: float) -> Floats:
        """Return seconds of a pass on the slowest stage, with the wait for exchanges, shape [layers
        - 1, sharded].

        Args:
            passes: of each unlike stage, and the part of them that is no layer's.
            exchange_s: of one layer.
        """
        # [layers - 1, sharded] of the slowest replica.
        slowest_s: Floats = np.maximum.reduce([times_s for times_s, _ in passes])
        # Seconds of one layer, behind which the exchange of another may hide.
        layer_s: Floats = np.maximum.reduce(
            [(times_s - ends_s) / self._layers for times_s, ends_s in passes]
        )
        overlaps = self._memory.overlaps
        return slowest_s + waits_s(self._sharded, exchange_s, layer_s, overlaps=overlaps)

    def _option(
        self, ways: _Ways, index: int, number: int, times: tuple[float, float]
    ) -> StageOption:
        of = self._options
        recompute = of.choices[int(ways.kind[index, number])]
        num_recomputed = int(ways.num_recomputed[index, number])
        # Some of `index + 1` layers recompute; all or none is a kind of its own.
        if 0 < num_recomputed <= index:
            return StageOption(*times, recompute, num_recomputed)
        return StageOption(*times, None if recompute == of.own else recompute, None)

    def _ends(self, place: StagePlace) -> PassTimes:
        pieces = self._options.pieces(self._options.choices[0], place)
        return pieces.stage(0, place.first, place.last)

    def _ways(self, place: StagePlace) -> _Ways:
        """Return the fastest of all kinds of recompute; of equals the first, that is the least."""
        shape = len(self._layers), self._sharded.shape[1]
        best = _Ways(*np.full((2, *shape), np.inf), *np.zeros((2, *shape), np.int64))
        for kind, recompute in enumerate(self._options.choices):
            number, fits = self._recomputed(recompute, place)
            forward_s, backward_s = self._times(recompute, place, number)
            # Strictly faster, so that of equals the first kind stays.
            chosen = fits & (forward_s + backward_s < best.forward_s + best.backward_s)
            for of, found in (
                (best.forward_s, forward_s),
                (best.backward_s, backward_s),
                (best.kind, kind),
                (best.num_recomputed, number),
            ):
                np.copyto(of, found, where=chosen)
        return best

    def _times(
        self, recompute: Recompute, place: StagePlace, number: Ints
    ) -> tuple[Floats, Floats]:
        """Return seconds forward and backward where `number` layers recompute."""
        pieces = self._options.pieces(recompute, place)
        plain = pieces if not self._is_partly(recompute) else self._options.pieces("none", place)
        ends, rest = pieces.stage(0, place.first, place.last), self._layers - number
        return (
            ends.forward_s + pieces.layer.forward_s * number + plain.layer.forward_s * rest,
            ends.backward_s + pieces.layer.backward_s * number + plain.layer.backward_s * rest,
        )

    def _is_partly(self, recompute: Recompute) -> bool:
        """Return whether only as many layers recompute as have to."""
        return recompute == "full" and "none" in self._options.choices

    def _recomputed(self, recompute: Recompute, place: StagePlace) -> tuple[Ints, Truths]:
        """Return the number of recomputing layers, and whether the stage fits, per number of layers
        and sharded layers."""
        of, most = self._options, len(self._layers)
        memories = of.memories(recompute, place)
        # Zero times the sharded layers only gives the array its second axis.
        number: Ints = self._layers + 0 * self._sharded
        fits = self._sharded <= self._layers
        if not self._is_partly(recompute):
            for memory in memories:
                peaks = self._lines(memory)
                fits &= np.maximum(*peaks) <= memory.capacity_bytes
            return number, fits
        least = np.ones_like(number)
        for kept, of_all in zip(of.memories("none", place), memories, strict=True):
            # Bytes that one recomputing layer saves.
            memory = with_some_layers_recomputed(kept, of_all, 0)
            less = with_some_layers_recomputed(kept, of_all, most)
            saved = (memory.base_bytes - less.base_bytes) // most
            training, saving = self._lines(memory)
            missing = training - memory.capacity_bytes
            if saved > 0:
                # The fewest recomputing layers that save what is missing, rounded up.
                least = np.maximum(least, -(-missing // saved))
            else:
                fits &= missing <= 0
            fits &= saving <= memory.capacity_bytes
        return least, fits & (least <= self._layers)

    def _lines(self, memory: StageMemory) -> tuple[Ints, Ints]:
        return self._memory.lines(memory, self._sharded, self._layers)
