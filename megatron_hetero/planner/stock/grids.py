"""Grids of ranks: tensor-parallel groups in rank order fill a grid of replicas, stages and
context-parallel ranks in one of Megatron's two orders of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np

from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.hashed import value
from megatron_hetero.plan.stock_ranks import RANK_ORDERS, RankOrder
from megatron_hetero.planner.problem import Chain, Problem, Unit
from megatron_hetero.planner.replica_shapes import Likeness


@dataclass(frozen=True)
class StockRanks:
    """Tensor-parallel groups in the order of ranks; `kinds` are the groups' kinds, equal for
    interchangeable nodes."""

    units: tuple[Unit, ...]
    kinds: tuple[int, ...]
    known: dict[object, object] = field(default_factory=dict, compare=False, repr=False)
    """Prices of grids of these groups, kept for all further settings."""

    @property
    def width(self) -> int:
        """Tensor-parallel width."""
        return self.units[0].width

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The node of each group."""
        return tuple(unit.node for unit in self.units)

    @cached_property
    def kind_counts(self) -> Counter[int]:
        """The number of groups of each kind."""
        return Counter(self.kinds)


@value(frozen=True, eq=False)
class StockGrid:
    """Equal replicas on groups in rank order."""

    ranks: StockRanks
    num_replicas: int
    num_stages: int
    rank_order: RankOrder
    context_parallel: int = 1

    @cached_property
    def chains(self) -> tuple[Chain, ...]:
        """[replica][stage]."""
        return tuple(map(self.chain, range(self.num_replicas)))

    def chain(self, d: int) -> Chain:
        """Return the stages of one replica, the GPUs of each in rank order."""
        return tuple(self.stage(d, p) for p in range(self.num_stages))

    def stage(self, d: int, p: int) -> Unit:
        """Return stage `p` of replica `d`."""
        return self._unit(self.groups(d, p))

    def groups(self, d: int, p: int) -> range:
        """Return the positions of the groups of a stage."""
        # Position of the stage among all of them: replicas first, or stages first.
        if self.rank_order == "tp-dp-pp":
            place = d + self.num_replicas * p
        else:
            place = p + self.num_stages * d
        context = self.context_parallel
        return range(place * context, (place + 1) * context)

    def _unit(self, groups: range) -> Unit:
        units = self.ranks.units[groups.start : groups.stop]
        if len(units) == 1:
            return units[0]
        # A stage over several nodes has its first node as its own, and the rest beyond it.
        indices: dict[str, tuple[int, ...]] = {}
        for unit in units:
            indices[unit.node] = (*indices.get(unit.node, ()), *unit.indices)
        (own, *beyond) = indices.items()
        return Unit(*own, self.context_parallel, tuple(beyond))

    @cached_property
    def state_holders(self) -> StateHolders:
        """Return how many GPUs divide the states of the distributed optimizer; tied ends have
        twice as many."""
        number = self.num_replicas * self.context_parallel
        return StateHolders(number, number * min(self.num_stages, 2))

    def kinds_of(
        self, cluster: Cluster, replicas: Iterable[int], p: int
    ) -> dict[int, Node]:
        """Return the kinds of the GPUs of stage `p` of some replicas, each with a node."""
        units, kinds = self.ranks.units, self.ranks.kinds
        # One group of each kind, then its node.
        found = {kinds[i]: units[i] for d in replicas for i in self.groups(d, p)}
        return {kind: cluster.node_by_name[unit.node] for kind, unit in found.items()}

    @cached_property
    def kinds_of_stages(self) -> tuple[tuple[int, ...], ...]:
        """The kinds of groups of each stage in all replicas, ascending."""
        kinds = self.ranks.kinds
        return tuple(
            tuple(sorted({kinds[i] for d in range(self.num_replicas) for i in self.groups(d, p)}))
            for p in range(self.num_stages)
        )

    @property
    def replica_patterns(self) -> tuple[int, ...]:
        """A key per replica, equal for replicas on interchangeable nodes: the kind of each group,
        and the groups that share a node."""
        key = ("patterns", *self.shape)
        if key not in self.ranks.known:
            # Hashes of numbers, the same in every run: thousands of GPUs have long patterns.
            found = tuple(hash(self.pattern([d])) for d in range(self.num_replicas))
            self.ranks.known[key] = found
        return cast(tuple[int, ...], self.ranks.known[key])

    def priced_replicas(self, cluster: Cluster, likeness: Likeness) -> tuple[int, ...]:
        """Return the first replica of each that differs from others in more than the names of its
        nodes: by the machine of each stage, and the links to and from the next one.  Nothing else
        decides prices without context parallelism, experts dealt out, lines and NICs."""
        key = ("priced", *self.shape)
        if key not in self.ranks.known:
            table, number = cluster.link_classes.of_pairs, cluster.link_classes.node_number
            likes = np.array(list(map(likeness.node, self.ranks.nodes)))
            nodes = np.array([number[node] for node in self.ranks.nodes])
            # [replica, stage] -> its group.
            numbers = np.arange(len(nodes))
            if self.rank_order == "tp-dp-pp":
                groups = numbers.reshape(self.num_stages, self.num_replicas).T
            else:
                groups = numbers.reshape(self.num_replicas, self.num_stages)
            # Chunks go from the last stage to the first.
            here, there = nodes[groups], np.roll(nodes[groups], -1, axis=1)
            both = (here, there), (there, here)
            ways = [np.where(here == there, -1, table[ends]) for ends in both]
            rows = np.concatenate([likes[groups], *ways], axis=1)
            _, first = np.unique(rows, axis=0, return_index=True)
            self.ranks.known[key] = tuple(sorted(first.tolist()))
        return cast(tuple[int, ...], self.ranks.known[key])

    def distinct_replicas(self, together: int) -> tuple[int, ...]:
        """Return the first replica of each pattern, in blocks of `together` replicas that share
        experts: the pattern of the replica, and of its block."""
        key = ("distinct", together, *self.shape)
        if key not in self.ranks.known:
            patterns: dict[tuple[int, int], int] = {}
            for d, own in enumerate(self.replica_patterns):
                first = d // together * together
                whole = hash(self.pattern(range(first, first + together))) if together > 1 else 0
                patterns.setdefault((own, whole), d)
            self.ranks.known[key] = tuple(patterns.values())
        return cast(tuple[int, ...], self.ranks.known[key])

    @property
    def content(self) -> object:
        """A key, equal for grids that differ only in names of like nodes and places of replicas."""
        key = ("content", *self.shape)
        if key not in self.ranks.known:
            counts = Counter(self.replica_patterns)
            self.ranks.known[key] = hash(frozenset(counts.items())), len(counts)
        return self.ranks.known[key]

    @cached_property
    def shape(self) -> tuple[object, ...]:
        """All but its groups."""
        return self.num_replicas, self.num_stages, self.rank_order, self.context_parallel

    def pattern(
        self, replicas: Sequence[int], stages: Sequence[int] | None = None
    ) -> tuple[object, ...]:
        """Return `replica_patterns` of some stages of several replicas together; all stages by
        default."""
        kinds, nodes = self.ranks.kinds, self.ranks.nodes
        # Nodes by the order in which they come, as names do not matter.
        numbers: dict[str, int] = {}
        found: list[tuple[int, int]] = []
        for d in replicas:
            for p in range(self.num_stages) if stages is None else stages:
                own = self.groups(d, p)
                places = [
                    numbers.setdefault(node, len(numbers)) for node in nodes[own.start : own.stop]
                ]
                found += zip(kinds[own.start : own.stop], places, strict=True)
        return tuple(found)

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas."""
        return len(self.ranks.units) * self.width

    @property
    def width(self) -> int:
        """Tensor-parallel width."""
        return self.ranks.width

    @property
    def ranks_of_stage(self) -> int:
        """GPUs of a stage of one replica."""
        return self.width * self.context_parallel


def grids_of(problem: Problem, ranks: StockRanks, context_parallel: int) -> Iterator[StockGrid]:
    """Yield every way to fill replicas and stages with all groups.

    Args:
        problem: whose limits are kept.
        ranks: the groups.
        context_parallel: of them to a stage.
    """
    num_units, rest = divmod(len(ranks.units), context_parallel)
    if rest:
        # More replicas than groups, and replica counts only rise.
        return
    limits = problem.cluster.limits
    for num_replicas in problem.replica_counts():
        num_stages, rest = divmod(num_units, num_replicas)
        if num_replicas > num_units:
            return
        if rest or num_stages > problem.max_stages():
            continue
        for order in RANK_ORDERS:
            grid = StockGrid(ranks, num_replicas, num_stages, order, context_parallel)
            is_free = not (limits.first_stage_nodes or limits.last_stage_nodes)
            if is_free or all(problem.chain_is_allowed(chain) for chain in grid.chains):
                yield grid
            # With one replica or one stage both orders are the same grid.
            if num_replicas == 1 or num_stages == 1:
                break
