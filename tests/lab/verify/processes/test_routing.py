"""Replaying which experts one process chose: whose micro-batch, which rows, and what flipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core.transformer.moe import router

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.routing import Replay, Routers, _Seat, replay_of_rank
from megatron_hetero.lab.verify.run import outcome_to_data, verify
from megatron_hetero.runtime.megatron import balance_choices
from tests.runtime.workloads import MIXTRAL_LIKE, plan, workload

NOWHERE = Path("record-0.safetensors")


def choose(scores: torch.Tensor, topk: int, **groups: Any) -> Any:
    return torch.topk(scores, topk, dim=1)


def test_each_rank_replays_its_own_micro_batches() -> None:
    asked = plan("tp2:3,tp1:1 @3 | tp1:4 @1")
    first, second, third, last = (replay_of_rank(asked, r, 2, NOWHERE, 8) for r in range(4))
    assert first.numbers == second.numbers == third.numbers == (0, 2, 3)
    assert last.numbers == (1,)
    assert [first.number(call) for call in range(6)] == [0, 2, 3, 4, 6, 7]
    assert [last.number(call) for call in range(2)] == [1, 5]
    assert (first.part, second.part) == (0, 1)


def test_a_near_tie_is_counted_and_the_given_choice_is_taken() -> None:
    given = numpy.array([[[0], [1], [2], [2]]])
    seat = _Seat(1, Replay(NOWHERE, (0,), 1, part=1), given)
    scores = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.1, 0.4]])
    values, taken = seat.get_replay_topk(scores, 1, default_compute_topk=choose)
    assert taken.tolist() == [[2], [2]]
    assert values.flatten().tolist() == pytest.approx([0.7, 0.4])
    assert (seat.flips.num_flipped, seat.flips.num_tokens) == (1, 2)
    assert seat.flips.margin == pytest.approx(0.2)


def test_a_recomputed_micro_batch_is_the_one_it_was() -> None:
    given = numpy.array([[[0]], [[1]]])
    seat = _Seat(1, Replay(NOWHERE, (0, 1), 2), given)
    scores = torch.tensor([[0.9, 0.1]])

    def asked() -> int:
        return int(seat.get_replay_topk(scores, 1, default_compute_topk=choose)[1])

    with torch.no_grad():
        assert [asked(), asked()] == [0, 1]
    assert [asked(), asked()] == [0, 1]
    assert len(seat.chosen) == 2
    assert seat.flips.num_tokens == 2


def test_a_balancing_loss_counts_the_given_choices_through_megatrons_own_router_code() -> None:
    """Megatron's balancing loss chooses by itself; unlike choices near a tie moved the gradient of
    a router of NVIDIA's own job by 8 %."""
    own = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 2.99]], dtype=torch.bfloat16)
    due = numpy.array([[[0, 0, 1], [1, 0, 0], [0, 0, 1], [0, 0, 1]]], dtype=numpy.uint8)
    sent = numpy.array([[[2], [0], [2], [2]]])
    routers = Routers()
    seat = _Seat(1, Replay(NOWHERE, (0,), 1, part=1), sent, due, routers._is_asked)
    try:
        balance_choices.apply(routers._count)
        seat.get_replay_topk(own, 1, default_compute_topk=choose)
        counted, scores = router.compute_routing_scores_for_aux_loss(own, 1, "softmax")
    finally:
        balance_choices.REPLACEMENT.revert()
    assert counted.tolist() == [[False, False, True], [False, False, True]]
    assert counted.dtype == torch.bool
    # What it would have counted is kept, and its margin is held to the bound.
    assert seat.counts[0].tolist() == [[0, 0, 1], [1, 0, 0]]
    assert seat.flips.num_tokens == 2
    expected = float((scores[1, 0] - scores[1, 2]) / scores[1, 0])
    assert seat.flips.margin == pytest.approx(max(expected, (3.0 - float(own[1, 2])) / 3.0))


def test_a_margin_is_a_part_of_the_largest_score() -> None:
    """The logit that was chosen last may be all but zero, and rounding is that of the largest."""
    seat = _Seat(1, Replay(NOWHERE, (0,), 1), numpy.array([[[0, 2]]]))
    seat.get_replay_topk(torch.tensor([[4.0, 0.001, -0.001]]), 2, default_compute_topk=choose)
    assert seat.flips.margin == pytest.approx(0.002 / 4.0)


@pytest.mark.slow
def test_experts_in_half_precision_follow_the_one_process(tmp_path: Path) -> None:
    """Some token of these would go to another expert without the replay, and nothing would be
    equal."""
    asked = plan("tp2:3,tp1:1 @4 | tp1:4 @2")
    job = workload(**MIXTRAL_LIKE)
    options = Options(steps=3, optimizers=("adam",), precision="bf16")
    outcome = verify(asked, job, options, tmp_path)
    routing = outcome.comparisons["adam"].routing
    assert outcome.ok, outcome_to_data(outcome)
    assert routing is not None
    assert routing.flips.num_tokens > 0
