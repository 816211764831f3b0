"""Equal copies of a bundle: how many, and the bundles of which they end soonest."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_hetero.planner.columns.bundle_shapes import shapes_of_one_kind
from megatron_hetero.planner.columns.bundles import Bundle
from megatron_hetero.planner.columns.equal_shapes import MAX_KINDS, equal_shapes
from megatron_hetero.planner.columns.pool_nodes import PoolNodes
from megatron_hetero.planner.columns.pricing import BundlePricer, BundleShape

_FEWER = MAX_KINDS - 1
"""Kinds of bundles that stand for equal copies alone, where there are more."""
_PART = 4
"""Orders are made of one part in so many of their numbers and ways."""
_MAX_EQUAL = 8
"""Bundles for equal copies, of each of so many numbers of micro-batches."""


def equal_copies(
    nodes: PoolNodes, shape: BundleShape, num_micro_batches: int
) -> tuple[int, int]:
    """Return how many of a bundle its scarcest kind of nodes allows, and the micro-batches of
    each replica."""
    most = min(nodes.capacity[k] // n for k, n in shape.num_nodes().items())
    return most, -(-num_micro_batches // max(1, most * shape.num_replicas))


def numbers_of_copies(
    nodes: PoolNodes, bundle: Bundle, num_micro_batches: int
) -> Iterator[int]:
    """Yield as many copies as there is room for, and the fewest that are as soon."""
    most, share = equal_copies(nodes, bundle.shape, num_micro_batches)
    yield most
    # Fewer do, where some would have a micro-batch less than others.
    fewest = -(-num_micro_batches // (share * bundle.shape.num_replicas))
    if fewest < most:
        yield fewest


def soonest_of_fewer_kinds(
    nodes: PoolNodes, pricer: BundlePricer, num_likely: int
) -> list[Bundle]:
    """Return bundles for equal copies on one kind of nodes, and on two where there are more: of
    each number of micro-batches the one that ends soonest; `num_likely` as of `equal_shapes`."""
    number = nodes.table.problem.num_micro_batches
    shapes = list(shapes_of_one_kind(nodes.table, pricer, nodes.capacity))
    if len(nodes.capacity) > _FEWER:
        shapes += equal_shapes(nodes.table, pricer, nodes.capacity, num_likely // _PART, _FEWER)
    soonest: dict[tuple[frozenset[int], int], tuple[float, Bundle]] = {}
    for shape in shapes:
        bundle = nodes.bundle(shape)
        if bundle is not None:
            _, share = equal_copies(nodes, shape, number)
            time_s = bundle.filled.quick_time_s(share)
            key = frozenset(shape.num_nodes()), share
            if key not in soonest or time_s < soonest[key][0]:
                soonest[key] = time_s, bundle
    return [bundle for _, bundle in soonest.values()]


def soonest_of_several_kinds(
    nodes: PoolNodes, pricer: BundlePricer, num_likely: int
) -> Iterator[tuple[BundleShape, Bundle]]:
    """Yield the bundles of several kinds of which equal copies end soonest: a few of each number
    of micro-batches, which stands for the number of replicas; `num_likely` as of `equal_shapes`."""
    number = nodes.table.problem.num_micro_batches
    ranked: list[tuple[float, int, int, BundleShape, Bundle]] = []
    for index, shape in enumerate(equal_shapes(nodes.table, pricer, nodes.capacity, num_likely)):
        bundle = nodes.bundle(shape)
        if bundle is not None:
            _, share = equal_copies(nodes, shape, number)
            ranked.append((bundle.filled.quick_time_s(share), share, index, shape, bundle))
    ranked.sort(key=lambda entry: entry[:3])
    kept: dict[int, int] = {}
    for _, share, _, shape, bundle in ranked:
        kept[share] = kept.get(share, 0) + 1
        if kept[share] <= _MAX_EQUAL and len(kept) <= _MAX_EQUAL:
            yield shape, bundle
