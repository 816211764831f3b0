"""Overlapped gradient exchange and the distributed optimizer, really run, last as predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cluster.spec import Cluster, Link
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.rehearse.rehearsal import Rehearsal
from megatron_hetero.runtime.rehearse.run import Options, rehearse
from tests.cost.builders import FAST, SLOW, make_cluster
from tests.runtime.rehearse.test_rehearse import with_hosts
from tests.schedule.test_step import placed

OURS = "tp1:8 @1 | tp2:8 @1", ["a:0"], ["b:0", "b:1"]
STOCK = "tp1:8 @1 | tp1:8 @1", ["a:0"], ["b:0"]
BOTH = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}


def cluster() -> Cluster:
    return make_cluster(("a", FAST, 1), ("b", SLOW, 2), between=Link(4e10, 1e-3))


def plan(layout: str, *devices: list[str], **flags: bool) -> Plan:
    sizes = {"hidden_size": 2048, "seq_length": 2048, "max_position_embeddings": 2048}
    made = placed(layout, *devices, num_layers=8, tied_embeddings=False, **sizes, **flags)
    return with_hosts(made, cluster())


def run(predicted: Plan, folder: Path, rehearsed: Plan | None = None) -> Rehearsal:
    return rehearse(predicted, cluster(), None, Options(1, rehearsed_plan=rehearsed), folder)


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


def test_an_exchange_that_does_not_overlap_shows(tmp_path: Path) -> None:
    """The prediction counts on the overlap, which a quarter of this step is; the rehearsal alone
    goes without."""
    layout, *devices = OURS
    overlapping = plan(layout, *devices, overlap_grad_reduce=True)
    plain = plan(layout, *devices)
    assert run(overlapping, tmp_path, plain).error < -0.1
