"""Argument vectors of plans: stock where it can be, refused where the user contradicts the plan."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.flags.emit import (
    is_stock,
    megatron_args,
    plan_arguments,
    render_bash,
)
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Layout, Plan, ReplicaShape, StageShape
from megatron_hetero.planner.evaluate.written import with_dispatcher
from tests.plan.edits import PLAN, with_replica, with_stage, with_training
from tests.plan.strategies import placed_plans, split, workload
from tests.runtime.workloads import MIXTRAL_LIKE
from tests.runtime.workloads import workload as runtime_workload

USER = workload().megatron_args
STOCK = "tp2:4,tp2:4 @8 | tp2:4,tp2:4 @8"
UNEVEN = "tp2:5,tp2:3 @8 | tp2:5,tp2:3 @8"
HETERO = "tp2:5,tp1:3 @12 | tp1:8 @4"


def plan_of(text: str, *more: str) -> Plan:
    load = workload()
    return plan_from_layout(
        parse_layout(text), replace(load, megatron_args=(*load.megatron_args, *more))
    )


def of_the_plan(plan: Plan, plan_path: str | None = None) -> list[str]:
    """Return the flags that the plan adds to the user's, one line of each."""
    argv = megatron_args(plan, plan_path)
    assert argv[: len(USER)] == USER
    return render_bash(argv[len(USER) :]).replace("    ", "").split("\n")[1:-1]


def test_a_stock_plan_comes_out_as_stock_flags() -> None:
    assert of_the_plan(plan_of(STOCK)) == [
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--use-tp-pp-dp-mapping",
    ]
    assert of_the_plan(plan_of("tp4:8 @16")) == [
        "--tensor-model-parallel-size 4",
        "--pipeline-model-parallel-size 1",
    ]


def test_uneven_stages_are_stock_through_the_layout() -> None:
    assert of_the_plan(plan_of(UNEVEN)) == [
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--pipeline-model-parallel-layout 'Et*5|t*3L'",
        "--use-tp-pp-dp-mapping",
    ]


def test_the_rest_is_one_hetero_flag() -> None:
    assert of_the_plan(plan_of(HETERO)) == ["--hetero-layout 'tp2:5,tp1:3 @12 | tp1:8 @4'"]
    assert of_the_plan(PLAN, "build/plan.json") == ["--hetero-plan build/plan.json"]
    assert of_the_plan(PLAN, "-odd") == ["--hetero-plan=-odd"]
    launch_count = with_stage(plan_of("tp1:4,tp1:4 @16"), 0, 0, num_launched_forwards=5)
    assert of_the_plan(launch_count, "plan.json") == ["--hetero-plan plan.json"]


def test_a_plan_with_devices_needs_its_file() -> None:
    with pytest.raises(UsageError, match="save it to a file and give its path"):
        megatron_args(PLAN)


def test_batch_flags_are_added_where_the_user_gave_none() -> None:
    load = replace(workload(), megatron_args=("--bf16",))
    plan = plan_from_layout(parse_layout(HETERO), load)
    assert megatron_args(plan)[:5] == (
        *("--bf16", "--micro-batch-size", "1"),
        *("--global-batch-size", "16"),
    )
    bare = plan_from_layout(parse_layout("tp2:4 @3x2 | tp2:4 @3x2"))
    assert shlex.join(megatron_args(bare)) == (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 "
        "--micro-batch-size 2 --global-batch-size 12"
    )
    unknown = plan_from_layout(parse_layout("tp2:4,tp1:4 @3"))
    assert megatron_args(unknown) == ("--hetero-layout", "tp2:4,tp1:4 @3")


def test_a_bare_stock_layout_needs_a_micro_batch_size() -> None:
    with pytest.raises(UsageError, match=r"write '@12xSIZE', or give .* --micro-batch-size"):
        megatron_args(plan_from_layout(parse_layout("tp2:4 @12 | tp2:4 @12")))


