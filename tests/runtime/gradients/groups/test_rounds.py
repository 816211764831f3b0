"""Exchange plans run over gloo: plain sums, one order of addition, errors that reach who waits."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.exchange.groups.by_group import plan_by_group
from megatron_hetero.exchange.groups.pairs import pair_sums
from megatron_hetero.exchange.plan import ExchangePlan, Owned, Purpose
from megatron_hetero.runtime.gradients.groups.pair_group import PairGroup
from megatron_hetero.runtime.gradients.groups.rounds import HolderRounds, RoundsEngine, RoundsWork
from tests.runtime.toy_model import in_world

WORLD = "tp1:1 @1 | tp1:1 @1 | tp1:1 @1 | tp1:1 @1"
SIZE = 29
PURPOSES: tuple[Purpose, ...] = ("all_reduce", "reduce_scatter", "all_gather")
OWNERS = (Owned(0, 3, 0), Owned(3, 20, 1), Owned(20, 29, 3))


def planned(
    purpose: Purpose = "all_reduce", owners: tuple[Owned, ...] | None = None
) -> ExchangePlan:
    made = plan_by_group(("a", "b", "c", "c"), (("a", "b"), ("c",)), SIZE, purpose, owners)
    assert made is not None
    return made


def buffer(rank: int, dtype: torch.dtype = torch.float32, size: int = SIZE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator).to(dtype)


def test_holders_end_with_what_the_purpose_says(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        total = torch.stack([buffer(r).double() for r in range(4)]).sum(0)
        bound = 4 * torch.finfo(torch.float32).eps * total.abs().max() * 4
        found = {}
        for tag, purpose in enumerate(PURPOSES):
            flat = buffer(rank)
            rounds = HolderRounds(planned(purpose, OWNERS), rank)
            rounds.run(flat, dist.group.WORLD, tag)
            found[purpose] = flat
        assert (found["all_reduce"] - total).abs().max() <= bound
        for owned in OWNERS:
            part = slice(owned.start, owned.stop)
            assert torch.equal(found["all_gather"][part], buffer(owned.holder)[part])
            if owned.holder == rank:
                assert torch.equal(found["reduce_scatter"][part], found["all_reduce"][part])
        # The same bits on all holders, though fp32 sums depend on their order.
        all_found = [torch.empty(SIZE) for _ in range(4)]
        dist.all_gather(all_found, found["all_reduce"])
        assert all(torch.equal(one, all_found[0]) for one in all_found)

    in_world(WORLD, check, tmp_path)


def test_buffers_in_half_precision_are_summed(tmp_path: Path) -> None:
    """Whole numbers below 256 are exact in bf16."""

    def check(rank: int) -> None:
        flat = torch.full((SIZE,), float(60 + rank), dtype=torch.bfloat16)
        HolderRounds(planned(), rank).run(flat, dist.group.WORLD, 0)
        assert flat.tolist() == [246.0] * SIZE

    in_world(WORLD, check, tmp_path)


def in_one_process(plan: ExchangePlan, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run a plan element by element: pieces are added one by one in the order of the holders."""
    for number in range(plan.num_rounds):
        before = [flat.clone() for flat in buffers]
        pieces: dict[tuple[int, int], list[tuple[int, float]]] = {}
        for t in plan.transfers():
            for element in range(t.start, t.stop) if t.round == number else ():
                if t.reduces:
                    own = t.destination, before[t.destination][element].item()
                    added = pieces.setdefault((t.destination, element), [own])
                    added.append((t.source, before[t.source][element].item()))
                else:
                    buffers[t.destination][element] = before[t.source][element]
        for (holder, element), found in pieces.items():
            total = torch.zeros((), dtype=torch.float32)
            for _, piece in sorted(found):
                total += piece
            buffers[holder][element] = total
    return buffers


def some_plans(seed: int) -> Iterator[ExchangePlan]:
    """Make exchanges of holders on machines in groups, both drawn, whole and to drawn owners."""
    draw = random.Random(seed)
    while True:
        machines = [draw.choice("abcd") for _ in range(4)]
        groups = [draw.sample("abcd", 4)]
        for _ in range(draw.randint(1, 3)):
            cut = draw.randrange(len(groups[-1]) + 1)
            groups[-1:] = [groups[-1][:cut], groups[-1][cut:]]
        size = draw.randint(1, 40)
        ends = sorted(draw.randint(0, size) for _ in range(3))
        owners = [
            Owned(start, stop, holder)
            for holder, (start, stop) in enumerate(pairwise([0, *ends, size]))
            if stop > start
        ]
        purpose = draw.choice(PURPOSES)
        given = owners if purpose != "all_reduce" or draw.random() < 0.5 else None
        made = plan_by_group(machines, groups, size, purpose, given)
        if made is not None:
            yield made


