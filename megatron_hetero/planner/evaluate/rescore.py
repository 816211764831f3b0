"""The end of a search: its best placements with queues on the paths that replicas share.

The strategies compare by the cost model, which is quick, and never predicts a longer step than the
simulation (`schedule.simulator.shared_paths`).  The search over structures simulates its best ones
itself; of all others those are simulated first that would be fastest if they waited as these do,
until the next one is slower even without queues.  Stock Megatron's own exchange is the exception:
it may take less than the model's, so the best stock placements are simulated too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from math import inf

from megatron_hetero.cost.placement import PlacedReplica, Placement
from megatron_hetero.plan.stock_ranks import RankOrder
from megatron_hetero.planner.division.counts import with_counts, with_replicas
from megatron_hetero.planner.evaluate.candidate import NEAR, Candidate
from megatron_hetero.planner.evaluate.hanging import Hanging
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.evaluate.written import bare_plan
from megatron_hetero.planner.objective import Standing
from megatron_hetero.schedule.estimate import plan_cost
from megatron_hetero.schedule.simulator.shared_paths import num_simulated, queued, sharing_replicas

_MAX_SIMULATED = 12
"""Placements simulated beside the placements simulated by the search."""
_MAX_MESSAGES = 40_000
"""Limit in messages simulated in each turn; the first is simulated anyhow."""
SHORT = 20_000
"""Messages in the first part of a step, from which the waiting between pipelines is estimated."""
_MORE_AHEAD = (1, 2, 4)
_LESS_AHEAD = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0)
"""Parts of the forwards ahead with which a candidate that hangs is tried again."""
_MAX_STOCK = 4
"""Best stock placements that are simulated."""
_NUM_FURTHER = 3
"""Placements with forwards launched further ahead: among the best with queues, and among the best
without."""


class Rescorer:
    """Prices of placements of one board with queues."""

    def __init__(self, board: Scoreboard) -> None:
        self.board = board
        self.costs = board.problem.costs
        self._left = _MAX_MESSAGES

    def best(self) -> Candidate | None:
        """Return the best placement of the board by simulation; None where the board has none."""
        # Without a ranking, or without the plan's own prices, the board's best stands.
        ranking = self.board.ranking_of_all
        if not ranking or not self.costs.has_variants or not ranking[0].keeps_limits:
            return self.board.best
        about: dict[tuple[Placement, RankOrder | None], tuple[Candidate, Candidate]] = {}
        # What a search has simulated may be far behind in the order of the cost model.
        for found, candidate in self.board.simulated:
            about[_key(candidate)] = found, candidate
        is_near, crowded = self._is_near, self._crowded
        waiting = [c for c in distinct(ranking) if _key(c) not in about]
        # A part of each candidate's queues tells which ones to simulate whole.
        for _ in range(_MAX_SIMULATED):
            # Only candidates near the best so far, the most promising first.
            soonest = min((found for found, _ in about.values()), key=_standing, default=None)
            # Without queues a step is never longer: who is behind so stays behind.
            waiting = [c for c in waiting if is_near(c, soonest)]
            if not waiting:
                break
            # Queues so far say how much contention costs.
            crowding = _crowding(list(about.values()))
            candidate = min(waiting, key=lambda c: crowded(c, crowding))
            if about and not self.may_simulate(candidate, SHORT):
                break
            waiting.remove(candidate)
            about[_key(candidate)] = self.with_part_of_queues(candidate, SHORT), candidate
        # Simulate whole: in the order of the short simulations, as far as messages allow.
        simulated: dict[tuple[Placement, RankOrder | None], Candidate] = {}
        self._left = _MAX_MESSAGES
        for found, candidate in sorted(about.values(), key=lambda pair: pair[0].key):
            if not is_near(found, min(simulated.values(), key=_standing, default=None)):
                break
            if not simulated or self.may_simulate(candidate):
                simulated[_key(candidate)] = self.with_queues(candidate)
        # Try launch counts further ahead for the best, and for those that promise most.
        rescored = sorted(simulated.values(), key=lambda candidate: candidate.key)
        # Further ahead none is faster than the cost model says: those that promise most may gain,
        # however long they wait as they are.
        rest = [key for key, (_, c) in about.items() if _standing(c) < _standing(rescored[0])]
        rest.sort(key=lambda key: about[key][1].key)
        firsts = [_key(c) for c in rescored[:_NUM_FURTHER]]
        for key in dict.fromkeys((*firsts, *rest[:_NUM_FURTHER])):
            of = simulated.get(key, about[key][0])
            for further in self.further_ahead(of):
                if not self.may_simulate(further):
                    break
                rescored.append(self.with_queues(further))
        # What stock Megatron runs exchanges tied words otherwise, and may take less for it.
        stock = self.best_stock()
        rescored += [] if stock is None else [stock]
        # What would hang on GPUs is out, and with it what was made of the same operations.
        running = [candidate for candidate in rescored if not self.board.is_refused(candidate)]
        return min(running, key=lambda candidate: candidate.key, default=None)

    def best_stock(self) -> Candidate | None:
        """Return the board's best stock placement, with stock Megatron's waits for sends; None if
        no placement keeps the limits of time and money."""
        rescored: list[Candidate] = []
        ranking = self.board.ranking_of_stock if self.costs.has_variants else ()
        for candidate in ranking[:_MAX_STOCK]:
            # Stock placements come best first: further ones are worse even before queues.
            if rescored and _standing(candidate) > min(map(_standing, rescored)):
                break
            if rescored and not self.may_simulate(candidate):
                break
            rescored.append(self.with_queues(candidate))
        best = min(rescored, key=lambda candidate: candidate.key, default=self.board.best_stock)
        return best if best is not None and best.keeps_limits else None

    def _is_near(self, one: Candidate, best: Candidate | None) -> bool:
        """Return whether a candidate may be better than the best so far, once it is priced more
        exactly: by the limits first, then by the objective's measure."""
        if best is None or one.standing.excess != best.standing.excess:
            return best is None or one.standing.excess < best.standing.excess
        value, least = one.standing.value, best.standing.value
        # Money grows with the step; numbers of GPUs do not.
        if self._is_by_money and least:
            return value <= NEAR * least
        return value < least or (value == least and one.step_time_s <= NEAR * best.step_time_s)

    def _crowded(self, one: Candidate, crowding: float) -> tuple[Standing, float]:
        """Return how a candidate would stand if its queues were as long as those seen."""
        longer = 1 + crowding * one.contention
        value = one.standing.value * (longer if self._is_by_money else 1)
        return Standing(one.standing.excess, value), one.step_time_s * longer

    @property
    def _is_by_money(self) -> bool:
        return self.board.problem.objective.name == "cheapest"

    def sends_as_stock(self, candidate: Candidate) -> bool:
        """Return whether the candidate is priced with stock Megatron's waits for sends."""
        return candidate.is_stock and self.costs.workload.training.stock_waits

    def _waits(self, candidate: Candidate) -> bool:
        """Return whether the candidate's stages wait for their sends."""
        return self.sends_as_stock(candidate) or self.costs.workload.training.waits_for_receivers

    def may_simulate(self, candidate: Candidate, most: float = inf) -> bool:
        """Return whether the simulation fits the remaining limit of messages. At most `most`
        messages of the candidate are simulated."""
        return min(self.num_messages(candidate), most) <= self._left

    def num_messages(self, candidate: Candidate) -> int:
        """Return messages that have still to be simulated."""
        placement = candidate.placement
        # What was simulated before costs no messages.
        if (placement, candidate.rank_order) in self.board.with_queues:
            return 0
        return num_simulated(
            self.costs.cluster, placement, candidate.cost, waits=self._waits(candidate)
        )

    def with_queues(self, candidate: Candidate) -> Candidate:
        """Return the candidate as its plan is priced (`schedule.estimate`)."""
        placement = candidate.placement
        self._left -= self.num_messages(candidate)
        known, key = self.board.with_queues, (placement, candidate.rank_order)
        if key not in known:
            if self.sends_as_stock(candidate):
                plan = bare_plan(self.board.problem, candidate, {})
                known[key] = plan_cost(plan, self.costs, placement, candidate.cost)
            else:
                known[key] = queued(self.costs, placement, candidate.cost)
        return self.board.candidate(placement, known[key], candidate.strategy, candidate.rank_order)

    def with_part_of_queues(self, candidate: Candidate, max_messages: int) -> Candidate:
        """Return the candidate about as `with_queues` does: of steps with more messages only so
        many are simulated, with fewer micro-batches, and pipelines wait in proportion."""
        part = max_messages / max(self.num_messages(candidate), 1)
        if part >= 1:
            return self.with_queues(candidate)
        self._left -= max_messages
        placement = candidate.placement
        costs = self.costs.sharded_as(placement)
        # A short step with fewer micro-batches, once without queues and once with them.
        rows = costs.vocab_rows(placement.widths)
        replicas = tuple([_shortened(replica, part) for replica in placement.replicas])
        short, price = replace(placement, replicas=replicas), self.board.replica_cost
        alone = costs.combine(short, tuple([price(r, costs, rows) for r in replicas]), rows)
        waiting = queued(self.costs, short, alone, is_stock=self.sends_as_stock(candidate))
        priced = []
        for own, one, other in zip(
            candidate.cost.replicas, alone.replicas, waiting.replicas, strict=True
        ):
            # Queues lengthen the whole pipeline as they lengthen the short one.
            longer = other.pipeline_s / one.pipeline_s
            ends_s = tuple([longer * end_s for end_s in own.ends_s])
            priced.append(replace(own, pipeline_s=longer * own.pipeline_s, ends_s=ends_s))
        cost = costs.combine(placement, tuple(priced), rows)
        return self.board.candidate(placement, cost, candidate.strategy, candidate.rank_order)

    def _simulated(self, candidate: Candidate) -> tuple[int, ...]:
        """Return replicas whose pipelines the cost model times too short."""
        placement = candidate.placement
        if self._waits(candidate):
            return tuple(range(len(placement.replicas)))
        return sharing_replicas(self.costs.cluster, placement)

    def further_ahead(self, best: Candidate) -> Iterator[Candidate]:
        """Yield the placement, priced, with more and more forwards ahead where replicas share a
        path: they hide queues as they hide the hops themselves.  One of stock Megatron's is the
        plug-in's with them, which does not wait for its sends."""
        placement = best.placement
        if placement.has_expert_groups:
            return  # stages of a group launch alike
        # Replicas that share no path gain nothing by launching further ahead.
        sharing = self._simulated(best)
        costs = self.costs.sharded_as(placement)
        rows = costs.vocab_rows(placement.widths)
        price = self.board.replica_cost
        may_differ = self.costs.has_launch_counts and not placement.has_sharded_layers
        for more in _MORE_AHEAD if sharing and may_differ else ():
            counted = [(r, price(r, costs, rows)) for r in placement.replicas]
            # Memory may not hold the further micro-batches of some replica.
            for r in sharing:
                ahead = _further(placement.replicas[r], more)
                priced = ahead, price(ahead, costs, rows)
                if priced[1].fits:
                    counted[r] = priced
            ahead_of, cost = with_replicas(costs, counted, rows)
            # All counts are as before: further ones would be too.
            if ahead_of == placement:
                return
            yield self.board.candidate(ahead_of, cost, best.strategy)

    def refuse(self, hanging: Hanging) -> None:
        """Drop a candidate that hangs, and keep the candidate with fewer forwards ahead instead."""
        self.board.refuse(hanging)
        candidate = hanging.candidate
        placement = replace(candidate.placement, exchange_groups=(), exchange_uplinks=())
        for part in _LESS_AHEAD if candidate.has_counts else ():
            fewer = replace(placement, replicas=tuple(_less(r, part) for r in placement.replicas))
            cost = self.board.whole_cost(fewer)
            self.board.keep_refined(fewer, cost, candidate.strategy, None)


