"""An estimate of the gradient exchange after the pipelines: rings of holders, and shared paths.

Only few candidates get an exact price of their exchange, and this estimate chooses them.  Every
set of holders is a ring in the order of sites and nodes, and each path carries the rings that cross
it one after the other.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, batched, chain

from megatron_hetero.cost.memory.states import bytes_each_way
from megatron_hetero.cost.parameters import further_params, layer_params
from megatron_hetero.cost.share import even_share
from megatron_hetero.kernels import KERNELS
from megatron_hetero.planner.completion.filled import Completion
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.units import Chain, Unit, divides

_Holders = tuple[int, ...]
"""Numbers of units (`Tails._numbered`) that hold the same layers."""

_INSIDE, _BETWEEN, _LINE = range(3)
"""Kinds of ways: a path inside a node; one between two nodes; a line that paths share."""


_Ring = array[float]
"""A ring of holders in a row, as the compiled loop reads it: what it carries of its bytes, among
how many GPUs they are divided inside a node, then `_NUM_WAY` numbers for each of its ways: kind,
number of the path or line, how often it is taken, and of a path the seconds a byte and those of all
latencies, of a line its bytes a second and zero."""
_NUM_WAY = 5


class Tails:
    """Estimates for one problem."""

    def __init__(self, problem: Problem) -> None:
        cluster, workload = problem.cluster, problem.workload
        model, training = workload.model, workload.training
        element = bytes_each_way(training)
        self.layer_bytes = layer_params(model, even_share(model, 1)) * element
        words = model.vocab_size * model.hidden_size
        further = further_params(model, even_share(model, 1))
        self.copies_words = model.copies_words
        self.word_bytes = words * element
        """Bytes of the word embedding; last stages may have a copy."""
        self.behind_bytes = (further + (0 if model.tied_embeddings else words)) * element
        """Bytes behind the layers of last stages."""
        self.links = cluster.node_links
        self.place = {node.name: (node.site, node.name) for node in cluster.nodes}
        self.node_of = cluster.node_by_name
        self.has_lines, self.lines = cluster.has_lines, cluster.lines
        self._rings: dict[tuple[_Holders, ...], _Ring] = {}
        self._units: list[Unit] = []
        self._numbers: dict[Unit, int] = {}
        self._chains: dict[int, tuple[Chain, tuple[int, ...]]] = {}
        """By the identity of chains, which structures share and which are kept here."""
        self._paths: dict[tuple[str, ...], int] = {}
        """Numbers of paths between two nodes, or inside one, and of lines."""
        self._ways: dict[tuple[str, str], tuple[int, float, float]] = {}
        """Of paths: the number, the seconds a byte, and the latency."""

    def estimate_s(self, found: Completion) -> float:
        """Return seconds of the gradient exchange, about."""
        chains = found.structure
        loads: list[tuple[_Ring, float]] = []
        known, rings = self._chains.get, self._rings.get
        numbers = [(known(id(own)) or self._numbered(own))[1] for own in chains]
        # Word embeddings: one exchange of both ends with a copy, one for each end otherwise.
        exchanges = len(chains) > 1 or divides(chains)
        if self.copies_words:
            ends = [number for own in numbers for number in {own[0], own[-1]}]
            loads.append((self._ring_of((tuple(ends),)), self.word_bytes))
        elif exchanges:
            loads.append((self._ring_of((tuple([own[0] for own in numbers]),)), self.word_bytes))
        if exchanges and self.behind_bytes:
            last = tuple([own[-1] for own in numbers])
            loads.append((self._ring_of((last,)), self.behind_bytes))
        # Layers: runs with the same stages in all replicas have the same holders.
        if exchanges:
            # Replicas with equal layers on their stages have all runs in common.
            alike: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
            for own, filled in zip(numbers, found.filled, strict=True):
                alike.setdefault(filled.layers, []).append(own)
            holders = [list(zip(*of, strict=True)) for of in alike.values()]
            # Layers at which a replica's next stage begins, with the kind of the replica.
            edges = [
                (start, kind)
                for kind, layers in enumerate(alike)
                for start in accumulate(layers[:-1])
            ]
            edges.sort()
            edges.append((sum(found.filled[0].layers), 0))
            # The stage of each kind of replica that holds the run up to the next edge.
            stages, first = [0] * len(holders), 0
            for end, kind in edges:
                if end > first:
                    # Sharded layers are exchanged in the passes; all replicas have the same ones.
                    sharded = found.sharded[stages[0]] if found.sharded else 0
                    held = tuple([of[stage] for of, stage in zip(holders, stages, strict=True)])
                    num_bytes = (end - first - sharded) * self.layer_bytes
                    loads.append((rings(held) or self._ring_of(held), num_bytes))
                    first = end
                stages[kind] += 1
        # The compiled loop does the same operations in the same order.
        if KERNELS is not None:
            return KERNELS.busiest_path(loads, len(self._paths))
        return _busiest_s(loads)

    def _numbered(self, own: Chain) -> tuple[Chain, tuple[int, ...]]:
        """Return a chain with a number for each unit: quicker to look up than its nodes."""
        numbers = []
        for unit in own:
            number = self._numbers.setdefault(unit, len(self._units))
            if number == len(self._units):
                self._units.append(unit)
            numbers.append(number)
        made = self._chains[id(own)] = own, tuple(numbers)
        return made

    def _ring_of(self, holders: tuple[_Holders, ...]) -> _Ring:
        """Return the ring of all holders, made once."""
        ring = self._rings.get(holders)
        if ring is None:
            units = [self._units[number] for number in chain.from_iterable(holders)]
            ring = self._rings[holders] = self._ring(units)
        return ring

    def _ring(self, units: Sequence[Unit]) -> _Ring:
        """Return the ring's use of paths, with the groups of each node side by side."""
        on_node = Counter(chain.from_iterable([unit.group_nodes for unit in units]))
        number = on_node.total()
        # Around a ring each path carries 2 (n - 1) / n of the bytes.
        factor = 2 * max(number - 1, 0) / max(number, 1)
        ring = array("d", [factor, min([unit.width for unit in units])])
        between: list[float] = []
        lines: list[float] = []
        nodes = sorted(on_node, key=self.place.__getitem__) if number > 1 else []
        latencies = 2 * (number - 1)
        known = self._ways.get
        for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True):
            # Groups of one node pass on inside it, the last of them to the next node.
            inside = on_node[a] - (a != b)
            if inside:
                path, per_byte, latency_s = known((a, a)) or self._way(a, a)
                ring.extend((_INSIDE, path, inside, per_byte, latencies * latency_s))
            if a == b:
                continue
            path, per_byte, latency_s = known((a, b)) or self._way(a, b)
            between += (_BETWEEN, path, 1, per_byte, latencies * latency_s)
            for line in self.lines(a, b) if self.has_lines else ():
                lines += (_LINE, self._path(line.name), 1, line.bytes_per_s, 0.0)
        ring.extend(between)
        ring.extend(lines)
        return ring

    def _path(self, *name: str) -> int:
        return self._paths.setdefault(name, len(self._paths))

    def _way(self, a: str, b: str) -> tuple[int, float, float]:
        link = self.node_of[a].link if a == b else self.links[a, b]
        way = self._ways[a, b] = self._path(a, b), 1 / link.bytes_per_s, link.latency_s
        return way


def _busiest_s(loads: Sequence[tuple[_Ring, float]]) -> float:
    """Return the seconds of the busiest path, or line that paths share, under exchanges around
    rings, each of so many bytes."""
    seconds: dict[float, float] = {}
    for ring, num_bytes in loads:
        factor, width, *ways = ring
        part = factor * num_bytes
        # Inside a node each GPU of the narrowest group carries its part.
        parts = part / width
        for kind, path, times, rate, latency_s in batched(ways, _NUM_WAY):
            if kind == _INSIDE:
                taken_s = times * (parts * rate + latency_s)
            elif kind == _BETWEEN:
                taken_s = part * rate + latency_s
            else:
                taken_s = part / rate
            seconds[path] = seconds.get(path, 0.0) + taken_s
    return max(seconds.values(), default=0.0)
