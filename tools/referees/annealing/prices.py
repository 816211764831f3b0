"""Steps of plans as the product prices them: the cost model's, with what pipelines wait for.

What is cheap is asked first, so that a plan over its limit seldom costs more: the parts of a step
add up, and queues only make it longer.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import inf

from megatron_hetero.cost.placement import PlacedReplica, Placement
from megatron_hetero.cost.placing import with_optimizer_shares
from megatron_hetero.cost.step_cost import PlacementCost, ReplicaCost
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.replica_shapes import ReplicaShapes
from megatron_hetero.schedule.simulator.shared_paths import num_simulated

Replicas = tuple[PlacedReplica, ...]
Places = tuple[tuple[tuple[str, int], ...], ...]
"""Node and width of every stage of every replica: which of a node's GPUs, nothing depends on."""

_MAX_MESSAGES = 400
"""Of longer steps a part with so many is simulated where replicas share paths."""


class Prices:
    """What is known of one problem; the same plan, or replica, is priced once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.rescorer = Rescorer(Scoreboard(problem))
        self.shapes = ReplicaShapes(problem.likeness)
        self.known: dict[Hashable, ReplicaCost] = {}
        self._steps: dict[Hashable, float] = {}
        self._waits: dict[Hashable, float] = {}

    def step_s(self, placement: Placement, limit_s: float) -> float:
        """Return the seconds of a step; infinity where memory or the limit does not hold it."""
        costs = self.problem.costs.sharded_as(placement)
        rows = costs.vocab_rows(placement.widths)
        keys = [(self.shapes.of(replica, rows), costs.holders) for replica in placement.replicas]
        places = places_of(placement)
        known_s = self._steps.get((places, *keys))
        if known_s is not None:
            return known_s
        priced: list[ReplicaCost] = []
        for key, replica in zip(keys, placement.replicas, strict=True):
            found = self.known.get(key)
            if found is None:
                found = self.known[key] = costs.replica(replica, rows)
            if not found.fits:
                return inf
            priced.append(found)
        update_s = max([stage.update_s for replica in priced for stage in replica.stages])
        if max([replica.pipeline_s for replica in priced]) + update_s > limit_s:
            return inf
        cost = costs.combine(placement, tuple(priced), rows)
        if cost.step_time_s > limit_s:
            return inf
        step_s = self._with_queues(placement, cost, places)
        self._steps[places, *keys] = step_s
        return step_s

    def _with_queues(self, placement: Placement, cost: PlacementCost, places: Places) -> float:
        """Return the step with what pipelines wait for each other, as found once for the places
        and launch counts."""
        replicas = placement.replicas
        key = (places, *[(own.launch_counts, own.micro_batch_size) for own in replicas])
        if key not in self._waits:
            self._waits[key] = 1.0
            if num_simulated(self.problem.cluster, placement, cost):
                candidate = Candidate(placement, cost, "referee")
                found = self.rescorer.with_part_of_queues(candidate, _MAX_MESSAGES)
                self.rescorer.board.with_queues.clear()
                self._waits[key] = found.step_time_s / cost.step_time_s
        return self._waits[key] * cost.step_time_s


def finished(replicas: Replicas) -> Placement:
    """Return their placement, with the parts of the optimizer's states that follow from it."""
    placement = Placement(replicas)
    stages = [stage for replica in replicas for stage in replica.stages]
    if all(stage.state_parts is None and stage.context_parallel == 1 for stage in stages):
        return placement
    return with_optimizer_shares(
        placement, [[stage.optimizer_share for stage in replica.stages] for replica in replicas]
    )


def places_of(placement: Placement) -> Places:
    """Return where the stages of a placement are."""
    return tuple(
        [
            tuple([(stage.devices[0].node, stage.width) for stage in replica.stages])
            for replica in placement.replicas
        ]
    )
