"""Megatron's two orders of ranks, and arrangements of nodes and replicas that follow an order.

Stock Megatron computes from a global rank which replica, stage and rank of the stage (its
tensor-parallel groups one after the other, one for each context-parallel rank) it is; `torchrun`
gives a node's GPUs consecutive ranks.  A plan of equal replicas is therefore stock's if its nodes
can be put one after the other such that every GPU gets its own place.  The order of nodes, of GPUs
inside a node (`CUDA_VISIBLE_DEVICES`) and of the equal replicas is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megatron_hetero.cluster.names import device_place
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.plan.hosts import hosts_of
from megatron_hetero.plan.plan import Host, Plan, Replica, StageShape
from megatron_hetero.plan.ranks import rank_table

RankOrder = Literal["tp-dp-pp", "tp-pp-dp"]
"""The fastest first: Megatron's default, and `--use-tp-pp-dp-mapping`."""

RANK_ORDERS: tuple[RankOrder, ...] = ("tp-dp-pp", "tp-pp-dp")

Pipeline = tuple[tuple[str, ...], ...]
"""The machine of every place of a replica, [stage][rank of the stage]."""

NodeGrid = tuple[Pipeline, ...]
"""The machine of every place, [replica][stage][rank of the stage]; all stages of one shape.
Here, as in `torchrun`'s words, a node is a machine."""

_MAX_NODES_TRIED = 2000
"""Six nodes in every order are 1956 steps.  With more, the search may give up where several
replicas share nodes; the plan is then run by the plug-in, which any order suits."""


@dataclass(frozen=True)
class StockArrangement:
    """A rank order, and for each of Megatron's data-parallel ranks the replica to put there."""

    rank_order: RankOrder
    replicas: tuple[int, ...]


