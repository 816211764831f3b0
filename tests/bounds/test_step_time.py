"""The lower bound never passes the best plan, and says something."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.bounds import counting as bound_counting
from megatron_hetero.bounds.chains import levels as bound_levels
from megatron_hetero.bounds.divided import divided_bound_s
from megatron_hetero.bounds.free_groups import free_groups_bound_s
from megatron_hetero.bounds.step_time import step_time_bound, step_time_bound_s
from megatron_hetero.cluster.limits import CHOICES
from megatron_hetero.cluster.lines import Line
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import make_problem
from tests.cost.builders import AS_GIVEN, FAST, FREE, SLOW, make_cluster, make_workload
from tests.planner.naive import best_step_time_s
from tests.planner.strategies import clusters, expert_workloads, link_terms, workloads


def check_bounds(costs: CostModel, best_s: float) -> None:
    """Not above a plan there is; nor where it is asked for no more than that plan takes, which
    leaves everything out of its tables that takes longer."""
    for enough_s in (inf, 1.001 * best_s):
        assert step_time_bound(costs, enough_s).step_time_s <= best_s * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(clusters(max_gpus=3), workloads(max_layers=3, max_micro_batches=3))
def test_no_plan_is_faster_than_the_bound(cluster: Cluster, workload: Workload) -> None:
    best_s = best_step_time_s(cluster, workload)
    if best_s is not None:
        check_bounds(CostModel(cluster, workload), best_s)


def over_sites(draw: st.DrawFn, cluster: Cluster) -> Cluster:
    """The cluster's nodes on up to three sites, slow links between these, which they may share."""
    site = st.sampled_from(["here", "there", "far"])
    nodes = tuple(replace(node, site=draw(site)) for node in cluster.nodes)
    slow = draw(st.sampled_from([1e9, 1e8, 1e7]))
    site_of = {node.name: node.site for node in nodes}
    links = {
        (a, b): link if site_of[a] == site_of[b] else replace(link, bytes_per_s=slow)
        for (a, b), link in cluster.node_links.items()
    }
    lines = {}
    if draw(st.booleans()):
        sites = sorted(set(site_of.values()))
        speed = slow * draw(st.sampled_from([1.0, 1.5]))
        lines = {(a, b): (Line(f"line {a} -> {b}", speed),) for a in sites for b in sites if a != b}
    return replace(cluster, nodes=nodes, node_links=links, site_lines=lines)


@st.composite
def free_jobs(draw: st.DrawFn) -> tuple[Cluster, Workload]:
    """What plans may choose, and what the distributed optimizer and the exchange do, is drawn."""
    held = tuple(name for name in CHOICES if draw(st.booleans()))
    cluster = over_sites(draw, draw(clusters(max_gpus=4, limits=replace(FREE, as_given=held))))
    workload = draw(workloads(max_layers=5, max_micro_batches=12))
    training = replace(
        workload.training,
        use_distributed_optimizer=draw(st.booleans()),
        overlap_grad_reduce=draw(st.booleans()),
        overlap_param_gather=draw(st.booleans()),
        per_token_loss=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "full"])),
    )
    return cluster, replace(workload, training=training)


def check_no_plan_beats_it(cluster: Cluster, workload: Workload) -> None:
    """No plan that any strategy prices on its way, with settings of its own or without; those whose
    groups divide sequences have a bound of their own, and so have those with unlike shares or with
    experts dealt out over replicas."""
    problem = make_problem(cluster, workload)
    found_s: dict[bool, list[float]] = {False: [], True: []}
    costs = CostModel(problem.cluster, workload)
    of_any_groups_s = free_groups_bound_s(costs)
    assert of_any_groups_s is not None
    for candidate in search(problem).ranking_of_all:
        placement = candidate.placement
        assert of_any_groups_s <= candidate.step_time_s * (1 + 1e-9)
        if not any(s.shares or s.expert_groups for r in placement.replicas for s in r.stages):
            found_s[placement.has_context_parallel].append(candidate.step_time_s)
    if found_s[False]:
        check_bounds(costs, min(found_s[False]))
    assert divided_bound_s(costs) <= min(found_s[True], default=inf) * (1 + 1e-9)


@settings(max_examples=8, deadline=None)
@given(clusters(max_gpus=4, limits=FREE), expert_workloads(max_layers=5))
def test_no_plan_that_deals_experts_out_is_faster(cluster: Cluster, workload: Workload) -> None:
    check_no_plan_beats_it(cluster, workload)


@settings(max_examples=15, deadline=None)
@given(free_jobs())
def test_no_plan_with_settings_of_its_own_is_faster(job: tuple[Cluster, Workload]) -> None:
    check_no_plan_beats_it(*job)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=1500, deadline=None)
@given(free_jobs())
def test_no_plan_of_many_with_settings_is_faster(job: tuple[Cluster, Workload]) -> None:
    check_no_plan_beats_it(*job)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=1500, deadline=None)
