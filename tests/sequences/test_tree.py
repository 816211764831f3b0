"""Groups of ranks, nested in each other."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from megatron_hetero.errors import UsageError
from megatron_hetero.sequences.price.group_price import longest_sequence, undominated
from megatron_hetero.sequences.tree import make_tree, nested, ranks_of
from tests.sequences.exact import LinearPrice, choices, random_tree
from tools.nests import halved
from tools.referees.flexsp import MODELS, published_tree


def test_every_rank_is_in_few_groups() -> None:
    tree = published_tree("GPT-13B", 64, 192 * 1024)
    assert len(tree.groups) == 127 and len(tree.kinds) == 7
    for rank in range(64):
        assert sum(g.first <= rank < g.stop for g in tree.groups) == 7


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 12, 24])
def test_any_number_of_ranks_is_nested(count: int) -> None:
    tree = make_tree(
        halved(range(count)), lambda ranks: (len(ranks), (LinearPrice(len(ranks), 0, 0, 1, 9),))
    )
    assert tree.num_ranks == count
    for group in tree.groups:
        parts = sorted((tree.groups[p].first, tree.groups[p].stop) for p in group.parts)
        assert not parts or [group.first, *(stop for _, stop in parts)] == [
            *(first for first, _ in parts), group.stop,
        ]  # fmt: skip


def test_counts_of_groups_are_placed_exactly_where_they_can_be() -> None:
    """Beside every choice of groups that are apart, on unlike ranks."""
    chance = random.Random(2)
    tree = random_tree(chance, 8, unlike=True)
    possible = set()
    for chosen in choices(tree):
        counts = [0] * len(tree.kinds)
        for g in chosen:
            counts[tree.groups[g].kind] += 1
        possible.add(tuple(counts))
    most = [sum(g.kind == k for g in tree.groups) for k in range(len(tree.kinds))]
    tried = list(product(*(range(m + 1) for m in most)))
    for counts in chance.sample(tried, 400) + sorted(possible):
        if not any(counts):
            continue
        placed = tree.placed(counts)
        assert (placed is not None) == tree.has_room(counts) == (tuple(counts) in possible)
        if placed is not None:
            groups = [tree.groups[g] for own in placed.values() for g in own]
            assert sorted(g.kind for g in groups) == sorted(
                k for k, c in enumerate(counts) for _ in range(c)
            )
            held = [r for g in groups for r in range(g.first, g.stop)]
            assert len(held) == len(set(held))


def test_ranks_that_are_not_in_a_row_are_a_fault() -> None:
    with pytest.raises(ValueError, match="0, 1, 2"):
        make_tree((1, 0), lambda ranks: (len(ranks), ()))
    assert ranks_of(nested([(0, 1), 2, (3,)])) == (0, 1, 2, 3)


def test_prices_that_are_never_better_are_left_out() -> None:
    lengths = np.array([10.0, 100.0])
    quick, slow = LinearPrice(2, 1, 0, 1, 99), LinearPrice(2, 1, 0, 2, 99)
    long, roomy = LinearPrice(2, 2, 0, 0.5, 99), LinearPrice(2, 1, 0, 2, 200)
    assert undominated([quick, slow, long, roomy, quick], lengths) == (quick, long, roomy)
    assert longest_sequence(quick) == 198 and longest_sequence(LinearPrice(1, 0, 0, 1, 0.5)) == 0


@pytest.mark.parametrize(
    ("model", "gpus", "longest", "message"),
    [
        ("GPT-8B", 64, 4096, "GPT-7B, GPT-13B"),
        ("GPT-7B", 48, 4096, "powers of two"),
        ("GPT-7B", 64, 5000, "published are"),
        ("GPT-30B", 8, 4096, "does not fit"),
    ],
)
def test_nothing_is_made_up_that_was_not_published(
    model: str, gpus: int, longest: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        published_tree(model, gpus, longest)


def test_published_seconds_are_those_of_the_formula() -> None:
    tree = published_tree("GPT-7B", 64, 4096)
    of = {price.size: price for _, price in tree.options}
    s, model = 32768.0, MODELS["GPT-7B"]
    alone = 5.128e-6 * s * s + 0.1839576 * s
    moved = 4 * 2 * 32 * 4096 * s * 2 / 16 / 10.33e9
    lengths = np.array([s])
    assert float(of[1].seconds(lengths)[0]) == pytest.approx(alone / 1e3)
    assert float(of[16].seconds(lengths)[0]) == pytest.approx(alone / 16e3 + moved)
    assert of[8].room[0] == pytest.approx((28e9 - 16 * 6.51e9 / 64) / model.token_bytes)
