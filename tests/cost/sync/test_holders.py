"""Ranks that reduce gradients together, from plan and model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_hetero.cost.sync.buckets import EMBEDDING
from megatron_hetero.cost.sync.holders import gradient_holders, layer_sets
from tests.runtime.workloads import LLAMA_LIKE, MIXTRAL_LIKE, plan, workload


def test_norms_of_a_single_group_are_summed_only_where_each_has_a_part() -> None:
    one_group = plan("tp2:4 @4")
    assert gradient_holders(one_group, workload()) == ()
    assert gradient_holders(one_group, workload(sequence_parallel=True)) == ((0, 1),)


def test_further_tokens_have_holders_on_both_ends() -> None:
    """Rank 0 has the first stage, 1 and 2 the last one, whose output layer is untied."""
    job = workload(**{**LLAMA_LIKE, "num_query_groups": 24, "mtp_num_layers": 1})
    one = plan("tp1:2,tp2:2 @4")
    assert set(gradient_holders(one, job)) == {(0, 1), (0, 2)}
    assert gradient_holders(one, workload(**{**LLAMA_LIKE, "num_query_groups": 24})) == ()
    # Layers at their place in the pass: the copies come last, as the words do.
    assert list(layer_sets(one, job)) == [(EMBEDDING, (0, 1)), (EMBEDDING, (0, 2))]
    # Positions are whole on all of them.
    learned = replace(job, model=replace(job.model, position_embedding="learned_absolute"))
    assert (0, 1, 2) in gradient_holders(one, learned)


@pytest.mark.parametrize("changes", [{}, LLAMA_LIKE, {"mtp_num_layers": 1}, MIXTRAL_LIKE])
@pytest.mark.parametrize(
    "layout", ["tp2:3,tp1:1 @4 | tp1:4 @2", "tp2:1,tp2(2:1):3 @3 | tp1:4 @3", "tp1:3,tp2:1 @6"]
)
def test_both_lists_have_the_same_sets(layout: str, changes: dict[str, Any]) -> None:
    """Of a job, and of its layers one by one."""
    job = workload(**changes)
    of_layers = {ranks for _, ranks in layer_sets(plan(layout), job)}
    assert of_layers == set(gradient_holders(plan(layout), job))


def test_uneven_shares_cut_heads_and_columns_apart() -> None:
    """12 query groups and 384 columns, 2:1 over two ranks, beside halves."""
    uneven = plan("tp2(2:1):4 @1 | tp2:4 @1")
    found = gradient_holders(uneven, workload(**LLAMA_LIKE))
    assert set(found) == {(0, 2), (0, 3), (1, 3), (0, 1, 2, 3)}
