"""Ranks in a circle of waits, in words."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.schedule.proof.operations import Item, JobOperations
from megatron_hetero.schedule.proof.rules import Blocked


def circle_of(blocked: Sequence[Blocked]) -> list[Blocked]:
    """Return ranks of which each waits for the next and the last for the first; or, where a rank
    waits for one that has come to its end, the ranks that lead there."""
    # Any missing rank that is blocked itself leads on to the circle.
    by_rank = {one.rank: one for one in blocked}
    path = [blocked[0]]
    while True:
        following = next((by_rank[rank] for rank in path[-1].missing if rank in by_rank), None)
        if following is None:
            return path
        if following in path:
            return path[path.index(following) :]
        path.append(following)


def describe(job: JobOperations, blocked: Sequence[Blocked]) -> str:
    """Write a line for each rank of a circle.

    Args:
        job: the operations.
        blocked: ranks that do not come to their end, at least one.
    """
    return "\n".join(f"  {_line(job, one)}" for one in circle_of(blocked))


def _line(job: JobOperations, one: Blocked) -> str:
    place = f" ({job.places[one.rank]})" if job.places else ""
    # Singular and plural of the ranks that are missing.
    others = _ranks(one.missing)
    has = "has" if len(one.missing) == 1 else "have"
    come = "does not come" if len(one.missing) == 1 else "do not come"
    # Hosts that wait for others, then operations on the GPU.
    if one.reason == "communicator":
        what = f"makes the communicator of its {_name(job, one.item)}, where {others} {come}"
    elif one.reason == "connection":
        what = f"connects for its {_name(job, one.item)}, for which {others} {come}"
    elif one.behind is None:
        what = "waits for an operation that it has not given"
    elif one.item.kind == "wait":
        what = f"waits for its {_name(job, one.behind)}, which {others} {has} not begun"
    else:
        what = (
            f"cannot begin its {_name(job, one.item)} before its {_name(job, one.behind)} ends, "
            f"which {others} {has} not begun"
        )
    return f"rank {one.rank}{place} {what}"


def _name(job: JobOperations, item: Item) -> str:
    return f"{item.what} [{job.groups[item.group]}]"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}"
