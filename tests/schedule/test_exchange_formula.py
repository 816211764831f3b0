"""The planner's formula of the gradient exchange, beside the simulation of its buckets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_hetero.bounds.estimate import workload_of
from megatron_hetero.cluster.node_links import Incast, Link
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.plan.build import canonical_hosts
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.estimate import plan_cost
from megatron_hetero.schedule.simulator.shared_paths import queued
from megatron_hetero.schedule.simulator.step import StepSimulation, simulate_plan
from tests.cost.builders import INSIDE
from tests.schedule.exchange.test_gradients import without_room
from tests.schedule.simulator.test_step import placed, three_nodes

NUM_LAYERS = 6
LINKS = [Link(b, s) for b in (2e8, 1e9, 4e9) for s in (1e-5, 2e-3, 4e-2)]

Terms = tuple[float, Incast | None]
TERMS: list[Terms] = [(inf, Incast(1, 1.0)), (2e9, None), (2e10, Incast(1, 0.5))]


def with_terms(link: Link, terms: Terms) -> Link:
    return replace(link, reduce_bytes_per_s=terms[0], incast=terms[1])


@st.composite
def plans(draw: st.DrawFn, **flags: bool) -> Plan:
    """Two or three replicas of one to three stages of one or two GPUs, anywhere."""
    free = {name: [f"{name}:{i}" for i in range(4)] for name in "abc"}
    layouts, devices = [], []
    for _ in range(draw(st.integers(2, 3))):
        depth = draw(st.integers(1, 3))
        cuts = sorted(draw(st.permutations(range(1, NUM_LAYERS)))[: depth - 1])
        stages, own = [], []
        for first, end in zip([0, *cuts], [*cuts, NUM_LAYERS], strict=True):
            width = draw(st.integers(1, 2))
            nodes = [name for name, left in free.items() if len(left) >= width]
            assume(nodes)
            node = draw(st.sampled_from(nodes))
            own += [free[node].pop(0) for _ in range(width)]
            stages.append(f"tp{width}:{end - first}")
        layouts.append(f"{','.join(stages)} @{draw(st.integers(2, 4))}")
        devices.append(own)
    sizes = {"num_layers": NUM_LAYERS, "hidden_size": 2048, "tied_embeddings": draw(st.booleans())}
    return placed(" | ".join(layouts), *devices, **sizes, **flags)  # type: ignore[arg-type]


def both(
    plan: Plan, link: Link, inside: Link = INSIDE, *, has_room: bool = True
) -> tuple[StepSimulation, float]:
    """The simulation of the plug-in's runtime, and the formula's step.

    The formula does not let the messages of a pipeline wait behind another replica's gradients;
    plans in which they do are left to the simulation.
    """
    cluster = three_nodes(link, inside)
    cluster = cluster if has_room else without_room(cluster)
    found, placement = simulate_plan(plan, cluster, is_stock=False), placement_of(plan, cluster)
    costs = CostModel(cluster, workload_of(plan))
    cost = queued(costs, placement, costs.placement(placement))
    alone_s = max(replica.pipeline_s for replica in cost.replicas)
    assume(found.collectives and found.pipelines_s == pytest.approx(alone_s, rel=1e-6))
    return found, cost.step_time_s


def late_messages_s(found: StepSimulation) -> float:
    """Seconds for which messages of pipelines hold paths after the first exchange has begun: by so
    much an exchange may be later than in the formula, in which it has the paths to itself."""
    begin_s = min(start_s for _, start_s, _ in found.collectives)
    return sum(m.end_s - m.start_s for m in found.messages if m.end_s > begin_s)


@settings(max_examples=25, deadline=None)
@given(plans(), st.sampled_from(LINKS))
def test_all_reduces_take_as_long_as_simulated(plan: Plan, link: Link) -> None:
    check_all_reduces(*both(plan, link))


@settings(max_examples=25, deadline=None)
@given(plans(), st.sampled_from(LINKS), st.sampled_from(TERMS), st.sampled_from(TERMS))
def test_all_reduces_that_take_time_to_add_do_too(
    plan: Plan, link: Link, terms: Terms, inside: Terms
) -> None:
    check_all_reduces(*both(plan, with_terms(link, terms), with_terms(INSIDE, inside)))


def check_all_reduces(found: StepSimulation, formula_s: float) -> None:
    room_s = late_messages_s(found) + 1e-9 * formula_s
    assert abs(found.step_time_s - formula_s) <= room_s


FOUR = "tp1ep2:3,tp1:3 @2 | tp1ep2:3,tp1:3 @2 | tp1ep2:4,tp1:2 @2 | tp1ep2:4,tp1:2 @2"


@pytest.mark.parametrize("link", LINKS[:2])
@pytest.mark.parametrize(
    "layout",
    ["tp1ep2:3,tp1ep2:3 @2 | tp1ep2:3,tp1ep2:3 @2", "tp1ep2:3,tp1:3 @2 | tp1ep2:3,tp1:3 @2", FOUR],
)
def test_experts_dealt_out_over_replicas_are_exchanged_by_their_holders(
    layout: str, link: Link
) -> None:
    places = [f"{node}:{i}" for i in range(4) for node in "abc"]
    devices = [places[2 * r : 2 * r + 2] for r in range(layout.count("@"))]
    experts = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 1024}
    sizes: dict[str, Any] = {"num_layers": NUM_LAYERS, "hidden_size": 512, **experts}
    plan, cluster = placed(layout, *devices, **sizes), three_nodes(link)
    placement = placement_of(plan, cluster)
    costs = CostModel(cluster, workload_of(plan))
    cost, found = plan_cost(plan, costs, placement), simulate_plan(plan, cluster)
    # The formula has all of a set of holders before what others hold, which is a small part here.
    assert cost.step_time_s == pytest.approx(found.step_time_s, rel=5e-3)


BUCKETED = st.one_of(
    plans(overlap_grad_reduce=True),
    plans(use_distributed_optimizer=True),
    plans(overlap_grad_reduce=True, use_distributed_optimizer=True),
)


@settings(max_examples=25, deadline=None)
@given(BUCKETED, st.sampled_from(LINKS))
def test_buckets_take_as_long_as_simulated_but_for_one_of_each_set_of_holders(
    plan: Plan, link: Link
) -> None:
    """The formula has equal buckets, all of a set of holders before those of the next: it may be
    off by a bucket where the set changes."""
    check_buckets(*both(plan, link))


@settings(max_examples=25, deadline=None)
@given(BUCKETED, st.sampled_from(LINKS), st.sampled_from(TERMS), st.sampled_from(TERMS))
def test_buckets_take_as_long_on_links_with_terms(
    plan: Plan, link: Link, terms: Terms, inside: Terms
) -> None:
    check_buckets(*both(plan, with_terms(link, terms), with_terms(INSIDE, inside)))


def check_buckets(found: StepSimulation, formula_s: float, more_s: float = 0.0) -> None:
    largest: dict[tuple[object, bool], float] = {}
    for collective, start_s, end_s in found.collectives:
        kind = collective.holders, collective.name.startswith("weights")
        largest[kind] = max(largest.get(kind, 0.0), end_s - start_s)
    room_s = sum(largest.values()) + late_messages_s(found) + more_s
    assert abs(found.step_time_s - formula_s) <= room_s


@settings(max_examples=25, deadline=None)
@given(st.one_of(plans(), BUCKETED), st.sampled_from(LINKS))
def test_buckets_without_room_take_as_long_as_simulated(plan: Plan, link: Link) -> None:
    """A bucket that finds no room when it is ready waits for the end of the pass; in the formula
    for room alone."""
    found, formula_s = both(plan, link, has_room=False)
    check_buckets(found, formula_s, waited_s(found))


def waited_s(found: StepSimulation) -> float:
    """Sum the longest pause of each set of holders between two of its exchanges of gradients."""
    spans: dict[object, list[tuple[float, float]]] = {}
    for collective, start_s, end_s in found.collectives:
        if not collective.name.startswith("weights"):
            spans.setdefault(collective.holders, []).append((start_s, end_s))
    pauses = (
        max((later - end for (_, end), (later, _) in pairwise(sorted(own))), default=0.0)
        for own in spans.values()
    )
    return sum(max(0.0, pause) for pause in pauses)


GROUPS = [(("a", "b"), ("c",)), (("a",), ("b", "c")), (("a",), ("b",), ("c",))]


def with_groups(
    plan: Plan, groups: tuple[tuple[str, ...], ...], uplinks: Mapping[str, int] | None = None
) -> Plan:
    """The plan, exchanging by those of the groups whose machines it has."""
    hosts = canonical_hosts(plan.replicas, three_nodes())
    used = {host.node for host in hosts}
    own = tuple(tuple(name for name in group if name in used) for group in groups)
    own = tuple(group for group in own if group)
    assume(len(own) > 1)
    found = tuple(tuple(uplinks[name] for name in group) for group in own) if uplinks else ()
    return replace(plan, hosts=hosts, exchange_groups=own, exchange_uplinks=found)


@settings(max_examples=25, deadline=None)
@given(
    st.one_of(plans(), BUCKETED),
    st.sampled_from(LINKS),
    st.sampled_from(GROUPS),
    st.one_of(st.none(), st.fixed_dictionaries({name: st.integers(1, 9) for name in "abc"})),
    st.sampled_from(TERMS),
    st.sampled_from(TERMS),
)
def test_exchanges_by_groups_take_as_long_as_simulated(
    plan: Plan,
    link: Link,
    groups: tuple[tuple[str, ...], ...],
    uplinks: dict[str, int] | None,
    terms: Terms,
    inside: Terms,
) -> None:
    grouped = with_groups(plan, groups, uplinks)
    for has_room in (True, False):
        links = with_terms(link, terms), with_terms(INSIDE, inside)
        check_buckets(*both(grouped, *links, has_room=has_room))


def test_by_groups_a_line_carries_the_sum_of_each_side_once() -> None:
    """Four holders, two on each side: a ring takes 2 (n - 1) / n of the buffer over the way between
    the sides, groups take it once."""
    plan = placed(" | ".join(["tp1:4 @2"] * 4), ["a:0"], ["a:1"], ["b:0"], ["b:1"])
    grouped = replace(plan, exchange_groups=(("a",), ("b",)))
    cluster = three_nodes(Link(1e9, 1e-3), INSIDE)
    carried = []
    for each in (plan, grouped):
        total = dict.fromkeys(("a -> b", "b -> a"), 0.0)
        for collective, *_ in simulate_plan(each, cluster, is_stock=False).collectives:
            for (path, _), num_bytes in zip(collective.hops, collective.hop_bytes, strict=True):
                if path in total:
                    total[path] += num_bytes
        carried.append(total)
    for path, num_bytes in carried[0].items():
        assert carried[1][path] / num_bytes == pytest.approx(1 / 1.5, rel=1e-4)


def test_many_senders_slow_each_part_on_its_way_to_its_owner() -> None:
    """Five replicas: three on a node, whose ports hear two, and cards that hear two other nodes."""
    plan = placed(
        " | ".join(["tp1:4 @2"] * 5), ["a:0"], ["a:1"], ["a:2"], ["b:0"], ["c:0"],
        use_distributed_optimizer=True,
    )  # fmt: skip
    between = Link(1e9, 1e-5)
    inside, crowded = replace(INSIDE, incast=Incast(1, 0.5)), replace(between, incast=Incast(1, 2))
    found = [
        simulate_plan(plan, three_nodes(*links), is_stock=False)
        for links in ((between, INSIDE), (crowded, inside))
    ]
    gradients = 0
    for (plain, *_), (slowed, *_) in zip(*(f.collectives for f in found), strict=True):
        is_part = plain.name.startswith("gradients")
        gradients += is_part
        for (path, seconds), (same, slower_s) in zip(plain.hops, slowed.hops, strict=True):
            factor = (3.0 if " -> " in path else 1.5) if is_part else 1.0
            assert (same, slower_s) == (path, pytest.approx(factor * seconds))
    assert gradients
