"""Plans under prices where replicas wait for each other: the search finds what annealing over
millions of plans found for these made-up clusters."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megatron_hetero.planner.columns.bundle_mix import PoolBundles
from megatron_hetero.planner.columns.pricing import StageTable
from megatron_hetero.planner.columns.site_mixes import Site
from megatron_hetero.planner.completion.fill import Filler, filled_placement
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import Problem, Unit
from megatron_hetero.planner.seeds.symmetric import Symmetric
from megatron_hetero.planner.shapes.kinds import kinds_of
from tools.referees.cases import load_case
from tools.referees.search import strategies
from tools.referees.search.all_columns import AllColumns
from tools.referees.search.even_columns import EvenColumns
from tools.referees.search.even_mixes import near_sites
from tools.referees.search.local import LocalSearch
from tools.referees.search.mixed_shapes import MixedReplicas
from tools.referees.search.shape_layout import ShapeLayouts
from tools.referees.search.unit_mix import UnitMixer

HERE, NEAR, FAR = "us-central1-a", "us-central1-b", "us-west1-b"


def problem_of(
    folder: Path, machines: list[tuple[str, int, str]], model: str, sequences: int, size: int
) -> Problem:
    """Machines of four GPUs: type, how many, zone."""
    lines = [
        f"    - {{device: {device}, gpus: 4, count: {count}, zone: {zone}}}\n"
        for device, count, zone in machines
    ]
    return problem_of_text(
        folder,
        "referee: sailor\ncluster:\n  machines:\n"
        + "".join(lines)
        + f"model: {model}\nbatch: {{sequences: {sequences}, micro_batch_sizes: [{size}]}}\n",
    )


def problem_of_text(folder: Path, text: str) -> Problem:
    path = folder / "case.yaml"
    anchor = "anchor: {value: 1, unit: s, source: none}\n"
    path.write_text(f"version: 1\ncase: made-up\n{text}{anchor}")
    return strategies.problem_of(load_case(path).questions[0])


def test_gpus_left_over_form_replicas_of_the_same_layers(tmp_path: Path) -> None:
    """Ten pairs of V100 before an A100 each; the two A100 left are an eleventh replica."""
    machines = [("A100-40", 3, HERE), ("V100-16", 5, HERE)]
    problem = problem_of(tmp_path, machines, "OPT-350", 1024, 2)
    kinds = kinds_of(problem)
    (a100,) = (k for k, kind in enumerate(kinds) if kind.node.gpu_type.name == "A100-40")
    v100 = 1 - a100
    mixer, shape = UnitMixer(problem, kinds), ((v100, 2), (a100, 1))
    chain = ShapeLayouts(problem, kinds).first_chain(shape, 1)
    filled = Filler(problem).chain(chain, 0, problem.num_micro_batches)
    mix = mixer.most(shape, filled)
    assert dict(mix.counts) == {shape: 10, ((a100, 1), (a100, 1)): 1}
    chains = mixer.chains(mix)
    devices = [device for chain in chains for unit in chain for device in unit.devices]
    assert len(devices) == len(set(devices)) == 32

    board = search(problem, None, [Symmetric(), MixedReplicas()])
    assert board.best is not None
    assert 1 / board.best.step_time_s > 0.07103
    assert len(board.best.placement.replicas) == 11


def test_each_group_of_near_sites_gets_layers_of_its_own(tmp_path: Path) -> None:
    """Two zones side by side exchange as one; the far one has other layers."""
    machines = [("A100-40", 6, HERE), ("A100-40", 2, NEAR), ("A100-40", 3, FAR)]
    problem = problem_of(tmp_path, machines, "GPT-Neo-2.7", 1024, 1)
    board = search(problem, None, [EvenColumns()])
    assert board.best is not None
    assert 1 / board.best.step_time_s > 0.0494
    nodes = problem.cluster.node_by_name
    found = Counter(
        (nodes[replica.stages[0].devices[0].node].site, tuple(s.num_layers for s in replica.stages))
        for replica in board.best.placement.replicas
    )
    assert found == {(HERE, (16, 16)): 6, (NEAR, (16, 16)): 2, (FAR, (8, 8, 8, 8)): 3}


def test_near_sites_are_grouped_first(tmp_path: Path) -> None:
    machines = [("A100-40", 1, HERE), ("A100-40", 1, FAR), ("A100-40", 1, NEAR)]
    problem = problem_of(tmp_path, machines, "OPT-350", 64, 1)
    kinds = kinds_of(problem)
    table, filler = StageTable(problem, kinds), Filler(problem)
    sites = [Site(PoolBundles(table, filler, [k], [1], 24), (kinds[k],)) for k in range(3)]
    names = [
        [sorted(site.kinds[0].node.site for site in group) for group in groups]
        for groups in near_sites(sites)
    ]
    assert names == [
        [[HERE], [NEAR], [FAR]],
        [[HERE, NEAR], [FAR]],
        [[HERE, NEAR, FAR]],
    ]


@pytest.mark.parametrize(("sequences", "shares"), [(7, (4, 3)), (2, (1, 1)), (1, None)])
def test_replicas_that_wait_for_each_other_do_as_much_each(
    tmp_path: Path, sequences: int, shares: tuple[int, int] | None
) -> None:
    """An A100 and a V100: by their speeds the A100 would do more."""
    machines = [("A100-40", 1, HERE), ("V100-16", 1, HERE)]
    problem = problem_of(tmp_path, machines, "OPT-350", sequences, 1)
    chains = [(Unit(node.name, (0, 1, 2, 3)),) for node in problem.nodes]
    filler = Filler(problem)
    filled = [filler.chain(chain, 0, 1) for chain in chains]
    placement = filled_placement(problem, chains, filled)
    found = placement and tuple(replica.num_micro_batches for replica in placement.replicas)
    assert found == shares


def test_replicas_of_unlike_length_share_nodes(tmp_path: Path) -> None:
    """HexiScale's prices: three of four replicas joined halve what the nodes exchange."""
    problem = problem_of_text(
        tmp_path,
        "referee: hexiscale\ncluster:\n  between_machines_gb_per_s: 0.7\n  machines:\n"
        "    - {device: 4090, gpus: 8, count: 2}\n    - {device: 3080Ti, gpus: 8}\n"
        "model: 13B\nbatch: {sequences: 120}\n",
    )
    before = search(problem, None, [AllColumns()]).best
    after = search(problem, None, [AllColumns(), LocalSearch()]).best
    assert before is not None and after is not None
    assert len(before.placement.replicas) == 4
    assert len(after.placement.replicas) == 2
    assert after.step_time_s < 54.6 < 55.4 < before.step_time_s
