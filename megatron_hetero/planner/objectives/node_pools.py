"""What can be rented of a cluster: machines of each kind, counted, and what a selection promises.

A selection is a number of GPUs of each pool.  Machines with a price of their own are taken whole,
since their price is paid once any GPU of them is used; others by the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod

from megatron_hetero.bounds.chains.kinds import group_widths
from megatron_hetero.bounds.space import relaxed
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cost.choices import micro_batch_sizes, recomputes
from megatron_hetero.cost.price import Price
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.shapes.kinds import kinds_of

Selection = tuple[int, ...]
"""GPUs of each pool."""

MAX_SELECTIONS = 20_000
"""Selections up to which each is looked at separately."""

_FINEST_LADDER = 1 / 2
"""Each number of units is by this part larger than the one before; coarser ladders double it."""


@dataclass(frozen=True)
class NodePool:
    """Equal machines at one price.

    `unit`: the number of GPUs by which they are taken.  `layer_gpu_s`: GPU-seconds of one layer's
    forward and backward for a sequence, at the width, micro-batch size and recompute that take
    least.
    """

    nodes: tuple[Node, ...]
    num_gpus: int
    """Usable GPUs of each machine."""
    unit: int
    layer_gpu_s: float
    least_layer_s: float
    """The least time of a layer for a micro-batch, over the pool's possible groups."""
    num_islands: int = 1
    """Nodes of a machine. Each node bears an equal part of the machine's price, so that no
    selection promises more than the cost."""

    @property
    def most(self) -> int:
        """GPUs of all of them."""
        return len(self.nodes) * self.num_gpus

    def price_per_hour(self, num_gpus: int) -> float | None:
        """Return the price of this many of the pool's GPUs."""
        node = self.nodes[0]
        if node.price_per_hour is not None:
            each = node.price_per_hour / self.num_islands
            # A machine is paid for as a whole as soon as one of its GPUs is used.
            return each * -(-num_gpus // self.num_gpus)
        return None if node.gpu_price_per_hour is None else node.gpu_price_per_hour * num_gpus

    def counts(self, growth: float = 0.0) -> list[int]:
        """Return numbers of GPUs to take, none first: all of them, or of a ladder whose steps grow
        by a part of the number that they start from."""
        num_units = self.most // self.unit
        units = [0]
        while units[-1] < num_units:
            units.append(min(num_units, units[-1] + 1 + int(growth * units[-1])))
        return [n * self.unit for n in units]


def node_pools(problem: Problem) -> tuple[NodePool, ...]:
    """Return the machines of a problem by kind and price; the cheapest work first."""
    rows = problem.workload.model.vocab_size
    objective = problem.objective
    # GPUs are counted one by one where their number is the objective.
    whole = objective.needs_prices(problem.cluster) and objective.name != "fewest-gpus"
    # Prices that those of no plan are below, one list for each size and recompute.
    least = relaxed(problem.costs)
    priced = [
        (size, least.variant(micro_batch_size=size, recompute=recompute))
        for size in micro_batch_sizes(problem.costs)
        for recompute in recomputes(problem.costs)
    ]
    pools = []
    for kind in kinds_of(problem):
        by_price: dict[tuple[float | None, float | None, int], list[Node]] = {}
        for node in kind.nodes:
            num_islands = len(problem.cluster.machines[node.machine])
            key = node.price_per_hour, node.gpu_price_per_hour, num_islands
            by_price.setdefault(key, []).append(node)
        # Width, sequences and seconds of a layer for a micro-batch.
        times_s = [
            (w, size, costs.pieces(kind.node, w, rows).layer.total_s)
            for size, costs in priced
            for w in group_widths(costs, kind.node, uneven=True)
            if w <= kind.num_gpus
        ]
        for (price, _, num_islands), nodes in by_price.items():
            unit = kind.num_gpus if whole and price is not None else 1
            layer_gpu_s = min(w * time_s / size for w, size, time_s in times_s)
            least_s = min(time_s for _, _, time_s in times_s)
            pools.append(
                NodePool(tuple(nodes), kind.num_gpus, unit, layer_gpu_s, least_s, num_islands)
            )
    return tuple(sorted(pools, key=lambda p: (_work_price(p), p.nodes[0].name)))


def _work_price(pool: NodePool) -> float:
    """Return what a layer costs in a pool; its GPU-seconds where it has no price."""
    price = pool.price_per_hour(pool.num_gpus)
    return pool.layer_gpu_s if price is None else pool.layer_gpu_s * price / pool.num_gpus


def all_selections(pools: Sequence[NodePool], most: int) -> list[Selection] | None:
    """Return every selection but the empty one; None if there are more than `most`."""
    counts = [pool.counts() for pool in pools]
    if prod(map(len, counts)) > most:
        return None
    return [s for s in product(*counts) if any(s)]


def some_selections(pools: Sequence[NodePool], most: int) -> list[Selection]:
    """Return all selections, or where there are more than `most` those of ever coarser ladders;
    at last the pools one after the other, the cheapest work first."""
    found = all_selections(pools, most)
    if found is not None:
        return found
    growth = _FINEST_LADDER
    # Ever coarser ladders, until the selections are few enough.
    while growth <= max(pool.most for pool in pools):
        counts = [pool.counts(growth) for pool in pools]
        if prod(map(len, counts)) <= most:
            return [s for s in product(*counts) if any(s)]
        growth *= 2
    return list(dict.fromkeys(_one_after_the_other(pools)))[:most]


def _one_after_the_other(pools: Sequence[NodePool]) -> Iterator[Selection]:
    none = (0,) * len(pools)
    # `taken` has all GPUs of the pools before.
    taken: Selection = none
    for index, pool in enumerate(pools):
        for count in pool.counts(_FINEST_LADDER)[1:]:
            yield (*none[:index], count, *none[index + 1 :])
            yield (*taken[:index], count, *taken[index + 1 :])
        taken = (*taken[:index], pool.most, *taken[index + 1 :])


def neighbours(pools: Sequence[NodePool], selection: Selection) -> Iterator[Selection]:
    """Yield selections with a unit less or more of one pool, and with a unit exchanged between two
    pools."""
    changes = [(k, sign) for k in range(len(pools)) for sign in (-1, 1)]
    moves = [(change,) for change in changes]
    pairs = [((j, -1), (k, 1)) for j in range(len(pools)) for k in range(len(pools)) if j != k]
    for move in (*moves, *pairs):
        moved = list(selection)
        for k, sign in move:
            moved[k] += sign * pools[k].unit
        if any(moved) and all(0 <= n <= o.most for n, o in zip(moved, pools, strict=True)):
            yield tuple(moved)


@dataclass(frozen=True)
class Promise:
    """A bound on every plan on exactly these machines, by work alone, with free traffic."""

    num_gpus: int
    step_s: float
    price: Price | None


def work_of(problem: Problem) -> int:
    """Return layers times sequences of a step."""
    return problem.workload.training.global_batch_size * problem.num_layers


def promise(problem: Problem, pools: Sequence[NodePool], selection: Selection) -> Promise:
    """Return the least step time of a selection under a perfect division of work, and the price."""
    taken = [(pool, n) for pool, n in zip(pools, selection, strict=True) if n]
    # All GPUs at their best, without a pause.
    layers_per_s = sum(n / pool.layer_gpu_s for pool, n in taken)
    way_s = problem.num_layers * min((pool.least_layer_s for pool, _ in taken), default=inf)
    prices = [pool.price_per_hour(n) for pool, n in taken]
    known = [price for price in prices if price is not None]
    return Promise(
        sum(selection),
        max(way_s, work_of(problem) / layers_per_s),
        Price(sum(known)) if len(known) == len(prices) else None,
    )


def restricted(problem: Problem, pools: Sequence[NodePool], selection: Selection) -> Problem:
    """Return the problem with the first machines of each pool alone; the rest stays idle."""
    gpus: dict[str, tuple[int, ...]] = {}
    for pool, count in zip(pools, selection, strict=True):
        for node in pool.nodes:
            taken = min(count, pool.num_gpus)
            if taken:
                gpus[node.name] = problem.gpus[node.name][:taken]
            count -= taken
    return replace(
        problem,
        nodes=tuple(node for node in problem.nodes if node.name in gpus),
        gpus=gpus,
        widths={
            name: tuple(w for w in problem.widths[name] if w <= len(found))
            for name, found in gpus.items()
        },
    )
