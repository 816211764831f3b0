"""The figure of gradients on the tree of links: exact bytes, conservation, and what it draws."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from megatron_hetero.cluster.lines import Line
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.api import plan_cluster
from megatron_hetero.report.page.exchange_tree import exchange_tree, traffic_of_gradients
from megatron_hetero.report.page.figure import PAGE_WIDTH
from megatron_hetero.schedule.simulator.step import simulate_plan
from tests.planner.test_exchange_groups import small_job, two_sites

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Six replicas of one GPU, three at each of two sites."""
    return plan_cluster(two_sites(), small_job())


def test_groups_send_each_gradient_once_between_two_sites(plan: Plan) -> None:
    grouped = traffic_of_gradients(two_sites(), simulate_plan(plan, two_sites()))
    ring = replace(plan, exchange_groups=())
    plain = traffic_of_gradients(two_sites(), simulate_plan(ring, two_sites(), is_stock=False))
    assert plan.exchange_groups and set(grouped) == set(plain) == {"north", "south"}
    # Six holders of all weights: once there and back, and by a ring 2 (6 - 1) / 6 times.
    once = grouped["north"].uplink.sent
    assert plain["north"].uplink.sent == pytest.approx(once * 10 / 6, rel=1e-6)
    assert grouped["south"].uplink.received == pytest.approx(once)


@pytest.mark.parametrize("is_grouped", [True, False])
def test_what_is_sent_is_received(plan: Plan, is_grouped: bool) -> None:
    groups = plan.exchange_groups if is_grouped else ()
    made = replace(plan, exchange_groups=groups)
    sites = traffic_of_gradients(two_sites(), simulate_plan(made, two_sites(), is_stock=False))
    machines = [machine for site in sites.values() for machine in site.machines.values()]
    assert len(machines) == 6
    assert sum(m.sent for m in machines) == pytest.approx(sum(m.received for m in machines))
    assert sites["north"].uplink.sent == pytest.approx(sites["south"].uplink.received)
    assert sites["north"].uplink.sent <= sum(m.sent for m in sites["north"].machines.values())


def test_every_machine_has_a_row_inside_the_page(plan: Plan) -> None:
    figure = exchange_tree(plan, two_sites(), simulate_plan(plan, two_sites()))
    assert figure is not None
    root = ET.fromstring(figure.standalone())
    words = [element.text or "" for element in root.iter(f"{SVG}text")]
    machines = {f"{site}{i}" for site in ("north", "south") for i in range(3)}
    assert {"site north", "site south"} | machines <= set(words)
    assert any(word.startswith("Gradients are reduced inside each group") for word in words)
    for bar in root.iter(f"{SVG}rect"):
        if bar.get("x") is not None:
            right = float(bar.get("x", 0)) + float(bar.get("width", 0))
            assert right <= PAGE_WIDTH and float(bar.get("y", 0)) < figure.height


@pytest.mark.parametrize("shared", ["line north -> south", "uplink of site north out"])
def test_bytes_on_a_shared_line_are_not_known_by_machine(shared: str, plan: Plan) -> None:
    """Names of lines have an arrow or a direction, as those of paths of two nodes and of ports."""
    back = Line("line south -> north", 125e6)
    lines = {("north", "south"): (Line(shared, 125e6),), ("south", "north"): (back,)}
    cluster = replace(two_sites(), site_lines=lines)
    simulation = simulate_plan(plan, cluster)
    taken = {path for exchange, _, _ in simulation.collectives for path, _ in exchange.hops}
    assert shared in taken and "north0 -> north1" in taken
    assert exchange_tree(plan, cluster, simulation) is None


def test_a_plan_without_an_exchange_has_no_such_figure(plan: Plan) -> None:
    simulation = replace(simulate_plan(plan, two_sites()), collectives=())
    assert exchange_tree(plan, two_sites(), simulation) is None