def distinct(ranking: Sequence[Candidate]) -> list[Candidate]:
    """Return the best placements that differ in more than layers and the number of
    micro-batches: in shape, micro-batch sizes, or in whether they launch further ahead."""
    chosen: dict[Hashable, Candidate] = {}
    for candidate in ranking:
        sizes = tuple(replica.micro_batch_size for replica in candidate.placement.replicas)
        chosen.setdefault((candidate.structure, sizes, candidate.has_counts), candidate)
    return list(chosen.values())


def _crowding(simulated: Sequence[tuple[Candidate, Candidate]]) -> float:
    """Return the part by which queues lengthen a step on a path busy all the time: the mean over
    simulated placements (with queues, as priced)."""
    crowded = [(found, c) for found, c in simulated if c.contention > 0]
    longer = [(found.step_time_s / c.step_time_s - 1) / c.contention for found, c in crowded]
    return sum(longer) / len(longer) if longer else 0.0


def _standing(candidate: Candidate) -> tuple[Standing, float]:
    """Return how a candidate stands, then its seconds: by these alone where only speed counts."""
    return candidate.standing, candidate.step_time_s


def _key(candidate: Candidate) -> tuple[Placement, RankOrder | None]:
    return candidate.placement, candidate.rank_order


def _shortened(replica: PlacedReplica, part: float) -> PlacedReplica:
    """Return the replica with a part of the micro-batches, at least one."""
    number = max(1, round(part * replica.num_micro_batches))
    counts = None
    if replica.launch_counts is not None:
        counts = tuple([min(count, number) for count in replica.launch_counts])
    return replace(replica, num_micro_batches=number, launch_counts=counts)


def _less(replica: PlacedReplica, part: float) -> PlacedReplica:
    """Return the replica with a part of the forwards that it launches beyond 1F1B's own."""
    own = replace(replica, launch_counts=None).num_in_flight
    pairs = zip(own, replica.num_in_flight, strict=True)
    return with_counts(replica, [least + int(part * (count - least)) for least, count in pairs])


def _further(replica: PlacedReplica, more: int) -> PlacedReplica:
    """Let every stage but the last launch so many forwards more, as far as there are."""
    most = replica.num_micro_batches
    *ahead, last = replica.num_in_flight
    return with_counts(replica, [*(min(count + more, most) for count in ahead), last])
