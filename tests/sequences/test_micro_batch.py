"""Deals of one micro-batch beside brute force and the paper's programme."""

from __future__ import annotations

import math
import random

import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.sequences.cluster_groups import cluster_groups
from megatron_hetero.sequences.deal.micro_batch import deal_micro_batch
from megatron_hetero.sequences.deal.price_table import price_table
from megatron_hetero.sequences.price.modelled import TRAINED
from tests.cost.builders import FAST, SLOW, make_cluster
from tests.sequences.exact import brute_force, paper_programme, random_tree
from tests.sequences.test_modelled import job


@pytest.mark.parametrize("num_cases", [120, pytest.param(300, marks=pytest.mark.slow)])
def test_the_search_is_within_two_percent_of_the_optimum_and_its_bound_is_not_above(
    num_cases: int,
) -> None:
    """Deals of 2 to 5 sequences on 4 ranks, half of them on unlike ranks."""
    chance, num_possible = random.Random(24), 0
    while num_possible < num_cases:
        tree = random_tree(chance, 4, unlike=bool(num_possible % 2))
        longest = tree.longest_sequence
        lengths = [
            int(chance.choice([chance.uniform(5, 60), chance.uniform(20, 0.7 * longest)]))
            for _ in range(chance.randint(2, 5))
        ]
        table = price_table(tree, lengths)
        best = brute_force(table)
        exact = paper_programme(table)
        assert exact == pytest.approx(best, rel=1e-6), (lengths, best)
        found = deal_micro_batch(table, range(len(lengths)))
        if math.isinf(best):
            assert found is None
            continue
        num_possible += 1
        assert found is not None and found.seconds <= best * 1.02, (lengths, best)
        assert found.bound_s <= best * (1 + 1e-9), (lengths, best)
        assert found.seconds >= best * (1 - 1e-9)


@pytest.mark.parametrize("quick", [False, True])
def test_sequences_of_single_tokens_do_not_raise_the_bound_above_the_optimum(quick: bool) -> None:
    """Beside long ones they take a millionth of a group's memory: the solver's tolerance."""
    cluster = make_cluster(("a", FAST, 2), ("b", SLOW, 2), between=Link(50e9, 1e-5))
    tree = cluster_groups(cluster, job(), exchanges=TRAINED).tree
    lengths = [17_001, 5000, 300, 299, 2, 1]
    best = brute_force(price_table(tree, lengths))
    found = deal_micro_batch(price_table(tree, lengths), range(6), quick=quick)
    assert found is not None and found.bound_s <= best * (1 + 1e-9)
    assert found.seconds <= best * 1.01


@pytest.mark.slow
def test_the_bound_holds_on_eight_ranks() -> None:
    chance = random.Random(7)
    for number in range(60):
        tree = random_tree(chance, 8, unlike=bool(number % 2))
        lengths = [int(chance.uniform(5, 0.3 * tree.longest_sequence)) for _ in range(7)]
        table = price_table(tree, lengths)
        exact = paper_programme(table)
        found = deal_micro_batch(table, range(len(lengths)))
        assert (found is None) == math.isinf(exact)
        if found is not None:
            assert found.bound_s <= exact * (1 + 1e-6)
            assert exact * (1 - 1e-6) <= found.seconds <= exact * 1.02, (number, lengths)
