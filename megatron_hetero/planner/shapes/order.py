"""The order of a replica's stages: fast links between neighbours, large memories early."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import permutations

from megatron_hetero.planner.completion.own_flags import OwnFlags
from megatron_hetero.planner.units import Chain, Unit

_MAX_PERMUTED = 3
"""So few things are put in all orders: 6."""


def some_orders[Thing](things: Sequence[Thing]) -> Iterable[Sequence[Thing]]:
    """Return all orders of a few things; of more the given one, and from the end on."""
    return permutations(things) if len(things) <= _MAX_PERMUTED else (things, things[::-1])


class Orderer:
    """Finds, for the units of a replica, the stage order with the best quick time."""

    def __init__(self, own_flags: OwnFlags) -> None:
        self.problem = own_flags.problem
        self.own_flags = own_flags
        self._orders: dict[tuple[tuple[Unit, ...], int], Chain | None] = {}

    def best(self, units: Iterable[Unit], num_replicas: int) -> Chain | None:
        """Return the best order for one of `num_replicas` replicas; None if the limits allow
        none."""
        key = (tuple(sorted(units)), num_replicas)
        if key not in self._orders:
            self._orders[key] = self._search(*key)
        return self._orders[key]

    def _search(self, units: tuple[Unit, ...], num_replicas: int) -> Chain | None:
        num_micro_batches = self.problem.num_micro_batches / num_replicas
        best: tuple[bool, float, Chain] | None = None
        for chain in self._orders_of(units):
            if not self.problem.chain_is_allowed(chain):
                continue
            fits, filled = self.own_flags.nearest(chain, num_replicas)
            # What fits comes before what is quick; the chain itself breaks ties.
            rank = (not fits, filled.quick_time_s(num_micro_batches), chain)
            if best is None or rank < best:
                best = rank
        return best[2] if best else None

    def _orders_of(self, units: tuple[Unit, ...]) -> Iterator[Chain]:
        """Yield orders worth pricing: whole nodes one after the other."""
        blocks: dict[str, list[Unit]] = {}
        for unit in units:
            blocks.setdefault(unit.node, []).append(unit)
        for block in blocks.values():
            # Inside a node the widest group first.
            block.sort(key=lambda u: (-u.width, u.indices))
        names = sorted(blocks)
        few = len(names) <= _MAX_PERMUTED
        orders: Iterable[tuple[str, ...]] = permutations(names) if few else self._near_orders(names)
        for order in orders:
            yield tuple(unit for name in order for unit in blocks[name])

    def _near_orders(self, names: list[str]) -> Iterator[tuple[str, ...]]:
        """Yield memory-large first, memory-small first, and from every node to the nearest next
        one."""
        nodes, links = self.problem.cluster.node_by_name, self.problem.cluster.node_links
        by_memory = sorted(names, key=lambda n: (-nodes[n].gpu_type.memory_bytes, nodes[n].site, n))
        yield tuple(by_memory)
        yield tuple(reversed(by_memory))
        bytes_sent = self.problem.costs.activation_bytes

        def time_s(here: str, name: str) -> float:
            link = links[here, name]
            return link.latency_s + bytes_sent / link.bytes_per_s

        # From each node the others, the nearest first; ties: larger memory first.
        nearest = {
            here: sorted((n for n in by_memory if n != here), key=partial(time_s, here))
            for here in names
        }
        for start in names:
            order, left = [start], {*names} - {start}
            while left:
                order.append(next(name for name in nearest[order[-1]] if name in left))
                left.remove(order[-1])
            yield tuple(order)
