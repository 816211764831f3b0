"""Shapes repeated with unlike GPUs in the replicas, where the last replica sets the pace of all."""

from __future__ import annotations

from megatron_hetero.planner.completion.fill import FilledChain
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from tools.referees.search.equal_replicas import EqualReplicas
from tools.referees.search.shape_layout import Shape
from tools.referees.search.shape_search import ShapeSearch
from tools.referees.search.unit_mix import Mix, UnitMixer


class MixedShapeSearch(ShapeSearch):
    """Shapes, and replicas of the same layers on the GPUs that a shape leaves over."""

    def __init__(self, board: Scoreboard, name: str) -> None:
        super().__init__(board, name)
        self.mixer = UnitMixer(board.problem, self.kinds)

    def price(self, shape: Shape, beat: Candidate | None) -> Candidate | None:
        """See `ShapeSearch`."""
        best = super().price(shape, beat)
        return self._mixed(shape, beat if best is None else best) or best

    def quick_time_s(self, shape: Shape) -> float | None:
        """See `ShapeSearch`."""
        own_s, found = super().quick_time_s(shape), self._mix(shape)
        if found is None:
            return own_s
        filled, _, count = found
        mixed_s = filled.quick_time_s(self.each(count))
        return mixed_s if own_s is None else min(own_s, mixed_s)

    def _mixed(self, shape: Shape, beat: Candidate | None) -> Candidate | None:
        """The placement of unlike GPUs with a shape's layers, where it is better than `beat`."""
        found = self._mix(shape)
        if found is None:
            return None
        filled, mix, count = found
        if beat and filled.quick_time_s(self.each(count)) >= beat.step_time_s:
            return None
        chains = self.mixer.chains(mix)[:count]
        candidate = self.score(chains, filled.layers) if chains else None
        return candidate if candidate and (beat is None or candidate.key < beat.key) else None

    def _mix(self, shape: Shape) -> tuple[FilledChain, Mix, int] | None:
        """A replica of a shape, as many of its layers as there are GPUs for, and how many of these
        are needed."""
        if len(self.kinds) < 2 or not self.is_allowed(shape):
            return None
        if not self.layouts.has_room(shape, 1, True):
            return None
        filled = self.fill(self.layouts.first_chain(shape, 1))
        if not filled.fits:
            return None
        mix = self.mixer.most(shape, filled)
        counts = self.problem.replica_counts()
        if len(mix.counts) < 2 or not counts or mix.num_replicas < counts.start:
            return None
        most = min(mix.num_replicas, counts[-1])
        fewest = -(-self.problem.num_micro_batches // self.each(most))
        return filled, mix, fewest if fewest in counts else most


class MixedReplicas(EqualReplicas):
    """Hill climbing over such shapes."""

    searching = MixedShapeSearch
