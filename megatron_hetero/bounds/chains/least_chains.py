"""The least time of any chain of stages, by the GPUs taken, for any launch counts.

This is the second part of the lower bound for pipelines that may launch ahead.  Take a stage of t
seconds a micro-batch, and let the stages and boundaries before it take S seconds together.  A step
of m micro-batches then lasts S + m t at least, whatever the launch counts: the stage's first
forward pass waits for the first micro-batch to come through the stages before, and the last
backward pass still returns through them.  The same holds for a boundary.  From the last stage on,
the longest of these is

    E_i = max(m t_i, t_i + max(m send, trip + E_{i+1}))

A shorter E_{i+1} is never worse.  So the table needs only the least E for each number of layers
held from the end and each part of the cluster that the chain has taken.

Tables are in single precision, which halves their time.  All their numbers come from sums and from
the larger or smaller of two, so each is too large by the roundings of its own sums at most; the
result is made shorter by as much, and stays a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hetero.bounds.chains.rests import Rows, Singles, least_of_rests
from megatron_hetero.bounds.chains.stages import PLACES, ChainStageOptions, Floats, Ints

MAX_NUMBERS = 50_000
"""Most numbers of a single operation; larger arrays are processed in parts."""


@dataclass(frozen=True)
class _Stages:
    """Seconds of the stages of one place, shape [layers, kind, stages to the last - 1, range]: for
    a whole step, and for a micro-batch; `further` are those with stages behind, [layers, row]."""

    own_s: Singles
    further_own_s: Singles
    further_time_s: Singles
    most_layers: int


@dataclass(frozen=True)
class _Boundaries:
    """Boundaries to the stage in front, [kind behind, (kind in front, stages to the last - 1,
    range)]: rows of the chains behind, seconds of a trip, and seconds of all sends."""

    rows: Rows
    trip_s: Singles
    floor_s: Singles


def rounded_down(num_layers: int) -> float:
    """Return by what the seconds of a chain in single precision are multiplied to be none too
    many: two sums for each stage, and its own seconds, are rounded to half of `eps` at most."""
    return 1 - 2 * (num_layers + 1) * float(np.finfo(np.float32).eps)


class ChainTimes:
    """Least times of chains of `num_layers` layers.

    A kind of stage takes `steps[kind]` along the axes of a table of `shape`: its GPUs of each
    class, or what they are priced at.
    """

    def __init__(
        self, options: ChainStageOptions, num_layers: int, shape: tuple[int, ...], steps: Ints
    ) -> None:
        self.options = options
        self.num_layers = num_layers
        self.shape = shape
        self._size = int(np.prod(shape))
        self.work = 0
        """Numbers looked at so far."""
        self._before: list[tuple[slice, ...]] = []
        self._after: list[tuple[slice, ...]] = []
        self._at: list[tuple[int, ...] | None] = []
        # Slices by which a table moves along every axis when a stage of a kind joins the chain.
        for row in steps:
            pairs = list(zip(shape, map(int, row), strict=True))
            self._before.append(tuple(slice(0, max(0, n - step)) for n, step in pairs))
            self._after.append(tuple(slice(step, None) for _, step in pairs))
            # A stage that needs more than the table's last entry is in no chain.
            fits = all(step < n for n, step in pairs)
            self._at.append(tuple(step for _, step in pairs) if fits else None)
        # Depths from which more in flight changes nothing are one depth.
        rates = options.rate_s
        same = [
            np.array_equal(rates[:, :, i], rates[:, :, -1])
            and np.array_equal(options.time_s[:, :, i], options.time_s[:, :, -1])
            for i in range(options.max_in_flight)
        ]
        self.depth = max(2, 1 + same.index(True))
        """Stages from one to the last are told apart up to this many."""

    def least_s(self, ranges: Sequence[tuple[int, int]], cut_s: float) -> Floats:
        """Return the least step of a chain for each range of sequences, by GPUs taken, with the
        most sequences of the range and the memory of the least, [range, *shape].

        Infinite where not even the least are done in `cut_s`.  A chain's step grows by less than
        its sequences: what does k of n takes k / n of the step at least.
        """
        # Ranges are tabulated together as long as arrays stay small.
        size = self.options.width.size * self.depth * int(np.prod(self.shape))
        some = max(1, MAX_NUMBERS // max(1, size))
        least: Floats = np.concatenate(
            [
                self._least_s(np.array(ranges[i : i + some]).T, cut_s)
                for i in range(0, len(ranges), some)
            ]
        ).astype(np.float64)
        # More GPUs are never worse: a chain may leave them idle.
        for axis in range(1, least.ndim):
            np.minimum.accumulate(least, axis=axis, out=least)
        return least * rounded_down(self.num_layers)

    def _least_s(self, ranges: Ints, cut_s: float) -> Singles:
        """Return `least_s` of chains that take just so much; `ranges` is [end, range]."""
        total, num = self.num_layers, len(self.options.width)
        inner, last, first, lone = (
            self._stages(place, ranges, cut_s) for place in range(len(PLACES))
        )
        shape = (num, self.depth, ranges.shape[1], *self.shape)
        # [layers held, kind in front, stages from that one to the last - 2, range, *shape]
        behind = _infinite((total, num, self.depth - 1, *shape[2:]))
        # [layers that are not behind - 1, row]: the row of `behind`, for the most layers first.
        num_rows = int(np.prod(behind.shape[1:4]))
        table = np.arange(total * num_rows, dtype=np.int32).reshape(total, num_rows)
        rows: Rows = np.ascontiguousarray(table[::-1])
        boundaries = self._boundaries(ranges[1])
        # From the end of the model on: `behind[held]` is complete before any longer chain reads it.
        for held in range(1, total):
            found = _infinite(shape)
            self._begin(found[:, 0], last, held)
            if held > 1:
                self._take(found[:, 1:], self._best(inner, behind, rows, held))
            behind[held] = self._crossed(found, boundaries)
        # The whole model: a single stage, or a first stage in front of the best rest.
        least = _infinite((num, *shape[2:]))
        self._begin(least, lone, total)
        if total > 1:
            found = _infinite((num, self.depth - 1, *shape[2:]))
            self._take(found, self._best(first, behind, rows, total))
            least = np.minimum(least, found.min(axis=1))
        smallest: Singles = least.min(axis=0)
        return smallest

    def _begin(self, goal: Singles, stages: _Stages, layers: int) -> None:
        """Chains of one last stage, [kind, range, *shape]."""
        for kind, at in enumerate(self._at):
            if at is not None:
                goal[kind][(slice(None), *at)] = stages.own_s[layers, kind, 0]

    def _best(self, stages: _Stages, behind: Singles, rows: Rows, held: int) -> Singles:
        """Return a stage in front of the best rest, together with `held` layers, [kind, stages to
        the last - 2, range, *shape].

        Args:
            stages: in front.
            behind, rows: as of `_least_s`.
            held: layers of both.
        """
        # The layers of the stage in front; all other layers of `held` are behind it.
        most = min(held - 1, stages.most_layers)
        ways, first = slice(1, most + 1), self.num_layers - held
        best = least_of_rests(
            behind.reshape(-1, self._size),
            rows[first : first + most],
            stages.further_time_s[ways],
            stages.further_own_s[ways],
        )
        self.work += best.size * most
        return best.reshape(behind.shape[1:])

    def _stages(self, place: int, ranges: Ints, cut_s: float) -> _Stages:
        options, (least, most) = self.options, ranges
        # The range's least sequences decide the memory, its most decide the time.
        num_micro_batches = np.maximum(least // options.most_size, 1)
        in_flight = np.minimum(np.arange(1, self.depth + 1)[:, None], num_micro_batches[None, :])
        # [depth, range]: micro-batches in flight, as an index into the options.
        rows = np.minimum(in_flight, options.max_in_flight) - 1
        rate_s = options.rate_s[:, place][:, rows]
        update_s = options.update_s[:, place][:, None, None]
        sync_s = options.sync_s[:, place][:, None, None]
        # Stages that are late even with the least sequences cannot be in any chain that counts.
        late = least[:, None] * rate_s + update_s + sync_s > cut_s
        own_s = np.where(late, np.inf, most[:, None] * rate_s + update_s)
        own_s = np.moveaxis(own_s, -1, 0).astype(np.float32)
        time_s = np.moveaxis(options.time_s[:, place][:, rows], -1, 0).astype(np.float32)

        def further(seconds: Singles) -> Singles:
            """Return those with stages behind, in rows."""
            return np.ascontiguousarray(seconds[:, :, 1:]).reshape(len(seconds), -1)

        fitting = np.isfinite(own_s).reshape(len(own_s), -1).any(axis=1)
        most_layers = int(np.flatnonzero(fitting).max(initial=0))
        return _Stages(own_s, further(own_s), further(time_s), most_layers)

    def _take(self, goal: Singles, options_s: Singles) -> None:
        """Write chains, with the GPUs of each kind added to those that the stages behind take."""
        for kind, (before, after) in enumerate(zip(self._before, self._after, strict=True)):
            goal[kind][:, :, *after] = options_s[kind][:, :, *before]

    def _boundaries(self, counts: Ints) -> _Boundaries:
        """Return the boundaries between all kinds, for the most sequences of each range."""
        options, num = self.options, len(self.options.width)
        shape = (num, num, self.depth, len(counts))  # behind, in front
        # Rows of `found` in `_crossed`: [kind, stages to the last - 1, range].
        table = np.arange(num * self.depth * len(counts), dtype=np.int32)
        rows: Rows = table.reshape(num, 1, *shape[2:])
        # [range, kind, kind behind]
        busy_s: Singles = (counts[:, None, None] * options.send_rate_s).astype(np.float32)
        trip_s: Singles = options.trip_s.T[:, :, None, None].astype(np.float32)
        floor_s = busy_s.transpose(2, 1, 0)[:, :, None]
        return _Boundaries(_spread(rows, shape), _spread(trip_s, shape), _spread(floor_s, shape))

    def _crossed(self, found: Singles, boundaries: _Boundaries) -> Singles:
        """Go from chains by the first kind to chains by the kind in front, including the boundary,
        [kind in front, stages to the last - 2, range, *shape]."""
        self.work += found.size * len(self.options.width)
        crossed = least_of_rests(
            found.reshape(-1, self._size), boundaries.rows, boundaries.trip_s, boundaries.floor_s
        ).reshape(found.shape)
        # More stages than are told apart count as the most that are.
        merged = crossed[:, :-1].copy()
        merged[:, -1] = np.minimum(merged[:, -1], crossed[:, -1])
        return merged


def _spread[Kind: np.generic](
    part: npt.NDArray[Kind], shape: tuple[int, ...]
) -> npt.NDArray[Kind]:
    """Return an array repeated to a shape, in two dimensions: the first, and all others."""
    return np.ascontiguousarray(np.broadcast_to(part, shape)).reshape(shape[0], -1)


def _infinite(shape: tuple[int, ...]) -> Singles:
    return np.full(shape, np.inf, np.float32)
