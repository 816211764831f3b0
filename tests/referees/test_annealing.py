"""Annealing over whole plans: as good as brute force on three GPUs, and what it finds is a plan;
clusters drawn from a hash: the same again, others for another hash, and all feasible."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner import plan_cluster
from megatron_hetero.planner.problem import make_problem
from tests.planner.naive import best_step_time_s
from tests.planner.strategies import clusters, workloads
from tools.bench.search.annealing import fitting_jobs, problem_of, result_of
from tools.drawn_clusters import MAX_GPUS, DrawnJob
from tools.referees.annealing.run import Annealing

JOBS = list(islice(fitting_jobs("a hash"), 8))
SMALL = DrawnJob(
    "desktops",
    {
        "version": 1,
        "nodes": [
            {"name": "a", "gpu": "RTX-4090", "count": 2},
            {"name": "b", "gpu": "RTX-3090", "count": 1},
        ],
        "links": {
            "inside_node": {"RTX-4090": {"bandwidth": "20 GB/s", "latency": "10 us"}},
            "between_nodes": {"bandwidth": "10 Gb/s", "latency": "50 us"},
        },
    },
    "355M",
    (
        *("--num-layers=12", "--hidden-size=1024", "--num-attention-heads=16", "--bf16"),
        *("--seq-length=1024", "--max-position-embeddings=1024", "--vocab-size=50257"),
        *("--micro-batch-size=1", "--global-batch-size=16", "--lr=1e-4"),
    ),
)


@settings(max_examples=10, deadline=None)
@given(clusters(max_gpus=3), workloads(max_layers=3, max_micro_batches=3))
def test_three_gpus_are_annealed_to_the_best_of_brute_force(
    cluster: Cluster, workload: Workload
) -> None:
    expected_s = best_step_time_s(cluster, workload)
    problem = make_problem(cluster, workload)
    annealing = Annealing(problem, 1, max_plans=1_000)
    found = annealing.run()
    if expected_s is None or found is None:
        assert expected_s is None and found is None
        return
    alone_s = [problem.costs.placement(kept).step_time_s for _, kept in annealing.kept.values()]
    assert min(alone_s) <= expected_s * (1 + 1e-9)
    assert min(alone_s) <= found.step_time_s * (1 + 1e-9)


@given(st.sampled_from([SMALL, *JOBS[:2]]), st.integers(0, 99))
@settings(max_examples=4, deadline=None)
def test_what_it_finds_uses_each_gpu_once_and_the_whole_batch(job: DrawnJob, seed: int) -> None:
    problem = problem_of(job)
    found = Annealing(problem, seed, max_plans=150).run()
    assert found is not None
    placement, training = found.placement, problem.workload.training
    devices = list(placement.devices())
    assert len(set(devices)) == len(devices)
    own = training.micro_batch_size
    sequences = sum(r.num_micro_batches * (r.micro_batch_size or own) for r in placement.replicas)
    assert sequences == training.global_batch_size
    for replica in placement.replicas:
        assert sum(stage.num_layers for stage in replica.stages) == problem.num_layers
    assert problem.costs.placement(placement).missing_bytes <= 0


def test_annealing_is_the_same_again_and_never_worse_than_its_start() -> None:
    cluster, workload = SMALL.load()
    plan = plan_cluster(cluster, workload, bounded=False)
    assert plan.estimates is not None
    start = placement_of(plan, cluster)
    one, other = (Annealing(problem_of(SMALL), 3, max_plans=200).run(start) for _ in range(2))
    assert one is not None and other is not None
    assert (one.placement, one.step_time_s) == (other.placement, other.step_time_s)
    assert one.step_time_s <= plan.estimates.step_time_s * (1 + 1e-9)


def test_a_hash_has_its_own_clusters_and_a_plan_fits_each() -> None:
    assert list(islice(fitting_jobs("a hash"), 8)) == JOBS
    others = list(islice(fitting_jobs("another hash"), 8))
    assert not any(job in JOBS for job in others)
    for job in JOBS:
        problem = problem_of(job)
        assert 2 <= problem.num_gpus <= MAX_GPUS
        assert 2 <= len({node.gpu_type.name for node in problem.nodes}) <= 4
        assert Annealing(problem, 7).first() is not None


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    path, limits = tmp_path / "row.json", {"plans": 50, "seconds": 60.0}
    row: dict[str, object] = {}
    result_of(SMALL, limits, row, path)
    before = dict(row)
    del row["ours"]
    result_of(SMALL, limits, row, path)
    kept = {key: row[key] for key in ("plan", "our_step_s", "scratch")}
    assert kept == {key: before[key] for key in kept}
    assert path.exists() and row["ours"]
