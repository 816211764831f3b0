"""Seconds of an exchange plan by its flows: every message has a rate, max-min fair among all that
share its links, and each holder goes from round to round at its own pace.

A message flows from when its sender comes to its round, and is there the latency of its way after
its last byte has left.  A way down that more senders use than it bears carries less.  A holder
leaves a round when all that it sends has left and all that it receives is there and added.  It
shares no formula with the prices that it is beside (`tools.referees.gentree.price`).
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from megatron_hetero.exchange.plan import ExchangePlan, Floats, Ints
from tools.referees.gentree.tree import LinkTree

_TINY = 1e-12


class FlowSimulation:
    """One run of a plan on a tree."""

    def __init__(self, plan: ExchangePlan, tree: LinkTree, bytes_per_element: float) -> None:
        self._tree = tree
        table = plan.expanded().table
        num = plan.num_holders
        key = (table[:, 0] * num + table[:, 1]) * num + table[:, 2]
        messages, own = np.unique(key, return_inverse=True)
        width = (table[:, 4] - table[:, 3]) * float(bytes_per_element)
        self._left = np.bincount(own, width, len(messages))
        rounds, ends = np.divmod(messages, num * num)
        self._source, self._destination = np.divmod(ends, num)
        self._message, self._edge = tree.paths(self._source, self._destination)
        self._latency_s = np.bincount(self._message, tree.latency_s[self._edge], len(messages))
        self._of_round: dict[tuple[int, int], list[int]] = {}
        for i, (at, here, there) in enumerate(
            zip(rounds.tolist(), self._source.tolist(), self._destination.tolist(), strict=True)
        ):
            self._of_round.setdefault((here, at), []).append(i)
            self._of_round.setdefault((there, at), []).append(i)
        self._rounds: list[list[int]] = [[] for _ in range(num)]
        for holder, at in sorted(self._of_round):
            self._rounds[holder].append(at)
        self._adding_s = self._adding(table, bytes_per_element)
        self._round_of = rounds
        self._place = [-1] * num
        self._open = {key: len(own) for key, own in self._of_round.items()}
        self._is_flowing = np.zeros(len(messages), bool)
        self._events: list[tuple[float, int, int]] = []
        self._incidence = self._edges_of()

    def _adding(self, table: Ints, num_bytes: float) -> dict[tuple[int, int], float]:
        pieces: dict[tuple[int, int, int, int], int] = {}
        for at, _, there, start, stop, reduces in table.tolist():
            if reduces:
                key = there, at, start, stop
                pieces[key] = pieces.get(key, 0) + 1
        tree = self._tree
        found: dict[tuple[int, int], float] = {}
        for (holder, at, start, stop), count in pieces.items():
            seconds = (
                num_bytes
                * (stop - start)
                * (
                    count * float(tree.add_s_per_byte[holder])
                    + (count + 2) * float(tree.access_s_per_byte[holder])
                )
            )
            found[holder, at] = found.get((holder, at), 0.0) + seconds
        return found

    def _edges_of(self) -> Ints:
        """Return [message, place] -> edge, filled up with one that carries everything."""
        most = int(np.bincount(self._message, minlength=1).max(initial=0))
        found = np.full((len(self._left), most), len(self._tree.bytes_per_s))
        place = np.zeros(len(self._left), np.int64)
        for message, edge in zip(self._message.tolist(), self._edge.tolist(), strict=True):
            found[message, place[message]] = edge
            place[message] += 1
        return found

    def run(self) -> float:
        """Return when the last holder is done, seconds."""
        now = 0.0
        for holder in range(len(self._place)):
            self._enter(holder, now)
        while self._events or self._is_flowing.any():
            active = np.flatnonzero(self._is_flowing)
            rates = self._rates(active)
            until = np.inf
            if len(active):
                until = now + float(np.min(self._left[active] / rates))
            if self._events and self._events[0][0] <= until:
                until = self._events[0][0]
            if len(active):
                self._left[active] -= rates * (until - now)
            now = until
            for message in active[self._left[active] <= rates * _TINY + 1e-6].tolist():
                self._is_flowing[message] = False
                self._done(int(self._source[message]), int(self._round_of[message]), now)
                arrival_s = now + float(self._latency_s[message])
                heappush(self._events, (arrival_s, 0, message))
            while self._events and self._events[0][0] <= now:
                _, kind, number = heappop(self._events)
                if kind:
                    self._enter(number, now)
                else:
                    here = int(self._destination[number])
                    self._done(here, int(self._round_of[number]), now)
        return now

    def _enter(self, holder: int, now: float) -> None:
        self._place[holder] += 1
        if self._place[holder] == len(self._rounds[holder]):
            return
        at = self._rounds[holder][self._place[holder]]
        for message in self._of_round[holder, at]:
            if self._source[message] == holder:
                self._is_flowing[message] = True
        self._leave(holder, at, now)

    def _done(self, holder: int, at: int, now: float) -> None:
        self._open[holder, at] -= 1
        place = self._place[holder]
        if place >= 0 and self._rounds[holder][place] == at:
            self._leave(holder, at, now)

    def _leave(self, holder: int, at: int, now: float) -> None:
        if not self._open[holder, at]:
            heappush(self._events, (now + self._adding_s.get((holder, at), 0.0), 1, holder))

    def _rates(self, active: Ints) -> Floats:
        """Fill all links at one pace, and stop the messages of each as it is full."""
        edges = self._incidence[active]
        room = np.append(self._tree.bytes_per_s, np.inf)
        for edge, (most, slowdown) in self._tree.incast.items():
            senders = active[(edges == edge).any(axis=1)]
            peers = self._tree.ancestors[self._source[senders], self._tree.depths[edge // 2]]
            own = peers < 0
            fan_in = len(np.unique(peers[~own])) + len(np.unique(self._source[senders][own]))
            room[edge] /= 1 + slowdown * max(0, fan_in - most)
        rates = np.zeros(len(active))
        is_free = np.ones(len(active), bool)
        while is_free.any():
            count = np.bincount(edges[is_free].ravel(), minlength=len(room))
            count[-1] = 0
            share = np.full(len(room), np.inf)
            share[count > 0] = room[count > 0] / count[count > 0]
            least = float(share.min())
            full = share <= least * (1 + 1e-9)
            stopped = is_free & full[edges].any(axis=1)
            rates[stopped] = least
            room -= least * np.bincount(edges[stopped].ravel(), minlength=len(room))
            room = np.maximum(room, 0.0)
            is_free &= ~stopped
        return rates
