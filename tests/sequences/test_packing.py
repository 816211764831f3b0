"""Sequences in groups, moved and exchanged; and the sets that groups can take."""

from __future__ import annotations

import random
from itertools import combinations
from typing import get_args

import numpy as np
import pytest

from megatron_hetero.sequences.deal import patterns as patterns_module
from megatron_hetero.sequences.deal.buckets import bucketed
from megatron_hetero.sequences.deal.packing import PackedGroups
from megatron_hetero.sequences.deal.patterns import PatternProgramme, patterns_within
from megatron_hetero.sequences.deal.price_table import price_table
from megatron_hetero.sequences.deal.programme import Programme, Whole
from megatron_hetero.sequences.tree import make_tree
from tests.sequences.exact import LinearPrice, brute_force, random_tree
from tools.nests import halved


def singles(count: int, most: float):  # type: ignore[no-untyped-def]
    """Ranks that train alone: a sequence takes as many seconds as it has tokens."""
    return make_tree(
        halved(range(count)),
        lambda ranks: (len(ranks), (LinearPrice(1, 0.0, 0.0, 1.0, most),) if len(ranks) == 1
                       else ()),
    )  # fmt: skip


def test_moves_and_exchanges_level_groups_within_memory() -> None:
    table = price_table(singles(2, 10.0), [6, 4, 3, 3, 3])
    packing = PackedGroups(table, [0, 0])
    for sequence, group in enumerate((0, 0, 1, 1, 1)):
        packing.put(sequence, group)
    packing.improve(0.0)
    assert packing.busiest_s == 10.0 and sorted(packing.seconds) == [9.0, 10.0]
    crowded = PackedGroups(table, [0, 0])
    for sequence, group in enumerate((0, 1, 0, 1, 1)):
        crowded.put(sequence, group)
    crowded.improve(0.0)
    assert crowded.seconds.max() <= 10.0
    assert not crowded.place(0, np.array([0, 1]))  # no group has room for six more


def test_the_sum_over_micro_batches_is_what_is_lowered() -> None:
    """A sequence moves to a micro-batch whose busiest group hides it."""
    table = price_table(singles(2, 100.0), [10, 4, 4, 30, 1])
    packing = PackedGroups(table, [0, 0, 0, 0], [0, 0, 1, 1])
    for sequence, group in enumerate((0, 0, 1, 2, 3)):
        packing.put(sequence, group)
    before = packing.busiest_s
    packing.improve(0.0)
    assert before == 44.0 and packing.busiest_s == 30.0
    assert sorted(packing.group_of >= 0) == [True] * 5


def test_every_set_that_fits_is_a_pattern() -> None:
    chance = random.Random(4)
    tree = random_tree(chance, 4, unlike=True)
    table = price_table(
        tree, [int(chance.uniform(5, 0.4 * tree.longest_sequence)) for _ in "12345"]
    )
    limit = float(np.nanmax(np.where(np.isfinite(table.seconds), table.seconds, np.nan))) * 1.3
    found = patterns_within(table, limit)
    assert found is not None and not found.loose.any()
    have = {
        (int(w), tuple(np.flatnonzero(m))) for w, m in zip(found.option, found.members, strict=True)
    }
    expected = set()
    for option, rows in enumerate(table.rows):
        for size in range(1, 6):
            for chosen in combinations(range(5), size):
                own = list(chosen)
                seconds = table.fixed_s[option] + table.seconds[option, own].sum()
                if seconds <= limit and table.fits(option, table.memory[rows][:, own].sum(axis=1)):
                    expected.add((option, chosen))
    assert have == expected


@pytest.mark.parametrize("seed", range(6))
def test_no_programme_refuses_a_time_that_is_possible(seed: int) -> None:
    chance = random.Random(seed)
    tree = random_tree(chance, 4, unlike=bool(seed % 2))
    table = price_table(tree, [int(chance.uniform(5, 0.4 * tree.longest_sequence)) for _ in "1234"])
    best = brute_force(table)
    if not np.isfinite(best):
        return
    patterns = patterns_within(table, best * 1.5)
    assert patterns is not None
    programmes = PatternProgramme(table, patterns), Programme(bucketed(table))
    assert programmes[0].solve(best * (1 + 1e-9))[0] == "possible"
    assert programmes[0].solve(best * (1 - 1e-6))[0] == "impossible"
    for whole in get_args(Whole):
        assert programmes[1].solve(best * (1 + 1e-9), whole=whole).answer == "possible"
    assert programmes[1].solve(float(table.fixed_s.min())).answer == "impossible"
    for part in (0.5, 0.7, 0.8, 0.9, 0.95):
        answers = [
            programmes[1].solve(best * part, whole=whole).answer for whole in get_args(Whole)
        ]
        # From the relaxation on: what one refuses, the sharper ones refuse.
        assert answers == sorted(answers, reverse=True), (part, answers)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("most_of_option", [1, 3, 6])
def test_short_sequences_fill_what_patterns_of_long_ones_leave(
    seed: int, most_of_option: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are too many patterns the bound is still one, and a whole answer a deal."""
    chance = random.Random(seed)
    tree = random_tree(chance, 4, unlike=bool(seed % 2))
    table = price_table(
        tree, [int(chance.uniform(5, 0.4 * tree.longest_sequence)) for _ in "12345"]
    )
    best = brute_force(table)
    if not np.isfinite(best):
        return
    monkeypatch.setattr(patterns_module, "_MAX_OF_OPTION", most_of_option)
    patterns = patterns_within(table, best * 1.5)
    assert patterns is not None and patterns.loose.any()
    for option in range(len(table.fixed_s)):
        # The longest are in patterns, or none are.
        listed = table.rank_seconds[~patterns.loose[option]]
        assert (listed[:, None] >= table.rank_seconds[patterns.loose[option]][None, :]).all()
        assert np.count_nonzero(patterns.option == option) <= most_of_option + 1
    programme = PatternProgramme(table, patterns)
    assert programme.times is None
    answer, packing = programme.solve(best * (1 + 1e-9))
    assert answer == "possible"
    if packing is not None:
        assert (packing.group_of >= 0).all() and packing.busiest_s >= best * (1 - 1e-9)
    least_s = float((table.seconds + table.fixed_s[:, None]).min(axis=0).max())
    assert programme.solve(least_s * 0.99)[0] == "impossible"
