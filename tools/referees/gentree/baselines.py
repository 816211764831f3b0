"""The exchanges that libraries and papers have, in the form of our own."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.exchange.baselines import halving_doubling, parameter_servers, ring
from megatron_hetero.exchange.groups.grouping import Grouping, even, grouped_plan
from megatron_hetero.exchange.plan import ExchangePlan, Owned, Purpose, plan_of
from tools.referees.gentree.tree import LinkTree


def two_level(
    size: int, num_holders: int, num_inside: int, purpose: Purpose = "all_reduce"
) -> ExchangePlan:
    """Make parameter servers in groups of `num_inside` neighbours, then between the groups.

    Raises:
        ValueError: the groups would not be equal.
    """
    if num_holders % num_inside:
        raise ValueError(f"{num_holders} holders are no groups of {num_inside}")
    groups = [even(range(first, first + num_inside)) for first in range(0, num_holders, num_inside)]
    return grouped_plan(f"two levels, {num_inside} first", purpose, size, even(groups))


def hierarchical_ring(size: int, tree: LinkTree, purpose: Purpose = "all_reduce") -> ExchangePlan:
    """Make rings inside each branch that joins devices, then rings between branches, up to the
    root."""
    # Leaves first: the deepest ancestor of a holder is the holder's own branch.
    groups: dict[int, Grouping | int] = {
        number: holder
        for holder, row in enumerate(tree.ancestors.tolist())
        for number in (max(row),)
    }
    # Preorder backwards visits children before the branch that joins them.
    for number, children in reversed(list(tree.inner())):
        members = [groups[child] for child in children]
        groups[number] = members[0] if len(members) == 1 else even(members, is_ring=True)
    return grouped_plan("hierarchical ring", purpose, size, groups[0])


def double_binary_tree(
    size: int, num_holders: int, purpose: Purpose = "all_reduce"
) -> ExchangePlan:
    """Make two binary trees of half of the buffer each (Sanders et al. 2009): what is a leaf of one
    has children in the other."""
    rows: list[tuple[int, int, int, int, int]] = []
    owners = []
    half = size // 2
    for number, (start, stop) in enumerate(((0, half), (half, size))):
        # A buffer of one element has an empty first half.
        if start == stop:
            continue
        parents = _binary_tree(num_holders)
        # Both halves have the same shape of tree; only the holders of its places differ.
        place = _other_places(num_holders) if number else list(range(num_holders))
        heights = _heights(parents)
        # A child sends when all of its own children have arrived.
        for child, parent in enumerate(parents):
            if parent >= 0:
                rows.append((heights[child], place[child], place[parent], start, stop))
            else:
                owners.append(Owned(start, stop, place[child]))
    return plan_of("double binary tree", purpose, num_holders, size, rows, owners)


def _binary_tree(num: int) -> list[int]:
    """Return [place] -> parent of a tree rooted at the first place; every other even place has
    children on both sides."""
    parents = [-1]
    for place in range(1, num):
        # The lowest set bit is a place's level; the parent has the next bit instead, if that place
        # exists.
        low = place & -place
        above = (place ^ low) | (low << 1)
        parents.append(above if above < num else place ^ low)
    return parents


def _other_places(num: int) -> list[int]:
    """Return the holders of the places of the second tree: mirrored, or shifted by one."""
    if num % 2 == 0:
        return list(reversed(range(num)))
    return [(place + 1) % num for place in range(num)]


def _heights(parents: Sequence[int]) -> list[int]:
    """Return for each place the rounds until everything from the children has arrived."""
    heights = [0] * len(parents)
    # Each pass carries heights one level up; the loop ends when nothing moves.
    for _ in parents:
        before = list(heights)
        for child, parent in enumerate(parents):
            if parent >= 0:
                heights[parent] = max(heights[parent], heights[child] + 1)
        if before == heights:
            break
    return heights


def baselines(
    size: int, tree: LinkTree, purpose: Purpose = "all_reduce"
) -> tuple[ExchangePlan, ...]:
    """Make all of them for a tree of two holders or more."""
    num = tree.num_holders
    return (
        ring(size, num, purpose),
        halving_doubling(size, num, purpose),
        parameter_servers(size, num, purpose),
        hierarchical_ring(size, tree, purpose),
        double_binary_tree(size, num, purpose),
    )
