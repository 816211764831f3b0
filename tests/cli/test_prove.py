"""`plan --prove`: a lower bound that is proved further."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.bounds.effort import PROOF
from megatron_hetero.bounds.estimate import may_be_proved_further
from megatron_hetero.bounds.free_groups import FREE_GROUPS_RELAX
from megatron_hetero.bounds.step_time import WORK_BOUND_RELAXES
from megatron_hetero.cli.main import main
from megatron_hetero.plan.file import load_plan
from tests.cli.example import CLUSTER, MODEL, PLAN

ROOT = Path(__file__).resolve().parents[2]
MANY = """\
version: 1
nodes:
"""
LINKS = """\
links:
  inside_node:
    H100-80GB: {bandwidth: 400 GB/s, latency: 3 us}
    L40S: {bandwidth: 25 GB/s, latency: 12 us}
  between_nodes: {bandwidth: 200 Gb/s, latency: 8 us}
"""
JOB = ["--", "--num-layers", "16", "--global-batch-size", "272"]


def bound_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main([*words[:1], "--json", *words[1:]]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_many_gpus_are_bounded_by_more_than_their_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Already by a part of the proof."""
    effort = replace(PROOF, max_work=10**9)
    monkeypatch.setattr("megatron_hetero.planner.answer.planned.PROOF", effort)
    cluster = tmp_path / "many.yaml"
    types = ["H100-80GB"] * 8 + ["L40S"] * 9
    nodes = [f"  - {{name: n{i}, gpu: {gpu}, count: 8}}\n" for i, gpu in enumerate(types)]
    cluster.write_text(MANY + "".join(nodes) + LINKS)
    words = ["plan", "--cluster", str(cluster), "--model", MODEL, "--strategy", "symmetric"]
    by_work = bound_of([*words, *JOB], capsys)
    proved = bound_of([*words, "--prove", *JOB], capsys)
    assert proved["layout"] == by_work["layout"]
    assert "memory" in str(by_work["bound_relaxes"])
    assert "memory" not in str(proved["bound_relaxes"])
    assert float(str(proved["gap"])) < 0.9 * float(str(by_work["gap"]))


def test_an_interrupted_proof_leaves_what_is_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"

    def interrupted(*_: object, progress: Callable[[float], None], **__: object) -> None:
        progress(1e-9)
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_hetero.planner.answer.planned.step_time_bound", interrupted)
    assert main([*PLAN, "--prove", "-o", str(path)]) == 130
    assert "interrupted" in capsys.readouterr().err
    plan = load_plan(path)
    assert plan.estimates is not None and plan.estimates.bound_s is not None
    assert 0 < plan.estimates.bound_s <= plan.estimates.step_time_s
    assert plan.estimates.bound_relaxes == WORK_BOUND_RELAXES
    assert all("interrupted" not in reason for reason in plan.idle_reasons.values())


def test_a_longer_proof_is_advised_only_where_it_may_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bound of a plan that divides sequences is by work alone, whatever the effort."""
    monkeypatch.setattr("megatron_hetero.cli.plan_found._WIDE_GAP", -1.0)
    divided = ROOT / "examples/one-workstation"
    words = ["plan", "--cluster", str(divided / "cluster.yaml")]
    assert main([*words, "--model", str(divided / "llama-1.5b.flags")]) == 0
    printed = capsys.readouterr().out
    assert "cp2" in printed and "--strategy thorough" in printed and "--prove" not in printed
    assert main(PLAN) == 0
    assert "plan --prove takes up to a minute more" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("groups", "relaxes", "may"),
    [
        ((), WORK_BOUND_RELAXES, True),
        ((("a100-0",), ("rtx-0",)), WORK_BOUND_RELAXES, False),
        ((), FREE_GROUPS_RELAX, False),
    ],
)
def test_bounds_by_work_alone_are_not_proved_further(
    groups: tuple[tuple[str, ...], ...], relaxes: str, may: bool, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    assert main([*PLAN, "-o", str(path)]) == 0
    plan = load_plan(path)
    assert plan.estimates is not None
    estimates = replace(plan.estimates, bound_relaxes=relaxes)
    assert may_be_proved_further(replace(plan, estimates=estimates, exchange_groups=groups)) is may
    assert not may_be_proved_further(replace(plan, estimates=None))


@pytest.mark.parametrize(
    ("words", "other"),
    [
        (["--schedule", "best"], "--schedule best"),
        (["--strategy", "stock"], "--strategy stock"),
        (["--near", "old.json"], "--near"),
    ],
)
def test_what_does_not_go_with_it(
    words: list[str], other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, "--prove", *words]) == 2
    assert f"--prove does not go with {other} yet" in capsys.readouterr().err


def test_other_orders_are_not_searched_near_an_old_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "--cluster", CLUSTER, "--near", "old.json", "--schedule", "best"]
    assert main(words) == 2
    assert "--schedule best does not go with --near yet" in capsys.readouterr().err
