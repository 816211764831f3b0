"""A plan on a terminal: everything is said in words, and it fits in 80 columns."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.model.training import TrainingSpec
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.diff import Difference
from megatron_hetero.plan.estimates import DeviceEstimate, Estimates
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Host, Plan, Replica, Stage, StageShape
from megatron_hetero.report.text.changes.differences import difference_table
from megatron_hetero.report.text.terminal import plan_report
from megatron_hetero.report.text.words import count, devices_by_node
from tests.plan.edits import with_replica

GIB = 1 << 30
MODEL = ModelSpec(32, 4096, 16384, 32, 32, 128, 50257, 2048, 2048)
WORKLOAD = Workload(MODEL, TrainingSpec(64, 1, "bf16"), (), "gpt-7b.sh")


def memory(peak_gib: float, capacity_gib: int) -> DeviceEstimate:
    return DeviceEstimate(capacity_gib * GIB, round(peak_gib * GIB), {})


PLAN = Plan(
    replicas=(
        Replica(
            (
                Stage(StageShape(2, 24), 0, ("big:0", "big:1")),
                Stage(StageShape(2, 8, (2, 1)), 24, ("small:0", "small:1")),
            ),
            48,
        ),
        Replica((Stage(StageShape(1, 32), 0, ("small:2",)),), 16, 2),
    ),
    workload=WORKLOAD,
    hosts=(
        Host("big", "big.example", "A100-40GB", (0, 1)),
        Host("small", "small.example", "RTX-4090", (0, 1, 2)),
    ),
    idle_devices=("small:3",),
    idle_reasons={"small:3": "a fourth stage would be slower"},
    estimates=Estimates(
        step_time_s=3.5,
        tokens_per_s=37449.1,
        bound_s=3.0,
        gap=3.5 / 3.0 - 1,
        replica_times_s=(3.4, 3.3),
        stage_times_s=((0.05, 0.04), (0.2,)),
        boundary_times_s=((0.001,), ()),
        gradient_sync_s=0.1,
        devices={
            "big:0": memory(30, 40), "big:1": memory(31, 40),
            "small:0": memory(23, 24), "small:1": memory(12, 24), "small:2": memory(25, 24),
        },
        bound_relaxes="memory, whole layers",
    ),
)  # fmt: skip


def printed(plan: Plan, width: int = 80, color: bool = False, in_full: bool = True) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        markup=False,
        highlight=False,
        no_color=not color,  # whatever NO_COLOR says where the tests run
    )
    console.print(plan_report(plan, in_full=in_full))
    return stream.getvalue()


@pytest.mark.parametrize(
    "fact",
    [
        "gpt-7b.sh", "32 layers", "global batch 64", "5 GPUs: 2 x A100-40GB + 3 x RTX-4090; 1 idle",
        "3.5 s, 37,449 tokens/s", "this plan takes 16.7% longer",
        "relaxes: memory, whole layers",
        "not measured", "48 micro-batches a step", "16 micro-batches a step of 2 sequences",
        "big: 0 1 (A100-40GB)", "2 (2:1)", "0-23 (24)", "24-31 (8)", "50 ms",
        "31.0 / 40.0 GiB  78%",
        "23.0 / 24.0 GiB  96%", "small: 3: a fourth stage would be slower",
        "tp2:24,tp2(2:1):8 @48 | tp1:32 @16x2",
        "(RTX-4090 has no table of products: a general efficiency, 4 to 12 %",
    ],
)  # fmt: skip
def test_every_fact_is_printed_on_one_line(fact: str) -> None:
    assert fact in printed(PLAN, width=100)


@pytest.mark.parametrize("width", [80, 100])
def test_it_fits_the_terminal(width: int) -> None:
    assert max(map(len, printed(PLAN, width).splitlines())) <= width


def test_colour_adds_no_information() -> None:
    colored = printed(PLAN, color=True)
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == printed(PLAN)


def test_without_colour_there_is_no_escape() -> None:
    assert "\x1b" not in printed(PLAN)


def test_memory_beyond_the_device_is_red() -> None:
    red_row = next(x for x in printed(PLAN, 100, color=True).splitlines() if "104%" in x)
    assert "\x1b[31m" in red_row


def test_a_bare_layout_is_printed_without_numbers() -> None:
    bare = Plan((Replica((Stage(StageShape(2, 3), 0), Stage(StageShape(1, 1), 3)), 4),))
    text = printed(bare)
    assert "memory" not in text
    assert "any" in text
    assert text.endswith("Layout  tp2:3,tp1:1 @4\n")


def test_measured_plans_do_not_say_otherwise() -> None:
    assert PLAN.estimates is not None
    measured = replace(PLAN, estimates=replace(PLAN.estimates, measured=True))
    assert "not measured" not in printed(measured)


@pytest.mark.parametrize(
    ("divided_s", "words"),
    [
        (2.5, "without context parallelism; with it, in equal parts, none is faster than 2.5 s)"),
        (0.0, "of plans without context parallelism; none is known of plans with it)"),
    ],
)
def test_a_bound_of_some_plans_says_of_which(divided_s: float, words: str) -> None:
    assert PLAN.estimates is not None
    assert "context parallelism" not in printed(PLAN)
    some = replace(PLAN.estimates, bound_with_context_parallel_s=divided_s)
    assert words in " ".join(printed(replace(PLAN, estimates=some), 100).split())


def test_devices_by_node() -> None:
    assert devices_by_node(("a:0", "b:3", "a:1")) == "a: 0 1; b: 3"


def test_count() -> None:
    assert [count(1, "layer"), count(2, "layer"), count(0, "batch", "batches")] == [
        "1 layer", "2 layers", "0 batches",
    ]  # fmt: skip


def test_differences_wrap_their_values_and_not_their_names() -> None:
    table = difference_table(
        (
            Difference("replica 0, stage 11", "max_position_embeddings", "2048", None),
            Difference("device a100-0:0", "moves", "replica 0, stage 3, tensor rank 0", "idle"),
        )
    )
    stream = io.StringIO()
    Console(file=stream, width=80, color_system=None).print(table)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    words = [line.split() for line in lines]
    assert ["replica", "0,", "stage", "11", "max_position_embeddings", "2048", "-"] in words
    moved = "device a100-0:0 moves replica 0, stage 3, tensor rank 0 idle"
    assert sorted(word for line in words[3:] for word in line) == sorted(moved.split())


def test_launch_counts_have_a_column_where_some_stage_has_one() -> None:
    assert "ahead" not in printed(PLAN, width=100)
    first, second = PLAN.replicas
    ahead = replace(
        first, stages=(replace(first.stages[0], num_launched_forwards=9), first.stages[1])
    )
    text = printed(replace(PLAN, replicas=(ahead, second)), width=100)
    rows = [line.split() for line in text.splitlines()]
    assert [row[4] for row in rows if row[:1] == ["stage"]] == ["ahead", "ahead"]
    # The second stage and the replica of one stage show 1F1B's own.
    layers = re.compile(r"[0-9]+-[0-9]+ \([0-9]+\) +([0-9]+) ")
    assert layers.findall(text) == ["9", "1", "1"]
    assert "ahead: the launch count, forwards before the first backward" in " ".join(text.split())


def test_replicas_and_stages_that_are_alike_are_one_row() -> None:
    """40 GPUs of 8 nodes: 8 replicas of 5 stages in one table, its equal stages in one row."""
    layout = " | ".join(["tp1:2,tp1:2,tp1:2,tp1:2,tp1:3 @4"] * 8)
    bare = plan_from_layout(parse_layout(layout))
    replicas = tuple(
        replace(
            replica,
            stages=tuple(
                replace(stage, devices=(f"n{r}:{s}",)) for s, stage in enumerate(replica.stages)
            ),
        )
        for r, replica in enumerate(bare.replicas)
    )
    plan = replace(bare, replicas=replicas, hosts=tuple(
        Host(f"n{r}", f"n{r}", "A100-40GB", tuple(range(5))) for r in range(8)
    ))  # fmt: skip
    text = printed(plan, 100)
    assert "Replicas 0-7  4 micro-batches each a step" in text
    assert "0-3" in text
    assert "0-7 (2 each)" in text
    assert "n0 to n7 (8 machines): 0 1 2 3 (A100-40GB)" in text
    assert "8-10 (3)" in text
    other = with_replica(plan, 3, num_micro_batches=5)
    assert "Replicas 0-2, 4-7" in printed(other, 100)


def test_in_short_the_bound_is_one_line_that_says_where_to_read_more() -> None:
    assert PLAN.estimates is not None
    some = replace(PLAN, estimates=replace(PLAN.estimates, bound_with_context_parallel_s=2.5))
    text = " ".join(printed(some, 100, in_full=False).split())
    assert "whether a faster one exists is not known (of which plans: explain)" in text
    assert "relaxes" not in text and "context parallelism" not in text


def test_equal_replicas_are_printed_once_and_said_to_be() -> None:
    alike = "tp2:2,tp1:1 @4"
    text = printed(plan_from_layout(parse_layout(" | ".join([alike] * 16 + ["tp1:3 @8"]))), 100)
    assert f"Layout  16 x ({alike}) | tp1:3 @8\n" in text
    assert "plan.json and `flags` have all of it" in text
    few = " | ".join([alike] * 3)
    assert printed(plan_from_layout(parse_layout(few)), 100).endswith(f"Layout  {few}\n")
