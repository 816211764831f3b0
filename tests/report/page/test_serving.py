"""The page of a serving plan: what it shows comes from the plan and from a simulated minute."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.report.page.serving import cost_bars, serving_page, share_bars
from megatron_hetero.serving.fleet import story
from megatron_hetero.serving.fleet.api import planned_fleet
from megatron_hetero.serving.fleet.plan import ServingPlan
from megatron_hetero.serving.fleet.story import FleetStory, story_of
from megatron_hetero.serving.prices.served import load_served
from megatron_hetero.serving.workload.load import load_request_mix

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/serving"


@pytest.fixture(scope="module")
def told() -> tuple[ServingPlan, FleetStory]:
    plan, fleet, found = planned_fleet(
        load_cluster(EXAMPLE / "cluster.yaml"),
        load_served(EXAMPLE, "16-bit", "16-bit"),
        load_request_mix(EXAMPLE / "workload.yaml"),
        "cost",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(story, "FACTORS", (0.001, 1.0))
        return plan, story_of(fleet, found, inf, 0)


def test_a_minute_has_every_replica_and_deadlines_have_a_price(
    told: tuple[ServingPlan, FleetStory],
) -> None:
    plan, seen = told
    assert len(seen.under_way) == len(plan.replicas)
    assert all(max(levels) > 0 for levels in seen.under_way)
    # A thousandth of the deadlines is kept by nobody; the workload's own by the plan.
    assert seen.costs == ((0.001, None), (1.0, pytest.approx(plan.cost_per_hour)))


def test_the_page_needs_no_network_and_names_replicas_and_classes(
    told: tuple[ServingPlan, FleetStory],
) -> None:
    plan, seen = told
    page = serving_page(plan, seen)
    assert "://" not in page
    for words in (*(r.name for r in plan.replicas), *(c.name for c in plan.classes)):
        assert words in page
    assert "no fleet of these machines keeps them" in page
    assert "table of kernels." in page
    assert page.count("<svg") == 3
    without = FleetStory(seen.load, seen.under_way, ())
    assert cost_bars(without) is None and serving_page(plan, without).count("<svg") == 2


def test_bars_are_as_long_as_rates(told: tuple[ServingPlan, FleetStory]) -> None:
    plan, _ = told
    shares = share_bars(plan)
    bars = re.findall(r'<rect class="p(\d)"[^>]*width="([\d.]+)"[^>]*><title>', shares.body)
    rates = [rate for replica in plan.replicas for rate in replica.rates]
    lengths = [float(width) for _, width in bars]
    assert [int(colour) for colour, _ in bars] == [0, 1] * len(plan.replicas)
    for rate, length in zip(rates, lengths, strict=True):
        assert length == pytest.approx(rate / max(rates) * max(lengths), abs=0.2)


def test_serve_plan_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "FACTORS", ())
    words = ["serve-plan", "--cluster", str(EXAMPLE / "cluster.yaml"), "--model", str(EXAMPLE)]
    words += ["--workload", str(EXAMPLE / "workload.yaml"), "--html", str(tmp_path / "page.html")]
    assert main(words) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
