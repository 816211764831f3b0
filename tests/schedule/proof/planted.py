"""Orders that hang under NCCL's rules, each made out of one that ends by a single error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from megatron_hetero.plan.communication.communicators import MESSAGE_USES
from megatron_hetero.schedule.proof.operations import Item, JobOperations


class Planted(NamedTuple):
    """An order, and the words that the report of its circle must have."""

    kind: str
    job: JobOperations
    words: str


def planted(job: JobOperations) -> Iterator[Planted]:
    """Yield what can be planted into the operations of a plan."""
    for kind, (plant, words) in KINDS.items():
        made = plant(job)
        if made is not None:
            yield Planted(kind, made, words)


def _changed(job: JobOperations, items: Sequence[Sequence[Item]]) -> JobOperations:
    return replace(job, ranks=[list(of) for of in items])


def _without(items: Sequence[Item], is_left_out: Callable[[Item], bool]) -> list[Item]:
    """Leave operations out, and the waits for them."""
    gone = {i.operation for i in items if i.kind not in ("wait", "sync") and is_left_out(i)}
    return [i for i in items if i.operation < 0 or i.operation not in gone]


def _is_start(item: Item) -> bool:
    return item.what.startswith("start of")


def _is_message(job: JobOperations, item: Item) -> bool:
    return item.group >= 0 and job.groups[item.group].use in MESSAGE_USES


def receive_before_communicator(job: JobOperations) -> JobOperations | None:
    """Communicators of messages are made where they are first used, as torch does by itself."""
    if not any(group.use == "backward" for group in job.groups):
        return None
    return _changed(
        job,
        [_without(of, lambda i: _is_start(i) and _is_message(job, i)) for of in job.ranks],
    )


def message_before_connection(job: JobOperations) -> JobOperations | None:
    """Communicators are made at the start, and pairs connected at their first message."""
    if not any(group.use == "backward" for group in job.groups):
        return None

    def first(item: Item) -> Item:
        if _is_start(item) and _is_message(job, item):
            return item._replace(kind="collective", messages=())
        return item

    return _changed(job, [[first(item) for item in of] for of in job.ranks])


def one_communicator_for_a_direction(job: JobOperations) -> JobOperations | None:
    """All messages of a direction are in one communicator, and receives are posted early."""
    first_of = {
        number: next(
            other
            for other, one in enumerate(job.groups)
            if (one.use, one.ranks, one.boundary) == (group.use, group.ranks, group.boundary)
        )
        for number, group in enumerate(job.groups)
        if group.use in MESSAGE_USES
    }
    if len(set(first_of.values())) == len(first_of):
        return None
    return _changed(
        job,
        [[i._replace(group=first_of.get(i.group, i.group)) for i in of] for of in job.ranks],
    )


def bucket_before_last_gradient(job: JobOperations) -> JobOperations | None:
    """A rank waits for its first bucket before it takes its last message."""
    for rank, items in enumerate(job.ranks):
        bucket = next((i for i in items if i.what == "gradients"), None)
        if bucket is None or not any(
            r != rank and _shares_pipeline(job, rank, r) for r in job.groups[bucket.group].ranks
        ):
            continue
        rest = _without(items, lambda i, b=bucket: i is b)  # type: ignore[misc]
        place = next(p for p, i in enumerate(rest) if not _is_start(i) and _is_message(job, i))
        early = [bucket, Item("wait", operation=bucket.operation)]
        made = list(job.ranks)
        made[rank] = [*rest[:place], *early, *rest[place:]]
        return _changed(job, made)
    return None


def _shares_pipeline(job: JobOperations, one: int, other: int) -> bool:
    return any(group.use == "forward" and {one, other} <= set(group.ranks) for group in job.groups)


def bucket_behind_a_bucket_early(job: JobOperations) -> JobOperations | None:
    """A rank gives its first two buckets before the step, and the second stands behind the
    first."""
    for rank, items in enumerate(job.ranks):
        for one, other in pairwise([i for i in items if i.what == "gradients"]):
            ranks = job.groups[one.group].ranks
            if one.group != other.group or not any(
                r != rank and _shares_pipeline(job, rank, r) for r in ranks
            ):
                continue
            rest = [i for i in items if i is not one and i is not other]
            place = next(p for p, i in enumerate(rest) if not _is_start(i) and _is_message(job, i))
            made = list(job.ranks)
            made[rank] = [*rest[:place], one, other, *rest[place:]]
            return _changed(job, made)
    return None


def bucket_behind_a_bucket(job: JobOperations) -> JobOperations | None:
    """A rank gives an operation twice in a row, as one that starts a bucket of the next step."""
    for rank, items in enumerate(job.ranks):
        for place, item in enumerate(items):
            is_used_again = any(i.group == item.group for i in items[place + 1 :])
            if item.what == "gradients" and is_used_again:
                count = sum(i.kind in ("collective", "messages") for i in items)
                again = item._replace(operation=count)
                made = list(job.ranks)
                made[rank] = [*items[: place + 1], again, *items[place + 1 :]]
                return _changed(job, made)
    return None


def rank_that_does_not_come(job: JobOperations) -> JobOperations | None:
    """A rank leaves one collective out."""
    for rank, items in enumerate(job.ranks):
        for item in items:
            if item.kind == "collective" and not _is_start(item):
                made = list(job.ranks)
                made[rank] = _without(items, lambda i, gone=item: i is gone)  # type: ignore[misc]
                return _changed(job, made)
    return None


def send_that_nobody_takes(job: JobOperations) -> JobOperations | None:
    """A stage leaves the receive of an activation out."""
    for rank, items in enumerate(job.ranks):
        for item in items:
            is_receive = bool(item.messages) and not any(sent for _, sent in item.messages)
            if is_receive and not _is_start(item):
                made = list(job.ranks)
                made[rank] = _without(items, lambda i, gone=item: i is gone)  # type: ignore[misc]
                return _changed(job, made)
    return None


def another_order_of_making(job: JobOperations) -> JobOperations | None:
    """One rank makes two communicators the other way round."""
    for rank, items in enumerate(job.ranks):
        blocks = _blocks(items)
        for n, (one, other) in enumerate(pairwise(blocks)):
            groups = [job.groups[block[0].group] for block in (one, other)]
            if len(set(groups[0].ranks) & set(groups[1].ranks)) > 1:
                order = [*blocks[:n], other, one, *blocks[n + 2 :]]
                made = list(job.ranks)
                rest = items[sum(map(len, blocks)) :]
                made[rank] = [*(i for block in order for i in block), *rest]
                return _changed(job, made)
    return None


def _blocks(items: Sequence[Item]) -> list[list[Item]]:
    """Return the start: an operation, its wait and the host's, for each communicator."""
    blocks = []
    place = 0
    while place < len(items) and _is_start(items[place]):
        blocks.append(list(items[place : place + 3]))
        place += 3
    return blocks


