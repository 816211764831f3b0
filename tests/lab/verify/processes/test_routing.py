"""Replaying which experts one process chose: whose micro-batch, which rows, and what flipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron_hetero.lab.verify.processes.jobs import Options
from megatron_hetero.lab.verify.processes.routing import Replay, _Seat, replay_of_rank
from megatron_hetero.lab.verify.run import outcome_to_data, verify
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
