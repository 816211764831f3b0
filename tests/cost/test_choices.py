"""Settings that plans may choose: never one that the runtime refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_hetero.cost.choices import NOT_WITH_CONTEXT_PARALLEL, context_parallels
from megatron_hetero.cost.model import CostModel
from megatron_hetero.model.spec import Workload
from tests.cost.builders import AS_GIVEN, FAST, FREE, make_cluster, make_workload

CLUSTER = make_cluster(("a", FAST, 8), limits=FREE)


def sizes(workload: Workload, width: int = 1, most: int = 16) -> tuple[int, ...]:
    return context_parallels(CostModel(CLUSTER, workload), width, most)


def test_context_parallel_ranks_get_two_chunks_that_their_group_divides() -> None:
    workload = make_workload(seq_length=48, max_position_embeddings=48)
    assert sizes(workload) == (2, 3, 4, 6, 8, 12)
    assert sizes(workload, 4) == sizes(workload)  # the group has all tokens of a rank
    training = replace(workload.training, sequence_parallel=True)
    assert sizes(replace(workload, training=training), 4) == (2, 3, 6)
    assert sizes(workload, most=3) == (2, 3)


def test_fp8_products_have_enough_tokens() -> None:
    workload = make_workload(seq_length=48, max_position_embeddings=48, fp8=True)
    assert sizes(workload) == (2, 3, 6)
    # Chunks for a group of 6 (12 tokens) and rows of 8 fit into the same 24.
    training = replace(workload.training, sequence_parallel=True)
    assert sizes(replace(workload, training=training), 6) == (2,)


def test_sequences_stay_whole_where_the_runtime_or_the_user_says_so() -> None:
    workload = make_workload()
    assert sizes(workload)
    for flag in NOT_WITH_CONTEXT_PARALLEL:
        assert not sizes(replace(workload, megatron_args=(f"{flag}=1",)))
    assert not sizes(replace(workload, model=replace(workload.model, mtp_num_layers=1)))
    held = make_cluster(("a", FAST, 8), limits=AS_GIVEN)
    assert not context_parallels(CostModel(held, workload), 1, 16)


def test_sequences_stay_whole_where_transformer_engines_ring_has_no_kernel() -> None:
    def with_offsets(**changes: Any) -> tuple[int, ...]:
        flags = ("--softmax-type", "learnable")
        return sizes(replace(make_workload(**changes), megatron_args=flags))

    assert not with_offsets()
    assert with_offsets(local_layers=True)
    assert with_offsets(cp_comm_type="a2a")


def test_exchanged_heads_are_of_whole_groups_of_keys() -> None:
    ring = make_workload(num_query_groups=4)
    exchanged = make_workload(num_query_groups=4, cp_comm_type="a2a")
    assert set(sizes(ring)) > {2, 4, 8}
    assert sizes(exchanged) == (2, 4)
    assert sizes(exchanged, 2) == (2,)
