"""The board on which every placement is scored: price, cache, best so far, progress."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property

from megatron_hetero.bounds.divided import divided_bound_s
from megatron_hetero.bounds.step_time import work_bound_s
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.cost.step_cost import PlacementCost, ReplicaCost, least_step_s
from megatron_hetero.model.blocks import divides_experts
from megatron_hetero.plan.stock_ranks import RankOrder
from megatron_hetero.planner.division.counts import LaunchRule
from megatron_hetero.planner.evaluate.candidate import NUM_KEPT, Candidate, ranked_time_s
from megatron_hetero.planner.evaluate.canonical import canonical
from megatron_hetero.planner.evaluate.hanging import Hanging, operations_of
from megatron_hetero.planner.evaluate.out_of_memory import OutOfMemory
from megatron_hetero.planner.evaluate.sites import sites_are_apart
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.replica_shapes import ReplicaShapes

Progress = Callable[[float, int, float], None]
"""Called with the best step time so far in seconds, the placements priced so far, and a lower bound
on every step time in seconds (the bound by work, which is known at once)."""

_NUM_STOCK = 12
MAX_GPUS_PRICED_WHOLE = 128
"""In larger clusters what is far behind is not priced whole.  In smaller ones a climb may lead
through it: with 11 GPUs of 4 labs the plan was 1.2 % slower without."""


class Scoreboard:
    """Prices placements; keeps the best that fit and the one that came closest to fitting, both of
    all and of those that stock Megatron can run.  What fits memory but is too slow or too dear for
    the objective's limits is ranked behind all that is not, so that a search can start from it.

    Strategies score placements of 1F1B's own launch counts.  Where counts by the rule gain, the
    placement is kept with them as well, beside itself.
    """

    def __init__(self, problem: Problem, progress: Progress | None = None) -> None:
        self.problem = problem
        self.num_priced = 0
        self.interrupted = False
        self.is_exact = False
        """Whether every placement of the space was priced."""
        self.out_of_memory = OutOfMemory()
        self.with_queues: dict[tuple[Placement, RankOrder | None], PlacementCost] = {}
        """What `Rescorer` found, which the end of a search and its explanation both ask."""
        self.refused: list[Hanging] = []
        """What no job could run, in the order of refusal."""
        self._refused: set[Hashable] = set()
        self._progress = progress
        self._fitting: list[Candidate] = []
        self._fitting_with_counts: list[Candidate] = []
        self._refined: list[Candidate] = []
        self._simulated: list[tuple[Candidate, Candidate]] = []
        self._with_counts: dict[Placement, Candidate] = {}
        self._stock: list[Candidate] = []
        self._replicas: dict[Hashable, ReplicaCost] = {}
        self._shapes = ReplicaShapes(problem.likeness)
        self._launch_rule = LaunchRule(problem.costs)
        self._stages: dict[PlacedStage, PlacedStage] = {}
        """One object for equal stages: placements of a board have many in common."""
        self._seen: dict[Placement, Candidate | None] = {}
        self._beaten: set[Placement] = set()

    @property
    def wanted(self) -> Candidate | None:
        """`nearest`, or `nearest_stock` where the objective wants a plan of stock Megatron."""
        return self.nearest_stock if self.problem.objective.stock_only else self.nearest

    @cached_property
    def _bound_s(self) -> float:
        costs = self.problem.costs
        return min(work_bound_s(costs), divided_bound_s(costs))

    @property
    def best(self) -> Candidate | None:
        """The best placement that fits and keeps the limits of time and money, or None."""
        first = self.nearest
        return first if first is not None and first.keeps_limits else None

    @property
    def nearest(self) -> Candidate | None:
        """The best placement that fits; where none keeps the limits of time and money, the one
        that exceeds them least."""
        firsts = [*self._fitting[:1], *self._fitting_with_counts[:1], *self._refined[:1]]
        return min(firsts, key=lambda candidate: candidate.key, default=None)

    @property
    def best_stock(self) -> Candidate | None:
        """The best placement for stock Megatron that fits and keeps the limits, or None."""
        stock = self.nearest_stock
        return stock if stock is not None and stock.keeps_limits else None

    @property
    def nearest_stock(self) -> Candidate | None:
        """`nearest`, among placements for stock Megatron."""
        return self._stock[0] if self._stock else None

    @property
    def ranking_of_stock(self) -> tuple[Candidate, ...]:
        """The best fitting placements for stock Megatron, best first (a few)."""
        return tuple(self._stock)

    @property
    def ranking(self) -> tuple[Candidate, ...]:
        """The best placements of 1F1B's own launch counts that fit, best first (a few dozen)."""
        return tuple(self._fitting)

    @property
    def ranking_with_counts(self) -> tuple[Candidate, ...]:
        """`ranking`, merged with the best placements with launch counts."""
        both = [*self._fitting, *self._fitting_with_counts]
        return tuple(sorted(both, key=lambda candidate: candidate.key))

    @property
    def refined(self) -> tuple[Candidate, ...]:
        """The best placements that do more than the job's flags say."""
        return tuple(self._refined)

    @property
    def ranking_of_all(self) -> tuple[Candidate, ...]:
        """`ranking_with_counts`, merged with placements that go beyond the job's flags."""
        both = [*self.ranking_with_counts, *self._refined]
        return tuple(sorted(both, key=lambda candidate: candidate.key))

    @property
    def simulated(self) -> tuple[tuple[Candidate, Candidate], ...]:
        """Pairs of a placement as simulated with queues and as priced without; the shortest step
        first (a few dozen)."""
        return tuple(self._simulated)

    def refuse(self, hanging: Hanging) -> None:
        """Drop a candidate that hangs, and all that give the library the same operations."""
        self.refused.append(hanging)
        self._refused.add(operations_of(hanging.candidate))
        self.is_exact = False  # what is dropped with it was not proved one by one
        for kept in (self._fitting, self._fitting_with_counts, self._refined, self._stock):
            kept[:] = [candidate for candidate in kept if not self.is_refused(candidate)]
        self._simulated = [pair for pair in self._simulated if not self.is_refused(pair[1])]

    def is_refused(self, candidate: Candidate) -> bool:
        """Return whether the candidate would hang as a refused candidate does, or divides experts
        that Megatron does not let it divide (`divides_experts`); a search goes on from these."""
        if bool(self._refused) and operations_of(candidate) in self._refused:
            return True
        model, replicas = self.problem.workload.model, candidate.placement.replicas
        return bool(model.num_experts) and not all(
            divides_experts(model, stage.shape.expert_width) for r in replicas for stage in r.stages
        )

    def keep_simulated(self, candidate: Candidate, simulated: Candidate) -> None:
        """Keep the step of a placement with queues, or an estimate of the step."""
        insort(self._simulated, (simulated, candidate), key=lambda pair: pair[0].key)
        del self._simulated[NUM_KEPT:]

    def score(
        self, placement: Placement, strategy: str, *, whole: bool | None = None
    ) -> Candidate | None:
        """Price a placement of 1F1B's own counts; the candidate if it fits memory and limits, else
        None.

        Args:
            whole: also one that is slower than all that are kept, for which there may be None;
                by itself in small clusters (`MAX_GPUS_PRICED_WHOLE`), whose climbs go on from it.
        """
        if whole is None:
            whole = self.problem.num_gpus <= MAX_GPUS_PRICED_WHOLE
        # One form for all placements that differ only in names.
        placement, rank_order = canonical(placement, self.problem.gpus, self._stages)
        if placement in self._seen:
            return self._seen[placement]
        # Known to be beaten, and nobody asks for it whole.
        if placement in self._beaten and not whole:
            return None
        self.num_priced += placement not in self._beaten
        candidate = self._price(placement, rank_order, strategy, whole)
        # What was only beaten is priced when somebody asks for it whole.
        if placement not in self._beaten or whole:
            self._seen[placement] = candidate
        return candidate

    def score_with_counts(
        self, placement: Placement, strategy: str, *, whole: bool | None = None
    ) -> Candidate | None:
        """`score`, and the candidate with launch counts where they gain."""
        candidate = self.score(placement, strategy, whole=whole)
        return candidate and self._with_counts.get(candidate.placement, candidate)

    def keep_counts(self, placement: Placement, cost: PlacementCost, strategy: str) -> None:
        """Keep a priced placement with launch counts that fits; its devices are canonical."""
        self._insert(self._fitting_with_counts, self.candidate(placement, cost, strategy))

    def candidate(
        self,
        placement: Placement,
        cost: PlacementCost,
        strategy: str,
        rank_order: RankOrder | None = None,
    ) -> Candidate:
        """Return a priced placement, with how it stands by the objective."""
        problem = self.problem
        time_s = ranked_time_s(placement, cost)
        standing = problem.objective.standing(problem.costs, placement, cost, time_s)
        if any(problem.costs.own_precision(s) for r in placement.replicas for s in r.stages):
            rank_order = None  # stock Megatron has one precision
        if placement.has_context_parallel and not problem.workload.training.flash_attention:
            rank_order = None  # Megatron's own layers do not divide sequences
        return Candidate(placement, cost, strategy, rank_order, standing)

    def keep_refined(
        self,
        placement: Placement,
        cost: PlacementCost,
        strategy: str,
        rank_order: RankOrder | None,
    ) -> Candidate | None:
        """Keep a priced placement that does more than the job's flags say; the candidate if it fits
        memory and limits, else None.

        Args:
            rank_order: as of `Candidate`, were it plain.
        """
        self.num_priced += 1
        if cost.missing_bytes > 0 or not sites_are_apart(self.problem, placement):
            return None
        candidate = self.candidate(placement, cost, strategy, rank_order)
        self._keep_stock(candidate)
        self._insert(self._refined, candidate)
        return candidate

    def replica_cost(
        self, replica: PlacedReplica, costs: CostModel, vocab_rows: int
    ) -> ReplicaCost:
        """Return the cost of a replica; one object for all that are alike.

        Args:
            costs: sharded as its placement is.
        """
        dispatcher = costs.workload.training.token_dispatcher
        key = self._shapes.of(replica, vocab_rows), costs.holders, dispatcher
        if key not in self._replicas:
            self._replicas[key] = costs.replica(replica, vocab_rows)
        return self._replicas[key]

    def whole_cost(self, placement: Placement) -> PlacementCost:
        """Return the cost of a placement, exchange and all, whatever the board has kept."""
        costs, rows, replicas = self._replica_costs(placement)
        return costs.combine(placement, tuple(replicas), rows)

    def _price(
        self, placement: Placement, rank_order: RankOrder | None, strategy: str, whole: bool
    ) -> Candidate | None:
        costs, rows, replicas = self._replica_costs(placement)
        # The exchange takes longest to price, and most placements lose without it.
        if not whole and self._is_beaten(replicas, rank_order is not None):
            self._beaten.add(placement)
            return None
        cost = costs.combine(placement, tuple(replicas), rows)
        candidate = self.candidate(placement, cost, strategy, rank_order)
        if not sites_are_apart(self.problem, placement):
            return None
        if cost.missing_bytes > 0:
            self.out_of_memory.keep(candidate)
            return None
        self._keep(candidate)
        # Launch counts are tried as soon as a placement fits.
        counted = self._launch_rule.apply(placement, cost, rows)
        if counted is not None:
            with_counts = self.candidate(*counted, strategy)
            self._with_counts[placement] = with_counts
            self._insert(self._fitting_with_counts, with_counts)
        return candidate

    def _replica_costs(self, placement: Placement) -> tuple[CostModel, int, list[ReplicaCost]]:
        """Return prices of a placement, the rows of the vocabulary, and the replicas' prices,
        shared by equal replicas."""
        costs = self.problem.costs.sharded_as(placement)
        rows = costs.vocab_rows(placement.widths)
        return costs, rows, [self.replica_cost(r, costs, rows) for r in placement.replicas]

    def _is_beaten(self, replicas: Sequence[ReplicaCost], is_stock: bool) -> bool:
        """Return whether a fitting placement is slower than every kept placement, whatever the
        exchange and launch counts. For a stock placement the kept stock placements count too. Most
        placements are beaten, and the exchange takes longest to price."""
        # Before the ranking is full nothing is beaten; by money nothing is for sure.
        if len(self._fitting) < NUM_KEPT or not self.problem.is_by_time:
            return False
        least_s = least_step_s(replicas)
        if is_stock and (len(self._stock) < _NUM_STOCK or least_s <= self._stock[-1].step_time_s):
            return False
        return least_s > self._fitting[-1].step_time_s and all(r.fits for r in replicas)

    def _keep(self, candidate: Candidate) -> None:
        self._keep_stock(candidate)
        self._insert(self._fitting, candidate)

    def _keep_stock(self, candidate: Candidate) -> None:
        kept = self._stock
        if not candidate.is_stock or self.is_refused(candidate):
            return
        if len(kept) < _NUM_STOCK or candidate.coarse_key <= kept[-1].coarse_key:
            insort(kept, candidate, key=lambda c: c.key)
            del kept[_NUM_STOCK:]

    def _insert(self, kept: list[Candidate], candidate: Candidate) -> None:
        if self.is_refused(candidate):
            return
        before = self.best
        # The quick key first: the full key is long to compare.
        if len(kept) < NUM_KEPT or candidate.coarse_key <= kept[-1].coarse_key:
            insort(kept, candidate, key=lambda c: c.key)
            del kept[NUM_KEPT:]
        if self._progress and self.best is not before:
            self.say_progress()

    def say_progress(self) -> None:
        """Tell who looks on how far the search is."""
        if self._progress and self.best is not None:
            self._progress(self.best.step_time_s, self.num_priced, self._bound_s)
