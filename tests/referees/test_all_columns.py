"""The bundles that the referees' column generation begins with."""

from __future__ import annotations

from itertools import product

import pytest

from megatron_hetero.planner.columns.bundle_shapes import plain_shapes
from megatron_hetero.planner.columns.pricing import BundleShape
from tests.cost.builders import FAST, SLOW
from tests.planner.columns.pools import capacity, pricer_of, problem_of
from tools.referees.search.all_columns import all_shapes


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_small_clusters_have_every_shape(num_replicas: int) -> None:
    """Of each kind any number of nodes side by side, cut alike, in both orders of the kinds."""
    table, pricer = pricer_of(
        problem_of(("a", FAST, 2), ("b", FAST, 2), ("c", SLOW, 2)), num_replicas
    )
    found = list(all_shapes(table, pricer, capacity(table)))
    assert len(found) == len(set(found))
    menus = {k: [b for b in pricer.blocks if b.kind == k] for k in (0, 1)}
    expected = set()
    for order in ((0, 1), (1, 0)):
        runs = [
            [()] + [(b,) * n for b in menus[k] for n in range(1, capacity(table)[k] + 1)]
            for k in order
        ]
        for one, other in product(*runs):
            shape = BundleShape(num_replicas, (*one, *other))
            if 0 < shape.num_stages <= pricer.max_stages:
                expected.add(shape)
    assert expected <= set(found)
    assert all(
        s.num_nodes()[k] <= n
        for s in found
        for k, n in capacity(table).items()
        if k in s.num_nodes()
    )


def test_many_nodes_have_fewer_shapes_and_the_plain_ones() -> None:
    nodes = [(f"{kind}{i}", gpu, 8) for kind, gpu in (("a", FAST), ("c", SLOW)) for i in range(40)]
    table, pricer = pricer_of(problem_of(*nodes), 1)
    found = list(all_shapes(table, pricer, capacity(table)))
    plain = plain_shapes(table, pricer, capacity(table))
    assert found[: len(plain)] == plain
    assert len(plain) < len(found) < len(plain) + 30
    for shape in found:
        assert 0 < shape.num_stages <= pricer.max_stages
