"""Several sites, one of them with a slow network between its nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.files import canonical_json
from megatron_hetero.model.load import load_workload
from megatron_hetero.planner.columns.strategy import Columns
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.problem import make_problem
from tools.scale_clusters import MODEL_FLAGS

FAST, SLOW = "400 Gb/s", "1 Gb/s"


def planned(folder: Path, networks: list[str]) -> Candidate:
    """The best of `Columns` alone on sites of three nodes of 8 A100, the network of each given."""
    sites = [f"s{number}" for number in range(len(networks))]
    data: dict[str, Any] = {
        "version": 1,
        "nodes": [
            {"name": f"{site}-{i}", "gpu": "A100-80GB", "count": 8, "site": site}
            for site in sites
            for i in range(3)
        ],
        "links": {
            "inside_node": {"A100-80GB": {"bandwidth": "240 GB/s", "latency": "5 us"}},
            "between_nodes": {
                site: {"bandwidth": network, "latency": "10 us"}
                for site, network in zip(sites, networks, strict=True)
            },
            "between_sites": [{"sites": sites, "bandwidth": "200 Gb/s", "latency": "2 ms"}],
        },
    }
    (folder / "cluster.yaml").write_text(canonical_json(data))
    (folder / "model.flags").write_text(f"{MODEL_FLAGS}--global-batch-size 256\n")
    cluster = load_cluster(folder / "cluster.yaml")
    board = Scoreboard(make_problem(cluster, load_workload(folder / "model.flags")))
    Columns().search(board)
    assert board.best is not None
    return board.best


def test_a_site_with_a_slow_network_does_not_hold_up_the_others(tmp_path: Path) -> None:
    without = planned(tmp_path, [FAST] * 5)
    best = planned(tmp_path, [*[FAST] * 5, SLOW])
    assert best.step_time_s <= 1.001 * without.step_time_s


def test_quick_times_are_near_exact_ones(tmp_path: Path) -> None:
    from megatron_hetero.planner.columns import strategy as columns

    seen: list[tuple[float, float]] = []
    in_order = columns._in_order

    def watched(found: Any) -> Any:
        firsts, others = in_order(found)
        problem = firsts[0][0][0].bundles.table.problem
        for choice in (*firsts, *others)[:6]:
            placement = columns._placed(problem, choice)
            if placement is not None:
                seen.append((found[choice], problem.costs.placement(placement).step_time_s))
        return firsts, others

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_in_order", watched)
        planned(tmp_path, [FAST] * 5)
    assert seen
    for quick_s, exact_s in seen:
        assert quick_s == pytest.approx(exact_s, rel=0.25), seen
