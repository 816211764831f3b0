"""Flags, refusals and faults of a job with `--hetero-sequences`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer.enums import AttnBackend

from megatron_hetero.errors import (
    FileFormatError,
    HeteroError,
    InfeasiblePlanError,
    UnsupportedError,
)
from megatron_hetero.runtime.job.arguments import split_arguments
from megatron_hetero.runtime.job.checks.support import refuse
from megatron_hetero.runtime.job.local_launch import RankFailedError, run_jobs
from megatron_hetero.runtime.job.steps import job_of
from megatron_hetero.runtime.sequences import steps
from megatron_hetero.runtime.sequences.checks import REFUSED
from megatron_hetero.runtime.sequences.job import sequences_plan
from megatron_hetero.sequences.cluster_groups import cluster_groups
from megatron_hetero.sequences.deal.dealt import Deal
from megatron_hetero.sequences.price.modelled import TRAINED
from megatron_hetero.sequences.step_tokens import check_step
from tests.cost.builders import FAST, make_cluster
from tests.runtime.sequences.flexible_runs import (
    SMALL,
    flexible_job,
    random_step,
    write_cluster,
    write_documents,
)
from tests.sequences.test_modelled import job

FLEXIBLE = "--hetero-sequences=flexible"
ACCEPTED: dict[str, Any] = {
    "transformer_impl": "local", "attention_backend": AttnBackend.auto, "spec": None,
    "multi_latent_attention": False,
    "num_experts": None, "mtp_num_layers": None, "window_size": None,
    "position_embedding_type": "rope", "sft": False, "dataloader_inter_document_masking": False,
    "reset_attention_mask": False, "reset_position_ids": False, "mock_data": False,
    "fim_data": False, "dataloader_fast_cache_load": False, "full_validation": False,
    "multiple_validation_sets": False, "step_batch_size_schedule": None,
    "phase_transition_iterations": None, "fp8": None, "recompute_granularity": None,
    "recompute_modules": None,
}  # fmt: skip
"""Parsed arguments that a job can follow."""
OTHERS: dict[str, Any] = {
    "transformer_impl": "transformer_engine", "attention_backend": AttnBackend.unfused,
    "spec": ["m", "f"], "multi_latent_attention": True,
    "num_experts": 8, "mtp_num_layers": 1, "window_size": (7, 0),
    "position_embedding_type": "yarn", "sft": True, "reset_position_ids": True, "mock_data": True,
    "fim_data": True, "dataloader_fast_cache_load": True, "full_validation": True,
    "step_batch_size_schedule": "0:8", "phase_transition_iterations": [4], "fp8": "hybrid",
}  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    return write_cluster(tmp_path / "cluster.yaml", a=("FAST", 2))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_covered_is_refused_by_name(name: str) -> None:
    refuse(REFUSED, SimpleNamespace(**ACCEPTED), "-")
    asked = SimpleNamespace(**{**ACCEPTED, name: OTHERS[name]})
    with pytest.raises(UnsupportedError, match="--" + name.replace("_", "-").split("-val")[0]):
        refuse(REFUSED, asked, "-")


def test_every_refusal_has_a_case() -> None:
    # The last rule, of what is recomputed, has two arguments.
    assert len(OTHERS) == len(REFUSED) - 1
    asked = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    refuse(REFUSED, SimpleNamespace(**{**ACCEPTED, **asked}), "-")
    asked["recompute_modules"] = ["core_attn", "mlp"]
    with pytest.raises(UnsupportedError, match="recompute core_attn alone"):
        refuse(REFUSED, SimpleNamespace(**{**ACCEPTED, **asked}), "-")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([FLEXIBLE, "CLUSTER", "--hetero-layout=tp1:1,tp1:1 @6"], "--global-batch-size 8"),
        ([FLEXIBLE, "CLUSTER", "--hetero-layout=tp1cp2:2 @8"], r"context parallelism \(cp\)"),
        ([FLEXIBLE, "CLUSTER", "--hetero-layout=tp1:2 @8"], "takes 1 GPUs"),
        (["--hetero-cluster=c.yaml"], "--hetero-cluster is for --hetero-sequences"),
        (["--hetero-profile=c.json"], "--hetero-profile is for --hetero-sequences"),
        ([FLEXIBLE], "--hetero-sequences needs --hetero-cluster FILE"),
        ([FLEXIBLE, "CLUSTER", "--micro-batch-size=2"], "--micro-batch-size 2: with --hetero-seq"),
        ([FLEXIBLE, "CLUSTER", "--dataloader-type=cyclic"], "--dataloader-type cyclic"),
        ([FLEXIBLE, "CLUSTER", "--tensor-model-parallel-size=2"], "tensor-model-parallel-size"),
        ([FLEXIBLE, "CLUSTER", "--context-parallel-size=2"], "context-parallel-size"),
        ([FLEXIBLE, "CLUSTER", "--pipeline-model-parallel-size=2"], "pipeline-model-parallel-si"),
        ([FLEXIBLE, "CLUSTER", "--global-batch-size=1"], "--global-batch-size 1"),
        ([FLEXIBLE, "CLUSTER", "--hetero-timeline=t.json"], "--hetero-timeline does not go"),
        ([FLEXIBLE, "CLUSTER", "--hetero-on-loss=replan"], "replan does not go"),
    ],
)
def test_flags_that_contradict_each_other(
    flags: Sequence[str], message: str, cluster: Path
) -> None:
    given = [f"--hetero-cluster={cluster}" if f == "CLUSTER" else f for f in flags]
    with pytest.raises(HeteroError, match=message):
        job_of([*SMALL, "--global-batch-size=8", *given])


def test_a_script_of_the_users_own_is_refused(cluster: Path) -> None:
    with pytest.raises(UnsupportedError, match="a script's own batches are of one length"):
        job_of([*SMALL, FLEXIBLE, f"--hetero-cluster={cluster}"], of_a_script=True)


def test_every_gpu_is_a_rank(cluster: Path) -> None:
    flags = [*SMALL, FLEXIBLE, f"--hetero-cluster={cluster}", "--global-batch-size=5"]
    plan = sequences_plan(split_arguments(flags))
    assert str(plan.layout) == "tp1:2 @3x1 | tp1:2 @2x1"
    with pytest.raises(FileFormatError, match=r"yaml\.none: cannot be read"):
        sequences_plan(split_arguments([*flags, f"--hetero-cluster={cluster}.none"]))


def test_a_search_that_fails_gives_way_to_the_greedy_deal(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = cluster_groups(make_cluster(("a", FAST, 4)), job(), exchanges=TRAINED).tree
    documents: Any = [{"tokens": range(n), "name": f"d{n}"} for n in (9000, 400, 30, 1)]

    def broken(*given: Any) -> Deal:
        raise ValueError("no solver")

    found, note = steps.dealt_tokens(tree, documents)
    assert note == ""
    monkeypatch.setattr(steps, "deal_batch", broken)
    greedy, note = steps.dealt_tokens(tree, documents)
    assert note == "dealt greedily, the search failed: ValueError: no solver"
    for step in (found, greedy):
        check_step(step, [9000, 400, 30, 1], 4)


def test_a_document_longer_than_the_positions_ends_the_job_before_its_first_step(
    cluster: Path, tmp_path: Path
) -> None:
    write_documents(tmp_path / "text", (4, 300, 5))
    flags = [f"--data-path={tmp_path / 'text'}", "--global-batch-size=2"]
    with pytest.raises(RankFailedError, match=r"document 1 of .*text has 300 tokens") as ended:
        run_jobs([flexible_job(tmp_path / "ours", cluster, 2, flags)], 60)
    assert ended.value.exit_code == InfeasiblePlanError.exit_code


@pytest.mark.slow
def test_a_step_that_cannot_be_dealt_ends_all_ranks_alike(cluster: Path, tmp_path: Path) -> None:
    write_documents(tmp_path / "text", (4, 7, 5))

    def begin(rank: int) -> None:
        calls: list[int] = []

        def deal(tree: Any, documents: steps.Documents) -> steps.Dealt:
            calls.append(rank)
            if len(calls) == 2:
                raise InfeasiblePlanError("nobody can hold it")
            return random_step(tree, documents, random.Random(1)), ""

        steps.dealt_tokens = deal

    flags = [f"--data-path={tmp_path / 'text'}", "--global-batch-size=2"]
    made = flexible_job(tmp_path / "ours", cluster, 2, flags, begin)
    with pytest.raises(RankFailedError) as ended:
        run_jobs([made], 60)
    assert ended.value.exit_code == InfeasiblePlanError.exit_code
    for rank in range(2):
        log = (made.directory / f"rank-{rank}.log").read_text()
        assert "nobody can hold it" in log
