"""The table of Megatron's flags by support: complete, without stray names, printed as a page."""

from __future__ import annotations

import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args

from megatron_hetero.flags.support.kinds import NEUTRAL, Neutral
from megatron_hetero.flags.support.lookup import (
    refused_by_presence,
    refused_options,
    support_of,
    without_effect,
)
from megatron_hetero.flags.support.tables import support_table
from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from tests.cost.builders import make_workload

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
import make_flags_page

SUPPORT = support_table()
NAMES = {name for flag in flag_table().flags for name in flag.names}


def with_args(workload: Workload, *flags: str) -> Workload:
    return replace(workload, megatron_args=flags)


def test_every_flag_is_decided() -> None:
    for flag in flag_table().flags:
        assert support_of(flag) in SUPPORT


def test_every_flag_is_proved_classed_or_refused() -> None:
    """A flag that is passed on says why a plan cannot differ by it from one process."""
    for flag in flag_table().flags:
        support = support_of(flag)
        assert (support.status == "passed on") == (support.neutral is not None), flag.names


def test_every_class_has_a_reason_and_flags() -> None:
    assert set(NEUTRAL) == set(get_args(Neutral))
    used = {entry.neutral for entry in SUPPORT} - {None}
    assert used == set(NEUTRAL)


def test_every_name_is_a_flag() -> None:
    named = [name for entry in SUPPORT for name in entry.names]
    assert [n for n in named if not any(fnmatchcase(flag, n) for flag in NAMES)] == []
    assert [n for n in named if "*" not in n and named.count(n) > 1] == []


def test_no_pattern_takes_everything() -> None:
    """Else a flag of a new Megatron would pass unseen."""
    patterns = [name for entry in SUPPORT for name in entry.names]
    assert not any(fnmatchcase("--a-flag-of-tomorrow", pattern) for pattern in patterns)


def test_flags_without_effect_are_named() -> None:
    given = flag_table().split(["--use-sharp", "--lr", "1e-3", "--ddp-bucket-size=5"])
    assert [(o.name, why) for o, why in without_effect(given)] == [
        ("--use-sharp", "the plan makes its process groups itself"),
        ("--ddp-bucket-size", "the gradient sync has buckets of its own"),
    ]
    assert refused_by_presence(given) == ()


def test_refused_options_are_those_that_ask_for_something() -> None:
    def refused(layout: str, *flags: str) -> list[str]:
        plan = plan_from_layout(parse_layout(layout), with_args(make_workload(), *flags))
        return list(map(str, refused_options(plan)))

    flags = (
        "--num-experts",
        "4",
        "--moe-use-upcycling",
        "--lr",
        "1e-3",
        "--delay-wgrad-compute",
        "--moe-layer-freq",
        "1",
    )
    assert refused("tp2:2,tp1:2 @4", *flags) == ["--moe-use-upcycling", "--delay-wgrad-compute"]
    assert refused("tp2:2,tp1:2 @4", "--num-experts", "4", "--moe-input-jitter-eps", "0.1") == [
        "--moe-input-jitter-eps 0.1"
    ]
    assert refused("tp2:2,tp2:2 @4", *flags) == []
    fp8 = ("--fp8-format", "hybrid")
    assert refused("tp2:2,tp1:2 @4", *fp8) == ["--fp8-recipe delayed"]
    assert refused("tp2:2,tp1:2 @4", *fp8, "--fp8-recipe", "tensorwise") == []
    assert refused("tp2:2,tp1:2 @4", "--fp8-param-gather") == []
    flex = "--moe-token-dispatcher-type flex"
    experts = ("--num-experts", "4", "--moe-token-dispatcher-type")
    assert refused("tp2:2,tp1:2 @4", *experts, "flex") == [flex]
    assert refused("tp2:2,tp1:2 @4", *experts, "alltoall") == []
    assert refused("tp2:2,tp1:2 @4", *flex.split()) == []
    for strictness in ("log_unexpected", "log_all", "assume_ok_unexpected"):
        assert refused("tp2:2,tp1:2 @4", "--dist-ckpt-strictness", strictness) == []
    strict = "--dist-ckpt-strictness raise_all"
    assert refused("tp2:2,tp1:2 @4", *strict.split()) == [strict]
    for recipe in ("delayed", "blockwise", "mxfp8"):
        asked = f"--fp8-recipe {recipe}"
        assert refused("tp2:2,tp1:2 @4", *fp8, *asked.split()) == [asked]


def test_the_page_is_up_to_date() -> None:
    assert make_flags_page.PAGE.read_text() == make_flags_page.page(), (
        "run python tools/make_flags_page.py"
    )
