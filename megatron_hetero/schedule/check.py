"""Deadlock check: a schedule can run if no instruction waits, in the end, for itself.

Operations of one instruction are posted together; a receive ends only when its send is posted.
What a send waits for is the transport's: nothing, where it is buffered (our runtime waits for its
receives alone), or its receive too, which is rendezvous, the strictest that a transport may be.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from megatron_hetero.errors import CheckFailedError
from megatron_hetero.schedule.programme import Operation, Schedule

Place = tuple[int, int]
"""(stage, index of the instruction in its programme)."""

Sends = Literal["buffered", "rendezvous"]


def check_schedule(schedule: Schedule, sends: Sends = "buffered") -> None:
    """Refuse a schedule that cannot finish, or that computes something twice or never.

    With `sends="rendezvous"` also one that only a transport with buffers can finish: 1F1B's own
    launch counts pass, counts further ahead may not.

    Raises:
        CheckFailedError: a message without its partner, messages of a channel in different orders
            on both sides, work missing or out of order, or a cycle (which is printed).
    """
    _check_work(schedule)
    cycle = find_cycle(schedule, sends)
    if cycle:
        path = " -> ".join(_describe(schedule, place) for place in [*cycle, cycle[0]])
        raise CheckFailedError(f"the schedule deadlocks; each waits for the next: {path}")


def message_partners(schedule: Schedule, sends: Sends) -> dict[Place, list[Place]]:
    """For every instruction, those that must be posted for its messages to end.

    Raises:
        CheckFailedError: a message has no partner, or a channel's orders differ.
    """
    sent_on: dict[tuple[int, int], list[tuple[int, Place]]] = defaultdict(list)
    received_on: dict[tuple[int, int], list[tuple[int, Place]]] = defaultdict(list)
    for stage, programme in enumerate(schedule.programmes):
        for index, instruction in enumerate(programme):
            for operation in instruction:
                entry = (operation.micro_batch, (stage, index))
                match operation.kind:
                    case "send_forward":
                        sent_on[stage, stage + 1].append(entry)
                    case "send_backward":
                        sent_on[stage, stage - 1].append(entry)
                    case "recv_forward":
                        received_on[stage - 1, stage].append(entry)
                    case "recv_backward":
                        received_on[stage + 1, stage].append(entry)
    partners: dict[Place, list[Place]] = defaultdict(list)
    for channel in sorted({*sent_on, *received_on}):
        sent, received = sent_on[channel], received_on[channel]
        if [m for m, _ in sent] != [m for m, _ in received]:
            raise CheckFailedError(
                f"stage {channel[0]} sends micro-batches {[m for m, _ in sent]} to stage "
                f"{channel[1]}, which receives {[m for m, _ in received]}; both must be equal"
            )
        for (_, sender), (_, receiver) in zip(sent, received, strict=True):
            if sends == "rendezvous":
                partners[sender].append(receiver)
            partners[receiver].append(sender)
    return partners


def find_cycle(schedule: Schedule, sends: Sends) -> list[Place]:
    """Instructions that wait for each other in a ring, or an empty list.

    Every programme is run as far as it goes; if some do not reach their end, following "waits for"
    from any of them must come back to where it has been.
    """
    partners = message_partners(schedule, sends)
    position = [0] * schedule.num_stages
    ready = list(range(schedule.num_stages))
    while ready:
        stage = ready.pop()
        while position[stage] < len(schedule.programmes[stage]):
            here = (stage, position[stage])
            if any(position[s] < index for s, index in partners.get(here, ())):
                break
            position[stage] += 1
        # A neighbour may have waited for what is posted now.
        for neighbour in (stage - 1, stage + 1):
            if not 0 <= neighbour < schedule.num_stages or neighbour in ready:
                continue
            waiting = (neighbour, position[neighbour])
            waits_for = partners.get(waiting, ())
            if waits_for and all(position[s] >= index for s, index in waits_for):
                ready.append(neighbour)
    stuck = [s for s in range(schedule.num_stages) if position[s] < len(schedule.programmes[s])]
    if not stuck:
        return []
    path: list[Place] = []
    place = (stuck[0], position[stuck[0]])
    while place not in path:
        path.append(place)
        target = next(p for p in partners[place] if position[p[0]] < p[1])
        place = (target[0], position[target[0]])
    return path[path.index(place) :]


def _check_work(schedule: Schedule) -> None:
    wanted = list(range(schedule.num_micro_batches))
    for stage, programme in enumerate(schedule.programmes):
        operations = [operation for instruction in programme for operation in instruction]
        for kind in ("forward", "backward"):
            found = [o.micro_batch for o in operations if o.kind == kind]
            if sorted(found) != wanted:
                raise CheckFailedError(
                    f"stage {stage} runs {kind} for micro-batches {found}; each of 0.."
                    f"{schedule.num_micro_batches - 1} is wanted once"
                )
        _check_order(stage, stage == schedule.num_stages - 1, operations)


def _check_order(stage: int, is_last: bool, operations: list[Operation]) -> None:
    """What an operation needs of its own stage comes before it."""
    done: set[Operation] = set()
    for operation in operations:
        k = operation.micro_batch
        needs: list[Operation] = []
        if operation.kind == "forward" and stage > 0:
            needs.append(Operation("recv_forward", k))
        elif operation.kind == "backward":
            needs.append(Operation("forward", k))
            if not is_last:
                needs.append(Operation("recv_backward", k))
        elif operation.kind == "send_forward":
            needs.append(Operation("forward", k))
        elif operation.kind == "send_backward":
            needs.append(Operation("backward", k))
        for need in needs:
            if need not in done:
                raise CheckFailedError(f"stage {stage} runs {operation} before {need}")
        done.add(operation)


def _describe(schedule: Schedule, place: Place) -> str:
    stage, index = place
    operations = " + ".join(str(o) for o in schedule.programmes[stage][index])
    return f"stage {stage}: {operations}"
