"""Where the word embedding may be: the cases, what each adds, and that every plan is one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from megatron_hetero.bounds.chains.ends import EndsCase, ends_cases
from megatron_hetero.bounds.chains.kinds import gpu_classes
from megatron_hetero.bounds.chains.stages import PLACES, ChainStageOptions
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from tests.bounds.chains.chain_options import options
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload, without_lines

FAR = Link(1e9, 1e-3)
NEAR = Link(10e9, 1e-5)


def cluster(between: Link = FAR, sites: list[str] | None = None) -> Cluster:
    nodes = ("a", FAST, 2), ("b", SLOW, 2), ("c", SLOW, 2)
    return without_lines(make_cluster(*nodes, between=between, sites=sites))


def cases(
    costs: CostModel, num_replicas: tuple[int, int], apart: str = "node", **how: object
) -> list[EndsCase]:
    return ends_cases(costs, gpu_classes(costs, apart), num_replicas, **how)  # type: ignore[arg-type]


UNTIED = make_workload(num_layers=4, global_batch_size=8, tied_embeddings=False)
TIED = make_workload(num_layers=4, global_batch_size=8, tied_embeddings=True)


def test_one_replica_of_untied_words_exchanges_nothing() -> None:
    assert cases(CostModel(cluster(), UNTIED), (1, 1)) == []


def test_several_replicas_by_hand() -> None:
    """Holders on one node, or anywhere: then the words cross a link between nodes."""
    found = cases(CostModel(cluster(), UNTIED), (2, 4))
    alone = [case for case in found if len(case.classes) == 1]
    (apart,) = [case for case in found if len(case.classes) == 3]
    assert {case.classes for case in alone} == {frozenset((i,)) for i in range(3)}
    assert all(case.extra_s == 0.0 and not case.has_last for case in alone)
    # At least the words, in fp32, over a link of 1 GB/s.
    assert apart.extra_s >= 1000 * 512 * 4 / 1e9


def test_slower_links_add_more() -> None:
    extra_s = []
    for link in (NEAR, FAR):
        found = cases(CostModel(cluster(link), TIED), (2, 4))
        extra_s.append(max(case.extra_s for case in found))
    assert 0 < 5 * extra_s[0] < extra_s[1]


def test_tied_words_have_last_stages_as_holders_too() -> None:
    found = cases(CostModel(cluster(), TIED), (2, 4))
    assert found and all(case.has_last for case in found)


def test_the_one_pipeline_stays_on_its_node_or_leaves_it_and_comes_back() -> None:
    """Eight activations and eight gradients leave the node, over two paths of 1 GB/s."""
    costs = CostModel(cluster(), TIED)
    found = cases(costs, (1, 1))
    on_a = [case for case in found if len(case.classes) == 1]
    inside = [case for case in on_a if case.is_inside]
    back = [case for case in on_a if not case.is_inside]
    assert len(inside) == len(back) == 3
    assert all(case.least_s == 0.0 for case in inside)
    size = 256 * 512 * 2
    assert [case.least_s for case in back] == pytest.approx([2 * 8 * size / 2e9] * 3)


def test_sites_have_cases_of_their_own() -> None:
    costs = CostModel(cluster(sites=["here", "there", "there"]), TIED)
    found = cases(costs, (2, 4), apart="site")
    by_classes = {case.classes: case for case in found}
    assert frozenset((0, 1)) in by_classes
    assert by_classes[frozenset((0, 1))].extra_s > 0


def test_what_stays_on_a_site_takes_at_least_what_the_site_takes() -> None:
    costs = CostModel(cluster(sites=["here", "there", "there"]), TIED)
    asked: list[tuple[str, bool]] = []

    def least_inside_s(site: str, has_last: bool) -> float:
        asked.append((site, has_last))
        return 7.0 if site == "here" else 3.0

    found = cases(costs, (2, 4), least_inside_s=least_inside_s)
    assert set(asked) == {("here", True), ("there", True)}
    least = {case.classes: case.least_s for case in found}
    assert least[frozenset((0,))] == 7.0
    assert least[frozenset((1,))] == 3.0
    assert least[frozenset((0, 1, 2))] == 0.0  # anywhere


def test_nodes_that_no_class_tells_apart_have_the_weakest_case() -> None:
    """b and c are one class by type: on one of them nothing is exchanged between nodes."""
    found = cases(CostModel(cluster(), UNTIED), (2, 4), apart="")
    slow = [case for case in found if case.classes == frozenset((1,))]
    assert [case.extra_s for case in slow] == [0.0]


def test_one_class_alone_says_nothing() -> None:
    costs = CostModel(make_cluster(("a", FAST, 4)), UNTIED)
    assert cases(costs, (2, 4)) == []


@settings(max_examples=25)
@given(options())
def test_limited_options_have_the_ends_on_the_cases_classes(found: ChainStageOptions) -> None:
    for has_last in (False, True):
        for is_inside in (False, True):
            case = EndsCase(frozenset((1,)), has_last=has_last, is_inside=is_inside)
            limited = case.limited(found)
            for kind in range(len(found.width)):
                for p, (first, last) in enumerate(PLACES):
                    is_end = first or (last and has_last) or is_inside
                    if found.gpu_class[kind] == 0 and is_end:
                        assert np.isinf(limited.time_s[kind, p]).all()
                        assert np.isinf(limited.rate_s[kind, p]).all()
                    else:
                        assert np.array_equal(limited.time_s[kind, p], found.time_s[kind, p])
            assert np.array_equal(limited.trip_s, found.trip_s)


def exchanged_s(costs: CostModel, *names: str) -> float:
    """What a step of replicas on single GPUs lasts beyond their pipelines and update."""
    replicas = tuple(
        PlacedReplica((PlacedStage((Device(name[0], int(name[1])),), 4),), 2) for name in names
    )
    return costs.placement(Placement(replicas)).gradient_sync_s


def test_no_exchange_is_shorter_than_its_case() -> None:
    costs = CostModel(cluster(), UNTIED)
    found = {case.classes: case.extra_s for case in cases(costs, (2, 4))}
    for names in (("a0", "a1"), ("a0", "b0"), ("b0", "c0"), ("a0", "b0", "c0"), ("a0", "a1", "c1")):
        classes = frozenset("abc".index(name[0]) for name in names)
        of = found.get(classes, found[frozenset((0, 1, 2))])
        assert exchanged_s(costs, *names) >= of * (1 - 1e-9)
    assert exchanged_s(costs, "a0", "b0") > found[frozenset((0, 1, 2))] > 0


def test_cases_with_more_holders_add_no_less() -> None:
    costs = CostModel(cluster(), UNTIED)
    extra_s = [max(case.extra_s for case in cases(costs, (n, 6))) for n in (2, 3, 6)]
    assert extra_s == sorted(extra_s)
