"""A job on an asymmetric plan: shares of the optimizer, and scripts that the plan cannot follow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training.training import destroy_global_state

from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.arguments import split_arguments
from megatron_hetero.runtime.job.asymmetric import AsymmetricJob
from megatron_hetero.runtime.job.flags_on_plan import optimizer_weights
from megatron_hetero.runtime.job.steps import job_of
from megatron_hetero.runtime.job.world import World
from megatron_hetero.runtime.megatron import straggler_port
from tests.runtime.test_refusals import LAYOUT, MODEL, refuse
from tests.runtime.workloads import plan


def never(*given: Any, **named: Any) -> None:
    """Megatron's function, which is not reached."""
    raise AssertionError("Megatron was asked")


def pretrained(**named: Any) -> None:
    job = AsymmetricJob(plan(LAYOUT), split_arguments(MODEL), World(0, 4))
    job.pretrain(never, SimpleNamespace(model=object()), never, None, never, **named)


def with_share(asked: Plan, share: int) -> Plan:
    first, *others = asked.replicas
    stage, *rest = first.stages
    own = replace(first, stages=(replace(stage, optimizer_share=share), *rest))
    return replace(asked, replicas=(own, *others))


def test_every_rank_of_a_stage_has_its_share() -> None:
    asked = plan("tp2:2,tp1:2 @4 | tp1:4 @2")
    assert optimizer_weights(asked) == [1, 1, 1, 1]
    assert optimizer_weights(with_share(asked, 3)) == [3, 3, 1, 1]


def test_a_script_may_not_say_what_the_plan_decides() -> None:
    with pytest.raises(UsageError, match="passes pg_collection, process_non_loss_data_func to"):
        pretrained(process_non_loss_data_func=never, pg_collection=1, store=None)


def test_a_model_that_the_plan_has_not_divided_is_refused() -> None:
    """Of a script that does not build it by `gpt_config_from_args`; where embeddings are is no
    matter of the script's."""
    with pytest.raises(UsageError, match="does not build its model with Megatron's gpt_config"):
        pretrained(get_embedding_ranks=never, get_position_embedding_ranks=never)


def test_unequal_shares_need_a_divided_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    save_plan(with_share(plan(LAYOUT), 3), tmp_path / "plan.json")
    message = refuse([*MODEL, f"--hetero-plan={tmp_path / 'plan.json'}"], UsageError)
    assert "Add the flag, or remove the shares" in message


def test_unlike_lengths_under_unlike_shares_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script asks for lengths of its own when the flags are parsed and checked already."""
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import parse_and_validate_args

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = [*MODEL, "--transformer-impl=local", "--moe-token-dispatcher-type=alltoall"]
    try:
        job = job_of([*flags, "--hetero-layout=tp1cp2(3:1):4 @6"])
        args = job.parse(parse_and_validate_args, args_defaults={})
        args.variable_seq_lengths = True
        with pytest.raises(UnsupportedError, match=r"args\.variable_seq_lengths does not go with"):
            job.configure(gpt_config_from_args, args)
    finally:
        backend.deactivate_cpu_backend()
        straggler_port.REPLACEMENT.revert()
        destroy_global_state()
