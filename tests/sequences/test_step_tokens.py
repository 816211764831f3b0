"""A dealt step as ranks run it: shares of every sequence, sent as text and checked."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.errors import PlanFormatError
from megatron_hetero.sequences.cluster_groups import ClusterGroups, cluster_groups
from megatron_hetero.sequences.deal.batch import deal_batch
from megatron_hetero.sequences.deal.dealt import Deal, DealtGroup, MicroBatch
from megatron_hetero.sequences.pipelines import WHOLE
from megatron_hetero.sequences.price.modelled import TRAINED, ModelledPrice
from megatron_hetero.sequences.simulated_step import SimulatedStep
from megatron_hetero.sequences.step_tokens import GroupTokens, StepTokens, read_step, step_tokens
from tests.cost.builders import FAST, SLOW, make_cluster
from tests.sequences.test_modelled import job

LENGTHS = [90_000, 40_000, 17_001, 300, 299, 1, 2, 5000]


def mixed() -> ClusterGroups:
    cluster = make_cluster(("a", FAST, 2), ("b", SLOW, 2), between=Link(50e9, 1e-5))
    return cluster_groups(cluster, job(), exchanges=TRAINED)


def test_every_token_has_one_rank_and_fast_ones_have_more() -> None:
    groups = mixed()
    deal = deal_batch(groups.tree, LENGTHS)
    step = step_tokens(groups.tree, LENGTHS, deal)
    assert read_step(step.text(), LENGTHS, 4) == step
    # Ranks that no group joins do not wait for the slowest micro-batch.
    simulated_s = SimulatedStep(step, [WHOLE] * 4).seconds
    assert max(step.busy_s(4)) <= simulated_s <= deal.seconds * (1 + 1e-9)
    busy_s = np.array(step.busy_s(4))
    assert busy_s.max() / busy_s.mean() == pytest.approx(deal.balance)
    for groups_of in step.micro_batches:
        for group in groups_of:
            for k, tokens in zip(group.sequences, group.tokens, strict=True):
                assert sum(tokens) == LENGTHS[k]
                if len(tokens) == 4 and LENGTHS[k] > 10_000:
                    assert tokens[0] > tokens[3]


def test_equal_gpus_exchange_heads_and_unlike_ones_gather() -> None:
    groups = mixed()
    for kind in groups.tree.kinds:
        for price in kind.prices:
            assert isinstance(price, ModelledPrice) and price.between == "gather"
    step = step_tokens(groups.tree, LENGTHS, deal_batch(groups.tree, LENGTHS))
    found = {(g.size, g.domains) for groups_of in step.micro_batches for g in groups_of}
    # Two nodes of two equal GPUs each: heads inside, keys and values between.
    assert {of for size, of in found if size == 4} <= {(), (2, 2)}
    assert any(max(of, default=1) > 1 for _, of in found)


def test_members_of_a_domain_have_equal_shares() -> None:
    cluster = make_cluster(("a", FAST, 4))
    tree = cluster_groups(cluster, job(), exchanges=TRAINED).tree
    whole = next(p for p in tree.kinds[0].prices if p.name == "all-to-all")
    number = tree.kinds[0].prices.index(whole)
    seconds = whole.fixed_s + float(whole.seconds(np.array([1001.0]))[0])
    dealt = DealtGroup(0, 4, 0, number, (0,), seconds)
    (group,) = step_tokens(tree, [1001], deal_of(dealt)).micro_batches[0]
    assert sorted(group.tokens[0]) == [250, 250, 250, 251] and group.domains == (4,)


def deal_of(group: DealtGroup) -> Deal:
    return Deal((MicroBatch((group,), 0.0, "search"),), 0.0, 4)


def test_groups_of_a_rank_and_of_the_log() -> None:
    pair, whole = GroupTokens(0, (0,), ((3, 1),), 1.0), GroupTokens(0, (2,), ((1, 1, 1),), 2.0)
    alone = GroupTokens(2, (1,), ((2,),), 0.5)
    step = StepTokens(((pair, alone), (whole,)))
    assert step.of_rank(1) == [pair, whole] and step.of_rank(2) == [alone, whole]
    assert step.sizes == "1x2 1x1; 1x3"
    assert SimulatedStep(step, [WHOLE] * 4).seconds == pytest.approx(3.0)
    assert step.busy_s(4) == [3.0, 3.0, 2.5, 0.0]


PAIR = GroupTokens(0, (0,), ((3, 1),), 2.0)
LONG, SHORT, OTHER = (
    GroupTokens(r, (k,), ((4,),), s) for r, k, s in ((0, 1, 4.0), (0, 2, 1.0), (2, 3, 1.0))
)


def test_pipelines_in_groups_run_every_micro_batch() -> None:
    step = StepTokens(((LONG, OTHER), (PAIR,), (SHORT,)))
    assert step.of_rank(0, 2) == [LONG, PAIR, SHORT] == step.of_rank(0)
    assert step.of_rank(1, 2) == [None, PAIR, None] and step.of_rank(1) == [PAIR]
    assert step.of_rank(3, 2) == [None, None, None] and step.of_rank(3) == [None]


def test_pipelines_on_their_own_go_from_short_to_long() -> None:
    step = StepTokens(((LONG, OTHER), (SHORT,)))
    assert step.of_rank(0, 3) == [SHORT, LONG] and step.of_rank(0) == [LONG, SHORT]
    assert step.of_rank(3, 3) == [None]


GOOD: list[Any] = [[[0, [0], [[2, 2]], 1.0, [2]], [2, [1], [[3]], 1.0, []]]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[0].pop(), "number 1 0 times"),
        (lambda s: s.append([[0, [2], [[3]], 1.0, []]]), "sequence 2 of a batch of 2"),
        (lambda s: s[0][1].__setitem__(1, [0]), "number 0 2 times"),
        (lambda s: s[0][1].__setitem__(1, [7]), "number 1 0 times"),
        (lambda s: s[0][0].__setitem__(2, [[2, 3]]), r"2, 3 of sequence 0 do not add up.* 4"),
        (lambda s: s[0][0].__setitem__(2, [[5, -1]]), "do not add up"),
        (lambda s: s[0][0].__setitem__(2, [[2, 2], [1]]), "2 divisions of 1 sequences"),
        (lambda s: s[0][0].__setitem__(4, [1, 2]), "domains of 1, 2 members are not the 2"),
        (lambda s: s[0][1].__setitem__(0, 1), "ranks 1 to 1 are in two groups"),
        (lambda s: s[0][1].__setitem__(0, 3), "not among the 3 of the job"),
    ],
)  # fmt: skip
def test_a_step_that_does_not_add_up(change: Any, message: str) -> None:
    assert read_step(json.dumps(GOOD), [4, 3], 3).sizes == "1x2 1x1"
    broken = json.loads(json.dumps(GOOD))
    change(broken)
    with pytest.raises(PlanFormatError, match=message):
        read_step(json.dumps(broken), [4, 3], 3)
