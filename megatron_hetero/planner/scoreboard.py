"""Every placement that is scored goes through here: price, cache, best so far, progress."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from megatron_hetero.cost.model import PlacementCost, ReplicaCost
from megatron_hetero.cost.placement import PlacedReplica, Placement
from megatron_hetero.plan.stock_ranks import RankOrder
from megatron_hetero.planner.canonical import canonical
from megatron_hetero.planner.problem import Problem

Progress = Callable[[float, int], None]
"""Called with (best step time so far in seconds, placements priced so far)."""

_NUM_KEPT = 64


@dataclass(frozen=True)
class Candidate:
    """A priced placement and the strategy that found it."""

    placement: Placement
    cost: PlacementCost
    strategy: str
    rank_order: RankOrder | None = None
    """The order of Megatron's that the replicas are arranged for, so that stock Megatron can run
    the placement; None if it cannot."""

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of one step."""
        return self.cost.step_time_s

    @cached_property
    def key(self) -> tuple[float, int, bool, tuple[object, ...]]:
        """Total order: faster, then fewer GPUs, then without the plug-in, then by devices and
        layers (never by chance)."""
        devices = tuple(self.placement.devices())
        shape = tuple(
            (r.num_micro_batches, tuple(s.num_layers for s in r.stages))
            for r in self.placement.replicas
        )
        return self.step_time_s, len(devices), self.rank_order is None, (devices, shape)


class Scoreboard:
    """Prices placements; keeps the best that fit and the one that came closest to fitting, both of
    all and of those that stock Megatron can run."""

    def __init__(self, problem: Problem, progress: Progress | None = None) -> None:
        self.problem = problem
        self.num_priced = 0
        self.nearest_miss: Candidate | None = None
        self.nearest_stock_miss: Candidate | None = None
        self._progress = progress
        self._fitting: list[Candidate] = []
        self._best_stock: Candidate | None = None
        self._replicas: dict[tuple[PlacedReplica, int], ReplicaCost] = {}
        self._seen: dict[Placement, Candidate | None] = {}

    @property
    def best(self) -> Candidate | None:
        """The fastest placement that fits, or None."""
        return self._fitting[0] if self._fitting else None

    @property
    def best_stock(self) -> Candidate | None:
        """The fastest placement that fits and that stock Megatron can run, or None."""
        return self._best_stock

    @property
    def ranking(self) -> tuple[Candidate, ...]:
        """The best placements that fit, best first (a few dozen are kept)."""
        return tuple(self._fitting)

    def score(self, placement: Placement, strategy: str) -> Candidate | None:
        """Price a placement; the candidate if it fits memory and limits, else None."""
        placement, rank_order = canonical(placement, self.problem.gpus)
        if placement in self._seen:
            return self._seen[placement]
        candidate = self._price(placement, rank_order, strategy)
        self._seen[placement] = candidate
        return candidate

    def _price(
        self, placement: Placement, rank_order: RankOrder | None, strategy: str
    ) -> Candidate | None:
        costs = self.problem.costs
        rows = costs.vocab_rows(placement.widths)
        replicas = []
        for replica in placement.replicas:
            key = (replica, rows)
            if key not in self._replicas:
                self._replicas[key] = costs.replica(replica, rows)
            replicas.append(self._replicas[key])
        cost = costs.combine(placement, tuple(replicas), rows)
        candidate = Candidate(placement, cost, strategy, rank_order)
        self.num_priced += 1
        if not _sites_are_apart(self.problem, placement):
            return None
        if cost.missing_bytes > 0:
            self.nearest_miss = _nearer(candidate, self.nearest_miss)
            if rank_order is not None:
                self.nearest_stock_miss = _nearer(candidate, self.nearest_stock_miss)
            return None
        self._keep(candidate)
        return candidate

    def _keep(self, candidate: Candidate) -> None:
        stock = self._best_stock
        if candidate.rank_order is not None and (stock is None or candidate.key < stock.key):
            self._best_stock = candidate
        before = self.best
        if len(self._fitting) < _NUM_KEPT or candidate.step_time_s <= self._fitting[-1].step_time_s:
            insort(self._fitting, candidate, key=lambda c: c.key)
            del self._fitting[_NUM_KEPT:]
        best = self.best
        if self._progress and best is not None and best is not before:
            self._progress(best.step_time_s, self.num_priced)


def _nearer(one: Candidate, other: Candidate | None) -> Candidate:
    """The one that lacks fewer bytes."""
    return one if other is None or _miss_key(one) < _miss_key(other) else other


def _miss_key(candidate: Candidate) -> tuple[int, tuple[object, ...]]:
    return candidate.cost.missing_bytes, candidate.key[-1]


def _sites_are_apart(problem: Problem, placement: Placement) -> bool:
    """With data parallelism kept inside sites, all holders of a layer are on one site."""
    if not problem.cluster.limits.no_data_parallel_across_sites:
        return True
    nodes = problem.cluster.node_by_name
    site_of_layer: dict[int, str] = {}
    for replica in placement.replicas:
        for first, stage in zip(replica.first_layers, replica.stages, strict=True):
            site = nodes[stage.devices[0].node].site
            for layer in range(first, first + stage.num_layers):
                if site_of_layer.setdefault(layer, site) != site:
                    return False
    return True
