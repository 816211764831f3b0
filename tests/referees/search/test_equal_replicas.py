"""The search over one replica's shape: what it finds fits and is as priced, and shapes that only
moves of all replicas at once lead to are found."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.cluster.spec import Cluster, Node
from megatron_hetero.cost.model import CostModel
from megatron_hetero.model.spec import Workload
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.seeds.symmetric import Symmetric
from tests.cost.builders import FAST, make_cluster, make_workload
from tests.planner.strategies import clusters, workloads
from tools.bench_planners import CASES
from tools.referees.cases import load_case
from tools.referees.search.equal_replicas import EqualReplicas
from tools.referees.search.mixed_shapes import MixedReplicas
from tools.referees.search.strategies import problem_of


@settings(max_examples=25, deadline=None)
@given(clusters(max_gpus=8), workloads(max_layers=8, max_micro_batches=8), st.booleans())
def test_it_never_makes_the_board_worse(
    cluster: Cluster, workload: Workload, limited: bool
) -> None:
    problem = make_problem(cluster, workload)
    before = search(problem, strategies=[Symmetric()]).best
    board = search(problem, strategies=[Symmetric(), EqualReplicas(max_work=200 * limited)])
    if before is None:  # it may find one by itself
        return
    assert board.best is not None
    assert board.best.key <= before.key
    best = board.best
    assert problem.costs.placement(best.placement).step_time_s == pytest.approx(
        best.cost.step_time_s
    )
    total = sum(replica.num_micro_batches for replica in best.placement.replicas)
    assert total == problem.num_micro_batches
    devices = list(best.placement.devices())
    assert len(set(devices)) == len(devices)


@pytest.mark.parametrize(
    ("case", "question", "least"),
    [
        ("sailor-s01", 1, 0.0445),
        ("sailor-s08", 1, 0.0854),
        pytest.param("sailor-s04", 1, 0.2015, marks=pytest.mark.slow),
    ],
)
def test_unlike_widths_and_sandwiches_of_types_are_found(
    case: str, question: int, least: float
) -> None:
    loaded = load_case(CASES / f"{case}.yaml")
    asked = loaded.questions[question]
    problem = problem_of(asked)
    best = search(problem, strategies=[Symmetric(), MixedReplicas()]).best
    assert best is not None
    assert round(loaded.score(asked.score(best.placement).step_s), 4) >= least


class _WideOnly(CostModel):
    """Prices of a profile that lacks width 1."""

    def widths(self, node: Node) -> tuple[int, ...]:
        return tuple(width for width in super().widths(node) if width > 1)


def test_widths_without_a_price_are_left_alone() -> None:
    cluster = make_cluster(("a", FAST, 4))
    workload = make_workload(num_layers=4, global_batch_size=8)
    problem = make_problem(cluster, workload, None, _WideOnly)
    best = search(problem, strategies=[Symmetric(), EqualReplicas()]).best
    assert best is not None
    assert 1 not in best.placement.widths
