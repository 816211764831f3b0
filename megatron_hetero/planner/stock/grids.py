"""Grids of ranks: tensor-parallel groups in rank order fill a grid of replicas, stages and
context-parallel ranks in one of Megatron's two orders of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.hashed import value
from megatron_hetero.plan.stock_ranks import RANK_ORDERS, RankOrder
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.units import Chain, Unit


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
    def names(self) -> tuple[str, ...]:
        """The nodes in their order: the groups of a node follow each other."""
        return tuple(dict.fromkeys(unit.node for unit in self.units))

    @cached_property
    def nodes(self) -> NDArray[np.int64]:
        """The node of each group: its position in `names`."""
        number = {name: i for i, name in enumerate(self.names)}
        return np.array([number[unit.node] for unit in self.units])

    def marks(
        self, places: NDArray[np.int64], kinds: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Return numbers in place of groups, [..., group], equal for rows of groups that are of
        like kinds and share nodes alike.

        Args:
            places: positions of groups, which ascend in each row.
            kinds: in place of `kind_numbers`.
        """
        found = 2 * (self.kind_numbers if kinds is None else kinds)[places]
        nodes = self.nodes[places]
        found[..., 1:] += nodes[..., 1:] != nodes[..., :-1]
        return found

    @cached_property
    def kind_counts(self) -> tuple[tuple[int, int], ...]:
        """Each kind and the number of its groups, in an order of their own."""
        return tuple(sorted(Counter(self.kinds).items()))

    @cached_property
    def kind_numbers(self) -> NDArray[np.int64]:
        """`kinds` as an array."""
        return np.array(self.kinds)


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

    @property
    def places(self) -> NDArray[np.int64]:
        """The positions of the groups, [replica, stage, group of the stage]."""
        numbers = np.arange(len(self.ranks.units))
        depth, context = self.num_stages, self.context_parallel
        if self.rank_order == "tp-dp-pp":
            return numbers.reshape(depth, self.num_replicas, context).swapaxes(0, 1)
        return numbers.reshape(self.num_replicas, depth, context)

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

    @cached_property
    def kinds_of_stages(self) -> tuple[tuple[int, ...], ...]:
        """The kinds of groups of each stage in all replicas, ascending."""
        stages = self.of_stages(self.ranks.kind_numbers)
        return tuple([tuple(sorted(set(own))) for own in stages.tolist()])

    def of_stages(self, of_groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return numbers of the groups of each stage, [stage, group of all replicas]."""
        return of_groups[self.places].swapaxes(0, 1).reshape(self.num_stages, -1)

    @property
    def content(self) -> object:
        """A key, equal for grids that differ only in names of like nodes and places of replicas."""
        key = ("content", *self.shape)
        if key not in self.ranks.known:
            rows = self.ranks.marks(self.places.reshape(self.num_replicas, -1))
            # Hashes of numbers, the same in every run: thousands of GPUs have long rows.
            counts = Counter(hash(tuple(row)) for row in rows.tolist())
            self.ranks.known[key] = hash(frozenset(counts.items())), len(counts)
        return self.ranks.known[key]

    @cached_property
    def shape(self) -> tuple[object, ...]:
        """All but its groups."""
        return self.num_replicas, self.num_stages, self.rank_order, self.context_parallel

    def together(self, expert_groups: tuple[int, int] | None) -> int:
        """Return among how many replicas experts are dealt out, which come in blocks of so many."""
        if expert_groups is None:
            return 1
        return max(1, expert_groups[0] * expert_groups[1] // self.ranks_of_stage)

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
