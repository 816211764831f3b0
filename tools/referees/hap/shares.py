"""The best shares of a program, by a linear programme.

HAP's released code minimises, over the stages between two collectives, the sum of the slowest
GPU's seconds and of the largest share that a collective sends, without constants and without
memory.  Here both are rows: a step costs `fixed + slope * share`, and what a program keeps on a GPU
fits into its memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron_hetero.rounding import ROUNDING
from tools.referees.hap.prices import ProgramPrices, Shares, share_of, terms_of
from tools.referees.hap.states import Dimension, LayerProgram, State

_OPTIMAL = 0


def best_shares(
    program: LayerProgram,
    prices: ProgramPrices,
    shares: Shares,
    fixed: Collection[Dimension] = (),
    least: Mapping[Dimension, float] | None = None,
) -> Shares | None:
    """Return the shares with which a program is fastest and fits; None where no shares do.

    Args:
        program: of the graph that is priced.
        prices: of the group.
        shares: of dimensions that the program does not use, or that are fixed.
        fixed: dimensions whose shares stay.
        least: that a GPU has along a dimension; 0 where nothing is said.
    """
    terms = terms_of(program, prices)
    used: set[State] = {held[1] for segment in terms.segments for held in segment}
    used |= {held[1] for held, _ in terms.kept}
    for collective in terms.collectives:
        used |= {d for of, _ in prices.collective_terms(collective)[1] for d in of}
    free = [d for d in sorted(shares) if d in used and d not in fixed]
    rows = _LinearProgramme(prices, shares, free, least or {})
    for segment in terms.segments:
        rows.add_segment(segment)
    for collective in terms.collectives:
        _, slopes = prices.collective_terms(collective)
        for dimensions, slope in slopes:
            rows.add_largest(dimensions, slope)
    lines = [(held[1], prices.memory_line(held, is_stored)) for held, is_stored in terms.kept]
    rows.add_memory(lines)
    return rows.solve()


class _LinearProgramme:
    """Unknown are the shares of every free dimension, [dimension][GPU], and behind them the seconds
    of segments and the largest shares."""

    def __init__(
        self,
        prices: ProgramPrices,
        shares: Shares,
        free: Sequence[Dimension],
        least: Mapping[Dimension, float],
    ) -> None:
        self._prices, self._shares, self._least, self._free = prices, shares, least, free
        self._count = prices.num_gpus
        # Seconds of a layer are small beside the solver's tolerance.
        self._unit_s = max(
            (fixed + slope for of in prices.compute_s.values() for fixed, slope in of), default=1.0
        )
        self._cost = [0.0] * (len(self._free) * self._count)
        self._rows: list[tuple[dict[int, float], float]] = []

    def _column(self, dimension: State, gpu: int) -> int | None:
        """Return the place of a share; None where it is no unknown."""
        if dimension not in self._free:
            return None
        return self._free.index(dimension) * self._count + gpu

    def _known(self, dimension: State, gpu: int) -> float:
        return share_of(self._shares, dimension, self._count)[gpu]

    def _add(self, row: dict[int, float], limit: float) -> None:
        """Add a row: what the unknowns sum to is no more than a limit."""
        self._rows.append((row, limit))

    def _lines(
        self, lines: Sequence[tuple[State, tuple[float, float]]], gpu: int
    ) -> tuple[dict[int, float], float]:
        """Sum lines over shares: the slopes of unknowns, and the constant."""
        row: dict[int, float] = {}
        constant = 0.0
        for division, (at_zero, slope) in lines:
            column = self._column(division, gpu)
            constant += at_zero
            if column is None:
                constant += slope * self._known(division, gpu)
            else:
                row[column] = row.get(column, 0.0) + slope
        return row, constant

    def add_segment(self, segment: Sequence[tuple[str, State]]) -> None:
        """Add the seconds of the slowest GPU between two collectives."""
        if not segment:
            return
        slowest = len(self._cost)
        self._cost.append(1.0)
        for gpu in range(self._count):
            priced = [(held, self._prices.compute_s.get(held)) for held in segment]
            lines = [(held[1], of[gpu]) for held, of in priced if of is not None]
            row, constant = self._lines(lines, gpu)
            row = {column: slope / self._unit_s for column, slope in row.items()}
            row[slowest] = -1.0
            self._add(row, -constant / self._unit_s)

    def add_largest(self, dimensions: Sequence[State], slope: float) -> None:
        """Add `slope` seconds for the largest share along any of some dimensions."""
        largest = len(self._cost)
        self._cost.append(slope / self._unit_s)
        for dimension in dimensions:
            for gpu in range(self._count):
                row, constant = self._lines([(dimension, (0.0, 1.0))], gpu)
                row[largest] = -1.0
                self._add(row, -constant)

    def add_memory(self, lines: Sequence[tuple[State, tuple[float, float]]]) -> None:
        """Limit what each GPU keeps."""
        for gpu, room in enumerate(self._prices.room_bytes):
            row, constant = self._lines(lines, gpu)
            if room == float("inf"):
                continue
            scale = max(room, 1.0)
            self._add({c: v / scale for c, v in row.items()}, (room - constant) / scale)

    def solve(self) -> Shares | None:
        """Return the best shares; None where none fit."""
        import numpy as np
        from scipy.optimize import linprog
        from scipy.sparse import coo_array

        if not self._free:
            fits = all(limit >= -ROUNDING for row, limit in self._rows if not row)
            return self._shares if fits else None
        entries = [(r, c, v) for r, (row, _) in enumerate(self._rows) for c, v in row.items()]
        above, columns, values = zip(*entries, strict=True)
        shape = len(self._rows), len(self._cost)
        sums = np.zeros((len(self._free), len(self._cost)))
        bounds: list[tuple[float, float | None]] = []
        for place, dimension in enumerate(self._free):
            sums[place, place * self._count : (place + 1) * self._count] = 1.0
            bounds += [(self._least.get(dimension, 0.0), 1.0)] * self._count
        bounds += [(0.0, None)] * (len(self._cost) - len(bounds))
        limits = [limit for _, limit in self._rows]
        found: Any = linprog(
            self._cost,
            A_ub=coo_array((values, (above, columns)), shape=shape).tocsr(),
            b_ub=limits,
            A_eq=sums,
            b_eq=[1.0] * len(self._free),
            bounds=bounds,
            method="highs",
        )
        if found.status != _OPTIMAL:
            return None
        made = dict(self._shares)
        for place, dimension in enumerate(self._free):
            own = found.x[place * self._count : (place + 1) * self._count]
            total = float(own.sum())
            made[dimension] = tuple(float(share) / total for share in own)
        return made