@given(clusters(max_gpus=4), workloads(max_layers=3, max_micro_batches=3))
def test_no_plan_of_many_is_faster(cluster: Cluster, workload: Workload) -> None:
    best_s = best_step_time_s(cluster, workload)
    if best_s is not None:
        check_bounds(CostModel(cluster, workload), best_s)


@st.composite
def spread_jobs(draw: st.DrawFn, max_gpus: int) -> tuple[Cluster, Workload]:
    """Nodes on several sites, and exchanges of every kind."""
    cluster = over_sites(draw, draw(clusters(max_gpus=max_gpus)))
    workload = draw(workloads(max_layers=3, max_micro_batches=4))
    training = replace(
        workload.training,
        use_distributed_optimizer=draw(st.booleans()),
        overlap_grad_reduce=draw(st.booleans()),
        overlap_param_gather=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "full"])),
    )
    model = replace(workload.model, tied_embeddings=draw(st.booleans()))
    return cluster, Workload(model, training, (), "test")


def check_bounds_of_spread(cluster: Cluster, workload: Workload) -> None:
    best_s = best_step_time_s(cluster, workload)
    if best_s is not None:
        costs = CostModel(cluster, workload)
        check_bounds(costs, best_s)
        assert bound_by_prices_s(costs) <= best_s * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(spread_jobs(max_gpus=3))
def test_no_plan_over_sites_is_faster(job: tuple[Cluster, Workload]) -> None:
    check_bounds_of_spread(*job)


@st.composite
def jobs_with_link_terms(draw: st.DrawFn, max_gpus: int) -> tuple[Cluster, Workload]:
    """Links on which adding takes time, and many senders to one receiver."""
    cluster, workload = draw(spread_jobs(max_gpus))
    return draw(link_terms(cluster)), workload


@settings(max_examples=40, deadline=None)
@given(jobs_with_link_terms(max_gpus=3))
def test_no_plan_with_link_terms_is_faster(job: tuple[Cluster, Workload]) -> None:
    check_bounds_of_spread(*job)


@settings(max_examples=10, deadline=None)
@given(free_jobs(), st.data())
def test_no_plan_with_link_terms_and_settings_of_its_own_is_faster(
    job: tuple[Cluster, Workload], data: st.DataObject
) -> None:
    cluster, workload = job
    check_no_plan_beats_it(data.draw(link_terms(cluster)), workload)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=1000, deadline=None)
@given(jobs_with_link_terms(max_gpus=4))
def test_no_plan_of_many_with_link_terms_is_faster(job: tuple[Cluster, Workload]) -> None:
    check_bounds_of_spread(*job)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=1000, deadline=None)
@given(spread_jobs(max_gpus=4))
def test_no_plan_of_many_over_sites_is_faster(job: tuple[Cluster, Workload]) -> None:
    check_bounds_of_spread(*job)


@pytest.mark.parametrize("is_divided", [False, True])
def test_a_tied_embedding_on_two_sites_is_exchanged_after_all_pipelines(is_divided: bool) -> None:
    """Two GPUs that need each other's memory, a slow link between them."""
    workload = make_workload(num_layers=4, tied_embeddings=True)
    training = replace(workload.training, use_distributed_optimizer=is_divided)
    tiny = replace(FAST, memory_bytes=160 << 20)
    link = Link(2e8, 0.0)
    cluster = make_cluster(("a", tiny, 1), ("b", tiny, 1), between=link, sites=["here", "there"])
    tied = CostModel(cluster, replace(workload, training=training))
    best_s = best_step_time_s(cluster, tied.workload)
    assert best_s is not None
    assert 0.75 * best_s < step_time_bound_s(tied) <= best_s * (1 + 1e-9)
    words = 1000 * 512 * (2 + 1 if is_divided else 2 * 2)  # half of 4 bytes, and of 2 or 4 more
    assert step_time_bound_s(tied) > words / 2e8


def test_first_stages_on_two_sites_exchange_their_embedding_after_all_pipelines() -> None:
    """One GPU on each site, two replicas asked for: an embedding and a layer cross."""
    workload = make_workload(num_layers=1, global_batch_size=2, tied_embeddings=False)
    link, limits = Link(1e9, 0.0), replace(AS_GIVEN, num_replicas=2)
    cluster = make_cluster(
        ("a", FAST, 1), ("b", FAST, 1), between=link, sites=["here", "there"], limits=limits
    )
    costs = CostModel(cluster, workload)
    two = PlacedReplica((PlacedStage((Device("a", 0),), 1),), 1)
    other = PlacedReplica((PlacedStage((Device("b", 0),), 1),), 1)
    step_s = costs.placement(Placement((two, other))).step_time_s
    embedding, layer = 1000 * 512, 12 * 512**2
    assert 4 * (embedding + layer) / 1e9 < step_time_bound_s(costs) <= step_s
    assert step_time_bound_s(costs) > 0.7 * step_s


