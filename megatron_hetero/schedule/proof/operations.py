"""The operations of every rank of a job as data: what it gives the communication library, in order.

A rank's list has four kinds of items.  A *collective* and *messages* (sends and receives that are
given together) are operations of a communicator; the rank goes on at once.  *wait* lets what the
GPU computes from there on wait for an operation.  *sync* lets the host wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megatron_hetero.plan.communication.communicators import Communicator

ItemKind = Literal["collective", "messages", "wait", "sync"]


class Item(NamedTuple):
    """One item of a rank's list.

    `group` is a place among the job's communicators; `operation` the number of an operation among
    the rank's, given or waited for.  `messages` are (peer, whether it is sent).  `what` says in
    words what it is for.
    """

    kind: ItemKind
    group: int = -1
    operation: int = -1
    messages: tuple[tuple[int, bool], ...] = ()
    what: str = ""


@dataclass
class JobOperations:
    """The operations of a job.

    Attributes:
        groups: the communicators, in the order in which all ranks make them.
        ranks: [rank] -> its items.
        training: [rank] -> those of its items that are a step of training.
        places: [rank] -> its place in the plan, in words.
    """

    groups: Sequence[Communicator]
    ranks: Sequence[Sequence[Item]]
    training: Sequence[slice] = ()
    places: Sequence[str] = ()


@dataclass
class RankItems:
    """The items of a rank, as written down."""

    rank: int
    items: list[Item] = field(default_factory=list)
    num_operations: int = 0
    training: slice = slice(0)

    def collective(self, group: int, what: str) -> int:
        """Add a collective; return its number."""
        return self._add("collective", group, (), what)

    def messages(self, group: int, messages: Sequence[tuple[int, bool]], what: str) -> int:
        """Add sends and receives that are given together; return their number."""
        return self._add("messages", group, tuple(messages), what)

    def wait(self, operation: int) -> None:
        """Let what is computed from here on wait for an operation."""
        self.items.append(Item("wait", operation=operation))

    def sync(self) -> None:
        """Let the host wait for the GPU."""
        self.items.append(Item("sync"))

    def done(self, group: int, what: str) -> None:
        """Add a collective and the wait for it."""
        self.wait(self.collective(group, what))

    def _add(
        self, kind: ItemKind, group: int, messages: tuple[tuple[int, bool], ...], what: str
    ) -> int:
        # Operations count from 0 on each rank, in the order in which they are given.
        number = self.num_operations
        self.num_operations += 1
        self.items.append(Item(kind, group, number, messages, what))
        return number
