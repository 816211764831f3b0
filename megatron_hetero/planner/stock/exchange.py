"""Seconds of stock Megatron's exchange of gradients and new weights, over the layers of a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


Shared = Sequence[tuple[int, Line]]
"""The stages that share a path between nodes, each with the seconds for which it takes the path."""


@dataclass(frozen=True)
class ExchangeLines:
    """Seconds of the gradients and of the new weights of each stage; then of each replica's tied
    embeddings; then on the paths that stages share, of gradients and of weights."""

    gradients: Sequence[Line]
    weights: Sequence[Line]
    tied_s: Sequence[float] = ()
    shared_gradients: Sequence[Shared] = ()
    shared_weights: Sequence[Shared] = ()

    def reduced_s(
        self,
        begins: Sequence[NDArray[np.float64]],
        ends: Sequence[NDArray[np.float64]],
        stages: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Return when all gradients are reduced at the earliest, [division].

        Each stage's all-reduce by itself, and those of several stages on their shared paths; then
        those of tied embeddings.

        Args:
            begins: when each stage's gradients may begin to be reduced, [replica][stage, division].
            ends: of the last backward pass of each stage, [replica][stage, division].
            stages: layers, [division, stage].
        """
        # In the slowest replica.
        begin_s, slowest_s = np.max(begins, axis=0), np.max(ends, axis=0)
        last_s = [
            np.maximum(slowest_s[p], begin_s[p] + zero_s + each_s * n)
            for p, ((zero_s, each_s), n) in enumerate(zip(self.gradients, stages.T, strict=True))
        ]
        # Tied embeddings wait for both ends.
        both_s = np.maximum(last_s[0], last_s[-1])
        last_s += [_shared_s(path, begin_s, stages) for path in self.shared_gradients]
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
        update_s = [
            np.max([zero_s + each_s * n for zero_s, each_s in own], axis=0)
            for own, n in zip(updates, stages.T, strict=True)
        ]
        found = [
            own_s + zero_s + each_s * n
            for own_s, (zero_s, each_s), n in zip(update_s, self.weights, stages.T, strict=True)
        ]
        found += [_shared_s(path, update_s, stages) for path in self.shared_weights]
        return np.asarray(np.max(found, axis=0))


def _shared_s(
    path: Shared,
    begin_s: Sequence[NDArray[np.float64]] | NDArray[np.float64],
    stages: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Return when a path has carried all that its stages exchange, [division].

    Args:
        begin_s: when each stage begins, [stage][division].
        stages: layers, [division, stage].
    """
    taken_s = [zero_s + each_s * stages[:, p] for p, (zero_s, each_s) in path]
    first_s = np.min([begin_s[p] for p, _ in path], axis=0)
    return np.asarray(first_s + np.sum(taken_s, axis=0))


def exchange_lines(
    grid: StockGrid, costs: CostModel, rows: int, expert_groups: tuple[int, int] | None
) -> ExchangeLines:
    """Return the lines of a grid, which micro-batches and recompute do not change.

    Buckets that overlap with passes take no less than the whole that is priced here.  The exchange
    of another trainer is left out, and new weights that hide behind forward passes.

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
    nothing: list[Line] = [(0.0, 0.0)] * grid.num_stages
    # A single replica exchanges nothing but copies of the words.
    is_alone = grid.num_replicas == 1 and grid.context_parallel == 1
    if not training.stock_waits or (is_alone and not model.copies_words):
        return ExchangeLines(nothing, nothing)

    like = _first_likes(grid, costs.cluster)
    stages = sorted(set(like))

    def collectives(num_layers: int) -> tuple[tuple[Collective, ...], ...]:
        """Return the collectives of gradients and of new weights, with so many layers on each of
        the unlike stages."""
        frame = _frame(grid, stages, num_layers, expert_groups)
        return GradientExchange(costs, frame, rows, {}, {}).stock(whole=True)

    # Prices with one layer and with two give the line: what a layer adds, and what is left.
    one = collectives(1)
    # A collective over several stages is that of a tied embedding.
    tied_s = [_seconds(c) for c in one[0] if len({stage for _, stage in c.holders}) > 1]
    found: list[list[Line]] = []
    shared: list[list[Shared]] = []
    for of_one, of_two in zip(one, collectives(2), strict=True):
        taken = [_taken_by_stages(own, len(stages)) for own in (of_one, of_two)]
        lines = {
            p: _line(max(a.values(), default=0.0), max(b.values(), default=0.0))
            for p, a, b in zip(stages, *taken, strict=True)
        }
        found.append([lines[p] for p in like])
        of_paths = {
            p: {path: _line(a[path], b[path]) for path in a if _is_between_nodes(path)}
            for p, a, b in zip(stages, *taken, strict=True)
        }
        shared.append(_shared_paths(grid, like, of_paths))
    if training.hides_gathers:
        found[1], shared[1] = nothing, []
    return ExchangeLines(found[0], found[1], tied_s, shared[0], shared[1])


def _line(of_one: float, of_two: float) -> Line:
    return 2 * of_one - of_two, of_two - of_one


def _is_between_nodes(path: object) -> bool:
    """Return whether it is a path that stages may share, and no replica or port of a group
    (`schedule.network.hops`)."""
    return isinstance(path, str) and not path.endswith((" in", " out"))


def _shared_paths(
    grid: StockGrid, like: Sequence[int], of_paths: Mapping[int, Mapping[object, Line]]
) -> list[Shared]:
    """Return the paths that several stages share; of those that carry the same, one.

    Args:
        like: for each stage one with an equal exchange, maybe on other nodes.
        of_paths: of these, what each path between nodes carries.
    """
    nodes = [frozenset(own) for own in grid.of_stages(grid.ranks.nodes).tolist()]
    found: dict[object, list[tuple[int, Line]]] = {}
    for p, other in enumerate(like):
        is_there = nodes[p] == nodes[other]
        for path, line in of_paths[other].items():
            # On other nodes its paths are known by their place in the like exchange alone.
            found.setdefault(path if is_there else (nodes[p], path), []).append((p, line))
    return list(dict.fromkeys(tuple(own) for own in found.values() if len(own) > 1))


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


def _taken_by_stages(
    collectives: Sequence[Collective], num_stages: int
) -> list[dict[object, float]]:
    """Add up the seconds of each stage's own collectives, by replica and by path; the stage takes
    the longest of these: experts dealt out are exchanged among some of the replicas, the other
    parameters beside these, and all of them over the network cards of their nodes."""
    found: list[dict[object, float]] = [{} for _ in range(num_stages)]
    for collective in collectives:
        stages = {s for _, s in collective.holders}
        if len(stages) == 1:
            own, seconds = found[stages.pop()], _seconds(collective)
            taken = *((r, seconds) for r, _ in collective.holders), *collective.hops
            for who, busy_s in taken:
                own[who] = own.get(who, 0.0) + busy_s
    return found


def _seconds(collective: Collective) -> float:
    return max((s for _, s in collective.hops), default=0.0) + collective.latency_s
