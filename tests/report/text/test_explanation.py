"""The explanation on a terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from megatron_hetero.cost.causes import StageCauses
from megatron_hetero.planner.advise.alternatives import Alternative, Shortage
from megatron_hetero.planner.advise.explain import (
    BindingStage,
    Explanation,
    HiddenHop,
    StageTime,
    TimeByCause,
)
from megatron_hetero.report.text.comparison import comparison_lines
from megatron_hetero.report.text.explanation import explanation_report, stage_time_lines

GIB = 1 << 30
NOT_STOCK = ("stages of different tensor-parallel widths (1, 2)",)
STOCK = Alternative(
    "tp1:2,tp1:2 @8", "symmetric", 10.0, 0.25, "its slowest pipeline takes 2 s more"
)
RUNNER_UP = Alternative("tp2:4 @8", "local", 8.8, 0.1, "its gradient exchange takes 0.8 s more")
EXPLANATION = Explanation(
    step_time_s=8.0,
    binding=BindingStage(0, 1, ("a:0", "a:1"), 0.5),
    time_by_cause=TimeByCause(4.0, 2.0, 0.4, 1.0, 0.5, 0.1),
    headroom_bytes={"a:0": 3 * GIB, "a:1": GIB, "b:0": 7 * GIB},
    best_stock=STOCK,
    stock_shortage=None,
    runners_up=(RUNNER_UP,),
    num_priced=617,
    idle_reasons={},
)


def test_stages_with_equal_causes_are_one_row() -> None:
    causes = StageCauses(0.3, 0.1, 0.04, 0.01, 0.05)
    times = tuple(StageTime(0, s, 0.5, causes, False) for s in range(6))
    other = StageTime(1, 0, 0.25, StageCauses(memory_s=0.25), True)
    text = printed(*stage_time_lines(replace(EXPLANATION, stage_times=(*times, other))))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "0.0, 0.1, 0.2 and 3 more 500 ms 60% 20% 8% 2% 10%" in rows
    assert "1.0" in text and "100%" in text
    assert "measured times are divided as the model divides its own" in text
    assert printed(*stage_time_lines(EXPLANATION)) == ""


def printed(*renderables: object, width: int = 80) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, markup=False, highlight=False)
    for renderable in renderables:
        console.print(renderable)
    return stream.getvalue()


@pytest.mark.parametrize(
    "fact",
    [
        "replica 0, stage 1 (a: 0 1), which sets the pace",
        "between 1.0 GiB (a:1) and 7.0 GiB",
        "+25.0%  tp1:2,tp1:2 @8",
        "its slowest pipeline takes 2 s more",
        "+10.0%  tp2:4 @8",
        "617 plans compared",
        "needed for stages of different tensor-parallel widths (1, 2)",
    ],
)
def test_every_fact_is_printed(fact: str) -> None:
    assert fact in printed(explanation_report(EXPLANATION, NOT_STOCK), width=100)


def test_launch_counts_say_what_they_hide() -> None:
    hop = HiddenHop(0, (6, 5, 2, 1), (4, 3, 2, 1), 1, 0.2, 0.1, 3.5, 5.0)
    text = printed(
        explanation_report(replace(EXPLANATION, hidden_hops=(hop,)), NOT_STOCK), width=140
    )
    assert "replica 0 runs 6, 5, 2, 1 forwards before the first backward (1F1B: 4, 3, 2, 1)" in text
    assert "stages 1 and 2 are 200 ms apart, there and back, against a period of 100 ms" in text
    assert "the counts save 1.5 s of the pipeline's 5 s" in text
    twice = (hop, replace(hop, replica=1, pipeline_s=3.4))
    text = printed(
        explanation_report(replace(EXPLANATION, hidden_hops=twice), NOT_STOCK), width=140
    )
    assert text.count("Launched ahead") == 1
    assert "replicas 0, 1 run 6, 5, 2, 1 forwards" in text
    assert "the counts save 1.5 s to 1.6 s of the pipeline's 5 s" in text
    worse = replace(hop, own_pipeline_s=3.0)
    text = printed(
        explanation_report(replace(EXPLANATION, hidden_hops=(worse,)), NOT_STOCK), width=140
    )
    assert "the counts cost 500 ms of the pipeline's 3 s" in text


def test_a_plan_that_does_not_fit_is_said_not_to() -> None:
    """One edited by hand is explained all the same."""
    full = replace(EXPLANATION, headroom_bytes={"a:0": -GIB, "a:1": -2 * GIB, "b:0": GIB})
    text = printed(explanation_report(full, NOT_STOCK), width=100)
    assert "Memory lacks  2.0 GiB on a:1" in text
    assert "the plan does not fit" in text
    assert "Memory left" not in text


@pytest.mark.parametrize(
    ("cause", "time", "part", "bar"),
    [
        ("compute", "4 s", "50.0%", "#" * 12),
        ("tensor-parallel communication", "2 s", "25.0%", "#" * 6),
        ("stage boundaries", "400 ms", "5.0%", "#"),
        ("waiting (pipeline bubble)", "1 s", "12.5%", "###"),
        ("gradient exchange", "500 ms", "6.2%", "##"),
        ("optimizer update", "100 ms", "1.2%", ""),
        ("step", "8 s", "100.0%", ""),
    ],
)
def test_causes(cause: str, time: str, part: str, bar: str) -> None:
    lines = printed(explanation_report(EXPLANATION, NOT_STOCK)).splitlines()
    line = next(x for x in lines if x.startswith(f"  {cause} "))
    assert line.split() == [*cause.split(), *time.split(), part, *([bar] if bar else [])]


def test_it_fits_80_columns() -> None:
    assert max(map(len, printed(explanation_report(EXPLANATION, NOT_STOCK)).splitlines())) <= 80


def test_runners_up_only_when_asked() -> None:
    text = printed(*comparison_lines(EXPLANATION, NOT_STOCK, runners_up=False))
    assert "tp1:2,tp1:2 @8" in text
    assert "tp2:4 @8" not in text


def test_no_reason_is_given_for_what_is_not_slower() -> None:
    equal = replace(EXPLANATION, best_stock=replace(STOCK, slower_by=0.0))
    text = printed(*comparison_lines(equal, NOT_STOCK, runners_up=False))
    assert "the same" in text
    assert "takes" not in text


def test_when_no_stock_plan_fits() -> None:
    short = Shortage("tp1:4,tp1:5 @8", ("a:0", "a:1"), "A100", 3 * GIB // 2, GIB)
    alone = replace(EXPLANATION, best_stock=None, stock_shortage=short)
    text = printed(*comparison_lines(alone, NOT_STOCK, runners_up=False), width=200)
    assert (
        "stock Megatron  no plan fits: the nearest, tp1:4,tp1:5 @8, lacks 1.5 GiB on a: 0 1 "
        "(A100), with 1 GiB in reserve"
    ) in text
    assert "best of stock Megatron" not in text


def test_when_the_job_leaves_stock_megatron_no_plan() -> None:
    alone = replace(EXPLANATION, best_stock=None)
    text = printed(*comparison_lines(alone, NOT_STOCK, runners_up=False))
    assert "stock Megatron  no plan at all" in text


def test_a_plan_of_stock_megatron_is_not_compared_with_itself() -> None:
    same = replace(EXPLANATION, best_stock=replace(STOCK, slower_by=0.0))
    text = printed(*comparison_lines(same, (), runners_up=False))
    assert "plug-in  " in text and "not needed: stock Megatron runs this plan" in text
    assert "best of stock Megatron" not in text


def test_a_faster_plan_of_stock_megatron_is_shown_beside_a_slower_one() -> None:
    faster = replace(EXPLANATION, best_stock=replace(STOCK, slower_by=-0.1))
    text = printed(*comparison_lines(faster, (), runners_up=False))
    assert "best of stock Megatron" in text and "-10.0%" in text
    assert "plan --stock plans it" in " ".join(text.replace("\n", " ").split())
