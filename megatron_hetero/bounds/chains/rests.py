"""The least over many ways to go on: the inner loop of the tables of chains.

A compiled loop (`_kernels.c`) runs it; where it is not installed, numpy does, several times more
slowly and with results equal to the bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_hetero.kernels import KERNELS

Singles = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int32]


def least_of_rests(rests_s: Singles, rows: Rows, add_s: Singles, floor_s: Singles) -> Singles:
    """Return the least of `max(rests_s[rows[i, r]] + add_s[i, r], floor_s[i, r])` over the ways i.

    Args:
        rests_s: Seconds of what follows, [row, place].
        rows: The row that a way takes for each row of the result, [way, result row].
        add_s: Seconds that a way adds to its row, [way, result row].
        floor_s: Seconds that a way takes at least, [way, result row]; infinite for no way.

    Returns:
        Seconds [result row, place], infinite where there is no way.
    """
    least = np.full((rows.shape[1], rests_s.shape[1]), np.inf, np.float32)
    if KERNELS is not None:
        KERNELS.least_of_rests(least, rests_s, rows, add_s, floor_s)
        return least
    for own_rows, own_add_s, own_floor_s in zip(rows, add_s, floor_s, strict=True):
        room = rests_s[own_rows]
        room += own_add_s[:, None]
        np.maximum(room, own_floor_s[:, None], out=room)
        np.minimum(least, room, out=least)
    return least
