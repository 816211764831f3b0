"""Overlapped gradient exchange and the distributed optimizer, really run, last as predicted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.lab.kit.orders import with_interleaving
from megatron_hetero.lab.rehearse.rehearsal import Rehearsal
from megatron_hetero.lab.rehearse.run import RehearsalOptions, rehearse
from megatron_hetero.plan.build import canonical_hosts
from megatron_hetero.plan.plan import Plan
from tests.cost.builders import FAST, SLOW, make_cluster
from tests.lab.rehearse.test_rehearse import with_hosts
from tests.schedule.simulator.test_step import placed

OURS = "tp1:8 @1 | tp2:8 @1", ["a:0"], ["b:0", "b:1"]
STOCK = "tp1:8 @1 | tp1:8 @1", ["a:0"], ["b:0"]
BOTH = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}


def cluster() -> Cluster:
    return make_cluster(("a", FAST, 1), ("b", SLOW, 2), ("c", SLOW, 1), between=Link(4e10, 1e-3))


def plan(layout: str, *devices: list[str], **flags: bool) -> Plan:
    sizes = {"hidden_size": 2048, "seq_length": 2048, "max_position_embeddings": 2048}
    made = placed(layout, *devices, num_layers=8, tied_embeddings=False, **sizes, **flags)
    return with_hosts(made, cluster())


def run(predicted: Plan, folder: Path, rehearsed: Plan | None = None) -> Rehearsal:
    return rehearse(
        predicted, cluster(), None, RehearsalOptions(1, rehearsed_plan=rehearsed), folder
    )


@pytest.mark.parametrize("of", [OURS, STOCK], ids=["our runtime", "stock Megatron"])
def test_prediction_and_rehearsal_agree(
    of: tuple[str, *tuple[list[str], ...]], tmp_path: Path
) -> None:
    layout, *devices = of
    found = run(plan(layout, *devices, **BOTH), tmp_path)
    assert found.is_stock == (of is STOCK)
    assert abs(found.error) < 0.05, (found.predicted.step_time_s, found.step_times_s)
    last_s = max(stage.compute_end_s for row in found.stages for stage in row)
    for row in found.stages:
        for stage in row:
            (update,) = (o for o in stage.operations if o.kind == "step")
            exchanged = [o for o in stage.operations if o.kind == "gradient_sync"]
            assert min(o.start_s for o in exchanged) < 0.9 * last_s, "it overlaps"
            assert max(o.end_s for o in exchanged) <= update.start_s + 1e-9
            gathered = [o for o in stage.operations if o.kind == "weight_sync"]
            assert min(o.start_s for o in gathered) >= update.end_s - 1e-9


def interleaved_replicas(**flags: bool) -> tuple[Plan, Cluster]:
    """Two equal replicas of two stages with two chunks of unlike size, one on each node."""
    wide = make_cluster(("a", FAST, 2), ("b", SLOW, 2), between=Link(1e10, 2e-3))
    sizes = {"hidden_size": 1024, "seq_length": 1024, "max_position_embeddings": 1024}
    devices = ["a:0", "a:1"], ["b:0", "b:1"]
    made = placed("tp1:4,tp1:4 @4 | tp1:4,tp1:4 @4", *devices, num_layers=8, **sizes, **flags)
    for replica in (0, 1):
        made = with_interleaving(made, replica, [(0, 1), (1, 2), (0, 3), (1, 2)])
    return replace(made, hosts=canonical_hosts(made.replicas, wide)), wide


@pytest.mark.parametrize(
    ("flags", "num_exchanges"),
    # Of each chunk, and of the embedding that the first and the last stage share; divided, the
    # first chunk has a bucket for it.
    [
        ({}, (3, 3)),
        pytest.param({"use_distributed_optimizer": True}, (4, 3), marks=pytest.mark.slow),
    ],
    ids=["all-reduce", "divided optimizer"],
)
def test_chunks_of_stock_megatron_exchange_one_after_the_other(
    flags: dict[str, bool], num_exchanges: tuple[int, int], tmp_path: Path
) -> None:
    made, wide = interleaved_replicas(**flags)
    found = rehearse(made, wide, None, RehearsalOptions(1), tmp_path)
    assert found.is_stock
    assert found.predicted.gradient_sync_s > 0.1 * found.predicted.step_time_s
    assert abs(found.error) < 0.03, (found.predicted.step_time_s, found.step_times_s)
    for stage in (stage for row in found.stages for stage in row):
        exchanged = [o for o in stage.operations if o.kind == "gradient_sync"]
        assert len(exchanged) == num_exchanges[stage.stage]
        for one, other in pairwise(exchanged):
            assert one.end_s <= other.start_s + 1e-9


def test_chunks_of_stock_megatron_overlap_when_all_stages_are_done_with_them(
    tmp_path: Path,
) -> None:
    made, wide = interleaved_replicas(overlap_grad_reduce=True)
    found = rehearse(made, wide, None, RehearsalOptions(1), tmp_path)
    assert found.is_stock
    assert abs(found.error) < 0.05, (found.predicted.step_time_s, found.step_times_s)
    for row in (found.stages, found.predicted.stages):
        slow, late = row[1]
        ends_s = [o.end_s for o in late.operations if o.kind == "backward"]
        begins_s = [o.start_s for o in late.operations if o.kind == "gradient_sync"]
        # The second chunk's last backward pass is two before the last; stage 1 begins one later.
        assert ends_s[-3] < min(begins_s) < ends_s[-1]
        tied = max(o.start_s for o in slow.operations if o.kind == "gradient_sync")
        assert tied >= max(o.end_s for o in slow.operations if o.kind == "gradient_sync") - 1e-3


def test_an_exchange_that_does_not_overlap_shows(tmp_path: Path) -> None:
    """The prediction counts on the overlap, which a quarter of this step is; the rehearsal alone
    goes without."""
    layout, *devices = OURS
    overlapping = plan(layout, *devices, overlap_grad_reduce=True)
    plain = plan(layout, *devices)
    assert run(overlapping, tmp_path, plain).error < -0.1


@pytest.mark.parametrize(
    ("flags", "uplinks"),
    [({}, ()), ({}, ((4,), (1,), (1,))), pytest.param(BOTH, (), marks=pytest.mark.slow)],
    ids=["all-reduce", "by uplinks", "divided and overlapped"],
)
def test_exchanges_by_groups_last_as_predicted(
    flags: dict[str, bool], uplinks: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    places = (["a:0"], ["b:0"], ["c:0"]) if uplinks else (["a:0"], ["b:0"], ["b:1"])
    made = plan("tp1:8 @1 | tp1:8 @1 | tp1:8 @1", *places, **flags)
    groups = (("a",), ("b",), ("c",)) if uplinks else (("a",), ("b",))
    made = replace(made, exchange_groups=groups, exchange_uplinks=uplinks)
    found = run(made, tmp_path)
    assert not found.is_stock
    assert abs(found.error) < 0.05, (found.predicted.step_time_s, found.step_times_s)
    for load in found.lines:
        if " -> " in load.name:
            assert load.rehearsed_s == pytest.approx(load.predicted_s, rel=0.02), load
