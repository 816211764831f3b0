"""The run of a fleet: arrivals, steps and transfers in the order of time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.serving.simulate.outcome import FleetOutcome, outcome_of
from megatron_hetero.serving.simulate.queue import ReplicaQueue, Running
from megatron_hetero.serving.simulate.router import Policy, Router
from megatron_hetero.serving.simulate.transfer import Transfers
from megatron_hetero.serving.workload.requests import Request, RequestMix


@dataclass(frozen=True)
class SimulatedReplica:
    """A replica of the run.

    Attributes:
        phase: "both", "prefill" or "decode".
        place: from which, and to which, keys and values go.
        weights: requests per second of each class that the plan gives it.
    """

    queue: ReplicaQueue
    phase: str
    place: str
    weights: tuple[float, ...]


Observer = Callable[[float, Sequence[ReplicaQueue]], None]
_ARRIVAL, _ARRIVED, _STEP = 0, 1, 2


class FleetRun:
    """One run of some replicas.

    Args:
        replicas: fresh ones.
        mix: classes, for deadlines and weights.
        transfers: the wires.
        hand_over_bytes: of a prompt of so many tokens, from prefill to decode.
        policy: of the router.
        seed: of its chance.
        flows: requests per second handed over, by sending place, receiving place and class; empty:
            any replica hands over to any other.
    """

    def __init__(
        self,
        replicas: Sequence[SimulatedReplica],
        mix: RequestMix,
        transfers: Transfers | None = None,
        hand_over_bytes: Callable[[int], float] = lambda tokens: 0.0,
        policy: Policy = "least-load",
        seed: int = 0,
        flows: Mapping[tuple[str, str, int], float] | None = None,
    ) -> None:
        self._replicas, self._mix = replicas, mix
        self._transfers = transfers or Transfers((), {})
        self._hand_over_bytes = hand_over_bytes
        self._policy = policy
        # Requests enter where prefill is.
        self._entries = [i for i, r in enumerate(replicas) if r.phase != "decode"]
        self._entry = self._router(self._entries, seed)
        decoders = [i for i, r in enumerate(replicas) if r.phase == "decode"]
        # The replicas of each receiving place; without flows all are one place.
        by_place: dict[str, list[int]] = {}
        for i in decoders:
            by_place.setdefault(replicas[i].place if flows else "", []).append(i)
        self._decoders = [(there, self._router(there, seed + 1)) for there in by_place.values()]
        # Sending place -> turns of the receiving places.
        self._receivers: dict[str, Router] = {}
        for sender in dict.fromkeys(r.place for r in replicas if r.phase == "prefill"):
            sent = [
                [(flows or {}).get((sender, place, w), 0.0) for w in range(len(mix.classes))]
                if flows else [1.0] * len(mix.classes)
                for place in by_place
            ]  # fmt: skip
            self._receivers[sender] = Router(sent, "turns", seed)
        # (moment, kind, number, place, request); the number keeps the order of equal moments.
        self._events: list[tuple[float, int, int, int, Running | None]] = []
        # Requests that wait at the router.
        self._held: deque[Running] = deque()
        # Requests that have all their tokens, in the order of their ends.
        self.finished: list[Running] = []
        self._number = 0

    def _router(self, places: Sequence[int], seed: int) -> Router:
        return Router([self._replicas[i].weights for i in places], self._policy, seed)

    def run(self, requests: Sequence[Request], observe: Observer | None = None) -> FleetOutcome:
        """Serve all requests, to the last token of the last one.

        Args:
            requests: those that arrive.
            observe: sees the moment of each event, and all replicas behind the event.
        Raises:
            InfeasiblePlanError: a request is longer than its replica's memory.
        """
        for request in requests:
            self._push(request.arrival_s, _ARRIVAL, -1, Running(request, request.arrival_s))
        now = 0.0
        queues = [replica.queue for replica in self._replicas]
        while self._events:
            # Events in order: a request comes, keys and values have arrived, a step ends.
            now, kind, _, place, running = heapq.heappop(self._events)
            if running is not None and kind == _ARRIVAL:
                self._admit(running, now)
            elif running is not None:
                self._replicas[place].queue.take(running, is_prefilled=True)
                self._start(place, now)
            else:
                self._end_steps(place, now)
            if observe is not None:
                observe(now, queues)
        # The run begins with the first arrival, as a trace may start late.
        first = min((r.arrival_s for r in requests), default=0.0)
        busy = [queue.busy_s for queue in queues]
        preempted = sum(queue.num_preemptions for queue in queues)
        return outcome_of(self.finished, self._mix, now - first, busy, preempted)

    def _push(self, when: float, kind: int, place: int, running: Running | None) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, kind, self._number, place, running))

    def _admit(self, running: Running, now: float) -> None:
        if not self._enter(running, now):
            self._held.append(running)

    def _enter(self, running: Running, now: float) -> bool:
        """Give a request to a replica; return whether one takes the request now.

        Raises:
            InfeasiblePlanError: the request is longer than the memory of that replica.
        """
        queues = [self._replicas[i].queue for i in self._entries]
        chosen = self._entry.choose(running.request.class_index, queues)
        if chosen is None:
            return False
        place = self._entries[chosen]
        if not self._replicas[place].queue.holds(running.request):
            raise InfeasiblePlanError(
                f"a request of {running.request.input_tokens} + {running.request.output_tokens} "
                f"tokens is longer than the memory of replica {place}"
            )
        self._replicas[place].queue.take(running)
        self._start(place, now)
        return True

    def _start(self, place: int, now: float) -> None:
        for end in self._replicas[place].queue.start(now):
            self._push(end, _STEP, place, None)

    def _end_steps(self, place: int, now: float) -> None:
        replica = self._replicas[place]
        for running in replica.queue.finish(now):
            if replica.phase != "prefill":
                self.finished.append(running)
                continue
            # The keys and values leave; a decoder gives out all tokens, the first one too.
            self._hand_over(replica, running, now)
        self._start(place, now)
        # A replica that has room now may take what waits at the router.
        while self._held and self._enter(self._held[0], now):
            self._held.popleft()

    def _hand_over(self, sender: SimulatedReplica, running: Running, now: float) -> None:
        kind = running.request.class_index
        # The plan says to which places; one-queue holds requests at the entry alone.
        turn = self._receivers[sender.place].choose(kind, ()) or 0
        there, router = self._decoders[turn]
        place = there[router.choose(kind, [self._replicas[i].queue for i in there]) or 0]
        num_bytes = self._hand_over_bytes(running.request.input_tokens)
        receiver = self._replicas[place].place
        arrives = self._transfers.send(now, sender.place, receiver, num_bytes)
        # The sender's blocks are free when the transfer is ordered.
        sender.queue.release(running)
        running.cached, running.blocks = 0, 0
        self._push(arrives, _ARRIVED, place, running)
