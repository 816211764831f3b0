"""Lines: capacities that several paths between nodes share.

A path between two nodes has a bandwidth of its own, and leads over lines that others lead over too:
the NIC of each of the two nodes, the uplink of each of their sites, the line between the sites.
What crosses a line adds up, in each direction; no path is faster than the slowest line on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

SitePair = tuple[str, str]
"""Names of two sites, sender first."""


@dataclass(frozen=True)
class Line:
    """Capacity in a single direction, shared by several paths.

    Names are for people, and never those of a path between two nodes or of a GPU's port: they begin
    with a word and a space, which no node's name has.
    """

    name: str
    bytes_per_s: float

    def faster(self, factor: float) -> Line:
        """Return the same line with `factor` times its capacity."""
        return replace(self, bytes_per_s=factor * self.bytes_per_s)


def node_uplink(node: str, bytes_per_s: float) -> tuple[Line, Line]:
    """Return the lines out of a node and into it."""
    return Line(f"uplink of {node} out", bytes_per_s), Line(f"uplink of {node} in", bytes_per_s)


def faster_lines(
    site_lines: Mapping[SitePair, tuple[Line, ...]],
    factor: float,
    is_meant: Callable[[SitePair], bool] = lambda pair: True,
) -> dict[SitePair, tuple[Line, ...]]:
    """Speed up all lines between the sites meant by `factor`, wherever else they lead.

    Args:
        site_lines: by (site, site), the lines of each pair.
        factor: of the capacity.
        is_meant: chooses the pairs of sites; all by default.
    """
    # A line may be shared by pairs that are not meant, and is faster for these too.
    named = {line.name for pair, lines in site_lines.items() if is_meant(pair) for line in lines}
    return {
        pair: tuple([line.faster(factor) if line.name in named else line for line in lines])
        for pair, lines in site_lines.items()
    }
