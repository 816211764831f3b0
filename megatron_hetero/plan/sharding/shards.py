"""Shard tables: the edges of each device's piece of a tensor, and the holders of each slice.

A tensor divides in units (query groups, MLP columns, experts, vocabulary rows).  The *edges* of a
group of `width` devices are `width + 1` rising positions from 0 to `num_units`; device i holds
units `edges[i] .. edges[i + 1] - 1`.  Groups of different width or shares cut the same tensor
differently; between two neighbouring cuts of all groups lies a *slice*, which each GPU of a group
holds whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from megatron_hetero.errors import PlanFormatError

COLUMN_BLOCK = 16
"""Columns of an MLP that a share takes or leaves together: what an fp8 product takes
(`cost.fp8_sizes.FP8_COLUMNS`), and 32 aligned bytes of a bf16 one."""


def shard_edges(num_units: int, width: int, shares: Sequence[int] | None = None) -> tuple[int, ...]:
    """Cut `num_units` units over `width` devices.

    Without shares the parts are equal.  With shares they are proportional, rounded by the method of
    largest remainders (ties go to the lower rank), and no part is empty.

    Args:
        num_units: of the tensor.
        width: devices of the group.
        shares: relative sizes, one for each device; None is equal parts.
    Returns:
        `width + 1` strictly rising edges, the first 0, the last `num_units`.
    Raises:
        PlanFormatError: equal parts are asked for and `width` does not divide `num_units`; fewer
            units than devices; or the shares are not `width` positive integers.

    >>> shard_edges(12, 4)
    (0, 3, 6, 9, 12)
    >>> shard_edges(8, 4, (3, 2, 2, 1))
    (0, 3, 5, 7, 8)
    >>> shard_edges(4, 3, (8, 1, 1))
    (0, 2, 3, 4)
    """
    # Every device needs at least one unit.
    if width < 1:
        raise PlanFormatError(f"a shard table needs at least one device, not {width}")
    if num_units < width:
        raise PlanFormatError(
            f"{num_units} units cannot give each of {width} devices one; use a smaller width"
        )
    # Equal parts, or parts in proportion to the shares.
    if shares is None:
        if num_units % width:
            raise PlanFormatError(
                f"{num_units} units do not divide by {width} devices; use a width that divides "
                "them, or give shares"
            )
        return tuple(range(0, num_units + 1, num_units // width))
    if len(shares) != width or min(shares) < 1:
        raise PlanFormatError(
            f"shares {':'.join(map(str, shares))} do not fit {width} devices; "
            f"give {width} integers of at least 1"
        )
    return (0, *accumulate(_largest_remainders(num_units, shares)))


def block_edges(
    num_units: int, block: int, width: int, shares: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Cut rows or columns by shares in whole blocks, for the kernels' sake, where there is a block
    for each device and nothing left over; else one by one.

    Args:
        num_units: rows of the padded vocabulary, or columns of an MLP.
        block: units of a block: `--make-vocab-size-divisible-by`, or `COLUMN_BLOCK`.
        width: devices of the group.
        shares: relative sizes, one for each device; None is equal parts.
    Raises:
        PlanFormatError: as `shard_edges`.

    >>> block_edges(1024, 128, 3, (2, 1, 1))
    (0, 512, 768, 1024)
    """
    # Equal parts need no rounding.
    whole = num_units % block == 0 and num_units // block >= width
    size = block if shares is not None and whole else 1
    return tuple(edge * size for edge in shard_edges(num_units // size, width, shares))


def _largest_remainders(num_units: int, shares: Sequence[int]) -> list[int]:
    """Divide units among devices in proportion to `shares`, at least one each (num_units >=
    devices)."""
    total = sum(shares)
    # Whole parts, rounded down; what is left goes to the largest remainders.
    parts = [num_units * share // total for share in shares]
    remainders = [num_units * share % total for share in shares]
    order = sorted(range(len(shares)), key=lambda i: (-remainders[i], i))
    for i in order[: num_units - sum(parts)]:
        parts[i] += 1
    # A device with a tiny share gets its one unit from the largest part.
    for i, part in enumerate(parts):
        if part == 0:
            parts[parts.index(max(parts))] -= 1
            parts[i] = 1
    return parts


def common_cuts(tables: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the union of several groups' edges of one tensor, rising.

    Raises:
        ValueError: no table, or tables of tensors of different length.

    >>> common_cuts([(0, 6, 12), (0, 4, 8, 12)])
    (0, 4, 6, 8, 12)
    """
    if len({(table[0], table[-1]) for table in tables}) != 1:
        raise ValueError(f"shard tables of different tensors: {list(map(tuple, tables))}")
    return tuple(sorted({edge for table in tables for edge in table}))
