"""Forms of groups that stock Megatron takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.stock.forms import contexts
from megatron_hetero.planner.stock.grids import StockRanks
from megatron_hetero.planner.units import Unit
from tests.cost.builders import FAST, OLD, make_cluster, make_workload


@pytest.mark.parametrize(
    ("rank", "flags", "sizes"),
    [(0, (), [1, 2, 3, 6]), (8, (), [1, 2]), (8, ("--rope-type", "rope"), [1, 2, 3, 6])],
)
def test_sequences_are_divided_as_the_table_of_positions(
    rank: int, flags: tuple[str, ...], sizes: list[int]
) -> None:
    """YaRN's table has 4096 positions, which three context-parallel ranks do not cut in chunks."""
    made = make_workload(seq_length=96)
    job = replace(
        made,
        model=replace(made.model, kv_lora_rank=rank),
        training=replace(made.training, flash_attention=True),
        megatron_args=flags,
    )
    problem = make_problem(make_cluster(("a", FAST, 6), limits=Limits()), job)
    node = problem.nodes[0].name
    ranks = StockRanks(tuple(Unit(node, (i,)) for i in range(6)), (0,) * 6)
    assert contexts(problem, ranks) == sizes


@pytest.mark.parametrize(("gpu", "precision"), [(OLD, "fp16"), (FAST, "fp32")])
def test_without_a_fused_kernel_sequences_stay_whole(gpu: GpuType, precision: str) -> None:
    job = make_workload(seq_length=96, flash_attention=True, precision=precision)
    problem = make_problem(make_cluster(("a", gpu, 6), limits=Limits()), job)
    ranks = StockRanks(tuple(Unit("a", (i,)) for i in range(6)), (0,) * 6)
    assert contexts(problem, ranks) == [1]