@pytest.mark.parametrize(
    ("layout", "flags", "says"),
    [
        (STOCK, "--tensor-model-parallel-size 4", "plan, which has tensor-parallel width 2"),
        (STOCK, "--pipeline-model-parallel-size 4", "which has pipeline depth 2"),
        (STOCK, "--pipeline-model-parallel-layout Et|tL", "which has equal stages"),
        (UNEVEN, "--pipeline-model-parallel-layout Et|tL", r"which has stages Et\*5\|t\*3L"),
        (STOCK, "--num-virtual-stages-per-pipeline-rank 2", r"no interleaved \(virtual\) stages"),
        (STOCK, "--num-layers-per-virtual-pipeline-stage 2", "no interleaved"),
        (STOCK, "--micro-batch-size 2", "--micro-batch-size 2 contradicts .* micro-batch size 1"),
        (STOCK, "--global-batch-size 32", "--global-batch-size 32 contradicts .* global batch 16"),
        (STOCK, "--context-parallel-size 2", "context-parallel size 1"),
        (STOCK, "--num-layers 9", "--num-layers 9 contradicts the plan, which has layers 8"),
        (STOCK, "--decoder-first-pipeline-num-layers 3", "its own layers for each stage"),
        (STOCK, "--account-for-loss-in-pipeline-split", "its own layers for each stage"),
        (HETERO, "--tensor-model-parallel-size 2", "which has tensor-parallel width 1, 2. Remove"),
        (HETERO, "--pipeline-model-parallel-size 2", "which has pipeline depth 1, 2"),
        (HETERO, "--pipeline-model-parallel-layout Et|tL", "its own layers for each stage"),
        (HETERO, "--use-tp-pp-dp-mapping", "its own order of ranks"),
        (HETERO, "--tensor-parallel-num-weight-shards 4", "no more shards of a weight, 1, 2"),
        (STOCK, "--expert-tensor-parallel-num-weight-shards 4", "tensor-parallel width of exper"),
        (HETERO, "--micro-batch-size 2", "micro-batch size 1"),
        (HETERO, "--global-batch-size 8", "global batch 16"),
        (HETERO, "--expert-model-parallel-size 2", "expert-parallel size 1"),
        (HETERO, "--nonsense", "--nonsense is not a flag of Megatron"),
        (HETERO, "--spec os system", "imports the module that it names, so a plan may not carry"),
        (STOCK, "--yaml-cfg other.yaml", "replaces all flags"),
    ],
)
def test_flags_that_contradict_the_plan_are_refused(layout: str, flags: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        megatron_args(plan_of(layout, *flags.split()))


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (STOCK, "--tensor-model-parallel-size 02 --use-tp-pp-dp-mapping"),
        (STOCK, "--context-parallel-size 1"),
        (UNEVEN, "--pipeline-model-parallel-layout Et*5|t*3L"),
        ("tp2:8 @16", "--use-tp-pp-dp-mapping"),
        ("tp2:5,tp2:3 @12 | tp2:5,tp2:3 @4", "--pipeline-model-parallel-size 2"),
    ],
)
def test_flags_that_agree_with_the_plan_are_kept_once(layout: str, flags: str) -> None:
    argv = megatron_args(plan_of(layout, *flags.split()))
    for name in re.findall(r"--\S+", flags):
        assert argv.count(name) == 1


def test_the_default_mapping_refuses_the_other() -> None:
    from tests.flags.test_stock import placed

    plan = placed(["a:0", "b:0", "a:1", "b:1"], a=2, b=2)
    assert of_the_plan(plan) == [
        "--tensor-model-parallel-size 1",
        "--pipeline-model-parallel-size 2",
    ]
    load = replace(workload(), megatron_args=(*USER, "--use-tp-pp-dp-mapping"))
    with pytest.raises(UsageError, match="ranks that follow the replicas before the pipeline"):
        megatron_args(replace(plan, workload=load))


