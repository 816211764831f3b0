"""Simulated annealing over whole plans: a referee of the planner's search, which it knows not.

A state is a plan with all that it says: groups of GPUs and their order, replicas, layers,
recompute, launch counts, micro-batch sizes, shares of the batch.  A random move changes places
(`random_moves`), and the product fills them anew (`Completer`), or it changes one of the others
alone.  Unequal shares, divided sequences and sharded layers are only kept from where it starts.

The limit that a plan has to keep to be accepted is drawn before the plan is priced (Metropolis et
al. 1953), so that the quick part of its price is enough to leave most.  Prices are the product's:
the cost model's, with what pipelines on shared paths wait for each other.  The best at the end are
simulated as every plan is.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, lcm, log
from random import Random

from megatron_hetero.cost.choices import may_choose, may_mix_sizes, micro_batch_sizes, recomputes
from megatron_hetero.cost.memory.device import StateHolders
from megatron_hetero.cost.placement import (
    PlacedReplica,
    Placement,
    with_optimizer_shares,
)
from megatron_hetero.cost.step_cost import PlacementCost, ReplicaCost
from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.completion.counts import moved_counts, with_counts
from megatron_hetero.planner.completion.stage_options import StageOptions
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.replica_shapes import ReplicaShapes
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.exchange_groups import grouped
from megatron_hetero.planner.moves.refine import arranged
from megatron_hetero.planner.problem import Chain, Problem, make_problem, unit_of
from megatron_hetero.planner.refit.refit import on_devices_of, places, with_option
from megatron_hetero.schedule.simulator.shared_paths import num_simulated
from tools.referees.random_moves import Pipelines, moved, random_pipelines

_FROM_SCRATCH, _FROM_A_PLAN, _LAST = 0.05, 0.01, 2e-4
"""Parts of a step that a move may well lose: at first, and at the end."""
_MAX_MESSAGES = 400
"""Of longer steps a part with so many is simulated where replicas share paths."""
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

Replicas = tuple[PlacedReplica, ...]


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
        self.problem = problem
        self.random = Random(seed)
        self.max_plans, self.max_seconds = max_plans, max_seconds
        self.num_plans = 0
        self.kept: dict[Hashable, tuple[float, Placement]] = {}
        training = problem.workload.training
        self.own_size, self.batch = training.micro_batch_size, training.global_batch_size
        self.kinds = recomputes(problem.costs)
        self._forget()

    def run(self, start: Placement | None = None) -> Annealed | None:
        """Anneal from a plan, or from a random one that fits; None where none was found to start
        from."""
        started = time.process_time()
        replicas = self.first() if start is None else start.replicas
        if replicas is None:
            return None
        step_s = least_s = self.price(replicas, inf)
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
            drawn_s = self.price(drawn, limit_s)
            if drawn_s <= limit_s:
                replicas, step_s = drawn, drawn_s
                least_s = min(least_s, step_s)
        placement, simulated_s = self._simulated()
        return Annealed(placement, simulated_s, self.num_plans, time.process_time() - started)

    def price(self, replicas: Replicas, limit_s: float) -> float:
        """Return the seconds of a step; infinity where memory or the limit does not hold it."""
        placement = _finished(replicas)
        costs = self.problem.costs.sharded_as(placement)
        rows = costs.vocab_rows(placement.widths)
        keys = [(self.shapes.of(replica, rows), costs.holders) for replica in placement.replicas]
        places = _places(placement)
        known_s = self.prices.get((places, *keys))
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
        self.prices[places, *keys] = step_s
        if step_s <= limit_s:
            self._keep(placement, step_s, places)
        return step_s

    def _forget(self) -> None:
        """Drop what is known of prices, which would fill the memory in the end."""
        old = self.problem
        self.problem = make_problem(
            old.cluster, old.workload, old.costs.profile, old.make_costs, old.objective
        )
        self.rescorer = Rescorer(Scoreboard(self.problem))
        self.shapes = ReplicaShapes(self.problem.likeness)
        self.completer = Completer(self.problem)
        self.known: dict[Hashable, ReplicaCost] = {}
        self.prices: dict[Hashable, float] = {}
        self.waits: dict[Hashable, float] = {}
        self.options: dict[tuple[int, int, StateHolders], StageOptions] = {}

    def _with_queues(self, placement: Placement, cost: PlacementCost, places: Hashable) -> float:
        """Return the step with what pipelines wait for each other, as found once for the places
        and launch counts."""
        replicas = placement.replicas
        key = (places, *[(own.launch_counts, own.micro_batch_size) for own in replicas])
        if key not in self.waits:
            self.waits[key] = 1.0
            if num_simulated(self.problem.cluster, placement, cost):
                candidate = Candidate(placement, cost, _NAME)
                found = self.rescorer.with_part_of_queues(candidate, _MAX_MESSAGES)
                self.rescorer.board.with_queues.clear()
                self.waits[key] = found.step_time_s / cost.step_time_s
        return self.waits[key] * cost.step_time_s

    def _keep(self, placement: Placement, step_s: float, places: Hashable) -> None:
        """Keep the best of each structure."""
        known = self.kept.get(places)
        if known is None or step_s < known[0]:
            self.kept[places] = step_s, placement
        if len(self.kept) > 2 * _NUM_KEPT:
            best = sorted(self.kept.items(), key=lambda item: item[1][0])
            self.kept = dict(best[:_NUM_KEPT])

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
            found.append((self.rescorer.with_queues(candidate).step_time_s, placement))
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
            if drawn is not None and self.price(drawn, inf) < inf:
                return drawn
        return None

    def _drawn(self, replicas: Replicas, limit_s: float) -> Replicas | None:
        """Return a plan one random move away; None where what was drawn is none, or is too slow at
        first sight."""
        if len(self.known) > _MAX_KNOWN:
            self._forget()
        random = self.random
        replicas = tuple([replica.without_sharding for replica in replicas])
        if random.random() < _PLACES:
            pipelines = moved(self.problem, list(map(_chain, replicas)), random)
            as_they_are = replicas if random.random() < 0.7 else ()
            size = replicas[0].micro_batch_size or self.own_size
            return self._filled(pipelines, as_they_are, size, limit_s)
        index = random.randrange(len(replicas))
        if len(replicas) > 1 and random.random() < 0.2:
            return self._batch(replicas, index)
        if random.random() < 0.1:
            size = random.choice(micro_batch_sizes(self.problem.costs, len(replicas)))
            return self._filled(list(map(list, map(_chain, replicas))), (), size, limit_s)
        (change,) = random.choices((self._layers, self._recompute, self._counts), (6, 2, 2))
        changed = change(replicas, replicas[index])
        if changed is None:
            return None
        alike = [index]
        if random.random() < 0.5:
            alike = [i for i, other in enumerate(replicas) if _is_like(other, replicas[index])]
        made = list(replicas)
        for i in alike:
            own = replicas[i]
            made[i] = _with_number(on_devices_of(changed, own), own.num_micro_batches)
        return tuple(made)

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
                made[index] = _with_number(own, made[index].num_micro_batches)
        return tuple(made)

    def _options(self, replicas: Replicas, size: int) -> StageOptions:
        placement = Placement(replicas)
        costs = self.problem.costs.sharded_as(placement).variant(micro_batch_size=size)
        rows = costs.vocab_rows(placement.widths)
        key = size, rows, costs.holders
        if key not in self.options:
            self.options[key] = StageOptions(costs, rows)
        return self.options[key]

    def _layers(self, replicas: Replicas, replica: PlacedReplica) -> PlacedReplica | None:
        """Give layers of a stage to another, each with as much recompute as it then needs."""
        if len(replica.stages) < 2:
            return None
        random, stages = self.random, list(replica.stages)
        giver, taker = random.sample(range(len(stages)), 2)
        number = random.choice((1, 1, 1, 2, 3))
        options = self._options(replicas, replica.micro_batch_size or self.own_size)
        has_counts = replica.launch_counts is not None
        of_stage = list(places(replica, replica.num_in_flight, has_counts))
        for index, num_layers in (
            (giver, stages[giver].num_layers - number),
            (taker, stages[taker].num_layers + number),
        ):
            found = options.of(of_stage[index])
            if not 1 <= num_layers <= len(found):
                return None
            stages[index] = with_option(stages[index], num_layers, found[num_layers - 1])
        return replace(replica, stages=tuple(stages))

    def _recompute(self, replicas: Replicas, replica: PlacedReplica) -> PlacedReplica | None:
        """Let a stage recompute otherwise."""
        random, stages = self.random, list(replica.stages)
        index = random.randrange(len(stages))
        kind = random.choice(self.kinds)
        own = self.problem.workload.training.recompute
        some = random.randrange(1, stages[index].num_layers + 1) if kind == "full" else None
        stages[index] = replace(
            stages[index],
            recompute=None if kind == own else kind,
            recompute_num_layers=None if some == stages[index].num_layers else some,
        )
        return replace(replica, stages=tuple(stages))

    def _counts(self, replicas: Replicas, replica: PlacedReplica) -> PlacedReplica | None:
        """Let a stage launch more or fewer forwards ahead."""
        random, depth = self.random, len(replica.stages)
        if depth < 2 or not self.problem.costs.has_launch_counts:
            return None
        if random.random() < 0.1:
            return replace(replica, launch_counts=None)
        index, step = random.randrange(depth - 1), random.choice((-2, -1, 1, 1, 2, 4, 8))
        together, most = random.random() < 0.5, replica.num_micro_batches
        counts = moved_counts(replica.num_in_flight, index, step, most, together)
        return None if counts is None else with_counts(replica, counts)

    def _batch(self, replicas: Replicas, index: int) -> Replicas | None:
        """Give micro-batches of a replica to another, or let one have others of its own size."""
        random, made = self.random, list(replicas)
        giver = replicas[index]
        size = giver.micro_batch_size or self.own_size
        if may_mix_sizes(self.problem.costs) and random.random() < 0.3:
            sizes = micro_batch_sizes(self.problem.costs, len(replicas))
            other = random.choice(sizes)
            number, rest = divmod(giver.num_micro_batches * size, other)
            if rest or not number:
                return None
            own_size = None if other == self.own_size else other
            made[index] = replace(_with_number(giver, number), micro_batch_size=own_size)
            return tuple(made)
        to = random.choice([i for i in range(len(replicas)) if i != index])
        taker = replicas[to]
        for i, replica, sequences in ((index, giver, -1), (to, taker, 1)):
            step = lcm(size, taker.micro_batch_size or self.own_size)
            number = replica.num_micro_batches + sequences * step // (
                replica.micro_batch_size or self.own_size
            )
            if number < 1:
                return None
            made[i] = _with_number(replica, number)
        return tuple(made)


def _finished(replicas: Replicas) -> Placement:
    """Return their placement, with the parts of the optimizer's states that follow from it."""
    placement = Placement(replicas)
    stages = [stage for replica in replicas for stage in replica.stages]
    if all(stage.state_parts is None and stage.context_parallel == 1 for stage in stages):
        return placement
    return with_optimizer_shares(
        placement, [[stage.optimizer_share for stage in replica.stages] for replica in replicas]
    )


def _places(placement: Placement) -> Hashable:
    """Return node and width of every stage: which of a node's GPUs, nothing depends on."""
    return tuple(
        [
            tuple([(stage.devices[0].node, stage.width) for stage in replica.stages])
            for replica in placement.replicas
        ]
    )


@lru_cache(maxsize=4096)
def _chain(replica: PlacedReplica) -> Chain:
    return tuple([unit_of(stage) for stage in replica.stages])


def _is_like(one: PlacedReplica, other: PlacedReplica) -> bool:
    """Return whether both have the same groups, layers and recompute, whatever the GPUs."""
    return [(s.cut, s.num_layers, s.recompute) for s in one.stages] == [
        (s.cut, s.num_layers, s.recompute) for s in other.stages
    ]


def _with_number(replica: PlacedReplica, number: int) -> PlacedReplica:
    """Return the replica with so many micro-batches."""
    if number == replica.num_micro_batches:
        return replica
    made = replace(replica, num_micro_batches=number, launch_counts=None)
    counts = replica.launch_counts
    return made if counts is None else with_counts(made, [min(c, number) for c in counts])
