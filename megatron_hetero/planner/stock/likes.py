"""Like stages and like messages of grids, as numbers in arrays: a search has far fewer of them than
stages and messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from megatron_hetero.cost.placement import PlacedStage
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.stock.grids import StockGrid, StockRanks
from megatron_hetero.planner.stock.links import StageLinks, stage_links
from megatron_hetero.planner.units import Unit

_SHIFT = 1 << 20
"""Above all numbers of kinds, of groups and of classes of links."""


@dataclass(frozen=True, eq=False)
class Likes:
    """Numbers of the stages of the unlike replicas of a grid, or of their messages.

    Attributes:
        numbers: each once, in the order in which they come.
        places: positions in `numbers`, [unlike replica, stage].
    """

    numbers: tuple[int, ...]
    places: NDArray[np.int64]

    @classmethod
    def of(cls, numbers: NDArray[np.int64]) -> Likes:
        """Return an array's numbers."""
        place: dict[int, int] = {}
        places = [place.setdefault(number, len(place)) for number in numbers.ravel().tolist()]
        return cls(tuple(place), np.array(places).reshape(numbers.shape))

    def figures(self, price: Callable[[int], float | Sequence[float]]) -> NDArray[np.float64]:
        """Return the figures of all stages or messages, [unlike replica, stage, figure].

        Args:
            price: gives those of a number, or the only one.
        """
        return np.array([price(number) for number in self.numbers])[self.places]


class StockLikes:
    """Numbers of the unlike stages and messages of all grids of a search.

    Args:
        problem: on whose cluster the grids are.

    Attributes:
        links: of stages, by number.
        ends: of messages, the sender and the receiver, by number.
    """

    def __init__(self, problem: Problem) -> None:
        self._cluster, self._likeness = problem.cluster, problem.likeness
        self.links: list[StageLinks] = []
        self.ends: list[tuple[PlacedStage, PlacedStage]] = []
        self._of_links: dict[StageLinks, int] = {}
        self._known: dict[object, dict[bytes, int]] = {}
        self._units: dict[Unit, int] = {}

    def of(self, grid: StockGrid, groups: tuple[int, int] | None) -> tuple[Likes, Likes, Likes]:
        """Return the stages of the unlike replicas and their messages there and back; all other
        replicas have the stages and messages of one of these.

        Args:
            grid: whose replicas.
            groups: of experts.
        """
        key = self, groups, *grid.shape
        if key not in grid.ranks.known:
            every = self.stages(grid, groups), *self.messages(grid)
            first: dict[bytes, int] = {}
            for d, row in enumerate(_rows(np.concatenate(every, axis=1))):
                first.setdefault(row, d)
            replicas = list(first.values())
            grid.ranks.known[key] = tuple([Likes.of(own[replicas]) for own in every])
        return cast(tuple[Likes, Likes, Likes], grid.ranks.known[key])

    def stages(self, grid: StockGrid, groups: tuple[int, int] | None) -> NDArray[np.int64]:
        """Return the number of the links of each stage, [replica, stage]."""
        places, kinds, together = grid.places, self._kinds(grid.ranks), grid.together(groups)
        rows = grid.ranks.marks(places, kinds)
        if groups is not None:
            # Experts lie on the stages of all replicas of a block.
            own = places.reshape(-1, together, *places.shape[1:]).swapaxes(1, 2)
            blocks = grid.ranks.marks(own.reshape(*own.shape[:2], -1), kinds)
            rows = np.concatenate([rows, blocks.repeat(together, axis=0)], axis=2)

        def number(d: int, p: int) -> int:
            first = d // together * together
            units = [grid.stage(r, p) for r in range(first, first + together)]
            links = stage_links(
                *(self._cluster, self._likeness, grid.width, grid.stage(d, p).devices),
                [device for unit in units for device in unit.devices],
                groups,
            )
            found = self._of_links.setdefault(links, len(self.links))
            if found == len(self.links):
                self.links.append(links)
            return found

        return self._numbers((grid.width, grid.context_parallel, groups), rows, number)

    def messages(self, grid: StockGrid) -> Iterator[NDArray[np.int64]]:
        """Yield the number of the message from each stage to the next one, from the last one to
        the first, and those of the messages back, each [replica, stage]."""
        here, kinds = grid.places, self._kinds(grid.ranks)
        there = np.roll(here, -1, axis=1)
        for is_back, (one, other) in enumerate(((here, there), (there, here))):
            ends = grid.ranks.nodes[one], grid.ranks.nodes[other]
            if self._cluster.has_lines or self._cluster.has_nics:
                pairs = kinds[one] * _SHIFT + kinds[other]
            else:
                pairs = self._pairs(grid.ranks, *ends)
            rows = 8 * pairs + (ends[0] == ends[1])
            # Where groups share nodes.
            for bit, nodes in zip((2, 4), ends, strict=True):
                rows[..., 1:] += bit * (nodes[..., 1:] != nodes[..., :-1])

            def number(d: int, p: int, is_back: int = is_back) -> int:
                after = (p + 1) % grid.num_stages
                stages = grid.stage(d, p).stage, grid.stage(d, after).stage
                self.ends.append((stages[is_back], stages[1 - is_back]))
                return len(self.ends) - 1

            yield self._numbers((grid.width, "message"), rows, number)

    def _pairs(
        self, ranks: StockRanks, here: NDArray[np.int64], there: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return numbers of the link between two nodes and of that inside the receiver's."""
        classes = self._cluster.link_classes
        own = np.array([classes.node_number[name] for name in ranks.names])
        one, other = own[here], own[there]
        found: NDArray[np.int64] = classes.of_pairs[one, other].astype(np.int64) * _SHIFT
        found += classes.of_pairs[other, other]
        return found

    def _numbers(
        self, key: tuple[object, ...], rows: NDArray[np.int64], number: Callable[[int, int], int]
    ) -> NDArray[np.int64]:
        """Return one number for equal rows, [replica, stage]; `number` gives that of a new row."""
        depth, known = rows.shape[1], self._known.setdefault(key, {})
        found = []
        for i, row in enumerate(_rows(rows.reshape(-1, rows.shape[-1]))):
            if row not in known:
                known[row] = number(*divmod(i, depth))
            found.append(known[row])
        return np.array(found).reshape(-1, depth)

    def _kinds(self, ranks: StockRanks) -> NDArray[np.int64]:
        """Return numbers of the groups, equal for those with like links."""
        if not self._cluster.has_nics:
            return ranks.kind_numbers
        # With several network cards in a machine the GPUs themselves tell the links.
        return np.array([self._units.setdefault(own, len(self._units)) for own in ranks.units])


def _rows(array: NDArray[np.int64]) -> Iterator[bytes]:
    """Yield the rows of an array: bytes are quicker to look up than numbers."""
    content, size = array.tobytes(), array.shape[1] * array.itemsize
    return (content[i : i + size] for i in range(0, len(content), size))
