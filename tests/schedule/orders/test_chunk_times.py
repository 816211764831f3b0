from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.model.blocks import blocks
from megatron_hetero.plan.plan import LayerRange, Stage, StageShape
from megatron_hetero.schedule.orders.chunk_times import stage_chunk_times
from tests.plan.strategies import workload

STAGE = Stage(StageShape(1, 4), 2)
TIMES = PassTimes(1.0, 2.0)


def test_one_chunk_keeps_the_stages_times() -> None:
    (times,) = stage_chunk_times(STAGE, TIMES, workload(), is_last=False)
    layer = blocks(workload())[1]
    share = layer.matmul_flops_forward / (
        layer.matmul_flops_forward + layer.attention_flops_forward
    )
    assert times.forward_s == 1.0
    assert times.backward_weight_s == pytest.approx(share)
    assert times.backward_input_s + times.backward_weight_s == pytest.approx(2.0)


def test_chunks_share_by_flops_and_the_last_has_the_output_layer() -> None:
    chunked = replace(STAGE, chunks=(LayerRange(2, 1), LayerRange(5, 3)))
    inner = stage_chunk_times(chunked, TIMES, workload(), is_last=False)
    assert [t.forward_s for t in inner] == pytest.approx([0.25, 0.75])
    last = stage_chunk_times(chunked, TIMES, workload(), is_last=True)
    assert last[0].forward_s < 0.25
    assert sum(t.forward_s for t in last) == pytest.approx(1.0)
    assert sum(t.backward_input_s + t.backward_weight_s for t in last) == pytest.approx(2.0)


def test_recomputing_belongs_to_the_part_for_inputs() -> None:
    again = replace(STAGE, recompute="full")
    (whole,) = stage_chunk_times(STAGE, TIMES, workload(), is_last=False)
    (times,) = stage_chunk_times(again, TIMES, workload(), is_last=False)
    assert times.backward_weight_s == pytest.approx(whole.backward_weight_s * 2 / 3)
    some = replace(again, recompute_num_layers=2)
    (half,) = stage_chunk_times(some, TIMES, workload(), is_last=False)
    assert half.backward_weight_s == pytest.approx(whole.backward_weight_s * 2 / 2.5)
