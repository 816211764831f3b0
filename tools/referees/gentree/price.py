"""GenModel's price of an exchange on a tree of links.

GenModel (arXiv 2409.04202) prices a plan at `A alpha + B beta + C gamma + D delta + max(w - w_t, 0)
B eps`: rounds, bytes on the critical link, additions and memory accesses of a device, senders to
one receiver above its threshold.  Here every link and device has terms of its own.  A message takes
as long as the busiest link of its way in its round; the price is that of the longest chain of
messages and additions, each of which waits for those of its holder's round before it.  Of the
chunks of a plan, those in one round share its links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_hetero.exchange.plan import ExchangePlan, Floats, Ints
from tools.referees.gentree.tree import LinkTree


@dataclass(frozen=True)
class ExchangePrice:
    """Seconds of an exchange: those of its rounds' latencies, of bytes on links, of what too many
    senders cost beside them, and of adding."""

    num_chunks: int
    latency_s: float
    bytes_s: float
    incast_s: float
    adding_s: float

    @property
    def total_s(self) -> float:
        """Return the sum."""
        return self.latency_s + self.bytes_s + self.incast_s + self.adding_s


class ExchangeLoads:
    """What each round of a plan puts on links and devices, before the buffer has a size in bytes.

    Args:
        plan: one whose chunks are not written out.
        tree: its holders are the plan's.

    Attributes:
        edges: [round, edge] -> elements.
        adding_s: [round, holder] -> seconds for each byte of an element.
    """

    def __init__(self, plan: ExchangePlan, tree: LinkTree) -> None:
        if plan.num_holders != tree.num_holders:
            raise ValueError(
                f"the plan is of {plan.num_holders} holders, the tree of {tree.num_holders}"
            )
        self.plan, self.tree = plan, tree
        # Each of them is [transfer].
        rounds, sources, destinations, start, stop, reduces = plan.table.T
        self._width = (stop - start).astype(np.float64)
        # What one holder sends another in a round is one message.
        key = (rounds * plan.num_holders + sources) * plan.num_holders + destinations
        messages, own = np.unique(key, return_inverse=True)
        size = np.bincount(own, self._width, len(messages))
        # All [message]: the round, the sender and the receiver.
        at, ends = np.divmod(messages, plan.num_holders**2)
        here, there = np.divmod(ends, plan.num_holders)
        # All [message's edge]: a message crosses several edges.
        message, edge = tree.paths(here, there)
        num_edges, num = 2 * len(tree.branches), plan.num_rounds
        self.edges = np.bincount(
            at[message] * num_edges + edge, size[message], num * num_edges
        ).reshape(num, num_edges)
        # Latency of a message's whole way, [message].
        path_s = np.bincount(message, tree.latency_s[edge], len(messages))
        self._path_s = path_s
        self._sources, self._destinations = here, there
        # Messages are sorted by round: round r has those from number r to number r + 1 of this
        # list.
        self._first_message = np.searchsorted(at, np.arange(num + 1)).tolist()
        self.adding_s = self._adding(rounds, destinations, start, reduces)
        self._at, self._here = at[message], here[message]
        self._message, self._message_edge = message, edge

    def _adding(self, rounds: Ints, destinations: Ints, start: Ints, reduces: Ints) -> Floats:
        """Count a pass over all pieces of a range that arrive in a round: each piece and the own
        elements are read, the sum is written."""
        plan, tree = self.plan, self.tree
        # Copies add nothing, so that only the widths of sums count.
        num, width = plan.num_holders, self._width * reduces
        place = rounds * num + destinations
        shape = plan.num_rounds, num
        added = np.bincount(place, width, plan.num_rounds * num).reshape(shape)
        # Pieces of one range that arrive together share one pass; its first piece stands for it.
        _, first = np.unique(place * (plan.size + 1) + start, return_index=True)
        ranges = np.bincount(place[first], width[first], plan.num_rounds * num).reshape(shape)
        # Each arriving piece is read once; the own elements are read and the sum is written.
        accessed = added + 2 * ranges
        return np.asarray(added * tree.add_s_per_byte + accessed * tree.access_s_per_byte)

    def estimate_s(self, bytes_per_element: float, num_chunks: int = 1) -> float:
        """Estimate the price quickly: rounds after one another, the longest of each term."""
        seconds, adding_s = self._seconds(bytes_per_element, num_chunks, with_incast=True)
        # The first chunk pays the chain of latencies, each later one the longest message behind it.
        chain_s = self._chain_latency_s + (num_chunks - 1) * self._message_latency_s
        busy_s = seconds.max(axis=1, initial=0.0).sum()
        return chain_s + float(busy_s + adding_s.max(axis=1, initial=0.0).sum())

    def price(self, bytes_per_element: float, num_chunks: int = 1) -> ExchangePrice:
        """Price the plan with so many chunks, term by term."""
        # Each term is the difference of two chains, one with the term and one without it.
        seconds, adding_s = self._seconds(bytes_per_element, num_chunks, with_incast=True)
        total_s = self._chain_s(num_chunks, seconds, adding_s)
        without_s = self._chain_s(num_chunks, seconds, None)
        latency_s = bytes_s = self._chain_s(num_chunks, None, None)
        # Without any limit of senders, the chains with and without incast are the same.
        if self.tree.incast:
            seconds, _ = self._seconds(bytes_per_element, num_chunks, with_incast=False)
        bytes_s = self._chain_s(num_chunks, seconds, None) if self.tree.incast else without_s
        return ExchangePrice(
            num_chunks, latency_s, bytes_s - latency_s, without_s - bytes_s, total_s - without_s
        )

    def _seconds(
        self, bytes_per_element: float, num_chunks: int, *, with_incast: bool
    ) -> tuple[Floats, Floats]:
        """Return the seconds of every edge, and of every holder's adding, in each round."""
        part = bytes_per_element / num_chunks
        seconds = _windows(self.edges, num_chunks) * (part / self.tree.bytes_per_s)
        # Each sender above an edge's threshold slows all bytes of the edge.
        if with_incast and self.tree.incast:
            of_edges, senders = self.num_senders(num_chunks)
            terms = np.array([self.tree.incast[edge] for edge in of_edges]).reshape(-1, 2).T
            seconds[:, of_edges] *= 1 + terms[1] * np.maximum(0, senders - terms[0])
        return seconds, _windows(self.adding_s, num_chunks) * part

    def _chain_s(self, num_chunks: int, seconds: Floats | None, adding_s: Floats | None) -> float:
        """Return the seconds of the longest chain: a sender leaves a round when its bytes have
        left, a receiver when they are there and added."""
        # [holder]: the moment at which the holder leaves the round before.
        left_s = np.zeros(self.plan.num_holders)
        ends = self._first_message
        for number in range(self.plan.num_rounds + num_chunks - 1 if len(self._path_s) else 0):
            # Chunk c is in round number - c, so that these messages of several rounds are under way
            # at once.
            low = max(0, number - num_chunks + 1)
            own = slice(ends[low], ends[min(number + 1, self.plan.num_rounds)])
            sent_s = left_s[self._sources[own]]
            # The column past the last edge has no time; short ways are filled up with it.
            if seconds is not None:
                row = np.append(seconds[number], 0.0)
                sent_s = sent_s + row[self._ways[own]].max(axis=1, initial=0.0)
            # A round reads `left_s` of all holders before any of them moves on.
            after_s = left_s.copy()
            np.maximum.at(after_s, self._sources[own], sent_s)
            np.maximum.at(after_s, self._destinations[own], sent_s + self._path_s[own])
            left_s = after_s if adding_s is None else after_s + adding_s[number]
        return float(left_s.max(initial=0.0))

    @cached_property
    def _chain_latency_s(self) -> float:
        return self._chain_s(1, None, None)

    @cached_property
    def _message_latency_s(self) -> float:
        return float(self._path_s.max(initial=0.0))

    @cached_property
    def _ways(self) -> Ints:
        """Return [message, place] -> edge of the message's path, filled up with an edge of zero
        time."""
        # Sorted by message, a message's edges are neighbours; `place` counts them from 0.
        order = np.argsort(self._message, kind="stable")
        message = self._message[order]
        first = np.searchsorted(message, np.arange(len(self._path_s)))
        place = np.arange(len(message)) - first[message]
        found = np.full((len(self._path_s), int(place.max(initial=-1)) + 1), self.edges.shape[1])
        found[message, place] = self._message_edge[order]
        return found

    @cached_property
    def _presence(self) -> tuple[list[int], list[int], Floats]:
        """Return (edges with a limit of senders, the first column of each edge, [round, sender of
        an edge] -> 1 if the sender uses the edge).

        What comes into a node counts by the nodes that send it, what comes into a device by
        devices.
        """
        tree, plan = self.tree, self.plan
        edges: list[int] = []
        firsts: list[int] = []
        columns: list[Floats] = []
        for edge in tree.incast:
            # Edges on which no message of the plan travels need no columns.
            mine = self._message_edge == edge
            if not mine.any():
                continue
            # Peers are branches at the receiver's depth: senders below one node come in as one.
            peers = tree.ancestors[self._here[mine], tree.depths[edge // 2]]
            # A sender that is nearer to the root than the receiver counts as itself.
            peers = np.where(peers < 0, len(tree.branches) + self._here[mine], peers)
            names, own = np.unique(peers, return_inverse=True)
            # [round, sender of the edge], 1 where the sender uses the edge.
            there = np.zeros((plan.num_rounds, len(names)))
            there[self._at[mine], own] = 1
            edges.append(edge)
            firsts.append(sum(column.shape[1] for column in columns))
            columns.append(there)
        return edges, firsts, np.hstack(columns) if columns else np.zeros((plan.num_rounds, 0))

    def num_senders(self, num_chunks: int = 1) -> tuple[list[int], Ints]:
        """Return the edges down with a limit of senders, and [round, edge] -> number of senders on
        the edge."""
        edges, firsts, there = self._presence
        if not edges:
            return [], np.zeros((self.plan.num_rounds, 0), np.int64)
        # A sender counts once in a round, however many chunks it sends there.
        at_once = _windows(there, num_chunks) > 0
        return edges, np.add.reduceat(at_once, firsts, axis=1, dtype=np.int64)

    def num_chunks(
        self,
        bytes_per_element: float,
        choices: Sequence[int] = (1,),
        max_received: float = np.inf,
    ) -> tuple[float, int] | None:
        """Return the least estimate over numbers of chunks, and the number; None where all need
        more than `max_received` elements of buffers."""
        found: tuple[float, int] | None = None
        for num_chunks in choices:
            # Chunks of less than two elements for each holder are nothing but latency.
            if num_chunks > 1 and self.plan.size < 2 * num_chunks * self.plan.num_holders:
                break
            if self.plan.most_received(num_chunks) > max_received:
                continue
            seconds = self.estimate_s(bytes_per_element, num_chunks)
            if found is not None and seconds > found[0]:
                break  # more latency for less and less
            found = seconds, num_chunks
        return found


def _windows(of_rounds: Floats, num_chunks: int) -> Floats:
    """Sum over the chunks that are in each round."""
    if num_chunks == 1 or not len(of_rounds):
        return of_rounds.copy()
    num = len(of_rounds)
    # A window's sum is the running sum at its end minus the one before its start.
    sums = np.cumsum(of_rounds, axis=0)
    total = np.empty((num + num_chunks - 1, *of_rounds.shape[1:]))
    total[:num] = sums
    total[num:] = sums[-1]
    total[num_chunks:] -= sums[: num - 1]
    # Differences of floats may fall a little below zero.
    return np.maximum(0.0, total, out=total)
