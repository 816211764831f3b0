"""Plans made for random trees are exact, and every kind of fault is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.exchange.baselines import ring
from megatron_hetero.exchange.check import FaultKind, faults, require_exact
from megatron_hetero.exchange.groups.grouping import Grouping, even, grouped_plan
from megatron_hetero.exchange.plan import ExchangePlan, Owned, Purpose
from megatron_hetero.exchange.programmes import programmes
from tools.random_trees import random_tree
from tools.referees.gentree.baselines import baselines
from tools.referees.gentree.generate import BranchReduction, Generator

PURPOSES: tuple[Purpose, ...] = ("all_reduce", "reduce_scatter", "all_gather")


def random_plan(random: Random, most_holders: int) -> ExchangePlan:
    """Make a plan for a random tree: any reductions of its branches, given owners or none."""
    tree = random_tree(random, most_holders)
    size = random.choice((1, 7, tree.num_holders, 1000, 99_991))
    purpose = random.choice(PURPOSES)
    owners = None
    if size >= tree.num_holders and random.random() < 0.4:
        cuts = [0, *sorted(random.sample(range(1, size), tree.num_holders - 1)), size]
        order = random.sample(range(tree.num_holders), tree.num_holders)
        owners = [Owned(a, b, h) for a, b, h in zip(cuts, cuts[1:], order, strict=False)]
    elif random.random() < 0.2:
        return random.choice(baselines(size, tree, purpose))
    generator = Generator(tree, size, 4.0, purpose, owners)
    reductions = {
        number: BranchReduction(
            random.choice((0, 2, 3, 4)), random.choice((0, 1, 2)), random.random() < 0.5
        )
        for number, _ in tree.inner()
    }
    plan = generator.plan(reductions)
    return replace(plan, num_chunks=random.choice((1, 1, 2, 5)))


def require_random_plans(count: int, seed: int, most_holders: int) -> None:
    random = Random(seed)
    for number in range(count):
        plan = random_plan(random, most_holders)
        found = list(faults(plan))
        assert not found, (seed, number, found[0])
        if plan.num_chunks > 1 and len(plan.table) < 3000:
            written_out = list(faults(plan.expanded()))
            assert not written_out, (seed, number, written_out[0])


def test_plans_of_random_trees_are_exact() -> None:
    require_random_plans(100, 1, 32)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_plans_of_ten_thousand_random_trees_are_exact(seed: int) -> None:
    require_random_plans(1000, seed, 64)


def test_chosen_plans_are_exact_and_keep_to_their_buffers() -> None:
    random = Random(3)
    for _ in range(12):
        tree = random_tree(random, 20)
        purpose = random.choice(PURPOSES)
        chosen = Generator(tree, 100_000, 4.0, purpose).choose()
        require_exact(chosen.plan, 200_000)


def test_numbers_come_out_as_the_sets_say() -> None:
    """Run plans on whole numbers, chunks written out."""
    random = Random(4)
    for _ in range(40):
        plan = random_plan(random, 9)
        values = np.array(
            [[random.randint(-9, 9) for _ in range(plan.size)] for _ in range(plan.num_holders)]
        ) if plan.size <= 1000 else np.ones((plan.num_holders, plan.size), int)  # fmt: skip
        expected = values.sum(axis=0)
        if plan.purpose == "all_gather":
            for start, stop, holder in plan.owners:
                expected[start:stop] = values[holder, start:stop]
        run = values.copy()
        rows = plan.expanded().table
        for number in range(plan.num_rounds_in_all):
            before = run.copy()
            for _, source, there, start, stop, reduces in rows[rows[:, 0] == number].tolist():
                if reduces:
                    run[there, start:stop] += before[source, start:stop]
                else:
                    run[there, start:stop] = before[source, start:stop]
        if plan.purpose == "reduce_scatter":
            for start, stop, holder in plan.owners:
                assert (run[holder, start:stop] == expected[start:stop]).all()
        else:
            assert (run == expected).all()


def _edited(plan: ExchangePlan, edit: Callable[[np.ndarray], np.ndarray]) -> ExchangePlan:
    return replace(plan, table=edit(plan.table.copy()))


def _set(row: int, column: int, value: int) -> Callable[[np.ndarray], np.ndarray]:
    def edit(table: np.ndarray) -> np.ndarray:
        table[row, column] = value
        return table

    return edit


def _again(row: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda table: np.insert(table, row, table[row], axis=0)


PLANTED: dict[str, tuple[FaultKind, Callable[[ExchangePlan], ExchangePlan]]] = {
    "no such holder": ("holder", lambda p: _edited(p, _set(0, 2, 4))),
    "to itself": ("holder", lambda p: _edited(p, _set(0, 2, int(p.table[0, 1])))),
    "beyond the buffer": ("range", lambda p: _edited(p, _set(0, 4, p.size + 1))),
    "an empty range": ("range", lambda p: _edited(p, _set(0, 4, int(p.table[0, 3])))),
    "no chunk": ("range", lambda p: replace(p, num_chunks=0)),
    "an owner twice": ("owners", lambda p: replace(p, owners=(p.owners[0], *p.owners))),
    "no owner of the end": ("owners", lambda p: replace(p, owners=p.owners[:-1])),
    "a transfer lost": ("missing", lambda p: _edited(p, lambda t: t[1:])),
    "one copy lost": ("missing", lambda p: _edited(p, lambda t: t[:-1])),
    "a copy in the place of a sum": ("missing", lambda p: _edited(p, _set(0, 5, 0))),
    "sent twice in a round": ("twice", lambda p: _edited(p, _again(0))),
    "added again later": (
        "twice",
        lambda p: _edited(
            p,
            lambda t: np.concatenate(
                [t, [[p.num_rounds, *t[0, 1:].tolist()]]]
            ),
        ),
    ),
    "copied again": (
        "twice",
        lambda p: _edited(
            p, lambda t: np.concatenate([t, [[p.num_rounds, *t[-1, 1:].tolist()]]])
        ),
    ),
    "ranges that overlap": (
        "clash",
        lambda p: _edited(p, lambda t: np.insert(t, 0, [*t[0, :3], t[0, 3], t[0, 4] - 1, 1], 0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("make", [lambda: ring(40, 4), lambda: grouped_plan(
    "two levels", "all_reduce", 40, even([even([0, 1]), even([2, 3])]))])  # fmt: skip
def test_a_planted_fault_is_found(name: str, make: Callable[[], ExchangePlan]) -> None:
    kind, plant = PLANTED[name]
    assert not list(faults(make()))
    planted = plant(make())
    assert kind in {fault.kind for fault in faults(planted)}
    with pytest.raises(PlanFormatError, match="exchange plan"):
        require_exact(planted)


def test_holders_that_wait_for_each_other_are_found() -> None:
    plan = ring(40, 4)
    of_holders = [list(own) for own in programmes(plan)]
    of_holders[2][1], of_holders[2][3] = of_holders[2][3], of_holders[2][1]
    found = list(faults(plan, of_holders=of_holders))
    assert {fault.kind for fault in found} == {"deadlock"}
    assert "holder 2 waits in round 3 for ever" in {fault.text for fault in found}


def test_too_small_buffers_are_found() -> None:
    group = Grouping((0, 1, 2, 3), (1.0, 0.0, 0.0, 0.0))
    plan = grouped_plan("one owner", "all_reduce", 1000, group)
    assert plan.most_received() == 3000
    assert [fault.kind for fault in faults(plan, 1000)] == ["buffers"]
    assert not list(faults(replace(plan, num_chunks=4), 1500))
    assert "more chunks need less" in next(faults(plan, 1000)).text
