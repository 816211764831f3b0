"""Rungs of the ladder: what a structure is completed, priced and tuned to, and which are alike."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import assume, given, settings

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner.evaluate.rungs import Rungs
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.moves.neighbours import Structure
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import Unit, chains_of, make_problem
from megatron_hetero.planner.shapes.symmetric import Symmetric
from tests.cost.builders import FREE
from tests.planner.shapes.test_spread import problem_of
from tests.planner.strategies import cases, clusters, workloads


@settings(max_examples=cases(8), deadline=None)
@given(cluster=clusters(max_gpus=4, limits=FREE), workload=workloads(6, 8))
def test_each_rung_is_priced_by_the_cost_model_and_none_is_slower_than_the_one_below(
    cluster: Cluster, workload: Workload
) -> None:
    problem = make_problem(cluster, workload)
    starts = search(problem, strategies=[Symmetric()]).ranking[:2]
    assume(starts)
    rungs = Rungs(Scoreboard(problem))
    priced_s = []
    for start in starts:
        structure = tuple(chains_of(start.placement))
        found = rungs.sizes(structure)
        assert [one.quick_s for one in found] == sorted(one.quick_s for one in found)
        assert found[:1] == ([] if (best := rungs.sized(structure)) is None else [best])
        for completion in found[:1]:
            for node in rungs.price(completion):
                assert node.candidate is not None
                tuned = rungs.tune(node, node.candidate)
                thorough = rungs.tune(tuned, node.candidate, level=2)
                steps = (node, tuned, thorough)
                for one in steps:
                    assert one.candidate is not None
                    cost = problem.costs.placement(one.candidate.placement)
                    assert cost.missing_bytes <= 0
                    assert one.candidate.step_time_s == pytest.approx(cost.step_time_s)
                    priced_s.append(one.candidate.step_time_s)
                keys = [one.candidate.key for one in steps if one.candidate is not None]
                assert max(keys[1:]) <= keys[0]
                assert tuned.candidate is not None
                ratio = tuned.candidate.step_time_s / node.candidate.step_time_s
                assert tuned.gain == pytest.approx(ratio)
    assert rungs.best_s == min(priced_s) if priced_s else rungs.num == 0


def all_structures() -> list[Structure]:
    """Two replicas of four nodes, one GPU each: every order, cut anywhere."""
    units = [Unit(name, (0,)) for name in "abcd"]
    return [(order[:cut], order[cut:]) for order in permutations(units) for cut in (1, 2, 3)]


def renamed(structure: Structure, names: str) -> Structure:
    to = dict(zip("abcd", names, strict=True))
    return tuple(tuple(replace(u, node=to[u.node]) for u in chain) for chain in structure)


def test_structures_have_one_image_where_like_nodes_are_exchanged_and_only_there() -> None:
    """Against all exchanges: a and b are alike, c and d are, and replicas have no order."""
    rungs = Rungs(Scoreboard(problem_of(1)))
    images: dict[object, object] = {}
    for structure in all_structures():
        orbit = frozenset(
            frozenset(renamed(structure, names)) for names in ("abcd", "bacd", "abdc", "badc")
        )
        image = rungs.image(structure)
        assert images.setdefault(orbit, image) == image
    assert len(set(images.values())) == len(images) < len(all_structures()) / 4


def test_structures_of_one_image_have_pipelines_of_one_price() -> None:
    """Their exchanges may differ: rings follow the order of the nodes."""
    rungs = Rungs(Scoreboard(problem_of(1)))
    known: dict[object, tuple[float, ...]] = {}
    for structure in all_structures():
        found = rungs.sizes(structure)
        quick_s = tuple(one.quick_s for one in found)
        assert quick_s and quick_s == pytest.approx(
            known.setdefault(rungs.image(structure), quick_s)
        )
