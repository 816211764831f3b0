from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.memory.libraries import CONTEXT_BYTES, communicators_bytes, num_channels
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.cost.work.profile import (
    MeasuredType,
    Profile,
    load_profile,
    profile_json_schema,
)
from megatron_hetero.errors import FileFormatError, ProfileError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.communication.communicators import CHANNELS_OF_MESSAGES
from tests.cost.builders import FAST, make_cluster, make_workload

UNLIKE_LAYERS = {
    "num_experts": 4,
    "moe_router_topk": 1,
    "moe_ffn_hidden_size": 512,
    "moe_layer_freq": (0, 1, 1, 1),
}


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


def write(path: Path, *points: dict[str, Any], **more: Any) -> Path:
    data = {"version": 1, "provenance": {"machine": "made up"}, "points": list(points)} | more
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


def test_between_measured_sizes_times_are_interpolated_outside_the_end_is_nearest(
    tmp_path: Path,
) -> None:
    points = [point(micro_batch_size=2), point(micro_batch_size=4, forward_s=3.0, backward_s=8.0)]
    profile = load_profile(write(tmp_path / "profile.json", *points))

    def near(size: int) -> tuple[int, PassTimes]:
        found = profile.nearest(make_workload(micro_batch_size=size), "FAST", 1, "decoder_layer")
        assert found is not None
        return found.micro_batch_size, found.times

    assert near(2) == (2, PassTimes(1.0, 2.0))
    assert near(3) == (3, PassTimes(2.0, 5.0))
    assert near(1) == (2, PassTimes(1.0, 2.0))
    assert near(5) == (4, PassTimes(3.0, 8.0))
    assert profile.nearest(make_workload(hidden_size=1024), "FAST", 1, "decoder_layer") is None
    assert profile.nearest(make_workload(precision="fp32"), "FAST", 1, "decoder_layer") is None


def test_the_nearest_point_has_the_nearest_width_then_the_same_recomputation(
    tmp_path: Path,
) -> None:
    points = [
        point(tensor_parallel=width, recompute=recompute)
        for width, recompute in ((1, "selective"), (4, "none"), (4, "full"), (8, "selective"))
    ]
    profile = load_profile(write(tmp_path / "profile.json", *points))

    def near(width: int, recompute: str) -> tuple[int, str]:
        found = profile.nearest(make_workload(recompute=recompute), "FAST", width, "decoder_layer")
        assert found is not None
        return found.width, found.recompute

    assert near(1, "none") == (1, "selective")
    assert near(4, "full") == (4, "full")
    assert near(4, "selective") == (4, "none")
    assert near(8, "full") == (8, "selective")


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


@pytest.mark.parametrize("value", [0.0, -1.0, 2.0, float("inf"), float("nan"), "53 us", True])
@pytest.mark.parametrize("name", MeasuredType.model_fields)
def test_impossible_figures_of_a_type_are_refused_by_name(
    tmp_path: Path, name: str, value: Any
) -> None:
    path = write(tmp_path / "profile.json", point(), gpus={"FAST": {name: value}})
    with pytest.raises((ProfileError, FileFormatError), match=rf"gpus\.FAST\.{name}"):
        load_profile(path)


def test_a_measured_launch_time_is_the_floor_of_a_pass(tmp_path: Path) -> None:
    """Where no point of the model says better, and unless cluster.yaml has a word of its own."""
    other = point(gpu="OTHER")
    path = write(tmp_path / "profile.json", other, gpus={"FAST": {"launch_s": 1e-3}})
    old, profile = load_profile(write(tmp_path / "old.json", other)), load_profile(path)
    asked = replace(FAST, launch_s=2e-3)

    def layer(gpu: GpuType, profile: Profile | None, workload: Workload) -> PassTimes:
        cluster = make_cluster(("a", gpu, 1))
        return CostModel(cluster, workload, profile).pieces(cluster.nodes[0], 1, 1024).layer

    for workload in (make_workload(), make_workload(**UNLIKE_LAYERS)):
        found = layer(asked, profile, workload)
        assert found == layer(replace(asked, launch_s=1e-3), None, workload)
        assert found.forward_s == pytest.approx(layer(asked, None, workload).forward_s / 2)
        assert layer(asked, old, workload) == layer(asked, None, workload)
        own = replace(asked, has_own_launch_time=True)
        assert layer(own, profile, workload) == layer(own, None, workload)


def test_measured_bytes_of_libraries_change_the_estimate_by_as_much(tmp_path: Path) -> None:
    figures = {"context_bytes": CONTEXT_BYTES - 7, "communicator_bytes": 10**6}
    path = write(tmp_path / "profile.json", point(gpu="OTHER"), gpus={"FAST": figures})
    cluster = make_cluster(("a", FAST, 2), limits=Limits())
    node = cluster.nodes[0]
    measured, usual = (
        CostModel(cluster, make_workload(), profile).memory(node, 1, True, False, 2, 1024)
        for profile in (load_profile(path), None)
    )
    # Three connections for the gradients and three for the job, of which two were measured, and of
    # messages one with few channels.
    of_messages = 10**6 // 2 * CHANNELS_OF_MESSAGES // num_channels(node)
    due = 6 * 10**6 // 2 + of_messages - communicators_bytes(node, 1, 1) - 7
    for num_layers in (0, 2):
        assert measured.peak_bytes(num_layers) - usual.peak_bytes(num_layers) == due
    assert measured.base["libraries"] - usual.base["libraries"] == due


@pytest.mark.parametrize("pass_", ["forward_s", "backward_s"])
def test_a_layer_that_takes_no_time_is_refused(pass_: str, tmp_path: Path) -> None:
    """It ended in a division by zero."""
    with pytest.raises(ProfileError, match=r"points\[0\] says .* takes 0 s on FAST"):
        load_profile(write(tmp_path / "p.json", point() | {pass_: 0.0}))


def test_a_point_measured_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"points\[1\] repeats"):
        load_profile(write(tmp_path / "profile.json", point(), point()))


def test_a_gpu_is_known_by_any_of_its_spellings(tmp_path: Path) -> None:
    """As in cluster.yaml: a profile written by hand has the driver's name of a card."""
    found = {
        load_profile(
            write(tmp_path / "p.json", point(gpu=name), gpus={name: {"launch_s": 1e-5}})
        ).gpus.get("RTX-3090")
        for name in ("RTX-3090", "NVIDIA GeForce RTX 3090", "rtx3090")
    }
    assert found == {MeasuredType(launch_s=1e-5)}
    spelled = write(tmp_path / "p.json", point(gpu="NVIDIA GeForce RTX 3090"))
    assert [key.gpu_name for key in load_profile(spelled).points] == ["RTX-3090"]
    twice = [point(gpu="RTX-3090"), point(gpu="rtx3090")]
    with pytest.raises(ProfileError, match="repeats a measurement"):
        load_profile(write(tmp_path / "p.json", *twice))
    gpus = {"RTX-3090": {"launch_s": 1e-5}, "rtx3090": {"launch_s": 2e-5}}
    with pytest.raises(ProfileError, match="gpus has a GPU twice"):
        load_profile(write(tmp_path / "p.json", point(), gpus=gpus))


def test_the_schema_names_the_points() -> None:
    assert "points" in profile_json_schema()["properties"]  # type: ignore[operator]
