"""The comparison of strategies on one small setting, and the published ones can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.model.load import load_workload
from tools.compare_strategies import PAPER, SETTINGS, STRATEGIES, compare, lines

CLUSTER = """
version: 1
nodes:
  - {name: a, gpu: A100-80GB, count: 1}
  - {name: r, gpu: RTX-4090, count: 2}
links:
  inside_node:
    RTX-4090: {bandwidth: 20 GB/s, latency: 10 us}
  between_nodes: {bandwidth: 10 Gb/s, latency: 30 us}
"""


def test_a_small_setting(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    flags = (SETTINGS / "setting-1-7b" / "model.flags").read_text()
    flags = flags.replace("--num-layers 32", "--num-layers 6").replace(" 240", " 12")
    (tmp_path / "model.flags").write_text(flags)
    result = compare(tmp_path)
    assert list(result["strategies"]) == list(STRATEGIES)
    ours, even = result["strategies"]["ours"], result["strategies"]["symmetric, even layers"]
    assert result["ours_over_even"] == pytest.approx(even["simulated_s"] / ours["simulated_s"])
    assert result["ours_over_even"] > 1
    assert ours["predicted_s"] <= even["predicted_s"]
    text = "\n".join(lines(result))
    assert f"{result['ours_over_hexiscale']:.2f}x" in text
    assert f"{PAPER[0]}x to {PAPER[1]}x" in text


def test_a_strategy_without_a_plan_is_said(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER.replace("A100-80GB", "RTX-4090"))
    (tmp_path / "model.flags").write_text((SETTINGS / "setting-1-7b" / "model.flags").read_text())
    result = compare(tmp_path)
    assert set(result["strategies"].values()) == {None}
    assert result["ours_over_even"] is None
    assert "no plan fits" in "\n".join(lines(result))


def test_the_published_settings_can_be_read() -> None:
    sizes = {
        folder.name: len(load_cluster(folder / "cluster.yaml").devices)
        for folder in SETTINGS.iterdir()
    }
    assert sizes == {
        "case-study-13b": 8,
        "setting-1-7b": 40,
        "setting-1-13b": 40,
        "setting-3-30b": 56,
    }
    assert all(load_workload(folder / "model.flags") for folder in SETTINGS.iterdir())
