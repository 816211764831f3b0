"""Ways of activations from stage to stage."""

from __future__ import annotations

import pytest

from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.schedule.network import crossing
from tests.cost.builders import FAST, make_cluster, make_workload, place


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("nodes", [(8,), (4, 4)])
def test_a_stock_rank_sends_its_part_of_the_sequence(
    nodes: tuple[int, ...], sequence_parallel: bool
) -> None:
    workload = make_workload(sequence_parallel=sequence_parallel)
    cluster = make_cluster(*((f"n{i}", FAST, count) for i, count in enumerate(nodes)))
    placed = placement_of(place("tp2cp2:2,tp2cp2:2 @4", workload, cluster), cluster)
    costs = CostModel(cluster, workload)
    sender, receiver = placed.replicas[0].stages
    found = crossing(costs, sender, receiver, is_stock=True)
    of_rank = costs.activation_bytes / (4 if sequence_parallel else 2)
    # Four ranks share the path between two nodes.
    assert found.num_bytes == of_rank * (1 if len(nodes) == 1 else 4)