def test_a_layout_on_a_command_line_is_settled_with_the_flags_beside_it() -> None:
    stock = plan_from_layout(parse_layout(STOCK))
    assert shlex.join(plan_arguments(stock, ["--micro-batch-size", "2"])) == (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping "
        "--global-batch-size 32"
    )
    hetero = plan_from_layout(parse_layout(HETERO))
    assert plan_arguments(hetero, USER) == ()
    for plan in (stock, hetero):
        with pytest.raises(UsageError, match=r"--global-batch-size 48 contradicts .* batch 32"):
            plan_arguments(plan, ["--micro-batch-size", "2", "--global-batch-size", "48"])


@pytest.mark.parametrize(
    ("recompute", "num_layers", "flags"),
    [
        ("none", None, []),
        ("selective", None, ["--recompute-granularity selective"]),
        (
            "full",
            None,
            [
                "--recompute-granularity full",
                "--recompute-method uniform",
                "--recompute-num-layers 1",
            ],
        ),
        (
            "full",
            3,
            [
                "--recompute-granularity full",
                "--recompute-method block",
                "--recompute-num-layers 3",
            ],
        ),
    ],
)
def test_recompute_of_all_stages_is_stock(
    recompute: str, num_layers: int | None, flags: list[str]
) -> None:
    plan = plan_of("tp1:4,tp1:4 @16")
    for s in (0, 1):
        plan = with_stage(plan, 0, s, recompute=recompute, recompute_num_layers=num_layers)
    assert [flag for flag in of_the_plan(plan) if "recompute" in flag] == flags


def test_recompute_that_the_user_already_asked_for_is_left_to_the_user() -> None:
    plan = with_training(
        plan_of("tp1:8 @16", "--recompute-granularity", "selective"), recompute="selective"
    )
    assert megatron_args(with_stage(plan, 0, 0, recompute="selective")) == megatron_args(plan)


def test_a_stock_plan_of_other_settings_takes_the_place_of_the_users_flags() -> None:
    flags = ("--recompute-granularity", "full", "--recompute-method", "uniform")
    plan = with_training(
        plan_of("tp1:8 @16", *flags, "--recompute-num-layers", "1"), recompute="full"
    )
    other = megatron_args(with_stage(plan, 0, 0, recompute="none"))
    assert not [flag for flag in other if flag.startswith("--recompute")]
    some = shlex.join(
        megatron_args(with_stage(plan, 0, 0, recompute="full", recompute_num_layers=3))
    )
    assert "--recompute-method block --recompute-num-layers 3" in some
    assert "uniform" not in some
    larger = with_replica(plan, 0, num_micro_batches=8, micro_batch_size=2)
    line = shlex.join(megatron_args(larger))
    assert "--micro-batch-size 2" in line and "--micro-batch-size 1" not in line


@pytest.mark.parametrize("biases", [True, False])
def test_experts_with_biases_are_divided_by_nobody(biases: bool) -> None:
    """Where an expert is divided, each of its ranks would add a bias whole."""
    layout = "tp2ep2etp2:4 @3 | tp2ep2etp2:4 @3"
    job = runtime_workload(**MIXTRAL_LIKE | {"add_bias_linear": biases, "num_query_groups": 24})
    asked = plan_from_layout(parse_layout(layout), job)
    if not biases:
        assert "--expert-tensor-parallel-size" not in megatron_args(asked)
        assert "--expert-model-parallel-size" in megatron_args(asked)
        assert any("ep2etp2" in word for word in megatron_args(asked, in_our_runtime=True))
        return
    with pytest.raises(UnsupportedError, match=re.escape("--disable-bias-linear")):
        megatron_args(asked, in_our_runtime=True)


def test_replica_sizes_of_their_own_leave_the_jobs_flag_alone() -> None:
    plan = with_training(plan_of(HETERO), per_token_loss=True)
    plan = with_replica(plan, 1, num_micro_batches=2, micro_batch_size=2)
    assert of_the_plan(plan) == ["--hetero-layout 'tp2:5,tp1:3 @12 | tp1:8 @2x2'"]


