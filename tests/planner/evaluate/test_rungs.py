"""Rungs of the ladder: what a structure is completed, priced and tuned to, and which are alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from math import inf

import pytest
from hypothesis import assume, given, settings

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner.evaluate.ladder import Climber
from megatron_hetero.planner.evaluate.rungs import Rungs
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.objective import Standing
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.seeds.symmetric import Symmetric
from megatron_hetero.planner.units import Chain, Structure, Unit, chains_of
from tests.cost.builders import FREE
from tests.planner.evaluate.boxes import problem_of
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
            for node in rungs.price(Climber((Standing(), completion.quick_s), 0, completion, None)):
                assert node.candidate is not None
                tuned = rungs.tune(node, node.candidate)
                steps = (node, tuned)
                for one in steps:
                    assert one.candidate is not None
                    cost = problem.costs.placement(one.candidate.placement)
                    assert cost.missing_bytes <= 0
                    assert one.candidate.step_time_s == pytest.approx(cost.step_time_s)
                keys = [one.candidate.key for one in steps if one.candidate is not None]
                assert max(keys[1:]) <= keys[0]
                assert tuned.candidate is not None
                ratio = tuned.candidate.step_time_s / node.candidate.step_time_s
                assert tuned.gain == pytest.approx(ratio)
                simulated = rungs.queued(tuned, tuned.candidate)
                assert simulated.candidate is not None
                # Stock Megatron exchanges tied words otherwise, and may take less for it.
                assert simulated.candidate.is_stock or simulated.wait >= 1 - 1e-9
                simulated_s = simulated.wait * simulated.candidate.coarse_key[1]
                assert simulated.time_s == pytest.approx(simulated_s)
                priced_s.append(simulated.time_s)
    assert rungs.best_s == min(priced_s, default=inf)


def all_structures(units: Sequence[Unit]) -> list[Structure]:
    """Two replicas: every order of the units, cut anywhere."""
    return [
        (order[:cut], order[cut:]) for order in permutations(units) for cut in range(1, len(units))
    ]


def renamed(structure: Structure, names: Mapping[Unit, Unit]) -> frozenset[Chain]:
    """Its chains, without an order, with other units in the places of these."""
    return frozenset(tuple(names[unit] for unit in chain) for chain in structure)


ALONE = [Unit(name, (0,)) for name in "abcd"]
"""One GPU of each node; a and b are alike, c and d are."""
PAIRS = [Unit(name, (i,)) for name in "ab" for i in range(2)]
"""Two GPUs of each of two like nodes."""


def exchanges(units: Sequence[Unit], groups: Sequence[str]) -> list[dict[Unit, Unit]]:
    """All exchanges of like units that keep those of a node together.

    Args:
        groups: of the units' places, those that may be exchanged as a whole.
    """
    found = []
    for order in permutations(units):
        names = dict(zip(units, order, strict=True))
        nodes = {(unit.node, own.node) for unit, own in names.items()}
        keeps_nodes = len(nodes) == len({unit.node for unit in units})
        if keeps_nodes and all(any(a in of and b in of for of in groups) for a, b in nodes):
            found.append(names)
    return found


@pytest.mark.parametrize(
    ("units", "num_exchanges"), [(ALONE, 4), (PAIRS, 8)], ids=["alone", "pairs"]
)
def test_structures_have_one_image_where_like_nodes_are_exchanged_and_only_there(
    units: Sequence[Unit], num_exchanges: int
) -> None:
    """Against all exchanges of like nodes, and of the GPUs of a node; replicas have no order."""
    rungs = Rungs(Scoreboard(problem_of(2)))
    all_exchanges = exchanges(units, ("ab", "cd"))
    assert len(all_exchanges) == num_exchanges
    images: dict[frozenset[frozenset[Chain]], object] = {}
    for structure in all_structures(units):
        orbit = frozenset(renamed(structure, names) for names in all_exchanges)
        image = rungs.image(structure)
        assert images.setdefault(orbit, image) == image
    assert len(set(images.values())) == len(images) < len(all_structures(units)) / 4


def test_structures_of_one_image_have_pipelines_of_one_price() -> None:
    """Their exchanges may differ: rings follow the order of the nodes."""
    rungs = Rungs(Scoreboard(problem_of(2)))
    known: dict[object, tuple[float, ...]] = {}
    for structure in (*all_structures(ALONE), *all_structures(PAIRS)):
        found = rungs.sizes(structure)
        quick_s = tuple(one.quick_s for one in found)
        assert quick_s and quick_s == pytest.approx(
            known.setdefault(rungs.image(structure), quick_s)
        )
