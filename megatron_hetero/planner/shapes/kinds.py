"""Classes of equal nodes (`Kind`): even a large cluster has few of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from megatron_hetero.cluster.nodes import Node
from megatron_hetero.hashed import hashed_once, value
from megatron_hetero.planner.problem import Problem


@dataclass(frozen=True)
class Kind:
    """Nodes that a plan may exchange: same GPUs, as many usable ones, same link and uplink, site
    and pins."""

    nodes: tuple[Node, ...]
    num_gpus: int
    """Usable GPUs of each node."""
    widths: tuple[int, ...]
    may_start: bool
    may_end: bool

    @property
    def node(self) -> Node:
        """The first node of the kind."""
        return self.nodes[0]

    @property
    def machine(self) -> tuple[object, ...]:
        """A key, equal for kinds with the same stage times and memory at any site."""
        gpu = self.node.gpu_type
        return gpu.name, gpu.memory_bytes, self.num_gpus, self.widths, self.node.link

    @property
    def content(self) -> tuple[object, ...]:
        """A key, equal for kinds that differ in names and site only."""
        return len(self.nodes), self.machine, self.may_start, self.may_end


def kinds_of(problem: Problem) -> tuple[Kind, ...]:
    """Return all kinds, by site, GPU type, size, and their first nodes' names."""
    first, last = problem.cluster.limits.first_stage_nodes, problem.cluster.limits.last_stage_nodes
    # Nodes are of one kind if no price, limit or place tells them apart.
    nodes_of: dict[tuple[object, ...], list[Node]] = {}
    for node in problem.nodes:
        gpu = node.gpu_type
        key: tuple[object, ...] = (
            node.site,
            gpu.name,
            gpu.memory_bytes,
            -len(problem.gpus[node.name]),
            problem.widths[node.name],
            node.link,
            node.uplink_bytes_per_s,
            node.nics,
            node.name in first,
            node.name in last,
        )
        nodes_of.setdefault(key, []).append(node)
    # A fixed order, whatever the order in the file.
    kinds = []
    for key in sorted(nodes_of, key=repr):
        nodes = tuple(nodes_of[key])
        name = nodes[0].name
        kinds.append(
            Kind(
                nodes,
                len(problem.gpus[name]),
                problem.widths[name],
                not first or name in first,
                not last or name in last,
            )
        )
    return tuple(kind for kind in kinds if kind.widths)


@hashed_once
@value(frozen=True)
class NodeBlock:
    """What `num_nodes` nodes of a kind give each replica of a bundle: stages of these widths.

    A bundle is `num_replicas` equal replicas side by side on whole nodes, so that the GPUs that
    hold the same layers share a node wherever a node serves several replicas.
    """

    kind: int
    num_nodes: int
    widths: tuple[int, ...]


_MAX_CUTS = 160
"""Ways to cut a node times the number of nodes: with more of either, groups of a node are alike."""


def blocks_of(kinds: Sequence[Kind], num_replicas: int) -> Iterator[NodeBlock]:
    """Yield the cuts of the fewest nodes that serve `num_replicas` replicas; if there are very
    many, only cuts into groups of one width."""
    # Cuts for each node, so that all nodes together have not too many.
    most = _MAX_CUTS // sum(len(kind.nodes) for kind in kinds)
    for index, kind in enumerate(kinds):
        num_nodes = -(-num_replicas // kind.num_gpus)
        if num_nodes > len(kind.nodes):
            continue
        # One node for several replicas gives each its part; several nodes give a GPU each.
        gpus = kind.num_gpus // num_replicas if num_nodes == 1 else 1
        for widths in cuts(gpus, kind.widths, most):
            yield NodeBlock(index, num_nodes, widths)


def cuts(num_gpus: int, allowed: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Return ways to cut GPUs into groups, the widest group first; as many GPUs used as can be.

    With more than `most` ways, those of one width (and a rest) remain.
    """
    found = list(islice(_partitions(num_gpus, allowed), most + 1))
    # Too many ways, or none that uses all GPUs.
    if len(found) > most or not found:
        plain = {cut(num_gpus, width, allowed) for width in allowed if width <= num_gpus}
        found = sorted(plain, reverse=True)
    return found


def _partitions(total: int, allowed: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not total:
        yield ()
    for width in reversed(allowed):
        if width <= total:
            for rest in _partitions(total - width, [w for w in allowed if w <= width]):
                yield (width, *rest)


def cut(num_gpus: int, width: int, allowed: Sequence[int]) -> tuple[int, ...]:
    """Return GPUs in groups of `width`; what is left over in the widest groups that fit."""
    groups = []
    while num_gpus:
        fitting = [w for w in allowed if w <= min(width, num_gpus)]
        if not fitting:
            break
        groups.append(fitting[-1])
        num_gpus -= fitting[-1]
    return tuple(groups)


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`."""
    return [1 << exponent for exponent in range(most.bit_length())]


def ladder(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, ... up to `most`: powers of two, and half as much again."""
    powers = powers_of_two(most)
    return sorted({n for power in powers for n in (power, power + power // 2) if n <= most})
