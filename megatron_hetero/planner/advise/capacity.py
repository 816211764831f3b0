"""An upper bound on the layers that a cluster can hold: where it is too low, no plan fits.

It asks for one replica only, whose stages stand in any order on any GPUs, whatever pins and links
say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cost.choices import may_choose
from megatron_hetero.cost.memory.libraries import memory_kind
from megatron_hetero.planner.problem import Problem

_MAX_STATES = 30_000
"""Above this many states of the exact bound, each kind of GPU is bounded by itself."""


@dataclass(frozen=True)
class MoreGpus:
    """`num_gpus` GPUs to be added in nodes like `node`, full ones first."""

    node: Node
    num_gpus: int

    @property
    def num_full_nodes(self) -> int:
        """Nodes with as many GPUs as `node`."""
        return self.num_gpus // self.node.num_gpus

    @property
    def num_left_over(self) -> int:
        """GPUs of one further node; 0 for none."""
        return self.num_gpus % self.node.num_gpus


@dataclass(frozen=True)
class _GpuPool:
    """GPUs of one type with the same possible group widths."""

    node: Node
    num_gpus: int
    widths: tuple[int, ...]


def may_fit_proves(problem: Problem) -> bool:
    """Return whether `may_fit` covers every possible plan. `may_fit` leaves out divided sequences,
    and unequal shares of weights or optimizer states, by which GPUs with the least memory hold
    less."""
    shards = problem.workload.training.use_distributed_optimizer
    return not (
        may_choose(problem.costs, "shares")
        or problem.divides_sequences
        or (shards and may_choose(problem.costs, "optimizer_share"))
    )


def may_fit(problem: Problem, more: MoreGpus | None = None) -> bool:
    """Return False as a proof that no plan of the job's own settings fits (see `may_fit_proves`),
    with `more` GPUs if given."""
    pools = _pools(problem, more)
    num_gpus = sum(pool.num_gpus for pool in pools)
    wanted = problem.cluster.limits.num_replicas
    most = min(problem.num_micro_batches, num_gpus)
    for num_replicas in range(1, most + 1) if wanted is None else (wanted,) * (wanted <= most):
        # One of the replicas has no more than its equal part of the GPUs, ...
        if not _may_hold(problem, pools, 1, num_gpus // num_replicas):
            return False
        # ... and one no less than its equal part of the micro-batches.
        share = -(-problem.num_micro_batches // num_replicas)
        others = num_replicas - 1
        most_stages = min(problem.max_stages(), num_gpus - others)
        # A share that fills the deepest pipeline has as many in flight as one replica, asked first.
        fills = share >= most_stages
        if (num_replicas == 1 or wanted or not fills) and _may_hold(
            problem, pools, share, num_gpus - others
        ):
            return True
    return False


def _pools(problem: Problem, more: MoreGpus | None) -> list[_GpuPool]:
    found: dict[tuple[object, ...], _GpuPool] = {}

    def add(node: Node, num_gpus: int, widths: tuple[int, ...]) -> None:
        key = (memory_kind(node), widths)
        before = found[key].num_gpus if key in found else 0
        if num_gpus and widths:
            found[key] = _GpuPool(node, before + num_gpus, widths)

    for node in problem.nodes:
        add(node, len(problem.gpus[node.name]), problem.widths[node.name])
    if more is not None:
        widths = problem.costs.widths(more.node)
        # Whole nodes have all widths, the last one only those that its GPUs allow.
        add(more.node, more.num_full_nodes * more.node.num_gpus, widths)
        narrow = tuple(width for width in widths if width <= more.num_left_over)
        add(more.node, more.num_left_over, narrow)
    return list(found.values())


def _may_hold(problem: Problem, pools: Sequence[_GpuPool], share: int, num_gpus: int) -> bool:
    """Return whether a replica with `share` micro-batches may fit into `num_gpus` GPUs of the
    pools."""
    # Every stage has a GPU at least.
    num_stages = min(problem.max_stages(), num_gpus)
    num_states = prod(pool.num_gpus + 1 for pool in pools) * num_stages
    if num_states <= _MAX_STATES:
        return _holds_together(problem, pools, share, num_gpus)
    alone = [_most_layers_alone(problem, pool, share, num_stages) for pool in pools]
    return sum(alone) >= problem.num_layers


def _holds_together(problem: Problem, pools: Sequence[_GpuPool], share: int, num_gpus: int) -> bool:
    """Answer exactly but for node borders, from the last stage on: for every choice of GPUs so
    far, the most layers that so many last stages hold."""
    # GPUs taken of each pool -> most layers on the stages so far.
    states: dict[tuple[int, ...], int] = {(0,) * len(pools): 0}
    for place in range(1, problem.max_stages() + 1):
        in_flight, last = min(place, share), place == 1
        # `outer` is a first stage, with which the pipeline is complete.
        inner = list(_stages(problem, pools, in_flight, False, last))
        outer = list(_stages(problem, pools, in_flight, True, last))
        grown: dict[tuple[int, ...], int] = {}
        for used, layers in states.items():
            left = num_gpus - sum(used)
            for p, width, held in outer:
                fits = width <= left and used[p] + width <= pools[p].num_gpus
                if fits and layers + held >= problem.num_layers:
                    return True
            for p, width, held in inner:
                if width <= left and used[p] + width <= pools[p].num_gpus:
                    key = (*used[:p], used[p] + width, *used[p + 1 :])
                    grown[key] = max(grown.get(key, 0), layers + held)
        states = grown
        if not states:
            break
    return False


def _stages(
    problem: Problem, pools: Sequence[_GpuPool], in_flight: int, first: bool, last: bool
) -> Iterator[tuple[int, int, int]]:
    """Yield (pool, width, most layers) of every stage with room for at least one layer."""
    for p, pool in enumerate(pools):
        for width in pool.widths:
            held = _layers_held(problem, pool, width, first, last, in_flight)
            if held > 0:
                yield p, width, held


def _most_layers_alone(problem: Problem, pool: _GpuPool, share: int, num_stages: int) -> int:
    """Return the most layers in the GPUs of one pool, were all last places of the pipeline
    theirs."""
    # most[n]: layers in n GPUs of the pool, on the last places up to `place`.
    most = [0] * (pool.num_gpus + 1)
    for place in range(1, min(num_stages, pool.num_gpus) + 1):
        in_flight = min(place, share)
        # Each place is taken as any end: the bound may only be too high.
        held = {
            width: max(
                _layers_held(problem, pool, width, first, last, in_flight)
                for first, last in product((False, True), repeat=2)
            )
            for width in pool.widths
        }
        before = most
        most = [
            max(
                before[used],
                *(before[used - w] + n for w, n in held.items() if w <= used and n > 0),
                0,
            )
            for used in range(pool.num_gpus + 1)
        ]
        if most == before:
            break
    return most[-1]


def _layers_held(
    problem: Problem, pool: _GpuPool, width: int, first: bool, last: bool, in_flight: int
) -> int:
    # Other widths can only make the padded vocabulary longer.
    rows = problem.costs.vocab_rows([width])
    # The more replicas, the less of the distributed optimizer's states has each device.
    costs = problem.costs.sharded_among(max(problem.replica_counts(), default=1))
    return costs.memory(pool.node, width, first, last, in_flight, rows).max_layers
