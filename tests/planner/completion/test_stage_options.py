"""Options of a stage, against every setting that a stage can have, priced by the cost model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Recompute
from megatron_hetero.planner.completion.stage_lines import StageOption, StageTimes
from megatron_hetero.planner.completion.stage_options import StageOptions
from megatron_hetero.planner.completion.stage_places import StagePlace
from tests.cost.builders import AS_GIVEN, FAST, FREE, SLOW, make_cluster, make_workload

MIB = 1 << 20
WORKLOAD = make_workload(num_layers=6, seq_length=1024, global_batch_size=8)
EXPERTS = make_workload(
    num_layers=6,
    seq_length=1024,
    global_batch_size=8,
    sequence_parallel=True,
    num_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=256,
)


def cluster(memory_mib: int, *, free: bool = True) -> Cluster:
    memory = memory_mib * MIB
    return make_cluster(
        ("a", replace(FAST, memory_bytes=memory), 2),
        ("b", replace(SLOW, memory_bytes=memory), 2),
        limits=FREE if free else AS_GIVEN,
    )


def place(devices: tuple[Device, ...], index: int, depth: int, **changes: object) -> StagePlace:
    made = StagePlace(devices, None, index == 0, index == depth - 1, min(depth - index, 8))
    return replace(made, **changes)  # type: ignore[arg-type]


def settings(num_layers: int) -> Iterator[tuple[Recompute, int | None]]:
    """Every recompute that a stage of so many layers can have."""
    yield "none", None
    yield "selective", None
    yield "full", None
    for some in range(1, num_layers):
        yield "full", some


def brute_force(
    costs: CostModel,
    of: StagePlace,
    depth: int,
    rows: int,
    tables: Sequence[tuple[int, ...] | None] = (None,),
) -> list[float]:
    """The least seconds with 1, 2, ... layers, as many as fit, under any table of experts."""
    index = 0 if of.first else depth - 1 if of.last else 1
    others = [PlacedStage((Device("b", i % 2),), 1) for i in range(depth)]
    found = []
    for num_layers in range(1, costs.workload.model.num_layers + 1):
        fitting = []
        for (recompute, some), table in product(settings(num_layers), tables):
            stages = list(others)
            stages[index] = PlacedStage(
                of.devices, num_layers, of.shares, recompute, some, expert_shares=table
            )
            priced = costs.stage(PlacedReplica(tuple(stages), 8), index, rows)
            if priced.missing_bytes <= 0:
                fitting.append(priced.times.total_s)
        if not fitting:
            break
        found.append(min(fitting))
    return found


@pytest.mark.parametrize("memory_mib", [150, 250, 350, 400, 480, 40_000])
@pytest.mark.parametrize(("index", "depth"), [(0, 1), (0, 3), (1, 3), (2, 3)])
def test_options_are_the_fastest_that_fit(memory_mib: int, index: int, depth: int) -> None:
    costs = CostModel(cluster(memory_mib), WORKLOAD)
    rows = costs.vocab_rows([1])
    of = place((Device("a", 0),), index, depth)
    found = StageOptions(costs, rows).of(of)
    assert [option.time_s for option in found] == pytest.approx(brute_force(costs, of, depth, rows))


@pytest.mark.parametrize("memory_mib", [150, 250, 2000])
def test_options_of_a_group_of_unlike_gpus_fit_on_each_of_them(memory_mib: int) -> None:
    """Shares of 3 to 1 heads put most on the first GPU, so it is the first that is full."""
    costs = CostModel(cluster(memory_mib), WORKLOAD)
    rows = costs.vocab_rows([2])
    of = place((Device("a", 0), Device("b", 0)), 0, 1, shares=(3, 1))
    found = StageOptions(costs, rows).of(of)
    assert [option.time_s for option in found] == pytest.approx(brute_force(costs, of, 1, rows))


@pytest.mark.parametrize("memory_mib", [130, 190, 250, 300, 40_000])
@pytest.mark.parametrize("shares", [None, (3, 1)])
def test_experts_are_dealt_out_where_that_is_faster(
    memory_mib: int, shares: tuple[int, ...] | None
) -> None:
    """In equal numbers where all else is divided in equal parts, else by the shares."""
    costs = CostModel(cluster(memory_mib), EXPERTS)
    rows = costs.vocab_rows([2])
    of = place((Device("a", 0), Device("a", 1)), 0, 2, shares=shares)
    found = StageOptions(costs, rows).of(of)
    tables = (None, shares or (1, 1))
    expected = brute_force(costs, of, 2, rows, tables)
    assert [option.time_s for option in found] == pytest.approx(expected)
    if memory_mib == 40_000:
        # Each GPU sorts and weights half of the tokens' choices instead of all of them.
        assert {option.expert_shares for option in found} == {shares or (1, 1)}
    # One module of all experts of a GPU wants as many on each.
    training = replace(EXPERTS.training, grouped_experts=True)
    grouped = CostModel(cluster(memory_mib), replace(EXPERTS, training=training))
    if shares is not None:
        assert {o.expert_shares for o in StageOptions(grouped, rows).of(of)} <= {None}
    held = CostModel(cluster(memory_mib, free=False), EXPERTS)
    assert {option.expert_shares for option in StageOptions(held, rows).of(of)} <= {None}


def test_a_table_that_a_plan_has_stays_where_none_is_searched() -> None:
    costs = CostModel(cluster(40_000), EXPERTS)
    of = place((Device("a", 0), Device("a", 1)), 0, 2, expert_shares=(3, 1))
    found = StageOptions(costs, 1024, given=True).of(of)
    assert {option.expert_shares for option in found} == {(3, 1)}
    assert [option.time_s for option in found] == pytest.approx(
        brute_force(costs, of, 2, 1024, [(3, 1)])
    )


def test_what_fits_with_room_recomputes_nothing_and_what_does_not_as_little_as_will_do() -> None:
    costs = CostModel(cluster(40_000), WORKLOAD)
    roomy = StageOptions(costs, 1024).of(place((Device("a", 0),), 0, 1))
    # "none" is the job's own, so the stage repeats nothing.
    assert [(o.recompute, o.num_recomputed) for o in roomy] == [(None, None)] * 6
    tight = StageOptions(CostModel(cluster(400), WORKLOAD), 1024)
    numbers = [o.num_recomputed or 0 for o in tight.of(place((Device("a", 0),), 0, 1))]
    assert numbers == sorted(numbers)


def test_a_job_that_recomputes_says_so_of_stages_that_do_not() -> None:
    workload = make_workload(num_layers=6, recompute="full")
    costs = CostModel(cluster(40_000), workload)
    assert {o.recompute for o in StageOptions(costs, 1024).of(place((Device("a", 0),), 0, 1))} == {
        "none"
    }


def test_as_given_stages_do_as_the_jobs_flags_say() -> None:
    costs = CostModel(cluster(350, free=False), WORKLOAD)
    found = StageOptions(costs, 1024).of(place((Device("a", 0),), 0, 1))
    memory = costs.memory(costs.cluster.node_by_name["a"], 1, True, True, 1, 1024)
    assert len(found) == min(6, memory.max_layers) < 6
    assert {(o.recompute, o.num_recomputed) for o in found} == {(None, None)}


def test_more_in_flight_is_never_faster_and_never_fits_more() -> None:
    options = StageOptions(CostModel(cluster(380), WORKLOAD), 1024)
    before: tuple[StageOption, ...] | None = None
    for in_flight in range(1, 9):
        found = options.of(place((Device("a", 0),), 0, 8, num_in_flight=in_flight))
        if before is not None:
            assert len(found) <= len(before)
            for less, more in zip(before, found, strict=False):
                assert less.time_s <= more.time_s * (1 + 1e-12)
        before = found
    assert before is not None and len(before) < 6


def test_times_rise_with_the_layers() -> None:
    options = StageOptions(CostModel(cluster(400), WORKLOAD), 1024)
    times_s = [o.time_s for o in options.of(place((Device("a", 0),), 0, 1))]
    assert len(times_s) > 1
    assert all(a < b for a, b in pairwise(times_s))


def test_places_that_are_alike_are_looked_at_once() -> None:
    options = StageOptions(CostModel(cluster(1000), WORKLOAD), 1024)
    one = options.of(place((Device("a", 0),), 1, 3))
    assert options.of(place((Device("a", 1),), 1, 3)) is one
    assert options.of(place((Device("b", 0),), 1, 3)) is not one
    assert options.of(place((Device("a", 0),), 2, 3)) is not one


def test_what_does_not_fit_has_no_options() -> None:
    options = StageOptions(CostModel(cluster(20), WORKLOAD), 1024)
    assert options.of(place((Device("a", 0),), 0, 1)) == ()


@given(
    st.integers(200, 600),
    st.integers(0, 3),
    st.integers(1, 12),
    st.none() | st.integers(0, 12),
    st.integers(1, 8),
)
def test_memory_by_what_a_stage_keeps_is_that_of_the_cost_model(
    memory_mib: int, index: int, in_flight: int, sends: int | None, holders: int
) -> None:
    """Options asked for one place after others are those of options that know no other."""
    costs = CostModel(cluster(memory_mib), WORKLOAD)
    of = place((Device("a", 0), Device("b", 0)), index, 4, shares=(3, 1))
    of = replace(of, holders=StateHolders(holders, holders))
    known = StageOptions(costs, 1024)
    known.of(of)
    asked = replace(of, num_in_flight=in_flight, num_sends_kept=sends)
    found = known.of(asked)
    fits = [
        all(
            memory.peak_bytes(num_layers) <= memory.capacity_bytes
            for memory in known.memories("full", asked)
        )
        for num_layers in range(1, WORKLOAD.model.num_layers + 1)
    ]
    assert len(found) == sum(fits)
    assert found == StageOptions(costs, 1024).of(asked)
    for num_layers, option in enumerate(found, 1):
        if option.recompute == "none":
            memories = known.memories("none", asked)
            assert all(m.peak_bytes(num_layers) <= m.capacity_bytes for m in memories)


@pytest.mark.parametrize("partly", [False, True])
def test_options_of_all_layers_are_those_of_each(partly: bool) -> None:
    rng = Random(partly)
    for _ in range(300):
        times = StageTimes(
            "full", "none", partly, (1.0, 2.0), (2.0, 3.0), (2.0, 2.0), expert_shares=None
        )
        for _ in range(3):
            rooms = tuple(
                (free, layer, free + rng.randint(-9, 9), rng.randint(-1, layer + 2))
                for free, layer in [(rng.randint(-9, 99), rng.randint(0, 9)) for _ in "ab"]
            )
            each = [times.within(n, rooms) for n in range(1, 13)]
            found = times.all_within(12, rooms)
            assert found == each[: len(found)]
            assert not any(each[len(found) :])


@given(st.integers(200, 600), st.integers(1, 12), st.integers(1, 8), st.integers(1, 8))
def test_options_under_another_division_of_the_states_share_what_does_not_depend_on_it(
    memory_mib: int, in_flight: int, one: int, other: int
) -> None:
    training = replace(WORKLOAD.training, use_distributed_optimizer=True)
    costs = CostModel(cluster(memory_mib), replace(WORKLOAD, training=training))
    of = place((Device("a", 0), Device("b", 0)), 1, 4, shares=(3, 1))
    first, second = (costs.variant(holders=StateHolders(n, n)) for n in (one, other))
    known = StageOptions(first, 1024)
    known.whatever_memory(replace(of, num_in_flight=7), 2)
    known.of(of)
    asked = replace(of, num_in_flight=in_flight)
    assert StageOptions(second, 1024, like=known).of(asked) == StageOptions(second, 1024).of(asked)
