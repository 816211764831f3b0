"""Nests of equal ranks."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.sequences.tree import Nest, nested


def halved(ranks: Sequence[int]) -> Nest:
    """Nest equal ranks: each group is two halves, the first one a power of two where they differ.

    >>> halved(range(6))
    (((0, 1), (2, 3)), (4, 5))
    """
    nests: list[Nest] = list(ranks)
    return nested(nests)
