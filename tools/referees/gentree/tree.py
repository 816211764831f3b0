"""The tree of links on which holders exchange: devices, what joins them, and the uplink of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite

import numpy as np

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.errors import ClusterError
from megatron_hetero.exchange.plan import Floats, Ints


@dataclass(frozen=True)
class DeviceTerms:
    """GenModel's gamma and delta: seconds for each byte that a device adds, and for each that it
    reads or writes meanwhile."""

    add_s_per_byte: float = 0.0
    access_s_per_byte: float = 0.0


FREE = DeviceTerms()
"""Terms of a device with adding hidden behind links."""


@dataclass(frozen=True)
class Branch:
    """A device (without children), or the node, site or region above the children.

    `up` leads to what it is a child of, `down` from there (None: as `up`).  The root has neither.
    """

    name: str
    children: tuple[Branch, ...] = ()
    up: Link | None = None
    down: Link | None = None
    device: DeviceTerms = FREE


class LinkTree:
    """A checked tree, with its uplinks as arrays.

    Holders are its leaves, numbered from left to right; branches are numbered in preorder, the root
    first.  Edge 2 b is the way up from branch b, edge 2 b + 1 the way down to it.

    Raises:
        ClusterError: two branches have one name, one has no uplink, or an uplink carries nothing.
    """

    def __init__(self, root: Branch) -> None:
        self.root = root
        self.branches: list[Branch] = []
        self.depths: list[int] = []
        self.parents: list[int] = []
        self._holders: list[int] = []
        self._add(root, -1, 0)
        self._require_links()

    def _add(self, branch: Branch, parent: int, depth: int) -> None:
        # Preorder: the branch takes its number before any of its children.
        number = len(self.branches)
        self.branches.append(branch)
        self.parents.append(parent)
        self.depths.append(depth)
        if not branch.children:
            self._holders.append(number)
        for child in branch.children:
            self._add(child, number, depth + 1)

    def _require_links(self) -> None:
        seen: set[str] = set()
        for number, branch in enumerate(self.branches):
            # Holders are found by name later, hence no name may stand twice.
            if branch.name in seen:
                raise ClusterError(
                    f"the tree of links has {branch.name!r} twice; an exchange needs one way "
                    "between two devices: give each device, node and site one place"
                )
            seen.add(branch.name)
            # The root is number 0; it hangs on nothing and needs no uplink.
            if not number:
                continue
            if branch.up is None:
                above = self.branches[self.parents[number]].name
                raise ClusterError(
                    f"{branch.name!r} has no uplink to {above!r} in the tree of links; give its "
                    "bandwidth and latency"
                )
            for link in (branch.up, branch.down or branch.up):
                if not (link.bytes_per_s > 0 and isfinite(link.latency_s) and link.latency_s >= 0):
                    raise ClusterError(
                        f"the uplink of {branch.name!r} has {link.bytes_per_s} B/s and "
                        f"{link.latency_s} s of latency; both must be numbers, the first above 0"
                    )

    @property
    def num_holders(self) -> int:
        """Count the devices."""
        return len(self._holders)

    @property
    def holder_names(self) -> tuple[str, ...]:
        """Return the names of the devices, from left to right."""
        return tuple(self.branches[number].name for number in self._holders)

    @cached_property
    def links(self) -> tuple[Link | None, ...]:
        """Return [edge] -> its link; those of the root are None."""
        return tuple(
            link for branch in self.branches for link in (branch.up, branch.down or branch.up)
        )

    @cached_property
    def bytes_per_s(self) -> Floats:
        """Return [edge] -> bandwidth; endless for the root's."""
        return np.array([inf if link is None else link.bytes_per_s for link in self.links])

    @cached_property
    def latency_s(self) -> Floats:
        """Return [edge] -> latency."""
        return np.array([0.0 if link is None else link.latency_s for link in self.links])

    @cached_property
    def incast(self) -> dict[int, tuple[int, float]]:
        """Return edge -> (senders possible at once, slowdown by each further sender), of the edges
        down with a limit."""
        return {
            edge: (link.incast.num_senders, link.incast.slowdown)
            for edge, link in enumerate(self.links)
            if link is not None and link.incast is not None and edge % 2
        }

    @cached_property
    def ancestors(self) -> Ints:
        """Return [holder, depth] -> the branch above the holder at a depth; -1 below the holder
        itself."""
        # [holder, depth], filled from the leaf upwards.
        found = np.full((self.num_holders, 1 + max(self.depths)), -1)
        for holder, number in enumerate(self._holders):
            branch = number
            while branch >= 0:
                found[holder, self.depths[branch]] = branch
                branch = self.parents[branch]
        return found

    @cached_property
    def add_s_per_byte(self) -> Floats:
        """Return [holder] -> gamma."""
        return np.array([self.branches[n].device.add_s_per_byte for n in self._holders])

    @cached_property
    def access_s_per_byte(self) -> Floats:
        """Return [holder] -> delta."""
        return np.array([self.branches[n].device.access_s_per_byte for n in self._holders])

    def paths(self, sources: Ints, destinations: Ints) -> tuple[Ints, Ints]:
        """Return (message, edge) of every edge that a message crosses.

        Args:
            sources, destinations: [message] -> holder.
        """
        # Both [message, depth]; a way goes up while the ancestors differ, and down again on the far
        # side.
        here, there = self.ancestors[sources], self.ancestors[destinations]
        apart = here != there
        up, up_at = np.nonzero(apart & (here >= 0))
        down, down_at = np.nonzero(apart & (there >= 0))
        return (
            np.concatenate([up, down]),
            np.concatenate([2 * here[up, up_at], 2 * there[down, down_at] + 1]),
        )

    def edge_name(self, edge: int) -> str:
        """Return an edge's name for people."""
        name = self.branches[edge // 2].name
        return f"{name} in" if edge % 2 else f"{name} out"

    def holders_below(self, number: int) -> tuple[int, ...]:
        """Return the holders of a branch."""
        # Holders below a branch have it as their ancestor at its depth.
        column = self.ancestors[:, self.depths[number]]
        return tuple(np.flatnonzero(column == number).tolist())

    def inner(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield (number, numbers of the children) of all that join branches."""
        children: dict[int, list[int]] = {}
        for number, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(number)
        for number in range(len(self.branches)):
            if number in children:
                yield number, tuple(children[number])
