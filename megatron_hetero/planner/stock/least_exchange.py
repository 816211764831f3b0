"""The least exchange of gradients and new weights that stages of stock Megatron can have.

Quicker than the exchange itself (`planner.stock.exchange`), so that a grid can be left out by it:
each ring of holders counts by the nodes that it leads over, without latencies, additions, senders
to one receiver and lines that other nodes share.

With `--overlap-grad-reduce` the exchange of a first stage begins within its last backward pass, and
that of another stage after the last one of a chunk (`schedule.exchange.gradients`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.memory.states import bytes_each_way
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.network.ring import ring_key
from megatron_hetero.cost.parameters import (
    layer_params,
    matrix_params,
    routed_matrix_params,
    routed_params,
    stage_matrix_params,
    stage_params,
)
from megatron_hetero.cost.share import even_share
from megatron_hetero.model.training import TrainingSpec
from megatron_hetero.planner.stock.exchange import Line
from megatron_hetero.planner.stock.grids import StockGrid


@dataclass(frozen=True)
class _Ring:
    """Seconds of one byte of a buffer on its way round.

    Attributes:
        slowest_s: on the slowest hop.
        hops_s: between nodes, by the two nodes.
    """

    slowest_s: float
    hops_s: dict[tuple[str, str], float]


def least_exchange(
    grid: StockGrid, costs: CostModel, rows: int, expert_groups: tuple[int, int] | None
) -> Sequence[Line]:
    """Return for each stage a line below the seconds of its gradients and new weights together.

    Args:
        costs: knows the links.
        rows: rows of the padded vocabulary.
        expert_groups: as of `StageShape`.
    """
    key = "least exchange", expert_groups, *grid.shape
    if key not in grid.ranks.known:
        grid.ranks.known[key] = _priced(grid, costs, rows, expert_groups)
    return cast(Sequence[Line], grid.ranks.known[key])


def _priced(
    grid: StockGrid, costs: CostModel, rows: int, expert_groups: tuple[int, int] | None
) -> Sequence[Line]:
    training, model = costs.workload.training, costs.workload.model
    is_alone = grid.num_replicas == 1 and grid.context_parallel == 1
    if is_alone or not training.stock_waits:
        return [(0.0, 0.0)] * grid.num_stages
    share, last = even_share(model, 1), grid.num_stages - 1
    routed = in_routed = 0
    if expert_groups is not None:
        routed, in_routed = routed_params(model), routed_matrix_params(model)

    def both_ways(num_params: int, num_in_matrices: int) -> float:
        """Return the bytes on every hop: reduced and gathered, or reduced everywhere."""
        return 2 * bytes_each_way(training, num_params, num_in_matrices)

    each = both_ways(
        layer_params(model, share) - routed, matrix_params(model, share) - in_routed
    )
    typical = model.num_layers / grid.num_stages
    of_ends = {
        place: both_ways(
            stage_params(model, share, 0, *place, rows),
            stage_matrix_params(model, share, 0, place[1]),
        )
        for place in {(p == 0, p == last) for p in (0, 1, last)}
    }
    found = []
    for p, nodes in enumerate(grid.of_stages(grid.ranks.nodes).tolist()):
        ends, lines = of_ends[p == 0, p == last], []
        for dense_s, together, experts_s in _paths(grid, costs.cluster, p, nodes, expert_groups):
            # Experts are divided among the replicas that hold them together.
            of_experts = experts_s * both_ways(routed // together, in_routed // together)
            lines.append((dense_s * ends, dense_s * each + of_experts))
        # Each path is a bound by itself; the one with most to carry counts.
        found.append(max(lines, key=lambda line: line[0] + line[1] * typical))
    return found


def num_hiding(training: TrainingSpec, num_stages: int, num_chunks: int) -> tuple[int, ...]:
    """Return the last micro-batches of each stage whose passes may hide its exchange, [stage].

    Args:
        training: of the job.
        num_stages: of each pipeline.
        num_chunks: of each stage, at most.
    """
    if not training.overlap_grad_reduce:
        return (0,) * num_stages
    # An interleaved stage takes micro-batches in groups of the depth: the chunk that comes to its
    # last backward pass first does so in the last group.
    return (1, *[0] * (num_stages - 1)) if num_chunks == 1 else (num_stages,) * num_stages


def beyond_passes(
    exchange: tuple[ArrayLike, ArrayLike],
    hiding: tuple[ArrayLike, ArrayLike],
    typical: float | NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return lines below what is left of each stage's exchange behind passes that may hide it.

    Args:
        exchange: seconds without layers, and what each layer adds, [stage].
        hiding: of the passes, likewise.
        typical: layers of a stage, for which a line is to be near.
    """
    zero_s, more_s = (np.subtract(a, b) for a, b in zip(exchange, hiding, strict=True))
    # A stage whose passes may hide all of it has none left.
    is_left = (more_s >= 0) & (zero_s + more_s * typical > 0)
    return np.where(is_left, zero_s, 0.0), np.where(is_left, more_s, 0.0)


