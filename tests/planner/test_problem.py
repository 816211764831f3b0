"""What a strategy searches: which GPUs may be used, and what the limits allow."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import UsageError
from megatron_hetero.planner.objective import Objective
from megatron_hetero.planner.problem import canonical_cluster, make_problem
from megatron_hetero.planner.seeds.divided import divided_structures
from megatron_hetero.planner.units import Unit
from tests.cost.builders import AS_GIVEN, FAST, OLD, SLOW, make_cluster, make_workload

WORKLOAD = make_workload(num_layers=6, global_batch_size=12, micro_batch_size=2)


def boxes(**limits: object) -> Cluster:
    nodes = ("b", SLOW, 3), ("a", FAST, 4), ("c", SLOW, 2)
    return make_cluster(*nodes, limits=replace(AS_GIVEN, **limits))  # type: ignore[arg-type]


def test_nodes_come_by_name_whatever_the_file_says() -> None:
    problem = make_problem(boxes(), WORKLOAD)
    assert [node.name for node in problem.nodes] == ["a", "b", "c"]
    assert [node.name for node in problem.cluster.nodes] == ["a", "b", "c"]
    assert problem.gpus == {"a": (0, 1, 2, 3), "b": (0, 1, 2), "c": (0, 1)}
    assert problem.widths == {"a": (1, 2, 4), "b": (1, 2), "c": (1, 2)}
    assert problem.num_gpus == 9
    assert problem.idle_reasons == {}
    turned = canonical_cluster(replace(boxes(), nodes=boxes().nodes[::-1]))
    assert turned.nodes == canonical_cluster(boxes()).nodes


def test_what_limits_keep_idle_is_not_used() -> None:
    problem = make_problem(boxes(idle_devices=("a:2", "a:3", "c")), WORKLOAD)
    assert problem.gpus == {"a": (0, 1), "b": (0, 1, 2)}
    assert problem.widths["a"] == (1, 2)  # no wider than what is left
    assert set(problem.idle_reasons) == {"a:2", "a:3", "c:0", "c:1"}
    assert set(problem.idle_reasons.values()) == {"kept idle by limits.idle or --without"}
    assert [node.name for node in problem.nodes] == ["a", "b"]


def test_what_cannot_train_in_the_jobs_precision_is_idle_and_says_so() -> None:
    cluster = make_cluster(("a", FAST, 2), ("old", OLD, 2))
    problem = make_problem(cluster, WORKLOAD)
    assert list(problem.gpus) == ["a"]
    assert set(problem.idle_reasons.values()) == {"OLD cannot train in bf16"}
    in_fp16 = replace(WORKLOAD, training=replace(WORKLOAD.training, precision="fp16"))
    assert make_problem(cluster, in_fp16).idle_reasons == {}


def test_micro_batches_and_replica_counts() -> None:
    problem = make_problem(boxes(), WORKLOAD)
    assert problem.num_micro_batches == 6
    assert list(problem.replica_counts()) == [1, 2, 3, 4, 5, 6]  # no more than micro-batches
    few = make_problem(make_cluster(("a", FAST, 2)), WORKLOAD)
    assert list(few.replica_counts()) == [1, 2]  # nor than GPUs
    assert list(make_problem(boxes(num_replicas=3), WORKLOAD).replica_counts()) == [3]
    assert list(make_problem(boxes(num_replicas=7), WORKLOAD).replica_counts()) == []


@pytest.mark.parametrize(("limit", "expected"), [(None, 6), (4, 4), (9, 6)])
def test_the_longest_pipeline(limit: int | None, expected: int) -> None:
    assert make_problem(boxes(max_pipeline_parallel=limit), WORKLOAD).max_stages() == expected


def test_chains_keep_to_pins_and_length() -> None:
    problem = make_problem(
        boxes(first_stage_nodes=("a",), last_stage_nodes=("b", "c"), max_pipeline_parallel=2),
        WORKLOAD,
    )
    a, b, c = (Unit(name, (0,)) for name in "abc")
    assert problem.may_start(a) and not problem.may_start(b)
    assert problem.may_end(b) and problem.may_end(c) and not problem.may_end(a)
    allowed = [(a, b), (a, c)]
    for chain in [(), (a,), (b,), (a, b), (b, a), (a, c), (c, b), (a, c, b)]:
        assert problem.chain_is_allowed(chain) == (chain in allowed)


def test_without_pins_any_chain_up_to_the_layers_is_allowed() -> None:
    problem = make_problem(boxes(), WORKLOAD)
    units = [Unit("a", (i,)) for i in range(4)] + [Unit("b", (i,)) for i in range(3)]
    assert problem.chain_is_allowed(tuple(units[:6]))
    assert not problem.chain_is_allowed(tuple(units))  # seven stages of six layers


def test_a_batch_that_does_not_divide_is_refused() -> None:
    workload = make_workload(global_batch_size=5, micro_batch_size=2)
    with pytest.raises(UsageError, match="--global-batch-size 5 is no multiple"):
        make_problem(boxes(), workload)


def test_experts_without_sequence_parallelism_are_refused() -> None:
    workload = make_workload(num_experts=4, moe_router_topk=1, moe_ffn_hidden_size=256)
    with pytest.raises(UsageError, match="--num-experts 4 without --sequence-parallel"):
        make_problem(boxes(), workload)
    training = replace(workload.training, sequence_parallel=True)
    assert make_problem(boxes(), replace(workload, training=training)).num_gpus == 9


def test_an_objective_without_its_prices_is_refused() -> None:
    with pytest.raises(UsageError, match="price"):
        make_problem(boxes(), WORKLOAD, objective=Objective("cheapest"))
    with pytest.raises(UsageError, match="--deadline"):
        make_problem(boxes(), WORKLOAD, objective=Objective("fewest-gpus"))
    with pytest.raises(UsageError, match="--steps"):
        make_problem(boxes(), WORKLOAD, objective=Objective(deadline_s=60.0))


@pytest.mark.parametrize(
    ("changes", "dividing"),
    [
        ({"precision": "fp16"}, {"a"}),
        ({"precision": "fp16", "flash_attention": False}, set()),
        ({"precision": "fp32"}, set()),
        ({"precision": "fp32", "local_layers": True}, {"a", "o"}),
    ],
)
def test_transformer_engine_divides_sequences_by_a_fused_kernel_alone(
    changes: dict[str, Any], dividing: set[str]
) -> None:
    cluster = make_cluster(("a", FAST, 4), ("o", OLD, 4), limits=Limits())
    problem = make_problem(cluster, make_workload(**changes))
    assert problem.dividing_nodes == dividing
    assert problem.divides_sequences == bool(dividing)
    for node in ("a", "o"):
        assert problem.may_be_a_unit(Unit(node, (0, 1), 2)) == (node in dividing)
    across = Unit("a", (0,), 2, (("o", (0,)),))
    assert problem.may_be_a_unit(across) == ("o" in dividing)
    for structure in divided_structures(problem, inf, 32):
        parts = {unit.node for chain in structure for unit in chain if unit.context_parallel > 1}
        assert parts <= dividing
