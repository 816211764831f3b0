"""The prices of a stage: recompute, and exchanges that price lists share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cost.model import CostModel
from tests.cost.builders import FAST, make_cluster, make_workload
from tests.cost.test_model import CLUSTER, WORKLOAD, replica


def test_some_layers_recomputed_lie_between_none_and_all() -> None:
    costs = CostModel(CLUSTER, WORKLOAD)
    times, peaks = [], []
    for some in (0, 1, 3, 5, 6):
        own = replica(("a0", 6))
        (stage,) = own.stages
        if some:
            stage = replace(stage, recompute="full", recompute_num_layers=some % 6 or None)
        found = costs.stage(replace(own, stages=(stage,)), 0, 1024)
        times.append(found.times.total_s)
        peaks.append(found.memory.parts_bytes(6)["activations"])
    assert times == sorted(times) and peaks == sorted(peaks, reverse=True)
    # Each layer that recomputes costs as much again, and saves as much.
    steps = [(times[i] - times[0]) / n for i, n in ((1, 1), (2, 3), (3, 5), (4, 6))]
    assert steps == pytest.approx([steps[0]] * 4)
    saved = [(peaks[0] - peaks[i]) / n for i, n in ((1, 1), (2, 3), (3, 5), (4, 6))]
    assert saved == pytest.approx([saved[0]] * 4)


def test_variants_share_the_price_of_equal_exchanges_alone() -> None:
    job = make_workload(precision="bf16", use_distributed_optimizer=True)
    costs = CostModel(make_cluster(("a", FAST, 2)), job)
    own = costs._exchange
    # Between precisions new weights travel in fp32: other bytes have prices of their own.
    assert costs.variant(precision="fp32")._exchange is not own
    # What exchanges do not depend on shares them.
    assert costs.variant(micro_batch_size=2)._exchange is own
    # Asked for again, each keeps what it knows.
    assert costs._exchange is own