def places_by_rank(
    order: RankOrder, num_replicas: int, num_stages: int, width: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (replica, stage, rank of the stage) of global ranks 0, 1, ... of equal replicas.

    Place (d, p, k) has, by `parallel_state.RankGenerator`, rank k + t (d + D p) in the default
    order tp-cp-ep-dp-pp, and k + t (p + P d) in tp-cp-ep-pp-dp of `--use-tp-pp-dp-mapping`.

    Args:
        order: Megatron's.
        num_replicas, num_stages: of the plan.
        width: ranks of every stage.

    >>> list(places_by_rank("tp-dp-pp", 2, 2, 1))
    [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]
    """
    # In Megatron's names a part that comes earlier changes faster from rank to rank.
    if order == "tp-dp-pp":
        cells = ((d, p) for p in range(num_stages) for d in range(num_replicas))
    else:
        cells = ((d, p) for d in range(num_replicas) for p in range(num_stages))
    for d, p in cells:
        for k in range(width):
            yield d, p, k


def rank_orders(plan: Plan) -> tuple[RankOrder, ...]:
    """Find Megatron's orders that give each global rank the same place as the plan; the default
    first.

    Empty too when replicas, depths or widths differ, for which Megatron has no order.
    """
    if not _is_regular(plan.replicas):
        return ()
    first = plan.replicas[0].stages
    return tuple(o for o in ranks_follow(plan) if groups_fit(first[0].shape, len(first), o))


def ranks_follow(plan: Plan) -> tuple[RankOrder, ...]:
    """Find the orders of `rank_orders`, with no regard to groups of experts."""
    if not _is_regular(plan.replicas):
        return ()
    first = plan.replicas[0].stages
    # All replicas have the first one's shape here.
    shape = len(plan.replicas), len(first), first[0].shape.num_devices
    width = first[0].shape.tensor_parallel
    # [global rank] -> (replica, stage, rank of the stage), as the plan numbers.
    table = [(p.replica, p.stage, p.context_rank * width + p.tensor_rank) for p in rank_table(plan)]
    return tuple(order for order in RANK_ORDERS if table == list(places_by_rank(order, *shape)))


def groups_fit(shape: StageShape, num_stages: int, order: RankOrder) -> bool:
    """Return whether Megatron's groups of experts fit an order of ranks.

    Experts have an order of their own, tp-ep-dp-pp with their sizes, which must number the stages
    as the rest of the model does (`initialize_model_parallel` compares the pipelines of both).
    With the replicas last a stage's ranks in a replica are then those of one group.  Even a model
    without experts has groups, as wide as its tensor-parallel ones.

    Args:
        shape: of every stage.
        num_stages: of every replica.
        order: Megatron's.
    """
    size, width = expert_sizes(shape)
    return order == "tp-dp-pp" or num_stages == 1 or size * width == shape.num_devices


def expert_sizes(shape: StageShape) -> tuple[int, int]:
    """Return `--expert-model-parallel-size` and `--expert-tensor-parallel-size` of a stage that
    stock Megatron runs."""
    if shape.expert_groups is not None:
        return shape.expert_groups
    return (1, shape.tensor_parallel) if shape.expert_shares is None else (shape.tensor_parallel, 1)


def node_grid(plan: Plan) -> NodeGrid:
    """Return the machines of a plan with devices, [replica][stage][rank of the stage]."""
    return tuple(
        tuple(tuple(device_place(name)[0] for name in s.devices) for s in replica.stages)
        for replica in plan.replicas
    )


@lru_cache(maxsize=4096)
def find_stock_arrangement(nodes: NodeGrid) -> StockArrangement | None:
    """Find the arrangement of equal replicas in which ranks follow an order of Megatron's.

    The default order is preferred, then the order in which replicas and nodes are given.  None if
    there is none, or (with many nodes that several replicas share) none was found in
    a limited number of steps.
    """
    for order in RANK_ORDERS:
        replicas = _OrderSearch(nodes, order).run()
        if replicas is not None:
            return StockArrangement(order, replicas)
    return None


def hosts_in_rank_order(
    replicas: Sequence[Replica], order: RankOrder, cluster: Cluster
) -> tuple[Host, ...]:
    """Return the hosts of replicas that are arranged as `find_stock_arrangement` says."""
    # Equal replicas, so that any of these says the numbers.
    shape = len(replicas), len(replicas[0].stages), replicas[0].stages[0].shape.num_devices
    places = places_by_rank(order, *shape)
    return hosts_of((replicas[d].stages[p].devices[k] for d, p, k in places), cluster)


def split_node(nodes: NodeGrid, order: RankOrder) -> tuple[str, int, int] | None:
    """Find a node whose ranks would not be consecutive with the replicas in the given order.

    Returns:
        Its name and the two neighbours among its ranks with others' ranks between; None if all
        nodes have consecutive ranks.
    """
    # The last rank of each node met; a node not met yet may begin anywhere.
    last_rank: dict[str, int] = {}
    shape = len(nodes), len(nodes[0]), len(nodes[0][0])
    for rank, (d, p, k) in enumerate(places_by_rank(order, *shape)):
        node = nodes[d][p][k]
        before = last_rank.get(node, rank - 1)
        if before != rank - 1:
            return node, before, rank
        last_rank[node] = rank
    return None


class _OrderSearch:
    """Backtracking search that lays nodes along the ranks, and steps back where no replica fits.

    Every data-parallel rank is followed as the stages that it has so far, each as the nodes of its
    tensor ranks.  The ranks so far can be completed exactly if for every such beginning there are
    no more data-parallel ranks with it than replicas (beginnings are nested or disjoint, so
    counting suffices).
    """

    def __init__(self, nodes: NodeGrid, order: RankOrder) -> None:
        self.nodes = nodes
        shape = len(nodes), len(nodes[0]), len(nodes[0][0])
        self.width = shape[2]
        self.places = list(places_by_rank(order, *shape))
        # Nodes in the order in which they come if nothing is changed, so that it is tried first.
        # Node -> its GPUs; a dict keeps the order of first appearance.
        self.num_gpus = Counter(nodes[d][p][k] for d, p, k in self.places)
        # Beginning of a pipeline -> replicas that have it and are not given away.
        self.free = Counter(replica[: p + 1] for replica in nodes for p in range(len(replica)))
        # [data-parallel rank] -> its stages so far; [rank] -> its node.
        self.filled: list[Pipeline] = [()] * len(nodes)
        self.ranks: list[str] = []

    def run(self) -> tuple[int, ...] | None:
        """Find the replica for each data-parallel rank, or None."""
        if not self._lay_all():
            return None
        # Replicas with equal nodes are equal here; reversed, so that `pop` gives the first.
        replicas_with: dict[Pipeline, list[int]] = {}
        for index, replica in reversed(list(enumerate(self.nodes))):
            replicas_with.setdefault(replica, []).append(index)
        return tuple(replicas_with[replica].pop() for replica in self.filled)

    def _lay_all(self) -> bool:
        """Search depth first, without recursion: a cluster may have more nodes than Python has
        frames."""
        # A search that never steps back tries at most n nodes on each of n levels.
        most = _MAX_NODES_TRIED + len(self.num_gpus) ** 2
        laid: dict[str, int] = {}
        # An iterator for each level: nodes that may be laid next.
        choices = [iter(self.num_gpus)]
        num_tried = 0
        while choices and num_tried < most:
            node = next(choices[-1], None)
            # All nodes of this level failed: the one laid before is taken back.
            if node is None:
                choices.pop()
                if laid:
                    self._take_back(laid.popitem()[1])
            elif node not in laid:
                num_tried += 1
                num_before = len(self.ranks)
                # The node fits nowhere here, so its ranks go back.
                if not self._lay(node):
                    self._take_back(len(self.ranks) - num_before)
                    continue
                laid[node] = self.num_gpus[node]
                if len(laid) == len(self.num_gpus):
                    return True
                choices.append(iter(self.num_gpus))
        return False

    def _lay(self, node: str) -> bool:
        """Give the next ranks to `node`; return whether some replica fits every stage completed."""
        for _ in range(self.num_gpus[node]):
            self.ranks.append(node)
            # The last rank of a stage completes it and takes a replica with this beginning.
            if len(self.ranks) % self.width == 0:
                d, _, _ = self.places[len(self.ranks) - 1]
                self.filled[d] += (tuple(self.ranks[-self.width :]),)
                self.free[self.filled[d]] -= 1
                # More data-parallel ranks than replicas have this beginning.
                if self.free[self.filled[d]] < 0:
                    return False
        return True

    def _take_back(self, num_ranks: int) -> None:
        for _ in range(num_ranks):
            # Each completed stage is given back before its last rank goes.
            if len(self.ranks) % self.width == 0:
                d, _, _ = self.places[len(self.ranks) - 1]
                self.free[self.filled[d]] += 1
                self.filled[d] = self.filled[d][:-1]
            self.ranks.pop()


def _is_regular(replicas: Sequence[Replica]) -> bool:
    shapes = {
        tuple((s.shape.tensor_parallel, s.shape.context_parallel) for s in replica.stages)
        for replica in replicas
    }
    return len(shapes) == 1 and len(set(shapes.pop())) == 1