def test_one_pipeline_that_leaves_its_node_comes_back_on_the_same_paths() -> None:
    """Both ends on one node: the link carries two boundaries in each direction."""
    workload = make_workload(
        num_layers=6, global_batch_size=16, tied_embeddings=True, vocab_size=4000
    )
    tiny = replace(FAST, memory_bytes=195 << 20)
    link = Link(2e8, 0.0)
    cluster = make_cluster(("a", tiny, 2), ("b", tiny, 1), between=link, sites=["here", "there"])
    costs = CostModel(cluster, workload)
    best_s = best_step_time_s(cluster, workload)
    assert best_s is not None
    bound_s = step_time_bound_s(costs)
    assert 2 * 16 * costs.activation_bytes / 2e8 <= bound_s <= best_s * (1 + 1e-9)
    assert bound_s > 0.8 * best_s


def bound_by_prices_s(costs: CostModel) -> float:
    """The bound as in clusters whose GPUs are too many to be counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound_counting, "_MAX_STATES", 0)
        patch.setattr(bound_counting, "_MAX_COUNTED", 0)
        return step_time_bound_s(costs)


def check_no_plan_beats_prices(cluster: Cluster, workload: Workload) -> None:
    best_s = best_step_time_s(cluster, workload)
    if best_s is not None:
        assert bound_by_prices_s(CostModel(cluster, workload)) <= best_s * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(clusters(max_gpus=3), workloads(max_layers=3, max_micro_batches=3))
def test_no_plan_is_faster_than_the_bound_by_prices(cluster: Cluster, workload: Workload) -> None:
    check_no_plan_beats_prices(cluster, workload)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=1000, deadline=None)
@given(clusters(max_gpus=4), workloads(max_layers=3, max_micro_batches=3))
def test_no_plan_of_many_is_faster_than_prices(cluster: Cluster, workload: Workload) -> None:
    check_no_plan_beats_prices(cluster, workload)


def test_prices_prove_nearly_as_much_as_numbers() -> None:
    """Two kinds of GPUs of which only whole layers fit: speeds alone are no good prices."""
    workload = make_workload(
        num_layers=12, hidden_size=2048, seq_length=2048, global_batch_size=64, recompute="full"
    )
    slow = replace(SLOW, memory_bytes=3 << 30)
    cluster = make_cluster(("a", FAST, 3), ("b", slow, 8))
    costs = CostModel(cluster, workload)
    by_numbers_s, by_prices_s = step_time_bound_s(costs), bound_by_prices_s(costs)
    assert 0.97 * by_numbers_s < by_prices_s <= by_numbers_s * 1.002


@settings(max_examples=25, deadline=None)
@given(free_jobs())
def test_ways_that_are_left_out_are_not_needed(job: tuple[Cluster, Workload]) -> None:
    costs = CostModel(*job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound_levels, "needed_options", lambda options, steps, *_: (options, steps))
        all_s = step_time_bound_s(costs)
    assert step_time_bound_s(costs) == pytest.approx(all_s, rel=1e-9)


def test_a_model_that_needs_all_memory_is_bounded_by_it() -> None:
    """One GPU is fast, but holds few layers: the slow one must take the rest, and paces it."""
    workload = make_workload(
        num_layers=16, hidden_size=2048, seq_length=2048, global_batch_size=32, recompute="full"
    )
    cluster = make_cluster(("a", FAST, 1), ("b", SLOW, 2))
    costs = CostModel(cluster, workload)
    bound = step_time_bound(costs)
    slow = costs.pieces(cluster.node_by_name["b"], 1, workload.model.vocab_size).layer.total_s
    fast = costs.pieces(cluster.node_by_name["a"], 1, workload.model.vocab_size).layer.total_s
    by_work_s = 32 * 16 / (1 / fast + 2 / slow)
    assert bound.step_time_s > 1.02 * by_work_s
    assert "memory" not in bound.relaxes


def test_a_stage_that_is_both_ends_exchanges_tied_words_once() -> None:
    """Two replicas of a stage each: the bound once counted the words as embedding and as head."""
    small = replace(SLOW, memory_bytes=100 << 20)
    cluster = make_cluster(("a", small, 4), inside=Link(1e9, 3e-6))
    workload = make_workload(num_layers=1, global_batch_size=3, seq_length=2048)
    best_s = best_step_time_s(cluster, workload)
    assert best_s is not None
    check_bounds(CostModel(cluster, workload), best_s)


def test_one_gpu_is_bounded_by_its_own_work() -> None:
    workload = make_workload(num_layers=4, global_batch_size=8)
    cluster = make_cluster(("a", FAST, 1))
    best_s = best_step_time_s(cluster, workload)
    bound = step_time_bound(CostModel(cluster, workload))
    assert best_s is not None
    assert bound.step_time_s <= best_s * (1 + 1e-9)
    assert bound.step_time_s == pytest.approx(best_s, rel=2e-3)


def test_equal_questions_get_equal_bounds() -> None:
    workload = make_workload(num_layers=12, global_batch_size=16)
    bounds = set()
    for names in (("a", "b"), ("b", "a")):
        nodes = {"a": ("a", FAST, 4), "b": ("b", SLOW, 4)}
        cluster = make_cluster(*(nodes[name] for name in names))
        bounds.add(step_time_bound_s(CostModel(cluster, workload)))
    assert len(bounds) == 1
