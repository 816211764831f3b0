"""Keys and values on their way from prefill to decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.serving.compose.problem import Wire


class Transfers:
    """Wires between pools; a wire serves transfers in turn.

    A transfer takes its path for `bytes / bandwidth` of one pair of machines, and each wire that it
    shares for its part of what the wire carries.

    Args:
        wires: shared by pairs of pools.
        links: of one pair of machines, by pair of pools.
    """

    def __init__(self, wires: Sequence[Wire], links: Mapping[tuple[str, str], Link]) -> None:
        self._links = links
        self._of_pair: dict[tuple[str, str], list[Wire]] = {}
        for wire in wires:
            for pair in wire.pairs:
                self._of_pair.setdefault(pair, []).append(wire)
        self._free_s: dict[str, float] = {}

    def send(self, now: float, sender: str, receiver: str, num_bytes: float) -> float:
        """Return the time of arrival of a transfer requested at `now`."""
        wires = self._of_pair.get((sender, receiver), [])
        # A transfer begins when every wire on its path is free.
        begins = max([now, *(self._free_s.get(wire.name, 0.0) for wire in wires)])
        for wire in wires:
            # Each wire is held for its own part of the time.
            self._free_s[wire.name] = begins + num_bytes / wire.bytes_per_s
        link = self._links.get((sender, receiver))
        if link is None:
            return begins
        return begins + link.latency_s + num_bytes / link.bytes_per_s
