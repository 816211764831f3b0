"""The tools about large clusters and equal bytes, on a small share of what they are for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from random import Random

import pytest

from megatron_hetero.cluster.file.description import cluster_hash, load_cluster
from megatron_hetero.plan.file import load_plan
from tools import prove_planner
from tools.bench.jobs import ROOT
from tools.bench.search.plan import _FUNCTIONS, PARTS, bench
from tools.bench.search.scale import run_once
from tools.prove_determinism import EXAMPLE, permuted, plan_bytes, yaml_text
from tools.scale_clusters import cluster_data, write_case


def test_a_small_size_is_planned_and_measured(tmp_path: Path) -> None:
    cluster, flags = write_case(24, tmp_path)
    small = flags.read_text().replace("num-layers 40", "num-layers 4")
    flags.write_text(small.replace("batch-size 64", "batch-size 8"))
    plan_path = tmp_path / "plan.json"
    result = run_once(cluster, flags, plan_path)
    plan = load_plan(plan_path)
    assert plan.estimates is not None
    assert result["step_time_s"] == plan.estimates.step_time_s
    assert result["num_replicas"] == len(plan.replicas)
    assert 0 < result["search_s"] <= result["cpu_s"]


def test_every_timed_function_is_there() -> None:
    for names in _FUNCTIONS.values():
        for name in names:
            module, _, function = name.rpartition(".")
            assert callable(getattr(import_module(f"megatron_hetero.{module}"), function))


@pytest.mark.slow
def test_the_parts_of_a_command_are_all_of_it(tmp_path: Path) -> None:
    (run,), (again,) = bench(3, [ROOT, ROOT], 1, tmp_path)
    assert run.plan == again.plan
    assert set(run.parts) <= set(PARTS)
    assert sum(run.parts.values()) == pytest.approx(run.cpu_s)
    assert all(seconds >= 0 for seconds in run.parts.values())


def test_ten_thousand_gpus_are_read_in_classes(tmp_path: Path) -> None:
    cluster = load_cluster(write_case(10_240, tmp_path)[0])
    assert len(cluster.devices) == 10_240
    assert len({node.site for node in cluster.nodes}) == 100
    assert len({node.gpu_type.name for node in cluster.nodes}) == 6
    # Each ordered pair of sites once, and a site with itself.
    assert len(cluster.link_summary.usual) == 100 * 100
    assert not cluster.link_summary.others


def test_orders_of_a_file_do_not_count(tmp_path: Path) -> None:
    data, path = cluster_data(5_120), tmp_path / "cluster.yaml"
    hashes = set()
    for seed in range(2):
        path.write_text(yaml_text(permuted(data, Random(seed))))
        hashes.add(cluster_hash(load_cluster(path)))
    assert len(hashes) == 1


def test_permutations_and_hash_seeds_give_equal_bytes(tmp_path: Path) -> None:
    cluster = EXAMPLE.parent.parent.parent / "examples" / "a100-rtx4090"
    model = tmp_path / "model.flags"
    flags = (EXAMPLE / "model.flags").read_text().replace("num-layers 32", "num-layers 6")
    model.write_text(flags.replace("batch-size 240", "batch-size 6"))
    # All strategies: `test_search.test_the_hash_seed_does_not_count`.
    files = {
        plan_bytes(cluster / "cluster.yaml", model, seed, tmp_path, "columns") for seed in (1, 2)
    }
    assert len(files) == 1


def test_every_property_to_prove_is_a_test() -> None:
    folder = Path(__file__).parent
    tests = "".join((folder / name).read_text() for name in prove_planner.FILES)
    for name in prove_planner.PROPERTIES:
        assert f"def {name}(" in tests