def test_every_exchange_has_the_bits_of_sums_in_the_order_of_the_holders(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        for tag, plan in enumerate(islice(some_plans(7), 40)):
            for dtype in (torch.float32, torch.bfloat16):
                buffers = [buffer(r, dtype, plan.size) for r in range(4)]
                flat = buffers[rank].clone()
                HolderRounds(plan, rank).run(flat, dist.group.WORLD, tag)
                assert torch.equal(flat, in_one_process(plan, buffers)[rank]), (plan, dtype)

    in_world(WORLD, check, tmp_path)


def pair_groups(plans: Iterable[ExchangePlan]) -> dict[tuple[int, int], PairGroup]:
    """Make the communicators of all pairs; every rank makes all of them in one order."""
    pairs = {own.holders for plan in plans for own in pair_sums(plan).values()}
    return {pair: PairGroup(dist.new_group(list(pair))) for pair in sorted(pairs)}


def test_pairs_have_the_bits_of_their_rounds(tmp_path: Path) -> None:
    sites = (("a", "b"), ("c", "d"))
    plans = [
        plan
        for machines in ("aacc", "acac", "abcd", "acdb", "abcc", "aabc")
        for size in (*range(1, 10), 15, 16, 23)
        if (plan := plan_by_group(machines, sites, size, "all_reduce")) is not None
    ]
    assert {len(pair_sums(plan)) for plan in plans} == {0, 2, 4}

    def check(rank: int) -> None:
        groups = pair_groups(plans)
        for tag, plan in enumerate(plans):
            own = pair_sums(plan).get(rank)
            pair = None if own is None else groups[own.holders]
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                flat = buffer(rank, dtype, plan.size)
                by_rounds = flat.clone()
                HolderRounds(plan, rank, pair).run(flat, dist.group.WORLD, tag)
                HolderRounds(plan, rank).run(by_rounds, dist.group.WORLD, tag)
                assert torch.equal(flat, by_rounds), (plan, dtype)

    in_world(WORLD, check, tmp_path)


def test_a_pair_sums_in_the_order_in_which_exchanges_start(tmp_path: Path) -> None:
    """Of three that use one pair the first has rounds before its sum, which others could overtake;
    in the last three runs it is kept back on one rank."""

    def check(rank: int) -> None:
        names, sites = ("a", "a", "b", "b"), (("a",), ("b",))
        of_all = plan_by_group(names, sites, SIZE, "all_reduce")
        of_two = plan_by_group(("a", "b"), sites, SIZE, "all_reduce")
        assert of_all is not None and of_two is not None
        groups = pair_groups([of_all])
        both = {pair: groups[pair].group for pair in sorted(groups)}
        mine = next(pair for pair in sorted(both) if rank in pair)
        whole = HolderRounds(of_all, rank, groups[mine])
        alone = HolderRounds(of_two, mine.index(rank), groups[mine])
        engine = RoundsEngine()
        run = whole.run

        def late(*args: Any) -> None:
            time.sleep(0.1)
            run(*args)

        for turn in range(6):
            whole.run = late if turn > 2 and rank == 0 else run  # type: ignore[method-assign]
            first, *others = [torch.full((SIZE,), 10.0**k * (rank + 1)) for k in range(3)]
            works = [engine.start(whole, first, dist.group.WORLD)]
            works += [engine.start(alone, other, both[mine]) for other in others]
            for work in works:
                assert work.wait()
            assert first.tolist() == [10.0] * SIZE
            for k, other in enumerate(others, 1):
                assert other.tolist() == [10.0**k * (sum(mine) + 2)] * SIZE

    in_world(WORLD, check, tmp_path)


def test_an_exchange_that_fails_keeps_no_other_from_its_turn() -> None:
    pair = PairGroup(None)  # type: ignore[arg-type]
    failing, turn = pair.next_turn(), pair.next_turn()
    plan = plan_by_group(("a", "a", "b", "b"), (("a",), ("b",)), SIZE, "all_reduce")
    assert plan is not None
    with pytest.raises(Exception, match="group"):
        HolderRounds(plan, 0, pair).run(torch.zeros(SIZE), None, 0, failing)  # type: ignore[arg-type]
    assert failing.is_over.is_set() and not turn.is_over.is_set()


class Allocated(TorchDispatchMode):
    """Counts the elements of all memory that is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            places = {x.untyped_storage().data_ptr() for x in given}
            if made.untyped_storage().data_ptr() not in places:
                self.num_elements += made.numel()
        return made


def test_an_exchange_takes_no_memory_but_for_what_is_to_be_added(tmp_path: Path) -> None:
    """Half of the buffer arrives inside a machine, and half of that from the other."""

    def check(rank: int) -> None:
        flat = torch.zeros(4096)
        plan = plan_by_group(("a", "a", "b", "b"), (("a",), ("b",)), len(flat), "all_reduce")
        assert plan is not None
        with Allocated() as allocated:
            HolderRounds(plan, rank).run(flat, dist.group.WORLD, 0)
        assert allocated.num_elements == 2048 + 1024
        groups = pair_groups([plan])
        pair = groups[pair_sums(plan)[rank].holders]
        with Allocated() as allocated:
            HolderRounds(plan, rank, pair).run(flat, dist.group.WORLD, 1)
        assert allocated.num_elements == 2048

    in_world(WORLD, check, tmp_path)


def test_exchanges_that_are_under_way_together_stay_apart(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        engine, rounds = RoundsEngine(), HolderRounds(planned(), rank)
        buffers = [torch.full((SIZE,), float(10**k * (rank + 1))) for k in range(5)]
        works = [engine.start(rounds, flat, dist.group.WORLD) for flat in buffers]
        for k in (4, 2, 0, 1, 3):
            assert works[k].wait() and works[k].is_completed()
            assert buffers[k].tolist() == [10.0**k * 10] * SIZE

    in_world(WORLD, check, tmp_path)


def test_a_plan_that_does_not_sum_is_refused_before_it_runs() -> None:
    made = planned()
    with pytest.raises(PlanFormatError, match=r"exchange plan .* puts less in its place"):
        HolderRounds(replace(made, table=made.table[1:]), 0)


def test_an_error_of_a_round_reaches_who_waits() -> None:
    def fail() -> None:
        raise ConnectionError("the other side is gone")

    work = RoundsWork(fail)
    assert not work.is_completed()
    work.run()
    assert work.is_completed()
    for _ in range(2):
        with pytest.raises(ConnectionError, match="the other side is gone"):
            work.wait()
