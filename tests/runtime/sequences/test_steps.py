"""Steps of documents: dealt by one rank, the same on all, and every token trained on once."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.runtime.sequences import steps
from megatron_hetero.runtime.sequences.groups import GroupPlace
from megatron_hetero.runtime.sequences.steps import DealtSteps
from megatron_hetero.sequences.cluster_groups import cluster_groups
from megatron_hetero.sequences.deal.dealt import Deal
from megatron_hetero.sequences.price.modelled import TRAINED
from megatron_hetero.sequences.step_tokens import StepTokens, check_step
from tests.cost.builders import FAST, make_cluster
from tests.runtime.sequences.flexible_runs import random_step
from tests.runtime.toy_model import in_world
from tests.sequences.test_modelled import job


def test_a_search_that_fails_gives_way_to_the_greedy_deal(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = cluster_groups(make_cluster(("a", FAST, 4)), job(), exchanges=TRAINED).tree
    documents: Any = [{"tokens": range(n), "name": f"d{n}"} for n in (9000, 400, 30, 1)]

    def broken(*given: Any) -> Deal:
        raise ValueError("no solver")

    found, note = steps.dealt_tokens(tree, documents)
    assert note == ""
    monkeypatch.setattr(steps, "deal_batch", broken)
    greedy, note = steps.dealt_tokens(tree, documents)
    assert note == "dealt greedily, the search failed: ValueError: no solver"
    for step in (found, greedy):
        check_step(step, [9000, 400, 30, 1], 4)


LENGTHS = (9, 4, 12, 3, 1, 7, 5)
WORLD = "tp1:1 @1 | tp1:1 @1 | tp1:1 @1"


def documents() -> list[dict[str, Any]]:
    """Every token of them is another number."""
    ends = numpy.cumsum(LENGTHS)
    return [
        {"tokens": torch.arange(end - n, end), "name": f"document {k}"}
        for k, (n, end) in enumerate(zip(LENGTHS, ends, strict=True))
    ]


def place_of(rank: int) -> GroupPlace:
    """Of a rank that may be in a group with any others."""
    spans = [(a, b) for a in range(3) for b in range(a + 1, 4) if a <= rank < b]
    return GroupPlace(rank, 3, 1, dict.fromkeys(spans, dist.group.WORLD))


def test_all_ranks_have_their_parts_of_one_deal(tmp_path: Path) -> None:
    """Each step has the next documents, and trains on each of their tokens but the first once."""

    def check(rank: int) -> None:
        tree = cluster_groups(make_cluster(("a", FAST, 3)), job(), exchanges=TRAINED).tree
        drawn, dealt = random.Random(3), []

        def deal(asked: steps.Documents) -> tuple[StepTokens, str]:
            assert rank == 0
            dealt.append([document["name"] for document in asked])
            return random_step(tree, asked, drawn), f"note {len(dealt)}"

        found = DealtSteps(documents(), 2, 1, deal, place_of(rank))
        for number in range(3):
            step = next(found)
            first = 1 + 2 * number
            assert step.num_sequences == 2
            assert step.num_tokens == LENGTHS[first] + LENGTHS[first + 1]
            labels = [b.labels[b.loss_mask.bool()].tolist() for b in step.batches]
            own = {"labels": [*chain(*labels)], "whole": step.whole.text()}
            everybodys: list[Any] = [None] * 3
            dist.all_gather_object(everybodys, own)
            assert len({other["whole"] for other in everybodys}) == 1
            start, end = sum(LENGTHS[:first]), sum(LENGTHS[: first + 2])
            expected = set(range(start, end)) - {start, start + LENGTHS[first]}
            trained = chain(*[other["labels"] for other in everybodys])
            assert sorted(trained) == sorted(expected)
            assert step.note == (f"note {number + 1}" if rank == 0 else "")
        with pytest.raises(StopIteration):
            next(found)
        names = [f"document {k}" for k in range(1, 7)]
        assert dealt == ([names[:2], names[2:4], names[4:]] if rank == 0 else [])

    in_world(WORLD, check, tmp_path)


def test_a_step_that_cannot_be_dealt_says_so_on_all_ranks(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        def deal(asked: steps.Documents) -> tuple[StepTokens, str]:
            raise InfeasiblePlanError(f"{asked[0]['name']} is too long")

        found = DealtSteps(documents(), 3, 2, deal, place_of(rank))
        with pytest.raises(InfeasiblePlanError, match=r"^document 2 is too long$"):
            next(found)

    in_world(WORLD, check, tmp_path)
