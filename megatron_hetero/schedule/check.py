"""Deadlock check: a schedule can run if no instruction waits, in the end, for itself.

Operations of one instruction are posted together; a receive ends only when its send is posted.
The transport decides how long a send waits: not at all where it is buffered (our runtime waits for
its receives alone), or for its receive, which is rendezvous, the strictest that a transport may be.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Literal

from megatron_hetero.errors import CheckFailedError
from megatron_hetero.schedule.programme import RECEIVES, SENDS, Operation, Schedule

Place = tuple[int, int]
"""(stage, index of the instruction in its programme)."""

Sends = Literal["buffered", "rendezvous"]


def check_schedule(schedule: Schedule, sends: Sends = "buffered") -> None:
    """Refuse a schedule without an end, or with a computation repeated or left out.

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
    """Map every instruction to the partners to be posted before its messages can end.

    Raises:
        CheckFailedError: a message has no partner, or a channel's orders differ.
    """
    # The messages of each channel (boundary, direction), in the order of both sides' programmes.
    sent_on: dict[tuple[int, bool], list[tuple[int, Place]]] = defaultdict(list)
    received_on: dict[tuple[int, bool], list[tuple[int, Place]]] = defaultdict(list)
    for stage, programme in enumerate(schedule.programmes):
        for index, instruction in enumerate(programme):
            for operation in instruction:
                on = {SENDS: sent_on, RECEIVES: received_on}
                for kinds, channels in on.items():
                    if operation.kind in kinds:
                        message = schedule.message(stage, operation)
                        entry = (message.micro_batch, (stage, index))
                        channels[message.boundary, message.is_forward].append(entry)
    # Pair both sides' messages in order: a channel has no tags, so the orders have to be equal.
    partners: dict[Place, list[Place]] = defaultdict(list)
    for channel in sorted({*sent_on, *received_on}):
        sent, received = sent_on[channel], received_on[channel]
        if [m for m, _ in sent] != [m for m, _ in received]:
            boundary, is_forward = channel
            ends = [_describe_end(schedule, boundary), _describe_end(schedule, boundary + 1)]
            sender, receiver = ends if is_forward else reversed(ends)
            raise CheckFailedError(
                f"{sender} sends micro-batches {[m for m, _ in sent]} to {receiver}, which "
                f"receives {[m for m, _ in received]}; both must be equal"
            )
        for (_, from_), (_, to) in zip(sent, received, strict=True):
            # Without a buffer a send ends only once its receive is posted; a receive always needs
            # its send.
            if sends == "rendezvous":
                partners[from_].append(to)
            partners[to].append(from_)
    return partners


def find_cycle(schedule: Schedule, sends: Sends) -> list[Place]:
    """Find instructions in a ring, each waiting for the next; return an empty list if there are
    none.

    Every programme is run as far as it goes; if some do not reach their end, following "waits for"
    from any of them must come back to where it has been.
    """
    # Run every programme until an instruction misses a partner; wake the stage when the partner
    # comes.
    partners = message_partners(schedule, sends)
    waiting_for: dict[Place, list[int]] = defaultdict(list)
    position = [0] * schedule.num_stages
    ready = list(range(schedule.num_stages))
    while ready:
        stage = ready.pop()
        while position[stage] < len(schedule.programmes[stage]):
            # To stand at an instruction is to have posted it: whoever waits for that may go on.
            ready += waiting_for.pop((stage, position[stage]), ())
            missing = [
                partner
                for partner in partners.get((stage, position[stage]), ())
                if position[partner[0]] < partner[1]
            ]
            if missing:
                waiting_for[missing[0]].append(stage)
                break
            position[stage] += 1
    # All programmes ended, or some stand still.
    stuck = [s for s in range(schedule.num_stages) if position[s] < len(schedule.programmes[s])]
    if not stuck:
        return []
    # From any stage that stands still, follow the missing partners until a place comes back.
    path: list[Place] = []
    place = (stuck[0], position[stuck[0]])
    while place not in path:
        path.append(place)
        target = next(p for p in partners[place] if position[p[0]] < p[1])
        place = (target[0], position[target[0]])
    return path[path.index(place) :]


