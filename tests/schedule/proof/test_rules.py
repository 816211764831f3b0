"""NCCL's rules on orders of two and three ranks, where the answer is known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_hetero.plan.communication.communicators import Communicator, Use
from megatron_hetero.schedule.proof.circle import circle_of, describe
from megatron_hetero.schedule.proof.operations import JobOperations, RankItems
from megatron_hetero.schedule.proof.rules import NUM_STREAMS, blocked_ranks

Step = tuple[str, int] | tuple[str, int, int]
"""(start, group), (send or receive, group, peer), (wait, operation), (all, group) or (sync, 0)."""

MANY = 1 << 20
"""Connections for as many queues as there are streams."""


def job(groups: Sequence[tuple[Use, tuple[int, ...]]], *ranks: Sequence[Step]) -> JobOperations:
    """Write out steps; `start` makes a communicator and all its connections."""
    found = []
    for rank, steps in enumerate(ranks):
        items = RankItems(rank)
        for kind, number, *peer in steps:
            if kind == "start":
                members = [r for r in groups[number][1] if r != rank]
                both = [(r, sent) for r in members for sent in (True, False)]
                items.wait(items.messages(number, both, "start"))
                items.sync()
            elif kind in ("send", "receive"):
                items.messages(number, [(peer[0], kind == "send")], f"{kind} {peer[0]}")
            elif kind == "all":
                items.collective(number, "all")
            elif kind == "sync":
                items.sync()
            else:
                items.wait(number)
        found.append(items.items)
    return JobOperations([Communicator(use, ranks) for use, ranks in groups], found)


def test_a_communicator_is_made_by_all_of_its_ranks_together() -> None:
    both: list[tuple[Use, tuple[int, ...]]] = [("world", (0, 1)), ("tensor", (0, 1))]
    one = [("all", 0), ("all", 1)]
    assert not blocked_ranks(job(both, one, one))
    crossed = job(both, one, one[::-1])
    assert [b.reason for b in blocked_ranks(crossed)] == ["communicator"] * 2
    assert "makes the communicator" in describe(crossed, blocked_ranks(crossed))


def test_two_ranks_connect_at_their_first_message_each_way() -> None:
    groups: list[tuple[Use, tuple[int, ...]]] = [("forward", (0, 1)), ("backward", (0, 1))]
    made = [("all", 0), ("wait", 0), ("all", 1), ("wait", 1)]
    late = job(
        groups,
        [*made, ("receive", 1, 1), ("send", 0, 1)],
        [*made, ("receive", 0, 0), ("wait", 2), ("send", 1, 0)],
    )
    assert {b.reason for b in blocked_ranks(late)} == {"connection"}
    started = [("start", 0), ("start", 1)]
    early = job(
        groups,
        [*started, ("receive", 1, 1), ("send", 0, 1)],
        [*started, ("receive", 0, 0), ("wait", 2), ("send", 1, 0)],
    )
    assert not blocked_ranks(early)


def test_what_waits_for_its_stream_holds_up_the_one_queue() -> None:
    """Rank 0 asks for two gradients in one communicator and sends behind them."""
    groups: list[tuple[Use, tuple[int, ...]]] = [("forward", (0, 1)), ("backward", (0, 1))]
    made = [("start", 0), ("start", 1)]
    asked = job(
        groups,
        [*made, ("receive", 1, 1), ("receive", 1, 1), ("send", 0, 1)],
        [*made, ("receive", 0, 0), ("wait", 2), ("send", 1, 0), ("send", 1, 0)],
    )
    assert len(blocked_ranks(asked)) == 2
    assert not blocked_ranks(asked, MANY)
    assert [one.rank for one in circle_of(blocked_ranks(asked))] == [0, 1]
    assert "before its receive 1" in describe(asked, blocked_ranks(asked))


def test_communicators_that_share_a_stream_of_torch_s_pool_wait_for_each_other() -> None:
    """The first and the 33rd communicator of a rank."""
    groups: list[tuple[Use, tuple[int, ...]]] = [("tensor", (0, 1))] * (NUM_STREAMS + 1)
    made: list[Step] = [("start", n) for n in range(NUM_STREAMS + 1)]

    def crossed(other: int) -> JobOperations:
        return job(groups, [*made, ("all", 0), ("all", other)], [*made, ("all", other), ("all", 0)])

    assert not blocked_ranks(crossed(1))
    assert blocked_ranks(crossed(NUM_STREAMS))
    assert blocked_ranks(crossed(NUM_STREAMS), MANY)


@pytest.mark.parametrize("connections", [1, 2, MANY])
def test_an_operation_that_is_missing_is_missed(connections: int) -> None:
    made = [("start", 0)]
    found = blocked_ranks(
        job([("forward", (0, 1))], [*made, ("receive", 0, 1), ("wait", 1), ("sync", 0)], made),
        connections,
    )
    assert [(b.rank, b.missing) for b in found] == [(0, (1,))]
