"""Small pieces of text that several tables have in common."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from megatron_hetero.cluster.names import device_place

GIB = 1 << 30
MIN_ALIKE = 4
"""So many stages in a row, or replicas, that are alike are shown once."""
_MAX_NODES = 4
"""More nodes with the same GPUs are named by the first and the last."""


def devices_by_node(devices: Sequence[str]) -> str:
    """Write `a:0 a:1 b:0` as `a: 0 1; b: 0`, and many alike as `n0 to n9 (10 machines):
    0 1`."""
    # Node -> indices of its GPUs, then indices -> nodes that have the same.
    indices: dict[str, list[str]] = {}
    for device in devices:
        node, index = device_place(device)
        indices.setdefault(node, []).append(str(index))
    alike: dict[str, list[str]] = {}
    for node, found in indices.items():
        alike.setdefault(" ".join(found), []).append(node)
    if all(len(nodes) <= _MAX_NODES for nodes in alike.values()):
        return "; ".join(f"{node}: {' '.join(found)}" for node, found in indices.items())
    return "; ".join(f"{_nodes(nodes)}: {found}" for found, nodes in alike.items())


def _nodes(nodes: Sequence[str]) -> str:
    if len(nodes) <= _MAX_NODES:
        return ", ".join(nodes)
    return f"{nodes[0]} to {nodes[-1]} ({len(nodes)} machines)"


def folded_layout(layout: str) -> str:
    """Write equal replicas of a layout that follow each other once; for people, since no flag
    takes it.

    >>> folded_layout("tp1:4 @2 | tp1:4 @2 | tp1:4 @2 | tp1:4 @2 | tp2:4 @8")
    '4 x (tp1:4 @2) | tp2:4 @8'
    """
    parts: list[str] = []
    for replica, alike in groupby(layout.split(" | ")):
        number = sum(1 for _ in alike)
        is_folded = number >= MIN_ALIKE
        parts += [f"{number} x ({replica})"] if is_folded else [replica] * number
    return " | ".join(parts)


def count(number: int, singular: str, plural: str = "") -> str:
    """Write `1 layer`, `2 layers`."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def ranges(numbers: Sequence[int]) -> str:
    """Write 0, 1, 2, 3, 5, which ascend, as `0-3, 5`."""
    runs: list[list[int]] = []
    # Each run is [first, last].
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
