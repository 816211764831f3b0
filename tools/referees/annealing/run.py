"""One run of the annealing.

The limit that a plan has to keep to be accepted is drawn before the plan is priced (Metropolis et
al. 1953), so that the quick part of its price is enough to leave most.  The best at the end are
simulated as every plan is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, log
from random import Random

from megatron_hetero.cost.choices import may_choose, micro_batch_sizes
from megatron_hetero.cost.placement import PlacedReplica, Placement
from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.canonical import arranged
from megatron_hetero.planner.exchange_groups import grouped
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.units import Chain, unit_of
from tools.referees.annealing.places import Pipelines, moved, random_pipelines
from tools.referees.annealing.prices import Places, Prices, Replicas, finished, places_of
from tools.referees.annealing.settings import SettingMoves, with_number

_FROM_SCRATCH, _FROM_A_PLAN, _LAST = 0.05, 0.01, 2e-4
"""Parts of a step that a move may well lose: at first, and at the end."""
_NUM_KEPT, _NUM_SIMULATED = 48, 16
_MAX_KNOWN = 50_000
"""Prices of replicas; with more, all are forgotten."""
_NUM_TRIES = 2_000
"""Random plans until one fits."""
_TURNS = 100
"""For each plan, so many moves are drawn at most; most that come to nothing are none at all."""
_MARGIN = 1.02
"""By so much a plan may seem too slow at first sight, before it is priced."""
_PLACES = 0.5
"""Part of the moves that changes places."""
_NAME = "referee"


@dataclass(frozen=True)
class Annealed:
    """What a run found: a plan as it is simulated, and how much work it was."""

    placement: Placement
    step_time_s: float
    num_plans: int
    seconds: float


class Annealing:
    """One run on one problem.

    Args:
        max_plans: limit in plans drawn.
        max_seconds: limit in processor seconds; whichever comes first.
    """

    def __init__(
        self, problem: Problem, seed: int, max_plans: float = inf, max_seconds: float = inf
    ) -> None:
        self.random = Random(seed)
        self.max_plans, self.max_seconds = max_plans, max_seconds
        self.num_plans = 0
        self.kept: dict[Places, tuple[float, Placement]] = {}
        training = problem.workload.training
        self.own_size, self.batch = training.micro_batch_size, training.global_batch_size
        self._begin(problem)

    def _begin(self, problem: Problem) -> None:
        self.problem = problem
        self.prices = Prices(problem)
        self.completer = Completer(problem)
        self.settings = SettingMoves(problem, self.random)

    def _forget(self) -> None:
        """Drop what is known of prices, which would fill the memory in the end."""
        old = self.problem
        self._begin(
            make_problem(
                old.cluster, old.workload, old.costs.profile, old.make_costs, old.objective
            )
        )

    def run(self, start: Placement | None = None) -> Annealed | None:
        """Anneal from a plan, or from a random one that fits; None where none was found to start
        from."""
        started = time.process_time()
        replicas = self.first() if start is None else start.replicas
        if replicas is None:
            return None
        step_s = least_s = self._price(replicas, inf)
        heat = _FROM_SCRATCH if start is None else _FROM_A_PLAN
        progress, turns = 0.0, 0
        while progress < 1:
            turns += 1
            if turns % 32 == 1:
                spent_s = time.process_time() - started
                progress = max(
                    self.num_plans / self.max_plans,
                    turns / (_TURNS * self.max_plans),
                    spent_s / self.max_seconds,
                )
            temperature_s = least_s * heat * (_LAST / heat) ** progress
            limit_s = step_s - temperature_s * log(1 - self.random.random())
            drawn = self._drawn(replicas, limit_s)
            if drawn is None:
                continue
            self.num_plans += 1
            drawn_s = self._price(drawn, limit_s)
            if drawn_s <= limit_s:
                replicas, step_s = drawn, drawn_s
                least_s = min(least_s, step_s)
        placement, simulated_s = self._simulated()
        return Annealed(placement, simulated_s, self.num_plans, time.process_time() - started)

    def _price(self, replicas: Replicas, limit_s: float) -> float:
        """Return the seconds of a step, infinity beyond the limit; keep the best of all places."""
        placement = finished(replicas)
        step_s = self.prices.step_s(placement, limit_s)
        if step_s <= limit_s and step_s < inf:
            places = places_of(placement)
            known = self.kept.get(places)
            if known is None or step_s < known[0]:
                self.kept[places] = step_s, placement
            if len(self.kept) > 2 * _NUM_KEPT:
                best = sorted(self.kept.items(), key=lambda item: item[1][0])
                self.kept = dict(best[:_NUM_KEPT])
        return step_s

    def _simulated(self) -> tuple[Placement, float]:
        """Return the best of those kept, as every plan is simulated; with its gradients exchanged
        by groups of machines where that is faster."""
        self._forget()
        problem = self.problem
        found: list[tuple[float, Placement]] = []
        best = sorted(self.kept.values(), key=lambda pair: pair[0])
        for _, kept in best[:_NUM_SIMULATED]:
            placement, rank_order = arranged(kept, problem.gpus)
            cost = problem.costs.placement(placement)
            candidate = Candidate(placement, cost, _NAME, rank_order)
            found.append((self.prices.rescorer.with_queues(candidate).step_time_s, placement))
            is_plain = not (placement.has_sharded_layers or placement.has_context_parallel)
            if is_plain and may_choose(problem.costs, "exchange"):
                found += [(c.step_time_s, p) for p, c in grouped(problem.costs, placement)]
        step_s, placement = min(found, key=lambda pair: pair[0])
        return placement, step_s

    def first(self) -> Replicas | None:
        """Return the first random plan that fits."""
        sizes = micro_batch_sizes(self.problem.costs)
        for number in range(_NUM_TRIES):
            pipelines = random_pipelines(self.problem, self.random)
            size = sizes[0] if number % 2 else self.random.choice(sizes)
            drawn = self._filled(pipelines, (), size, inf)
            if drawn is not None and self._price(drawn, inf) < inf:
                return drawn
        return None

    def _drawn(self, replicas: Replicas, limit_s: float) -> Replicas | None:
        """Return a plan one random move away; None where what was drawn is none, or is too slow at
        first sight."""
        if len(self.prices.known) > _MAX_KNOWN:
            self._forget()
        random = self.random
        replicas = tuple([replica.without_sharding for replica in replicas])
        if random.random() < _PLACES:
            pipelines = moved(self.problem, list(map(_chain, replicas)), random)
            as_they_are = replicas if random.random() < 0.7 else ()
            size = replicas[0].micro_batch_size or self.own_size
            return self._filled(pipelines, as_they_are, size, limit_s)
        if random.random() < 0.05:
            size = random.choice(micro_batch_sizes(self.problem.costs, len(replicas)))
            return self._filled(list(map(list, map(_chain, replicas))), (), size, limit_s)
        return self.settings.moved(replicas)

    def _filled(
        self,
        pipelines: Pipelines,
        as_they_are: Sequence[PlacedReplica],
        size: int,
        limit_s: float,
    ) -> Replicas | None:
        """Return pipelines with layers and settings, and with shares of the batch; None where they
        do not fit, or promise to take too long.

        Args:
            as_they_are: what is among these is filled already.
            size: of the micro-batches of the others.
        """
        problem, chains = self.problem, tuple([tuple(pipeline) for pipeline in pipelines])
        if not chains or len(chains) not in problem.replica_counts():
            return None
        known: dict[Chain, PlacedReplica] = {}
        if len(as_they_are) == len(chains):  # the optimizer's states are divided alike
            known = {_chain(replica): replica for replica in as_they_are}
        for chain in chains:
            is_one = problem.chain_is_allowed(chain) and all(map(problem.may_be_a_unit, chain))
            if chain not in known and not is_one:
                return None
        found = self.completer.complete(chains, size)
        if found is None:
            return None
        if found.quick_s > _MARGIN * limit_s:
            self.num_plans += 1
            return None
        made = list(found.placement(self.own_size).replicas)
        for index, chain in enumerate(chains):
            own = known.get(chain)
            if own is not None and own.micro_batch_size == made[index].micro_batch_size:
                made[index] = with_number(own, made[index].num_micro_batches)
        return tuple(made)


@lru_cache(maxsize=4096)
def _chain(replica: PlacedReplica) -> Chain:
    return tuple([unit_of(stage) for stage in replica.stages])
