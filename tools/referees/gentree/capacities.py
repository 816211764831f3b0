"""At which bandwidth each branch of a tree exchanges with the rest."""

from __future__ import annotations

from functools import cached_property

from tools.referees.gentree.tree import LinkTree


class Capacities:
    """Bandwidths at which the branches of a tree exchange with the rest: at most their uplinks',
    and their children's together."""

    def __init__(self, tree: LinkTree) -> None:
        self._tree = tree

    @cached_property
    def of_branch(self) -> tuple[float, ...]:
        """Return [branch] -> bytes per second."""
        tree = self._tree
        below = dict(tree.inner())
        found = [0.0] * len(tree.branches)
        # Preorder numbers put children after their parents, so that the reverse visits children
        # first.
        for number in reversed(range(len(tree.branches))):
            # Edges 2 b and 2 b + 1 are the ways up and down; the slower one limits an exchange.
            speeds = tree.bytes_per_s[2 * number : 2 * number + 2]
            found[number] = float(min(speeds))
            if number in below:
                together = sum(found[child] for child in below[number])
                found[number] = min(found[number], together)
        return tuple(found)
