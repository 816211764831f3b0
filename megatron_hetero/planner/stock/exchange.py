"""Seconds of stock Megatron's exchange of gradients and new weights, over the layers of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.network.ring import ring_key
from megatron_hetero.cost.placement import PlacedReplica, Placement
from megatron_hetero.cost.placing import with_expert_groups
from megatron_hetero.planner.stock.grids import StockGrid
from megatron_hetero.schedule.exchange.gradients import GradientExchange
from megatron_hetero.schedule.parts import Collective

Line = tuple[float, float]
"""Seconds without layers, and what each layer adds."""


@dataclass(frozen=True)
class ExchangeLines:
    """Seconds of the gradients and of the new weights of each stage; then of each replica's tied
    embeddings."""

    gradients: Sequence[Line]
    weights: Sequence[Line]
    tied_s: Sequence[float]

    def reduced_s(
        self, ends: Sequence[NDArray[np.float64]], stages: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return when all gradients are reduced, [division].

        Each stage's all-reduce by itself, then those of tied embeddings; what overlaps with the
        last backward passes is left out.

        Args:
            ends: of the last backward pass of each stage, [replica][stage, division].
            stages: layers, [division, stage].
        """
        slowest_s = np.max(ends, axis=0)
        # [stage]: when its gradients are reduced, after its last backward pass in any replica.
        last_s = [
            np.asarray(slowest_s[p] + zero_s + each_s * n)
            for p, ((zero_s, each_s), n) in enumerate(zip(self.gradients, stages.T, strict=True))
        ]
        # Tied embeddings wait for both ends.
        both_s = np.maximum(last_s[0], last_s[-1])
        return np.asarray(np.max([*last_s, *(both_s + s for s in self.tied_s)], axis=0))

    def updated_s(
        self, updates: Sequence[Sequence[Line]], stages: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return seconds of the optimizer, and with the distributed one the new weights, of the
        slowest stage, [division].

        Args:
            updates: seconds of the optimizer, [stage][unlike].
            stages: layers, [division, stage].
        """
        found = []
        for p, ((zero_s, each_s), own) in enumerate(zip(self.weights, updates, strict=True)):
            for own_zero_s, own_each_s in own:
                found.append(own_zero_s + zero_s + (own_each_s + each_s) * stages[:, p])
        return np.asarray(np.max(found, axis=0))


def exchange_lines(
    grid: StockGrid, costs: CostModel, rows: int, expert_groups: tuple[int, int] | None
) -> ExchangeLines:
    """Return the lines of a grid, which micro-batches and recompute do not change.

    What overlaps has as many buckets as there are layers, and is left out; so is the exchange of
    another trainer.

    Args:
        costs: prices the links.
        rows: rows of the padded vocabulary.
        expert_groups: as of `StageShape`.
    """
    key = "exchange", *grid.shape, expert_groups
    if key not in grid.ranks.known:
        grid.ranks.known[key] = _priced(grid, costs, rows, expert_groups)
    return cast(ExchangeLines, grid.ranks.known[key])


def _priced(
    grid: StockGrid, costs: CostModel, rows: int, expert_groups: tuple[int, int] | None
) -> ExchangeLines:
    training, model = costs.workload.training, costs.workload.model
    waits, num_stages = training.stock_waits, grid.num_stages
    nothing: list[Line] = [(0.0, 0.0)] * num_stages
    # A single replica exchanges nothing but copies of the words.
    is_alone = grid.num_replicas == 1 and grid.context_parallel == 1
    if is_alone and not (model.copies_words and waits):
        return ExchangeLines(nothing, nothing, [])

    like = _first_likes(grid, costs.cluster)
    stages = sorted(set(like))

    def collectives(num_layers: int) -> tuple[tuple[Collective, ...], ...]:
        """Return the collectives of gradients and of new weights, with so many layers on each of
        the unlike stages."""
        frame = _frame(grid, stages, num_layers, expert_groups)
        return GradientExchange(costs, frame, rows, {}, {}).stock()

    # Prices with one layer and with two give the line: what a layer adds, and what is left.
    one = collectives(1)
    # A collective over several stages is that of a tied embedding.
    tied_s = [_seconds(c) for c in one[0] if len({stage for _, stage in c.holders}) > 1]
    if not waits:
        tied_s = []
    if training.overlap_grad_reduce or not waits:
        return ExchangeLines(nothing, nothing, tied_s)
    found = []
    for of_one, of_two in zip(one, collectives(2), strict=True):
        seconds = (_of_stages_s(own, len(stages)) for own in (of_one, of_two))
        lines = {
            p: (2 * a - b, b - a) for p, a, b in zip(stages, *seconds, strict=True)
        }
        found.append([lines[p] for p in like])
    gradients, weights = found
    return ExchangeLines(gradients, weights, tied_s)


def _first_likes(grid: StockGrid, cluster: Cluster) -> list[int]:
    """Return for each stage the first one with an equal exchange for as many layers: with groups of
    the same kinds, whose nodes follow each other alike in rings.  The ends of the model are like no
    other stage."""
    units, kinds, last = grid.ranks.units, grid.ranks.kinds, grid.num_stages - 1
    first: dict[object, int] = {}
    found = []
    for p in range(grid.num_stages):
        places = [i for d in range(grid.num_replicas) for i in grid.groups(d, p)]
        nodes = {units[i].node for i in places}
        in_ring = sorted(nodes, key=lambda node: ring_key(cluster, Device(node, 0)))
        number = {node: i for i, node in enumerate(in_ring)}
        key: object = tuple((kinds[i], number[units[i].node]) for i in places)
        # Several network cards of a machine are near some of its GPUs each.
        is_alone = p in (0, last) or cluster.has_nics
        found.append(first.setdefault(p if is_alone else key, p))
    return found


def _frame(
    grid: StockGrid, stages: Sequence[int], num_layers: int, expert_groups: tuple[int, int] | None
) -> Placement:
    """Return some stages of the grid with so many layers on each; the number of micro-batches does
    not matter here."""
    frame = Placement(
        tuple(
            PlacedReplica(
                tuple(replace(grid.stage(d, p).stage, num_layers=num_layers) for p in stages),
                grid.num_stages,
            )
            for d in range(grid.num_replicas)
        )
    )
    return frame if expert_groups is None else with_expert_groups(frame, expert_groups)


def _of_stages_s(collectives: Sequence[Collective], num_stages: int) -> list[float]:
    """Add up the seconds of each stage's own collectives, in the replica with the largest sum, or
    on the path that they take longest: experts dealt out are exchanged among some of the replicas,
    the other parameters beside these, and all of them over the network cards of their nodes."""
    found: list[dict[object, float]] = [{} for _ in range(num_stages)]
    for collective in collectives:
        stages = {s for _, s in collective.holders}
        if len(stages) == 1:
            own, seconds = found[stages.pop()], _seconds(collective)
            taken = *((r, seconds) for r, _ in collective.holders), *collective.hops
            for who, busy_s in taken:
                own[who] = own.get(who, 0.0) + busy_s
    return [max(own.values(), default=0.0) for own in found]


def _seconds(collective: Collective) -> float:
    return max((s for _, s in collective.hops), default=0.0) + collective.latency_s
