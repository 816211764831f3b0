"""Deals of whole steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_hetero.errors import InfeasiblePlanError, PlanFormatError
from megatron_hetero.sequences.deal import micro_batch as searched
from megatron_hetero.sequences.deal.batch import deal_batch, greedy_deal
from megatron_hetero.sequences.deal.dealt import Deal, check_deal
from megatron_hetero.sequences.deal.programme import Programme, Solution, Whole
from megatron_hetero.sequences.deal.static import static_deals
from megatron_hetero.sequences.tree import GroupTree, make_tree
from tests.sequences.exact import LinearPrice, random_tree
from tools.drawn_lengths import DISTRIBUTIONS
from tools.nests import halved
from tools.referees.flexsp import published_tree

K = 1024


@pytest.fixture(scope="module")
def tree() -> GroupTree:
    return published_tree("GPT-7B", 64, 384 * K)


@pytest.fixture(scope="module")
def lengths() -> list[int]:
    return DISTRIBUTIONS["code"].drawn(512, 0)


@pytest.fixture(scope="module")
def deal(tree: GroupTree, lengths: list[int]) -> Deal:
    return deal_batch(tree, lengths)


def test_a_batch_is_within_three_percent_of_its_bound(deal: Deal) -> None:
    assert deal.least_s <= deal.seconds
    assert deal.bound_s <= deal.seconds <= 1.03 * deal.bound_s


def test_long_sequences_get_many_ranks_and_short_ones_one(deal: Deal) -> None:
    sizes = {size for m in deal.micro_batches for size in m.sizes}
    assert max(sizes) >= 32 and min(sizes) == 1
    assert deal.balance < 1.1 and 0 <= deal.idle < 0.1


def test_flexible_groups_beat_every_fixed_degree(
    tree: GroupTree, lengths: list[int], deal: Deal
) -> None:
    fixed = static_deals(tree, lengths)
    for size, other in fixed.items():
        check_deal(tree, lengths, other)
        assert {g.size for m in other.micro_batches for g in m.groups} == {size}
    assert min(d.seconds for d in fixed.values()) > 1.2 * deal.seconds


def test_a_fixed_degree_passes_through_the_other_stages_too(
    tree: GroupTree, lengths: list[int]
) -> None:
    piped = replace(tree, other_stages=(0.0, 3.0))
    for deal in static_deals(piped, lengths).values():
        longest_s = max(m.seconds for m in deal.micro_batches)
        passed_s = sum(m.seconds for m in deal.micro_batches)
        assert deal.seconds == pytest.approx(passed_s + 3.0 * longest_s)


def test_equal_batches_are_dealt_alike(tree: GroupTree) -> None:
    lengths = DISTRIBUTIONS["web"].drawn(96, 3)
    assert deal_batch(tree, lengths) == deal_batch(tree, lengths)


def test_unlike_ranks_that_are_alike_are_dealt_as_equal_ones() -> None:
    """All-equal blocks reproduce the homogeneous solver: names alone make no difference."""

    def prices_of(alike: bool):  # type: ignore[no-untyped-def]
        def of(ranks: tuple[int, ...]) -> tuple[object, tuple[LinearPrice, ...]]:
            size = len(ranks)
            price = LinearPrice(size, 3.0, 1e-3 / size, (0.4 + 0.05 * size) / size, 200.0)
            return (size if alike else (size, ranks[0] >= 8)), (price,)

        return of

    one = make_tree(halved(range(16)), prices_of(True))
    two = make_tree(halved(range(16)), prices_of(False))
    assert len(one.kinds) == 5 and len(two.kinds) == 9
    chance = random.Random(3)
    for _ in range(2):
        lengths = [int(chance.uniform(10, 300)) for _ in range(24)]
        a, b = deal_batch(one, lengths), deal_batch(two, lengths)
        assert b.seconds == pytest.approx(a.seconds, rel=0.02)
        assert b.least_s == pytest.approx(a.least_s)


def test_random_deals_hold_every_sequence_once() -> None:
    chance = random.Random(11)
    for number in range(6):
        tree = random_tree(chance, 8, unlike=bool(number % 2))
        most = tree.longest_sequence
        lengths = [int(chance.uniform(1, most)) for _ in range(chance.randint(1, 16))]
        made = deal_batch(tree, lengths)
        check_deal(tree, lengths, made)
        assert made.least_s <= made.seconds * (1 + 1e-9)
        assert made.seconds <= greedy_deal(tree, lengths, "asked for").seconds * (1 + 1e-9)


def test_a_solver_that_fails_leaves_a_valid_deal_that_says_so(
    tree: GroupTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(
        self: Programme, seconds: float, room: float = 1.0, whole: Whole = "groups"
    ) -> Solution:
        return Solution("unknown")

    monkeypatch.setattr(Programme, "solve", unknown)
    monkeypatch.setattr(searched, "_by_patterns", lambda search: None)
    lengths = DISTRIBUTIONS["web"].drawn(64, 1)
    made = deal_batch(tree, lengths)
    check_deal(tree, lengths, made)
    greedy = [m for m in made.micro_batches if m.method == "greedy"]
    assert greedy and all(m.reason for m in greedy)


def test_a_sequence_that_no_group_holds_is_named(tree: GroupTree) -> None:
    with pytest.raises(InfeasiblePlanError, match=r"book 7 has 400,000 tokens.*more than 371,927"):
        deal_batch(tree, [500, 400_000], ["page 1", "book 7"])


@pytest.mark.parametrize(
    ("lengths", "names", "message"),
    [
        ([], None, "no sequences"),
        ([5, 0], None, "sequence 1 has 0 tokens"),
        ([5, 6], ["a"], "2 lengths have 1 names"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(
    tree: GroupTree, lengths: list[int], names: list[str] | None, message: str
) -> None:
    with pytest.raises(PlanFormatError, match=message):
        deal_batch(tree, lengths, names)


def test_a_deal_that_is_not_right_is_refused(tree: GroupTree) -> None:
    lengths = [4000, 3000, 2000, 90_000]
    made = deal_batch(tree, lengths)
    first = made.micro_batches[0]
    group = first.groups[0]

    def with_groups(*groups: object) -> Deal:
        return replace(made, micro_batches=(replace(first, groups=tuple(groups)),))  # type: ignore[arg-type]

    other = replace(group, sequences=(*group.sequences, group.sequences[0]))
    for wrong, message in (
        (with_groups(*first.groups[1:]), "dealt 0 times"),
        (with_groups(*first.groups, group), "dealt 2 times"),
        (with_groups(other, *first.groups[1:]), "dealt 2 times"),
        (with_groups(replace(group, stop=group.stop + 1), *first.groups[1:]), "no group"),
        (with_groups(replace(group, seconds=1e-3), *first.groups[1:]), "not 0.001"),
        (with_groups(replace(group, sequences=(9, *group.sequences)), *first.groups[1:]),
         "sequence 9 of a batch of 4"),
    ):  # fmt: skip
        with pytest.raises(PlanFormatError, match=message):
            check_deal(tree, lengths, wrong)