@st.composite
def stock_plans(draw: st.DrawFn) -> Plan:
    """Equal replicas of one width, with even and uneven stages, without devices."""
    width, num_replicas = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 4]))
    counts = draw(split(8, draw(st.integers(1, 4))))
    stages = tuple(StageShape(width, count) for count in counts)
    replica = ReplicaShape(stages, 16 // num_replicas)
    return plan_from_layout(Layout((replica,) * num_replicas), workload())


hostile = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@settings(max_examples=200)
@given(hostile)
def test_hostile_values_survive_the_shell(value: str) -> None:
    argv = megatron_args(plan_of(STOCK, f"--tensorboard-dir={value}"))
    assert shlex.split(shlex.join(argv)) == list(argv)
    assert shlex.split(render_bash(argv).removeprefix("MEGATRON_ARGS=(").removesuffix(")")) == list(
        argv
    )
    position = next(i for i, token in enumerate(argv) if token.startswith("--tensorboard-dir"))
    joined = f"--tensorboard-dir={value}"
    assert (argv[position] == joined) == value.startswith("-")
    assert value.startswith("-") or argv[position + 1] == value


def test_bash_reads_the_array_as_it_was_meant() -> None:
    argv = megatron_args(plan_of(UNEVEN, "--tensorboard-dir", "$(touch /x) `a` 'q' \"d\"\n*\\"))
    script = render_bash(argv, "ARGS") + "\nprintf '%s\\0' \"${ARGS[@]}\""
    output = subprocess.run(["bash", "-c", script], check=True, capture_output=True).stdout
    assert output.decode().split("\0")[:-1] == list(argv)


@settings(max_examples=50)
@given(placed_plans().map(lambda planned: planned[0]) | stock_plans())
def test_what_is_printed_parses_in_megatrons_parser(
    megatron_parser: argparse.ArgumentParser, plan: Plan
) -> None:
    argv = megatron_args(plan, "plan.json")
    args = megatron_parser.parse_args(argv)
    hetero = args.hetero_layout or args.hetero_plan
    assert (hetero is None) == is_stock(plan)
    if is_stock(plan):
        assert args.tensor_model_parallel_size == plan.layout.tensor_parallel_widths[0]
        assert args.pipeline_model_parallel_size == len(plan.replicas[0].stages)
    elif args.hetero_layout is not None:
        assert parse_layout(args.hetero_layout) == plan.layout


@pytest.fixture(scope="module")
def megatron_parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_megatron_arguments(parser)
    parser.add_argument("--hetero-layout")
    parser.add_argument("--hetero-plan")
    return parser


@pytest.mark.parametrize("text", [UNEVEN, "tp1:1,tp1:1,tp1:6 @16", "tp2:2,tp2:5,tp2:1 @16"])
def test_megatron_expands_the_layout_to_the_plans_stages(
    megatron_parser: argparse.ArgumentParser, text: str
) -> None:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    plan = plan_of(text)
    args = megatron_parser.parse_args(megatron_args(plan))
    depth = args.pipeline_model_parallel_size
    layout = PipelineParallelLayerLayout(args.pipeline_model_parallel_layout, depth)
    layout.validate_layer_layout(8, None)
    assert [stage[0].count(LayerType.decoder) for stage in layout.layout] == [
        stage.shape.num_layers for stage in plan.replicas[0].stages
    ]


def test_a_dispatcher_that_the_planner_chose_is_said_where_the_user_names_none() -> None:
    job = runtime_workload(**MIXTRAL_LIKE | {"num_query_groups": 24})
    for layout in ("tp1ep2:4 @3 | tp1ep2:4 @3", "tp1ep2:4 @2 | tp1ep2:4 @2 | tp1:4 @2"):
        plan = plan_from_layout(parse_layout(layout), with_dispatcher(job, "alltoall"))
        chosen = ("--moe-token-dispatcher-type", "alltoall")
        assert plan_arguments(plan, ())[-2:] == chosen
        named = plan_arguments(plan, ("--moe-token-dispatcher-type", "allgather"))
        assert chosen[0] not in named
        plain = plan_from_layout(parse_layout(layout), job)
        assert chosen[0] not in plan_arguments(plain, ())
