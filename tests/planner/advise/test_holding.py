"""The fewest GPUs of a type that hold a model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.cluster.limits import CHOICES, Limits
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.planner import plan_cluster
from megatron_hetero.planner.advise.holding import holdings
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.seeds.constructive import Constructive
from tests.cost.builders import FAST, GIB, OLD, make_cluster, make_workload

SMALL = replace(FAST, name="SMALL", memory_bytes=2 * GIB)
WORKLOAD = make_workload(num_layers=60, recompute="full")
AS_GIVEN = Limits(memory_reserve_bytes=0, as_given=CHOICES)


def test_the_fewest_gpus_hold_it_and_one_fewer_do_not() -> None:
    (found,) = holdings(WORKLOAD, [SMALL], AS_GIVEN)
    assert found.num_gpus is not None and found.num_gpus > 1
    assert found.fullest is not None and 0.5 < found.fullest <= 1
    for num_gpus in (found.num_gpus - 1, found.num_gpus):
        problem = make_problem(make_cluster(("a", SMALL, num_gpus), limits=AS_GIVEN), WORKLOAD)
        board = search(problem, None, [Constructive()])
        assert (board.best is not None) == (num_gpus == found.num_gpus)


def test_its_layout_is_a_plan_of_the_model() -> None:
    for found in holdings(WORKLOAD, [SMALL, FAST], AS_GIVEN):
        assert found.layout is not None
        assert found.layout.num_devices == found.num_gpus
        plan_from_layout(found.layout, WORKLOAD)


def test_what_plans_may_choose_needs_no_more_than_the_flags() -> None:
    free = Limits(memory_reserve_bytes=0)
    workload = make_workload(
        num_layers=60, seq_length=2048, global_batch_size=16, micro_batch_size=4
    )
    (found,) = holdings(workload, [SMALL], free)
    assert (found.micro_batch_size, found.recompute) == (1, "full")
    assert found.num_gpus is not None
    assert found.num_gpus_as_given is None or found.num_gpus < found.num_gpus_as_given
    plan_cluster(make_cluster(("a", SMALL, found.num_gpus), limits=free), workload)


def test_types_that_cannot_train_are_left_out_and_none_is_said() -> None:
    assert holdings(make_workload(), [OLD]) == ()
    tiny = replace(FAST, name="TINY", memory_bytes=GIB // 64)
    (found,) = holdings(make_workload(hidden_size=1024), [tiny], AS_GIVEN)
    assert found.num_gpus is None


JOB = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "8"),
    *("--seq-length", "128", "--max-position-embeddings", "256", "--vocab-size", "1000"),
    *("--global-batch-size", "16", "--micro-batch-size", "2", "--bf16"),
)


def test_the_command_needs_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--memory", *JOB]) == 0
    out = capsys.readouterr().out
    assert "A100-80GB" in out
    assert "Cannot train in bf16: " in out
    assert main(["plan", "--memory", "--json", *JOB]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {gpu["num_gpus"] for gpu in found["gpus"]} == {1}
    assert "T4" in found["cannot_train"]


def test_it_makes_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--memory", "-o", "plan.json", *JOB]) == 2
    assert "--memory makes no plan, so --output does not go with it" in capsys.readouterr().err
    assert main(["plan", *JOB]) == 2
    assert "--cluster CLUSTER.YAML is missing" in capsys.readouterr().err
