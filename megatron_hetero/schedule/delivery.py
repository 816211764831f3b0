"""What one stage can know of its messages in advance: how many may be on their way to it, and which
of its own have arrived.

Both follow from the programmes alone.  The first says how many receives to post ahead, so that a
sender never waits for a receiver; the second when a tensor that was sent may be let go, without
asking the transport.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from megatron_hetero.schedule.programme import RECEIVES, SENDS, Message, Schedule

Channel = tuple[int, bool]
"""(boundary, is_forward) of a `Message`."""


def receive_windows(schedule: Schedule, stage: int) -> dict[Channel, int]:
    """The most messages of each channel that can be sent to `stage` before it takes the first.

    Found by letting all other stages run as far as they can at every point of this one's programme.
    """
    sent: Counter[Channel] = Counter()
    taken: Counter[Channel] = Counter()
    windows: dict[Channel, int] = {}
    others = _Others(schedule, stage, sent)
    for instruction in schedule.programmes[stage]:
        for operation in instruction:
            if operation.kind in SENDS:
                others.deliver(schedule.message(stage, operation))
        others.run()
        for operation in instruction:
            if operation.kind in RECEIVES:
                message = schedule.message(stage, operation)
                channel = message.boundary, message.is_forward
                windows[channel] = max(windows.get(channel, 1), sent[channel] - taken[channel])
                taken[channel] += 1
    return windows


def arrived_sends(schedule: Schedule, stage: int) -> dict[Message, int]:
    """For each message to `stage`: how many of the stage's own messages over the same boundary had
    arrived when the other side sent it."""
    own = {b + d for b in range(len(schedule.chain)) for d in (-1, 0) if schedule.chain[b] == stage}
    arrived: dict[Message, int] = {}
    for peer, programme in enumerate(schedule.programmes):
        if peer == stage:
            continue
        received: Counter[Channel] = Counter()
        for instruction in programme:
            for operation in instruction:
                if operation.kind in SENDS:
                    message = schedule.message(peer, operation)
                    if message.boundary in own:
                        arrived[message] = received[message.boundary, not message.is_forward]
            for operation in instruction:
                if operation.kind in RECEIVES:
                    message = schedule.message(peer, operation)
                    received[message.boundary, message.is_forward] += 1
    return arrived


class _Others:
    """All stages but `held`, running as far ahead as they can; sends are buffered.

    `sent` counts what was sent to the held stage.
    """

    def __init__(self, schedule: Schedule, held: int, sent: Counter[Channel]) -> None:
        self._schedule = schedule
        self._held = held
        self._sent = sent
        self._position = [0] * schedule.num_stages
        self._on_the_way: set[Message] = set()
        self._waiting: Mapping[Message, list[int]] = defaultdict(list)
        self._ready = [s for s in range(schedule.num_stages) if s != held]

    def deliver(self, message: Message) -> None:
        """A message of the held stage is sent."""
        self._on_the_way.add(message)
        self._ready += self._waiting[message]
        self._waiting[message].clear()

    def run(self) -> None:
        while self._ready:
            self._advance(self._ready.pop())

    def _advance(self, stage: int) -> None:
        schedule, programme = self._schedule, self._schedule.programmes[stage]
        while self._position[stage] < len(programme):
            instruction = programme[self._position[stage]]
            for operation in instruction:
                if operation.kind in SENDS:
                    message = schedule.message(stage, operation)
                    if message in self._on_the_way:
                        continue  # Posted when this instruction was first tried.
                    ends = schedule.chain[message.boundary : message.boundary + 2]
                    if self._held in ends:
                        self._sent[message.boundary, message.is_forward] += 1
                    self.deliver(message)
            for operation in instruction:
                if operation.kind in RECEIVES:
                    message = schedule.message(stage, operation)
                    if message not in self._on_the_way:
                        self._waiting[message].append(stage)
                        return
            self._position[stage] += 1