def host_that_waits_for_a_receive(job: JobOperations) -> JobOperations | None:
    """A rank waits for its last gradient right where it asks for it."""
    for rank, items in enumerate(job.ranks):
        posts = [
            p
            for p, i in enumerate(items)
            if i.messages and not _is_start(i) and job.groups[i.group].use == "backward"
            and not any(sent for _, sent in i.messages)
        ]  # fmt: skip
        if posts:
            place = posts[0]
            made = list(job.ranks)
            wait = Item("wait", operation=items[place].operation)
            made[rank] = [*items[: place + 1], wait, *items[place + 1 :]]
            found = _changed(job, made)
            first_send = next(
                (p for p, i in enumerate(items)
                 if i.messages and not _is_start(i) and i.messages[0][1]),
                0,
            )  # fmt: skip
            if place < first_send:
                return found
            post = items[place]
            rest = [i for p, i in enumerate(items) if p != place]
            made[rank] = [*rest[:first_send], post, wait, *rest[first_send:]]
            return _changed(job, made)
    return None


KINDS: dict[str, tuple[Callable[[JobOperations], JobOperations | None], str]] = {
    "a receive before the communicator": (receive_before_communicator, "makes the communicator"),
    "a message before the connection": (message_before_connection, "connects for"),
    "two receives on one stream": (one_communicator_for_a_direction, "before its"),
    "a bucket waited for too early": (bucket_before_last_gradient, "gradients"),
    "two buckets given early": (bucket_behind_a_bucket_early, "gradients"),
    "a bucket started twice": (bucket_behind_a_bucket, "gradients"),
    "a rank that leaves a collective out": (rank_that_does_not_come, "not begun"),
    "a receive that is left out": (send_that_nobody_takes, "not begun"),
    "communicators in another order": (another_order_of_making, "makes the communicator"),
    "a gradient waited for before the activation is sent": (host_that_waits_for_a_receive, "waits"),
}