_Path = tuple[float, int, float]
"""Seconds of one byte of the dense buffer; replicas that hold experts together; seconds of one byte
of the experts of each ring."""


def _paths(
    grid: StockGrid,
    cluster: Cluster,
    p: int,
    nodes: Sequence[int],
    expert_groups: tuple[int, int] | None,
) -> Sequence[_Path]:
    """Return the paths of a stage's rings: those that a replica waits for, and between nodes.

    Args:
        nodes: of the stage's tensor-parallel groups in all replicas, by their place in `names`.
    """
    own = grid.ranks_of_stage
    whole = own if expert_groups is None else expert_groups[0] * expert_groups[1]
    key = "least paths", p, whole, *grid.shape
    known = grid.ranks.known
    if key in known:
        return cast(Sequence[_Path], known[key])
    width = grid.width
    dense = _ring(grid, cluster, nodes, width)
    # Replicas at the same place of their groups hold the same experts (`StockBuckets.of_experts`).
    together, step = max(1, whole // own), min(whole, own)
    firsts, context = [i // width for i in range(0, own, step)], grid.context_parallel
    starts = range(0, len(nodes), context)
    # Groups on several nodes have a ring for each place in them, of which nothing is told here.
    units = range(max(1, step // width))
    has_rings = expert_groups is not None and all(
        len({nodes[d + i + u] for u in units}) == 1 for d in starts for i in firsts
    )
    rings = [
        _ring(grid, cluster, [nodes[d + i] for d in starts[turn::together] for i in firsts], step)
        for turn in range(together if has_rings else 0)
    ]
    sums_s: Counter[tuple[str, str]] = Counter()
    for ring in rings:
        sums_s.update(ring.hops_s)
    slowest_s = max((ring.slowest_s for ring in rings), default=0.0)
    found = [(dense.slowest_s, together, slowest_s)]
    found += [(dense.hops_s.get(ends, 0.0), together, own_s) for ends, own_s in sums_s.items()]
    known[key] = found
    return found


def _ring(grid: StockGrid, cluster: Cluster, nodes: Sequence[int], width: int) -> _Ring:
    """Return the ring over groups of so many ranks, each by the node of its first one."""
    counts = Counter(nodes)
    key = "least ring", width, frozenset(counts.items())
    known = grid.ranks.known
    if key not in known:
        names = grid.ranks.names
        known[key] = _made(cluster, Counter({names[i]: n for i, n in counts.items()}), width)
    return cast(_Ring, known[key])


def _made(cluster: Cluster, counts: Counter[str], width: int) -> _Ring:
    share = (counts.total() - 1) / counts.total()
    nodes = sorted(counts, key=lambda node: ring_key(cluster, Device(node, 0)))
    # Between nodes the path carries all of a group's buffer, inside a node each port a rank's part.
    hops_s = {
        ends: share / _bytes_per_s(cluster, *ends)
        for ends in pairwise([*nodes, nodes[0]] if len(nodes) > 1 else [])
    }
    inside_s = [
        share / width / cluster.node_by_name[node].link.bytes_per_s
        for node, number in counts.items()
        if number > 1
    ]
    return _Ring(max([*hops_s.values(), *inside_s], default=0.0), hops_s)


def _bytes_per_s(cluster: Cluster, here: str, there: str) -> float:
    """Return what a node can send to another at most."""
    link = cluster.node_links[here, there]
    nics = cluster.node_by_name[here].nics
    return link.bytes_per_s if nics is None else max(link.bytes_per_s, nics.total_bytes_per_s)
