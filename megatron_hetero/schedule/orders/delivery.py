"""Messages of a stage, known in advance: those on their way to it, and its own that arrived.

Both follow from the programmes alone.  The first says when to post a receive, so that a sender
never waits for a receiver; the second when a tensor that was sent may be let go, without asking the
transport.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_hetero.schedule.programme import RECEIVES, Instruction, Message, Schedule

Channel = tuple[int, bool]
"""(boundary, is_forward) of a `Message`."""


def receive_posts(schedule: Schedule, stage: int) -> tuple[tuple[int, ...], ...]:
    """Return the boundaries for which to post a receive before each instruction of the stage,
    [instruction].

    Each receive is posted when its message can be under way at the earliest, which is found by
    letting all other stages run as far as they can at every point of this one's programme.
    """
    # Boundaries of messages to this stage that nobody has posted for.
    sent: list[int] = []
    posts = []
    others = _Others(schedule, stage, sent)
    for sends, _ in schedule.messages[stage]:
        # The stage's own sends come first, as they may let others go on.
        for message in sends:
            others.deliver(message)
        others.run()
        posts.append(tuple(sorted(sent)))
        sent.clear()
    return tuple(posts)


def limited_posts(
    programme: Sequence[Instruction],
    posts: Sequence[Sequence[int]],
    most: Mapping[int, int],
    schedule: Schedule,
    stage: int,
) -> tuple[tuple[int, ...], ...]:
    """Put off receives until few enough are posted and not yet taken.

    Args:
        programme: of the stage.
        posts: boundaries to post before each instruction (`receive_posts`).
        most: boundary -> receives that may be posted at a time, at least 1.
        schedule, stage: the whole schedule, and the stage.
    """
    # `due`: boundaries whose receives were put off. `now`: receives posted and not yet taken.
    due: Counter[int] = Counter()
    now: Counter[int] = Counter()
    found = []
    for instruction, boundaries in zip(programme, posts, strict=True):
        due.update(boundaries)
        # Post as many of the due receives as the limits allow.
        posted = [b for b in sorted(due) for _ in range(min(due[b], most[b] - now[b]))]
        due.subtract(posted)
        now.update(posted)
        found.append(tuple(posted))
        # A receive that the instruction takes makes room for another.
        for operation in instruction:
            if operation.kind in RECEIVES:
                now[schedule.message(stage, operation).boundary] -= 1
    return tuple(found)


def receive_windows(
    programme: Sequence[Instruction], posts: Sequence[Sequence[int]], schedule: Schedule, stage: int
) -> dict[int, int]:
    """Return by boundary the most receives that are posted and not yet taken.

    Args:
        programme: a part of the stage's programme.
        posts: boundaries to post before each instruction (`receive_posts`).
        schedule, stage: the whole schedule, and the stage.
    """
    # As in `limited_posts`: posted and not yet taken.
    now: Counter[int] = Counter()
    most: dict[int, int] = {}
    for instruction, boundaries in zip(programme, posts, strict=True):
        now.update(boundaries)
        for boundary in boundaries:
            most[boundary] = max(most.get(boundary, 0), now[boundary])
        for operation in instruction:
            if operation.kind in RECEIVES:
                now[schedule.message(stage, operation).boundary] -= 1
    return most


def posts_within(
    programme: Sequence[Instruction], windows: Mapping[int, int], schedule: Schedule, stage: int
) -> tuple[tuple[int, ...], ...]:
    """Return the receives to post before each instruction of a part of a programme, as
    `receive_posts`: as many as `windows` at first, and one more for each that is taken, as long as
    there are any.

    Args:
        windows: receives posted at a time, by boundary.
        schedule, stage: the whole schedule, and the stage whose programme this is.
    """
    # Boundaries that each instruction receives from.
    wanted = [
        [schedule.message(stage, o).boundary for o in instruction if o.kind in RECEIVES]
        for instruction in programme
    ]
    left = Counter(boundary for boundaries in wanted for boundary in boundaries)
    posts: list[tuple[int, ...]] = []
    free = Counter(windows)
    for boundaries in wanted:
        # As many as there is room for, and never more than are still to come.
        now = {b: min(free[b], left[b]) for b in free}
        left.subtract(now)
        posts.append(tuple(sorted(b for b, count in now.items() for _ in range(count))))
        free = Counter(boundaries)
    return tuple(posts)


def arrived_sends(schedule: Schedule, stage: int) -> dict[Message, int]:
    """Count, for each message to `stage`, the stage's own messages that had arrived over the same
    boundary before the sender sent."""
    # Boundaries at the stage's own virtual stages.
    own = {b + d for b in range(len(schedule.chain)) for d in (-1, 0) if schedule.chain[b] == stage}
    # Nobody else sends over them.
    peers = {s for b in own if b >= 0 for s in schedule.chain[b : b + 2] if s != stage}
    arrived: dict[Message, int] = {}
    for peer in sorted(peers):
        # Walk a peer's programme: what it had received before a send, it has received for sure.
        received: Counter[Channel] = Counter()
        for sends, receives in schedule.messages[peer]:
            for message in sends:
                if message.boundary in own:
                    arrived[message] = received[message.boundary, not message.is_forward]
            for message in receives:
                received[message.boundary, message.is_forward] += 1
    return arrived


@dataclass(frozen=True)
class StagePosts:
    """Boundaries for which a stage posts receives before each instruction, [instruction], in
    training and in validation (forwards alone)."""

    training: tuple[tuple[int, ...], ...]
    validation: tuple[tuple[int, ...], ...]
    forwards: tuple[Instruction, ...]


_FORWARD_ONLY = ("forward", "send_forward", "recv_forward")


def stage_posts(
    schedule: Schedule, stage: int, most: Mapping[int, int] | None = None
) -> StagePosts:
    """Return when a stage posts its receives.

    Args:
        schedule: the schedule of the replica.
        stage: index of the stage in it.
        most: boundary -> receives that may be posted at a time; None does not limit them.
    """
    training = schedule.programmes[stage]
    posts = receive_posts(schedule, stage)
    if most is not None:
        posts = limited_posts(training, posts, most, schedule, stage)
    # Validation keeps the order of the forwards, and the windows of training.
    forwards = (tuple(o for o in made if o.kind in _FORWARD_ONLY) for made in training)
    validation = tuple(instruction for instruction in forwards if instruction)
    windows = receive_windows(training, posts, schedule, stage)
    return StagePosts(posts, posts_within(validation, windows, schedule, stage), validation)


class _Others:
    """All stages but `held`, running as far ahead as they can; sends are buffered.

    `sent` gets the boundary of each message to the held stage.
    """

    def __init__(self, schedule: Schedule, held: int, sent: list[int]) -> None:
        self._schedule = schedule
        chain = schedule.chain
        self._of_held = {b for b in range(len(chain)) if held in chain[b : b + 2]}
        self._sent = sent
        self._position = [0] * schedule.num_stages
        self._on_the_way: set[Message] = set()
        self._waiting: dict[Message, list[int]] = defaultdict(list)
        self._ready = [s for s in range(schedule.num_stages) if s != held]

    def deliver(self, message: Message) -> None:
        """Send a message of the held stage."""
        # A message on its way stays known, so a later receive finds it.
        self._on_the_way.add(message)
        self._ready += self._waiting.pop(message, ())

    def run(self) -> None:
        while self._ready:
            self._advance(self._ready.pop())

    def _advance(self, stage: int) -> None:
        messages, on_the_way = self._schedule.messages[stage], self._on_the_way
        for position in range(self._position[stage], len(messages)):
            sends, receives = messages[position]
            # Sends of an instruction go even if its receives have to wait.
            for message in sends:
                if message in on_the_way:
                    continue  # Posted when this instruction was first tried.
                if message.boundary in self._of_held:
                    self._sent.append(message.boundary)
                self.deliver(message)
            # The stage stops at the first message that nobody has sent yet.
            for message in receives:
                if message not in on_the_way:
                    self._waiting[message].append(stage)
                    self._position[stage] = position
                    return
        self._position[stage] = len(messages)
