"""Plans and layouts that the pages print: all are found, and some of the small ones are verified.

`tools/verify_printed.py` verifies them all; `docs/verified-plans.md` is its table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_hetero.lab.verify.command import verify_arguments
from megatron_hetero.plan.layout import format_layout, parse_layout
from tests.lab.verify.test_verify_command import asked

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
import printed_plans
import verify_printed


def _six() -> list[str]:
    """The printed layouts of several processes that take least time to verify."""
    costs: dict[str, int] = {}
    for printed in printed_plans.printed_layouts():
        layout = parse_layout(str(printed.layout))
        passes = sum(r.num_layers * r.num_micro_batches for r in layout.replicas)
        if layout.num_devices > 1:
            costs[str(printed.layout)] = passes + _PASSES_TO_START * layout.num_devices
    return sorted(costs, key=lambda line: costs[line])[:6]


_PASSES_TO_START = 20
"""Passes of a layer, forward and backward, in the time that a process takes to start."""
SIX = _six()


def test_layouts_are_found_as_they_are_printed() -> None:
    text = "| a | `tp1:2,tp2(2:1):3 @4x2 \\| tp1:5 @1` | and `tp2:6 @8`, twice, and tp2:3 alone"
    # A layout of a form that is not looked for is not read from its middle.
    text += "; `tp2:3z1,tp1:1 @4`, `tp2ep2:3, tp1:1 @4`"
    found = [format_layout(layout) for layout in printed_plans.layouts_of(text)]
    assert found == ["tp1:2,tp2(2:1):3 @4x2 | tp1:5 @1", "tp2:6 @8 | tp2:6 @8"]


def test_there_are_six_and_every_case_is_small_enough() -> None:
    assert len(SIX) == 6
    printed = [str(case.layout) for case in printed_plans.printed_layouts()]
    assert all(parse_layout(p).num_devices <= printed_plans.MAX_RANKS for p in printed)


def test_every_example_is_planned() -> None:
    commands = " ".join(str(case.command) for case in printed_plans.printed_commands())
    for folder in (printed_plans.ROOT / "examples").iterdir():
        # What serves a model is planned by `serve-plan`, and trains nothing.
        assert f"{folder.name}/" in commands or (folder / "workload.yaml").exists(), folder


def test_large_clusters_are_cut_machine_by_machine(tmp_path: Path) -> None:
    """Machines of equal cards and of unlike ones are counted alike."""
    path = tmp_path / "cluster.yaml"
    box = {"gpus": [{"type": "RTX-3090", "count": 2}, {"type": "RTX-4090", "count": 2}]}
    nodes = [{"name": f"n{i}", "gpu": "A100-80GB", "count": 8} for i in range(5)]
    nodes += [{"name": f"b{i}", **box} for i in range(5)]
    path.write_text(json.dumps({"nodes": nodes}))
    assert printed_plans._cut_cluster(path) == "7 of 10 nodes, 40 GPUs"
    path.write_text(json.dumps({"nodes": nodes[4:6]}))
    assert printed_plans._cut_cluster(path) == ""


@pytest.mark.parametrize("layout", SIX)
def test_a_printed_layout_trains_as_one_process(layout: str) -> None:
    data = verify_arguments(asked(layout, steps=1))
    assert data["ok"], data


def test_the_table_is_that_of_the_results() -> None:
    data = json.loads(verify_printed.RESULTS.read_text())
    assert verify_printed.PAGE.read_text() == verify_printed.page(data), (
        "run python tools/verify_printed.py table"
    )
    assert all(case["ok"] for case in data["cases"])