def _check_work(schedule: Schedule) -> None:
    micro_batches = range(schedule.num_micro_batches)
    for stage, programme in enumerate(schedule.programmes):
        # All operations of a stage, whatever instructions they stand in.
        operations = [operation for instruction in programme for operation in instruction]
        unknown = {o.chunk for o in operations} - set(range(schedule.num_chunks(stage)))
        if unknown:
            raise CheckFailedError(
                f"stage {stage} runs chunks {sorted(unknown)}, but has {schedule.num_chunks(stage)}"
            )
        # Each chunk has every micro-batch once, apart from the other chunks.
        for chunk in range(schedule.num_chunks(stage)):
            found = Counter[tuple[str, int]](
                (o.kind, o.micro_batch) for o in operations if o.chunk == chunk
            )
            where = f"stage {stage}" + (f", chunk {chunk}" if chunk else "")
            _check_passes(where, micro_batches, found)
        _check_order(schedule, stage, operations)


def _check_passes(where: str, micro_batches: range, found: Counter[tuple[str, int]]) -> None:
    """Check each micro-batch's passes: a single forward and a single backward, whole or in two
    parts."""
    # Nothing runs twice, and nothing runs for a micro-batch that does not exist.
    known = set(micro_batches)
    for (kind, k), count in sorted(found.items()):
        if k >= 0 and (count > 1 or k not in known):
            raise CheckFailedError(
                f"{where} runs {kind}({k}) {count} times; each micro-batch of 0..{len(known) - 1} "
                "is wanted once"
            )
    # Everything runs once: a forward, and either a whole backward or both of its parts.
    for k in micro_batches:
        whole, *parts = (
            found["backward", k],
            found["backward_input", k],
            found["backward_weight", k],
        )
        if not found["forward", k] or whole + parts[0] != 1 or parts[0] != parts[1]:
            raise CheckFailedError(
                f"{where} runs for micro-batch {k}: forward {found['forward', k]} times, backward "
                f"{whole}, backward_input {parts[0]}, backward_weight {parts[1]}; wanted is one "
                "forward and either one backward or both of its parts"
            )


def _check_order(schedule: Schedule, stage: int, operations: list[Operation]) -> None:
    """Check that an operation's inputs from the own stage come first."""
    done: set[Operation] = set()
    last = len(schedule.chain) - 1
    for operation in operations:
        # What has to come before it on its own stage; other stages' part is `find_cycle`'s.
        k, chunk = operation.micro_batch, operation.chunk
        here = schedule.virtual_stage(stage, chunk)
        needs: list[Operation] = []
        if operation.kind == "forward" and here > 0:
            needs.append(Operation("recv_forward", k, chunk))
        elif operation.kind in ("backward", "backward_input"):
            needs.append(Operation("forward", k, chunk))
            if here < last:
                needs.append(Operation("recv_backward", k, chunk))
        elif operation.kind == "backward_weight":
            needs.append(Operation("backward_input", k, chunk))
        elif operation.kind == "send_forward":
            needs.append(Operation("forward", k, chunk))
        elif operation.kind == "send_backward":
            # A gradient leaves after the whole backward pass, or after its first part alone.
            is_whole = Operation("backward", k, chunk) in done
            needs.append(Operation("backward" if is_whole else "backward_input", k, chunk))
        for need in needs:
            if need not in done:
                raise CheckFailedError(f"stage {stage} runs {operation} before {need}")
        done.add(operation)


def _describe_end(schedule: Schedule, virtual_stage: int) -> str:
    stage, chunk = schedule.place(virtual_stage)
    return f"stage {stage}" + (f", chunk {chunk}" if schedule.num_chunks(stage) > 1 else "")


def _describe(schedule: Schedule, place: Place) -> str:
    stage, index = place
    operations = " + ".join(str(o) for o in schedule.programmes[stage][index])
    return f"stage {stage}: {operations}"
