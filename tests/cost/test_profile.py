from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.cost.compute import PassTimes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.profile import load_profile, profile_json_schema
from megatron_hetero.errors import ProfileError
from tests.cost.builders import FAST, make_cluster, make_workload


def point(**changes: Any) -> dict[str, Any]:
    return {
        "gpu": "FAST",
        "precision": "bf16",
        "tensor_parallel": 1,
        "micro_batch_size": 1,
        "piece": "decoder_layer",
        "shape": {
            "hidden_size": 512,
            "ffn_hidden_size": 2048,
            "num_attention_heads": 8,
            "num_query_groups": 8,
            "seq_length": 256,
            "vocab_size": 1000,
        },
        "forward_s": 1.0,
        "backward_s": 2.0,
    } | changes


def write(path: Path, *points: dict[str, Any]) -> Path:
    data = {"version": 1, "provenance": {"machine": "made up"}, "points": list(points)}
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_measured_times_replace_the_analytic_ones(tmp_path: Path) -> None:
    pieces = [
        point(piece=piece, forward_s=forward_s)
        for piece, forward_s in (("embedding", 0.1), ("decoder_layer", 1.0), ("head", 0.3))
    ]
    profile = load_profile(write(tmp_path / "profile.json", *pieces))
    cluster, workload = make_cluster(("a", FAST, 1)), make_workload()
    found = CostModel(cluster, workload, profile).pieces(cluster.nodes[0], 1, 1024)
    assert found.measured
    assert found.stage(4, True, True).forward_s == pytest.approx(4.4)
    assert found.stage(4, True, True).backward_s == pytest.approx(12)
    partial = load_profile(write(tmp_path / "profile.json", pieces[1]))
    assert not CostModel(cluster, workload, partial).pieces(cluster.nodes[0], 1, 1024).measured


def test_between_measured_sizes_times_are_interpolated_and_outside_unknown(tmp_path: Path) -> None:
    points = [point(micro_batch_size=2), point(micro_batch_size=4, forward_s=3.0, backward_s=8.0)]
    profile = load_profile(write(tmp_path / "profile.json", *points))

    def times(size: int) -> PassTimes | None:
        return profile.times(make_workload(micro_batch_size=size), "FAST", 1, "decoder_layer")

    assert times(2) == PassTimes(1.0, 2.0)
    assert times(3) == PassTimes(2.0, 5.0)
    assert times(1) is None and times(5) is None
    assert profile.times(make_workload(hidden_size=1024), "FAST", 1, "decoder_layer") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward_s": -1.0}, "forward_s"),
        ({"piece": "dropout"}, "piece"),
        ({"gpus": "FAST"}, "gpus"),
    ],
)
def test_impossible_points_are_refused_with_their_place(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProfileError, match=message):
        load_profile(write(tmp_path / "profile.json", point(**changes)))


def test_a_point_measured_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"points\[1\] repeats"):
        load_profile(write(tmp_path / "profile.json", point(), point()))


def test_the_schema_names_the_points() -> None:
    assert "points" in profile_json_schema()["properties"]  # type: ignore[operator]
