"""Orders that hang are found, whatever hangs in them, and named rank by rank."""

from __future__ import annotations

import pytest

from megatron_hetero.lab.kit.orders import with_interleaving
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.proof.circle import describe
from megatron_hetero.schedule.proof.of_plan import job_operations
from megatron_hetero.schedule.proof.rules import blocked_ranks
from tests.runtime.workloads import plan, workload
from tests.schedule.proof.planted import KINDS

PLANS: dict[str, Plan] = {
    "two stages": plan("tp2:2,tp1:2 @3"),
    "three stages": plan("tp1:1,tp2:2,tp1:1 @6"),
    "four stages": plan("tp1:1,tp1:1,tp1:1,tp1:1 @6"),
    "unlike depth": plan("tp2:3,tp1:1 @4 | tp1:4 @2"),
    "two pipelines": plan("tp2:2,tp1:2 @4 | tp1:1,tp1:2,tp1:1 @2"),
    "context parallelism": plan("tp1cp2:2,tp1:2 @4 | tp1:4 @2"),
    "chunks": with_interleaving(plan("tp2:2,tp1:2 @4 | tp1:4 @2"), 0, [(0, 1), (1, 1)] * 2),
}


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], str]:
    """(plan, kind) -> the circle in words; empty where none was found."""
    circles = {}
    for name, asked in PLANS.items():
        job = job_operations(asked, workload())
        assert blocked_ranks(job) == ()
        for kind, (plant, _) in KINDS.items():
            made = plant(job)
            if made is not None:
                blocked = blocked_ranks(made)
                circles[name, kind] = describe(made, blocked) if blocked else ""
    return circles


def test_all_planted_orders_are_found(found: dict[tuple[str, str], str]) -> None:
    assert [where for where, circle in found.items() if not circle] == []
    assert len(found) >= 50
    assert {kind for _, kind in found} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_circle_names_what_each_of_its_ranks_waits_for(
    kind: str, found: dict[tuple[str, str], str]
) -> None:
    circles = [circle for (_, of), circle in found.items() if of == kind]
    for circle in circles:
        lines = circle.splitlines()
        assert all(line.startswith("  rank ") and "(replica " in line for line in lines)
    assert any(KINDS[kind][1] in circle and len(circle.splitlines()) > 1 for circle in circles)
