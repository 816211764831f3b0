"""A job on an asymmetric plan: shares of the optimizer, and scripts that the plan cannot follow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_hetero.errors import UsageError
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.job.arguments import split_arguments
from megatron_hetero.runtime.job.asymmetric import AsymmetricJob, optimizer_weights
from megatron_hetero.runtime.job.world import World
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
