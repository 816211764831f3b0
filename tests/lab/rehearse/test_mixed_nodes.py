"""Mixed nodes: our plan beside stock Megatron's best, the prediction, and equality of training.

Everywhere: an A100 and four RTX 4090, emulated.  On real machines the same test runs on the cluster
that MEGATRON_HETERO_CLUSTER names (docs/mixed-nodes.md):

    MEGATRON_HETERO_CLUSTER=cluster.yaml MEGATRON_HETERO_MODEL=gpt.sh \\
        pytest -m gpu tests/lab/rehearse/test_mixed_nodes.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.profile import Profile, load_profile
from megatron_hetero.lab.rehearse.run import RehearsalOptions, rehearse
from megatron_hetero.lab.verify.options import Options as VerifyOptions
from megatron_hetero.lab.verify.run import outcome_to_data, verify
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner import plan_cluster
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.stock.search import best_stock_plan
from megatron_hetero.schedule.simulator.step import simulate_plan
from megatron_hetero.schedule.stock import is_stock

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/a100-rtx4090"
_VARIABLES = ("MEGATRON_HETERO_CLUSTER", "MEGATRON_HETERO_MODEL")
_TRAINED_STEPS = 20
_MOST_ERROR = {"emulated": 0.08, "real": 0.15}


@dataclass(frozen=True)
class Nodes:
    """Place where plans run: on emulated or on real machines."""

    kind: str
    cluster: Cluster
    workload: Workload
    profile: Profile | None
    step_time_s: Callable[[Plan, Path], float]
    """Runs a plan; seconds of a step."""


def emulated() -> Nodes:
    cluster = load_cluster(EXAMPLE / "cluster.yaml")
    workload = load_workload(EXAMPLE / "gpt-7b.sh", ("--global-batch-size=8",))

    def rehearsed(plan: Plan, folder: Path) -> float:
        return rehearse(plan, cluster, None, RehearsalOptions(steps=1), folder).step_time_s

    return Nodes("emulated", cluster, workload, None, rehearsed)


def real() -> Nodes:
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not set: no real mixed nodes")
    cluster, model = (Path(os.environ[name]).resolve() for name in _VARIABLES)
    profile = os.environ.get("MEGATRON_HETERO_PROFILE")
    return Nodes(
        "real",
        load_cluster(cluster),
        load_workload(model),
        load_profile(Path(profile)) if profile else None,
        trained_over_ssh,
    )


def trained_over_ssh(plan: Plan, folder: Path) -> float:
    """Some steps of training, started over ssh from here, in a folder that all nodes share."""
    shared = Path(os.environ.get("MEGATRON_HETERO_SHARED", folder)) / folder.name
    shared.mkdir(parents=True)
    save_plan(plan, shared / "plan.json")
    job = shared / "job"
    words = ["launch", str(shared / "plan.json"), "--for", "ssh", "-o", str(job), "--"]
    steps = [f"--train-iters={_TRAINED_STEPS}", "--log-interval=1", "--eval-iters=0"]
    launch = [sys.executable, "-m", "megatron_hetero", *words, *steps]
    subprocess.run(launch, check=True)
    subprocess.run(["bash", str(job / "start.sh")], check=True)
    (log,) = [p.read_text() for p in (job / "logs").glob(f"node-{len(plan.hosts) - 1}.log")]
    return logged_step_time_s(log)


def logged_step_time_s(log: str) -> float:
    """Median of the second half of the steps in Megatron's log."""
    found = re.findall(r"elapsed time per iteration \(ms\): ([0-9.]+)", log)
    assert found, "Megatron logged no step"
    return median(float(text) for text in found[len(found) // 2 :]) / 1000


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "nodes", [emulated, pytest.param(real, marks=[pytest.mark.gpu, pytest.mark.slow])]
)
def test_mixed_nodes_train_faster_than_stock_and_alike(
    nodes: Callable[[], Nodes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = nodes()
    if at.kind == "emulated":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    plan = plan_cluster(at.cluster, at.workload, profile=at.profile)
    stock = best_stock_plan(make_problem(at.cluster, at.workload, at.profile))
    assert stock is not None
    times_s = {}
    for name, candidate in (("ours", plan), ("stock", stock.plan)):
        times_s[name] = at.step_time_s(candidate, tmp_path / name)
        predicted = simulate_plan(candidate, at.cluster, profile=at.profile)
        error = predicted.step_time_s / times_s[name] - 1
        assert abs(error) < _MOST_ERROR[at.kind], (name, error)
    assert is_stock(stock.plan)
    if at.kind == "emulated":
        assert not is_stock(plan)
        assert times_s["stock"] > 1.05 * times_s["ours"]
    else:
        assert times_s["stock"] > 0.97 * times_s["ours"]
    small = replace(plan, estimates=None)
    outcome = verify(
        small, at.workload, VerifyOptions(steps=2, optimizers=("sgd",)), tmp_path / "one"
    )
    assert outcome.ok, outcome_to_data(outcome)


def test_steps_are_read_from_megatrons_log() -> None:
    line = (
        " iteration        {0}/       4 | elapsed time per iteration (ms): {1} | lm loss: 1.0E+01"
    )
    log = "\n".join(line.format(i, ms) for i, ms in enumerate(["900.0", "300.1", "250.0", "254.0"]))
    assert logged_step_time_s(log) == pytest.approx(0.252)
