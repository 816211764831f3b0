"""Groups of the replicas of a plan: which divide sequences, and what these cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.sequences.cluster_groups import cluster_groups
from megatron_hetero.sequences.deal.batch import deal_batch
from megatron_hetero.sequences.job_plan import dealt_plan
from megatron_hetero.sequences.price.group_price import longest_sequence
from megatron_hetero.sequences.price.modelled import TRAINED
from megatron_hetero.sequences.price.token_rates import at_length
from megatron_hetero.sequences.replica_groups import launch_counts, replica_groups, replica_ranks
from megatron_hetero.sequences.tree import step_seconds
from tests.cost.builders import FAST, SLOW, make_cluster
from tests.sequences.test_modelled import job

MIXED = make_cluster(("a", FAST, 4), ("b", SLOW, 2))


def placed(layout: str, workload: Workload) -> Plan:
    plan = plan_from_layout(parse_layout(layout))
    batch = sum(replica.num_micro_batches for replica in plan.replicas)
    training = replace(workload.training, global_batch_size=batch)
    return dealt_plan(MIXED, plan, replace(workload, training=training))


@pytest.mark.parametrize("recompute", ["full", "none"])
def test_replicas_of_one_gpu_are_priced_as_gpus(recompute: str) -> None:
    workload = job()
    workload = replace(workload, training=replace(workload.training, recompute=recompute))
    gpus = cluster_groups(MIXED, workload, exchanges=TRAINED).tree
    tree = replica_groups(MIXED, placed(" | ".join(["tp1:8 @2"] * 6), workload), workload).tree
    assert tree.other_stages == (0.0,) * 6
    for alone in (True, False):
        # The pair of SLOW GPUs is one group in both; of all six one nest is as good as the other.
        ranks = (5, 6) if alone else (4, 6)
        one, other = (
            next(t.kinds[g.kind] for g in t.groups if (g.first, g.stop) == ranks)
            for t in (gpus, tree)
        )
        lengths = np.geomspace(64, one.prices[0].room[0] / 1e6, 9)
        for mine, theirs in zip(other.prices, one.prices, strict=True):
            assert mine.name == theirs.name
            assert mine.seconds(lengths) == pytest.approx(theirs.seconds(lengths), rel=1e-3)
            parts = [p.memory(lengths) / np.array(p.room)[:, None] for p in (mine, theirs)]
            assert parts[0] == pytest.approx(parts[1], rel=1e-3)
            assert mine.fixed_s == pytest.approx(theirs.fixed_s, rel=1e-2)


def test_a_pipeline_takes_what_its_slowest_stage_does_and_holds_what_its_fullest_gpu_can() -> None:
    workload = job()
    plan = placed("tp2:4,tp1:1,tp1:3 @9 | tp1:4,tp1:4 @3", workload)
    tree = replica_groups(MIXED, plan, workload).tree
    placement = placement_of(plan, MIXED)
    for number, replica in enumerate(placement.replicas):
        group = next(g for g in tree.groups if (g.first, g.stop) == (number, number + 1))
        (price,) = tree.kinds[group.kind].prices
        for length in (2048, 30_000):
            costs = CostModel(MIXED, at_length(workload, length)).sharded_as(placement)
            stages = costs.replica(replica, costs.vocab_rows(placement.widths)).stages
            slowest = max(stage.times.total_s for stage in stages)
            found = price.fixed_s + price.seconds(np.array([float(length)]))[0]
            # Within what three rates miss of a curve (`tests.sequences.test_modelled`).
            assert 0.988 * slowest <= found <= 1.05 * slowest
        longest = longest_sequence(price)
        for length, fits in ((longest, True), (longest * 1.05, False)):
            costs = CostModel(MIXED, at_length(workload, int(length))).sharded_as(placement)
            assert costs.replica(replica, costs.vocab_rows(placement.widths)).fits == fits


def test_only_replicas_of_equal_stages_divide_a_sequence() -> None:
    plan = placed("tp1:4,tp1:4 @4 | tp1:4,tp1:4 @4 | tp1:3,tp1:5 @4", job())
    tree = replica_groups(MIXED, plan, job()).tree
    priced = {(g.first, g.stop) for g in tree.groups if tree.kinds[g.kind].prices}
    assert priced == {(0, 1), (1, 2), (2, 3), (0, 2)}
    assert replica_ranks(plan) == [(0, 1), (2, 3), (4, 5)]
    assert 0.9 < tree.other_stages[0] == tree.other_stages[1] <= 1.1 and tree.other_stages[2] < 0.9


def test_launch_counts_never_rise_along_a_pipeline() -> None:
    (replica,) = placed("tp1:2,tp1:2,tp1:1,tp1:1,tp1:1,tp1:1 @9", job()).replicas
    assert launch_counts(replica) == [6, 5, 4, 3, 2, 1]
    for own, found in ((9, [9, 5]), (2, [5, 5])):
        first = replace(replica.stages[0], num_launched_forwards=own)
        counts = launch_counts(replace(replica, stages=(first, *replica.stages[1:])))
        assert counts == [*found, 4, 3, 2, 1]


def test_faster_pipelines_get_more_tokens() -> None:
    plan = placed("tp1:4,tp1:4 @4 | tp1:4,tp1:4 @4 | tp1:4,tp1:4 @4", job())
    tree = replica_groups(MIXED, plan, job()).tree
    lengths = [1000] * 60
    deal = deal_batch(tree, lengths)
    tokens = np.zeros(3)
    for micro_batch in deal.micro_batches:
        for group in micro_batch.groups:
            assert group.size == 1
            tokens[group.first] += 1000 * len(group.sequences)
    assert tokens[2] < 0.7 * tokens[0] and deal.balance < 1.25
    # More and shorter ones than where nothing has to be filled.
    flat = [m.seconds for m in deal_batch(replace(tree, other_stages=()), lengths).micro_batches]
    assert len(flat) < len(deal.micro_batches)
    assert deal.seconds < 0.9 * step_seconds(flat, tree.most_other_stages)
    seconds = [m.seconds for m in deal.micro_batches]
    assert seconds == sorted(seconds) and deal.seconds == pytest.approx(
        sum(seconds) + tree.most_other_stages * seconds[-1]
    )
    assert deal.least_s <= deal.bound_s <= deal.seconds


def test_a_pipeline_without_room_is_named() -> None:
    big = replace(job(), model=replace(job().model, hidden_size=16384, num_layers=64))
    with pytest.raises(InfeasiblePlanError, match="replica 0 of the plan"):
        replica_groups(MIXED, placed("tp1:32,tp1:32 @4 | tp1:16,tp1:16,tp1:16,tp1:16 @4", big), big)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_token_is_never_free() -> None:
    """Where a pass lasts as long as its launches, sequences are dealt by memory."""
    gpus = [replace(gpu, launch_s=1.0) for gpu in (FAST, SLOW)]
    cluster, workload = make_cluster(("a", gpus[0], 4), ("b", gpus[1], 2)), job()
    plan = placed(" | ".join(["tp1:8 @2"] * 6), workload)
    for kind in replica_groups(cluster, plan, workload).tree.kinds:
        for price in kind.prices:
            assert np.isfinite(price.seconds(np.array([77.0, 1000.0]))).all()
