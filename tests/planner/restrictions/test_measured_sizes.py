from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.choices import micro_batch_sizes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.work.profile import Profile, load_profile
from megatron_hetero.errors import UsageError
from megatron_hetero.planner.restrictions.measured_sizes import (
    far_off_words,
    held_to_measured_sizes,
    unmeasured_words,
)
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload
from tests.cost.work.test_profile import point, write


def free_cluster(*nodes: tuple[str, GpuType, int]) -> Cluster:
    """A cluster whose plans may choose their micro-batch size."""
    return replace(make_cluster(*nodes), limits=Limits())


def profile_of(tmp_path: Path, **sizes: tuple[int, ...]) -> Profile:
    points = [
        point(gpu=gpu, micro_batch_size=size, forward_s=float(size))
        for gpu, known in sizes.items()
        for size in known
    ]
    return load_profile(write(tmp_path / "profile.json", *points))


def test_a_type_with_one_measured_size_keeps_plans_to_it(tmp_path: Path) -> None:
    cluster, workload = free_cluster(("a", FAST, 2), ("b", SLOW, 2)), make_workload()
    profile = profile_of(tmp_path, FAST=(1, 2), SLOW=(1,))
    held = held_to_measured_sizes(cluster, workload, profile)
    assert len(micro_batch_sizes(CostModel(cluster, workload, profile))) > 1
    assert micro_batch_sizes(CostModel(held.cluster, workload, profile)) == (1,)
    assert "SLOW" in held.words and "FAST" not in held.words


def test_two_sizes_of_all_types_or_none_leave_the_choice(tmp_path: Path) -> None:
    cluster, workload = free_cluster(("a", FAST, 2), ("b", SLOW, 2)), make_workload()
    for profile in (profile_of(tmp_path, FAST=(1, 2)), profile_of(tmp_path, OTHER=(1,)), None):
        assert held_to_measured_sizes(cluster, workload, profile) == (cluster, "")


def test_a_size_that_is_not_the_jobs_is_refused(tmp_path: Path) -> None:
    cluster, workload = free_cluster(("a", FAST, 2)), make_workload()
    with pytest.raises(UsageError, match=r"--micro-batch-size 1, .* only size 4 of FAST"):
        held_to_measured_sizes(cluster, workload, profile_of(tmp_path, FAST=(4,)))


@pytest.mark.parametrize(("times", "is_far"), [(1.0, False), (1e3, True), (1e-6, True)])
def test_times_in_another_unit_are_named(times: float, is_far: bool, tmp_path: Path) -> None:
    cluster, workload = make_cluster(("a", FAST, 1), ("b", SLOW, 1)), make_workload()
    layer = CostModel(cluster, workload).pieces(cluster.nodes[0], 1, 1000).layer
    seconds = {"forward_s": times * layer.forward_s, "backward_s": times * layer.backward_s}
    profile = load_profile(write(tmp_path / "p.json", point() | seconds))
    words = far_off_words(cluster, workload, profile)
    assert ("FAST" in words and "seconds" in words) is is_far
    assert "SLOW" not in words and far_off_words(cluster, workload, None) == ""


def test_a_profile_of_another_card_precision_or_model_is_named(tmp_path: Path) -> None:
    cluster, workload = make_cluster(("a", FAST, 1), ("b", SLOW, 1)), make_workload()
    both = [point(), point(gpu="SLOW")]

    def said(*points: dict[str, object]) -> str:
        profile = load_profile(write(tmp_path / "p.json", *points))
        return unmeasured_words(cluster, workload, profile)

    assert unmeasured_words(cluster, workload, None) == said(*both) == ""
    assert "in bf16 of SLOW (it has FAST): the catalogue prices it" in said(point())
    assert "of SLOW (it has its layers in fp32):" in said(point(), both[1] | {"precision": "fp32"})
    other = both[1] | {"shape": point()["shape"] | {"hidden_size": 1024}}
    assert "of SLOW (it has layers of another model):" in said(point(), other)
    # Sizes of the head alone are no layer.
    assert "FAST (it has none), SLOW (it has none)" in said(
        *(one | {"piece": "head"} for one in both)
    )


def test_plan_compares_one_measured_size_unless_asked(tmp_path: Path, capsys) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        "version: 1\nnodes:\n- name: a\n  link: {bandwidth: 12 GB/s, latency: 15 us}\n"
        "  gpus: [{type: RTX-3090, count: 2}]\n"
    )
    job = tmp_path / "job.flags"
    job.write_text(
        "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 256\n"
        "--max-position-embeddings 256 --vocab-size 1000 --calculate-per-token-loss\n"
        "--micro-batch-size 1 --global-batch-size 16\n"
    )
    measured = [
        point(gpu="RTX-3090", piece=piece, forward_s=1e-3, backward_s=2e-3)
        for piece in ("embedding", "decoder_layer", "head")
    ]
    write(tmp_path / "profile.json", *measured)
    sizes = {}
    for asked in ([], ["--scale-profile"]):
        profile = ["--profile", str(tmp_path / "profile.json"), *asked]
        assert (
            main(["plan", "--cluster", str(cluster), "--model", str(job), *profile, "--json"]) == 0
        )
        found = json.loads(capsys.readouterr().out)
        # The job names no precision: the profile is asked in the one that the plan has.
        assert not any("no layer of this model" in note for note in found["notes"])
        sizes[len(asked)] = any("Only micro-batch size 1" in note for note in found["notes"])
    assert sizes == {0: True, 1: False}
