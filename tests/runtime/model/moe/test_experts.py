"""Mixture of experts on a plan: the routing losses in the log, and what is refused.

That training is equal, and checkpoints, are in `test_equality`, `test_checkpoint` and
`test_checkpoint_pairs`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.run import outcome_to_data, verify
from tests.runtime.flag_effects import EXPERTS as GIVEN_EXPERTS
from tests.runtime.flag_runs import plan_and_one
from tests.runtime.test_refusals import LAYOUT, MODEL, refuse
from tests.runtime.workloads import MIXTRAL_LIKE, plan, workload

EXPERTS = ["--num-experts=4", "--disable-bias-linear"]


def test_the_log_has_the_routing_losses_of_the_job(tmp_path: Path) -> None:
    """Unlike micro-batch counts, pipelines, and groups of unlike width."""
    asked = plan("tp2:3,tp1:1 @4 | tp1:2,tp2:2 @2")
    changes = {**MIXTRAL_LIKE, "num_query_groups": 24, "per_token_loss": True}
    options = Options(steps=2, optimizers=("adam",))
    outcome = verify(asked, workload(**changes), options, tmp_path)
    assert outcome.ok, outcome_to_data(outcome)
    reference = _routing_losses(tmp_path / "adam" / "reference")
    found = _routing_losses(tmp_path / "adam" / "plan")
    assert len(reference) == 1
    assert reference == found
    assert {name for name, _ in reference[0]} == {"load_balancing_loss", "z_loss"}


def test_tokens_go_to_unlike_numbers_of_experts_by_all_to_all(tmp_path: Path) -> None:
    """Two experts on one rank and one on the other two, there by Megatron's other dispatcher."""
    asked = plan("tp3ep3(2:1:1):2,tp1:2 @2 | tp2ep2:4 @2")
    given = replace(
        workload(**MIXTRAL_LIKE, global_batch_size=4),
        megatron_args=(
            "--moe-token-dispatcher-type", "alltoall", "--moe-expert-capacity-factor", "0.6",
        ),
    )  # fmt: skip
    outcome = verify(asked, given, Options(steps=2, optimizers=("sgd",)), tmp_path)
    assert outcome.ok, outcome_to_data(outcome)
    assert any("alltoall" in flag for flag in outcome.flags.kept)


def test_a_larger_micro_batch_counts_for_its_sequences_in_the_log(tmp_path: Path) -> None:
    """Losses of routing and of further tokens, where replicas have micro-batches of unlike size."""
    flags = [
        *GIVEN_EXPERTS, "--moe-router-load-balancing-type=seq_aux_loss", "--moe-z-loss-coeff=0.01",
        "--mtp-num-layers=1", "--position-embedding-type=rope", "--calculate-per-token-loss",
        "--global-batch-size=10",
    ]  # fmt: skip
    ours, one = plan_and_one(tmp_path, flags, "tp2:3,tp1:1 @4x2 | tp1:4 @2")
    for name in ("seq_load_balancing_loss", "z_loss", "mtp_1 loss", "lm loss"):
        found = ours.numbers(rf"{name}: (\S+) ")
        assert len(found) == 3, name
        assert found == pytest.approx(one.numbers(rf"{name}: (\S+) "), rel=3e-6), name


def _routing_losses(folder: Path) -> list[list[tuple[str, float]]]:
    """Return the routing losses of the first step, as printed (seven digits), by rank that
    prints."""
    found = []
    for log in sorted(folder.glob("rank-*.log")):
        lines = re.findall(r"iteration +1/.*", log.read_text())
        for line in lines:
            found.append(
                [(n, float(v)) for n, v in re.findall(r"(\w+_loss): ([\d.]+E[+-]\d+)", line)]
            )
    return found


@pytest.mark.parametrize(
    "flags",
    [
        ["--moe-latent-size=16"],
        ["--moe-router-load-balancing-type=global_aux_loss"],
        ["--moe-pad-expert-input-to-capacity", "--moe-expert-capacity-factor=1.0"],
    ],
    ids=lambda flags: flags[0],
)
def test_what_experts_cannot_do_yet(flags: list[str], world_of_four: None) -> None:
    argv = [*MODEL, *EXPERTS, "--sequence-parallel", *flags, f"--hetero-layout={LAYOUT}"]
    assert flags[0].partition("=")[0] in refuse(argv, UnsupportedError)


def test_a_loss_within_micro_batches_needs_one_size(world_of_four: None) -> None:
    layout = "tp2:3,tp1:1 @4x2 | tp1:4 @2"
    argv = [*MODEL, *EXPERTS, "--sequence-parallel", "--calculate-per-token-loss"]
    argv += [f"--hetero-layout={layout}", "--global-batch-size=10"]
    assert "seq_aux_loss" in refuse(argv, UnsupportedError)


def test_a_group_needs_sequence_parallelism(world_of_four: None) -> None:
    argv = [*MODEL, *EXPERTS, f"--hetero-layout={LAYOUT}"]
    assert "without --sequence-parallel" in refuse(argv, UnsupportedError)


@pytest.fixture
def world_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
