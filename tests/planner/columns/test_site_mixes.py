"""Several sites, one of them with a slow network between its nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.files import canonical_json
from megatron_hetero.model.load import load_workload
from megatron_hetero.planner.columns import choice_prices, strategy
from megatron_hetero.planner.columns.strategy import Columns
from megatron_hetero.planner.completion.own_flags import OwnFlags
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.problem import make_problem
from tools.scale_clusters import MODEL_FLAGS

FAST, SLOW = "400 Gb/s", "1 Gb/s"


def board_of(
    folder: Path, networks: list[str], gpus: tuple[str, ...] = ("A100-80GB",)
) -> Scoreboard:
    """The board of `Columns` alone on sites of three nodes of 8 GPUs of each type, the network of
    each given."""
    sites = [f"s{number}" for number in range(len(networks))]
    data: dict[str, Any] = {
        "version": 1,
        "nodes": [
            {"name": f"{site}-{gpu.lower()}-{i}", "gpu": gpu, "count": 8, "site": site}
            for site in sites
            for gpu in gpus
            for i in range(3)
        ],
        "links": {
            "inside_node": {gpu: {"bandwidth": "240 GB/s", "latency": "5 us"} for gpu in gpus},
            "between_nodes": {
                site: {"bandwidth": network, "latency": "10 us"}
                for site, network in zip(sites, networks, strict=True)
            },
        },
    }
    if len(sites) > 1:
        between = {"sites": sites, "bandwidth": "200 Gb/s", "latency": "2 ms"}
        data["links"]["between_sites"] = [between]
    (folder / "cluster.yaml").write_text(canonical_json(data))
    (folder / "model.flags").write_text(f"{MODEL_FLAGS}--global-batch-size 256\n")
    cluster = load_cluster(folder / "cluster.yaml")
    board = Scoreboard(make_problem(cluster, load_workload(folder / "model.flags")))
    Columns().search(board)
    return board


def planned(folder: Path, networks: list[str]) -> Candidate:
    """The best on that board."""
    best = board_of(folder, networks).best
    assert best is not None
    return best


def test_a_site_with_a_slow_network_does_not_hold_up_the_others(tmp_path: Path) -> None:
    without = planned(tmp_path, [FAST] * 5)
    best = planned(tmp_path, [*[FAST] * 5, SLOW])
    assert best.step_time_s <= 1.001 * without.step_time_s


def test_quick_times_are_near_exact_ones(tmp_path: Path) -> None:
    seen: list[tuple[float, float]] = []
    in_order = strategy.in_order

    def watched(found: Any) -> Any:
        firsts, others = in_order(found)
        problem = firsts[0][0][0].bundles.table.problem
        for choice in (*firsts, *others)[:6]:
            placement = choice_prices._placed(OwnFlags(problem), choice)
            if placement is not None:
                seen.append((found[choice].step_s, problem.costs.placement(placement).step_time_s))
        return firsts, others

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "in_order", watched)
        planned(tmp_path, [FAST] * 5)
    assert seen
    for quick_s, exact_s in seen:
        assert quick_s == pytest.approx(exact_s, rel=0.25), seen


def test_each_set_of_types_has_its_start_and_no_division_comes_twice(tmp_path: Path) -> None:
    ordered: list[tuple[list[Any], list[Any]]] = []
    in_order = strategy.in_order

    def watched(found: Any) -> Any:
        ordered.append(in_order(found))
        return ordered[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "in_order", watched)
        board = board_of(tmp_path, [FAST], ("A100-80GB", "RTX-4090"))
        few = Scoreboard(board.problem)
        Columns(max_work=0).search(few)
    firsts, others = ordered[0]
    divisions = [choice_prices._division(choice) for choice in (*firsts, *others)]
    assert len(set(divisions)) == len(divisions) > len(firsts)
    of_node = few.problem.cluster.node_by_name
    priced = {
        frozenset(of_node[d.node].gpu_type.name for d in candidate.placement.devices())
        for candidate in few.ranking
    }
    assert priced == {choice_prices._gpu_types(choice) for choice in firsts}
    assert len(priced) > 1
