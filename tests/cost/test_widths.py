"""Tensor-parallel widths that a job may take on a node."""

from __future__ import annotations

import pytest

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cost.widths import usable_widths
from megatron_hetero.errors import UnsupportedError
from megatron_hetero.planner.problem import make_problem
from tests.cost.builders import make_cluster, make_workload

CLUSTER = make_cluster(("a", gpu_type("H100-80GB"), 4))


@pytest.mark.parametrize(
    ("changes", "widths"),
    [({}, (1, 2, 4)), ({"ffn_hidden_size": 96}, (1, 2)), ({"kv_channels": 8}, (1, 2, 4))],
)
def test_in_fp8_every_part_of_a_layer_has_a_product(
    changes: dict[str, int], widths: tuple[int, ...]
) -> None:
    node = CLUSTER.nodes[0]
    assert usable_widths(CLUSTER, make_workload(**changes, fp8=True), node) == widths
    assert usable_widths(CLUSTER, make_workload(**changes), node) == (1, 2, 4)


def test_a_model_that_fp8_does_not_take_is_refused() -> None:
    make_problem(CLUSTER, make_workload(hidden_size=520, kv_channels=64))
    with pytest.raises(UnsupportedError, match=r"520 hidden channels.* no multiple of 16"):
        make_problem(CLUSTER, make_workload(hidden_size=520, kv_channels=64, fp8=True))
