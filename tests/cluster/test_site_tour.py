from __future__ import annotations

from itertools import pairwise, permutations

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.site_tour import site_tour

NEAR, FAR = Link(1e10, 2e-3), Link(1e10, 50e-3)


def test_a_tour_stays_in_a_region_before_it_goes_on() -> None:
    """Sites of two regions whose names alternate: two long ways, not six."""
    region = {"a": 0, "b": 1, "c": 0, "d": 1, "e": 0, "f": 1}
    links = {
        (one, other): NEAR if region[one] == region[other] else FAR
        for one, other in permutations(region, 2)
    }
    tour = site_tour(list(region), links)
    assert sorted(tour) == sorted(region)
    crossed = [region[a] != region[b] for a, b in pairwise((*tour, tour[0]))]
    assert sum(crossed) == 2
    assert site_tour([*reversed(region), "a"], links) == tour  # the order of a file does not count


def test_of_three_sites_or_less_all_tours_are_one() -> None:
    assert site_tour(["b", "a", "b", "c"], {}) == ("a", "b", "c")
    assert site_tour([], {}) == ()
