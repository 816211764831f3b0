"""The lines that paths share, as arrays: what an exchange among many nodes loads on each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from math import inf

import numpy as np
import numpy.typing as npt

from megatron_hetero.cluster.lines import Line, node_uplink
from megatron_hetero.cluster.nics import nic_name
from megatron_hetero.cluster.node_links import NodePair
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.network.nics import port_name

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Number for no line, so that arrays have one width.
_NONE = -1
_ENDLESS = Line("", inf)
# The first, the last and the narrowest line of a path.
_CHOICES: tuple[Callable[[Sequence[Line]], Line], ...] = (
    lambda lines: lines[0],
    lambda lines: lines[-1],
    lambda lines: min(lines, key=lambda line: line.bytes_per_s),
)


class LineTable:
    """Numbered lines of a cluster; its nodes have the numbers of their places in it."""

    def __init__(self, cluster: Cluster) -> None:
        self.numbers: dict[str, int] = {}
        """Number of each line by its name."""
        self._bytes_per_s: list[float] = []
        # Lines between sites, by the pair of sites.
        sites = {site: i for i, site in enumerate(dict.fromkeys(n.site for n in cluster.nodes))}
        shared = {
            (sites[a], sites[b]): lines
            for (a, b), lines in cluster.site_lines.items()
            if a in sites and b in sites
        }
        most = max(map(len, shared.values()), default=0)
        self._of_sites = np.full((len(sites), len(sites), most), _NONE)
        for pair, lines in shared.items():
            self._of_sites[pair][: len(lines)] = [self._number(line) for line in lines]
        # Uplinks of nodes, out and in.
        self._site = np.array([sites[node.site] for node in cluster.nodes])
        self._uplinks = np.full((len(cluster.nodes), 2), _NONE)
        for i, node in enumerate(cluster.nodes):
            if node.uplink_bytes_per_s != inf:
                both = node_uplink(node.machine, node.uplink_bytes_per_s)
                self._uplinks[i] = [self._number(line) for line in both]
        # Lines between machines with islands, and inside such machines.
        machines = {name: i for i, name in enumerate(cluster.machines)}
        self._machine = np.array([machines[node.machine] for node in cluster.nodes])
        self._between: Ints = np.broadcast_to(_NONE, (len(machines), len(machines)))
        """Line between two machines, one of them with islands, or inside such a machine."""
        if any(node.is_island for node in cluster.nodes):
            self._between = self._between.copy()
            self._number_machines(cluster)
        # NICs of machines with several.
        for node in cluster.nodes:
            if node.nics is not None:
                for number, sends in product(range(node.nics.num), (True, False)):
                    name = port_name((nic_name(node.machine, number), sends))
                    self._number(Line(name, node.nics.bytes_per_s))
        self.bytes_per_s = np.array(self._bytes_per_s)
        """[line]; those of NICs too, whose loads come from the groups (`cost.network.nics`)."""

    def loads(self, senders: Ints, receivers: Ints, num_bytes: Floats) -> tuple[Ints, Floats]:
        """Return the numbers of the lines that some messages take, and the seconds of each.

        Args:
            senders, receivers: numbers of unlike nodes, [message].
        """
        # A cluster without shared lines.
        if not self.numbers:
            return np.zeros(0, np.int64), np.zeros(0)
        # Shape [message, line]: lines of the sites, uplink out, uplink in.
        own = [
            self._of_sites[self._site[senders], self._site[receivers]],
            self._uplinks[senders, :1],
            self._uplinks[receivers, 1:],
        ]
        taken = np.concatenate(own, axis=1)
        ends = self._machine[senders], self._machine[receivers]
        # Messages between islands of one machine take no line of sites and no uplink.
        taken[ends[0] == ends[1]] = _NONE
        taken = np.concatenate([taken, self._between[ends][:, None]], axis=1)
        # Add up all messages of each line.
        there = taken != _NONE
        carried = np.broadcast_to(num_bytes[:, None], taken.shape)[there]
        total = np.bincount(taken[there], carried, len(self.numbers))
        lines = np.flatnonzero(total)
        return lines, total[lines] / self.bytes_per_s[lines]

    def _number_machines(self, cluster: Cluster) -> None:
        """Number the lines that `Cluster.lines` has for islands, beside the lines of sites and
        nodes."""
        machines = list(enumerate(cluster.machines.values()))
        # First and last node of a machine: unlike where it has islands.
        for (i, one), (j, other) in product(machines, repeat=2):
            here, there = one[0], other[-1]
            if here != there and (here.is_island or there.is_island):
                own = [
                    x for x in cluster.lines(here.name, there.name) if x.name not in self.numbers
                ]
                self._between[i, j] = self._number(own[0]) if own else _NONE

    def _number(self, line: Line) -> int:
        # A line met again keeps its number.
        number = self.numbers.setdefault(line.name, len(self.numbers))
        if number == len(self._bytes_per_s):
            self._bytes_per_s.append(line.bytes_per_s)
        return number


def most_bytes_per_s(cluster: Cluster, pairs: Iterable[NodePair]) -> float:
    """Bound the bytes per second over all these paths between nodes together from above.

    The first line of each path cuts the paths into sets that share it, and so do the last and the
    narrowest; a set has no more than its line, nor than its paths have by themselves.
    """
    # Bandwidth of each path by itself, then the least over the three ways to share lines.
    own = {pair: cluster.node_links[pair].bytes_per_s for pair in pairs}
    least = sum(own.values())
    if not cluster.has_lines:
        return least
    for choose in _CHOICES:
        speed: dict[Line, float] = {}
        for pair, bytes_per_s in own.items():
            lines = cluster.lines(*pair)
            line = choose(lines) if lines else _ENDLESS
            speed[line] = speed.get(line, 0.0) + bytes_per_s
        least = min(least, sum(min(s, line.bytes_per_s) for line, s in speed.items()))
    return least


def line_seconds(cluster: Cluster, carried: Iterable[tuple[NodePair, float]]) -> dict[str, float]:
    """Return {line name: seconds} for which bytes between nodes occupy the line."""
    found: dict[str, float] = {}
    if cluster.has_lines:
        for pair, num_bytes in carried:
            for line in cluster.lines(*pair):
                found[line.name] = found.get(line.name, 0.0) + num_bytes / line.bytes_per_s
    return found
