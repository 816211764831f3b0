"""What an exchange by groups of machines puts on the links: the very messages of its plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from megatron_hetero.cluster.names import machine_of
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.exchange.groups.by_group import grouping_of
from megatron_hetero.exchange.groups.grouping import Grouping, RangeSums, reduce_scatter
from megatron_hetero.exchange.plan import Ints, Owned, Purpose

Floats = npt.NDArray[np.float64]

_ELEMENTS = 1 << 40
"""Elements of the buffer at which exchanges are priced; parts are exact to one element."""
_AT_ONCE = 1 << 20
"""Transfers that are summed at a time."""


@dataclass(frozen=True)
class GroupTransfer:
    """A holder's whole transfer to a receiver: the part of the buffer, and the link's seconds for
    each byte of the buffer."""

    sender: int
    receiver: int
    part: float
    s_per_byte: float


@dataclass(frozen=True, eq=False)
class GroupTransfers:
    """An exchange among some holders, for each byte of their buffer.

    Attributes:
        senders, receivers, parts, s_per_byte: [pair of holders], as of `GroupTransfer`.
        latency_s: the sum over its rounds of the longest message's.
        adding_s_per_byte: the sum of the longest additions.
    """

    senders: Ints
    receivers: Ints
    parts: Floats
    s_per_byte: Floats
    latency_s: float
    adding_s_per_byte: float

    @cached_property
    def transfers(self) -> tuple[GroupTransfer, ...]:
        """Return the pairs as a tuple of transfers."""
        columns = self.senders, self.receivers, self.parts, self.s_per_byte
        return tuple(
            GroupTransfer(*row) for row in zip(*(c.tolist() for c in columns), strict=True)
        )


def group_transfers(
    cluster: Cluster,
    devices: Sequence[Device],
    groups: Sequence[Sequence[str]],
    purpose: Purpose,
    weights: Sequence[int] | None = None,
    uplinks: Sequence[Sequence[int]] = (),
) -> GroupTransfers | None:
    """Price an exchange by groups; None where all holders are in one group.

    Args:
        cluster: its links.
        devices: [holder] -> its GPU, or the first of those that work side by side.
        groups: `Plan.exchange_groups`.
        purpose: all-reduce, reduce-scatter or all-gather.
        weights: relative sizes of what each holder owns of a reduce-scatter or an all-gather; None
            is equal parts.
        uplinks: `Plan.exchange_uplinks`.
    """
    grouping = grouping_of([machine_of(device.node) for device in devices], groups, uplinks)
    if grouping is None:
        return None
    owners = None
    # An all-reduce has no owners; else edges of owned ranges, in elements of the buffer.
    if purpose != "all_reduce":
        each = list(weights or [1] * len(devices))
        ends = [round(_ELEMENTS * end / sum(each)) for end in accumulate(each)]
        owners = [Owned(a, b, h) for h, (a, b) in enumerate(zip([0, *ends], ends, strict=False))]
    return _priced(cluster, devices, _rounds_of(len(devices), grouping, purpose, owners))


@dataclass(frozen=True, eq=False)
class _RoundMessages:
    """Messages of one round: who sends whom which part of the buffer.

    `accesses`: [holder], for each byte of the buffer, bytes of memory that its additions touch.
    """

    senders: Ints
    receivers: Ints
    parts: Floats
    accesses: Floats


def _rounds_of(
    num: int, grouping: Grouping, purpose: Purpose, owners: Sequence[Owned] | None
) -> Iterator[_RoundMessages]:
    """Yield the rounds of an exchange among `num` holders, in any order."""
    waiting: dict[int, list[RangeSums]] = {}
    parts: dict[int, Floats] = {}
    accesses: dict[int, Floats] = {}

    # Sum the waiting messages of a round by pair of holders.
    def take(number: int) -> None:
        found = waiting.pop(number, [])
        # A pair of holders has the number sender * num + receiver.
        pairs = [sums.senders * num + sums.receivers for sums in found]
        widths = [np.broadcast_to(s.stops - s.starts, s.senders.shape) for s in found]
        flat = [np.concatenate([array.ravel() for array in arrays]) for arrays in (pairs, widths)]
        total = np.bincount(flat[0], flat[1], num * num) / _ELEMENTS
        parts[number] = parts.get(number, 0.0) + total
        for sums in found:
            # All that was sent for a range is added to the own in one pass (`adding_s`).
            touched = (len(sums.senders) + 2) * (sums.stops - sums.starts) / _ELEMENTS
            own = accesses.setdefault(number, np.zeros(num))
            own += np.bincount(sums.receivers, touched, num)

    # Keep few messages waiting: a large exchange has very many.
    def add(sums: RangeSums) -> None:
        own = waiting.setdefault(sums.round, [])
        own.append(sums)
        if sum(s.senders.size for s in own) > _AT_ONCE:
            take(sums.round)

    # Rounds come from the planned exchange itself.
    reduce_scatter(_ELEMENTS, grouping, add, owners)
    for number in list(waiting):
        take(number)
    for number, total in parts.items():
        pairs = np.flatnonzero(total)
        senders, receivers = np.divmod(pairs, num)
        # All-reduce: the rounds of a reduce-scatter, then of a gather.
        if purpose != "all_gather":
            yield _RoundMessages(senders, receivers, total[pairs], accesses[number])
        if purpose != "reduce_scatter":
            # A gather is the same backwards, and adds nothing.
            yield _RoundMessages(receivers, senders, total[pairs], np.zeros(num))


def _priced(
    cluster: Cluster, devices: Sequence[Device], rounds: Iterator[_RoundMessages]
) -> GroupTransfers:
    num, classes = len(devices), cluster.link_classes
    # Shape [holder]: number of the holder's node.
    nodes = np.array([classes.node_number[device.node] for device in devices])
    latencies, rates = (
        np.array([getattr(link, name) for link in classes.links])
        for name in ("latency_s", "reduce_bytes_per_s")
    )
    # Sums over all rounds; `parts` and `seconds` have the shape [sender * num + receiver].
    latency_s = adding_s = 0.0
    parts, seconds = np.zeros(num * num), np.zeros(num * num)
    for each in rounds:
        kinds = classes.of_pairs[nodes[each.senders], nodes[each.receivers]]
        # Seconds of each message; of latencies and additions the longest in each round counts.
        taken_s = each.parts / classes.bytes_per_s[kinds] * _slowdowns(cluster, nodes, each, kinds)
        latency_s += float(latencies[kinds].max(initial=0.0))
        slowest = np.full(num, np.inf)
        np.minimum.at(slowest, each.receivers, rates[kinds])
        adding_s += float((each.accesses / slowest).max(initial=0.0))
        pairs = each.senders * num + each.receivers
        parts[pairs] += each.parts
        seconds[pairs] += taken_s
    # Back to pairs that exchange anything.
    pairs = np.flatnonzero(parts)
    senders, receivers = np.divmod(pairs, num)
    factors = _waits_for_cards(cluster, (nodes[senders], nodes[receivers]), parts[pairs],
                               seconds[pairs])  # fmt: skip
    return GroupTransfers(
        senders, receivers, parts[pairs], seconds[pairs] * factors, latency_s, adding_s
    )


def _slowdowns(cluster: Cluster, nodes: Ints, each: _RoundMessages, kinds: Ints) -> Floats:
    """Return the factor by which simultaneous senders to a receiver slow each message
    (`transfer_s`).

    Other nodes send to a node's NIC, from one NIC each; neighbours to a GPU's own port.
    """
    found = np.ones(len(kinds))
    # Each kind of incast counts its own senders alone.
    incasts = [link.incast for link in cluster.link_classes.links]
    distinct = [incast for incast in dict.fromkeys(incasts) if incast is not None]
    for incast in distinct:
        has = np.flatnonzero(np.array([other == incast for other in incasts])[kinds])
        senders, receivers = each.senders[has], each.receivers[has]
        here, there = nodes[senders], nodes[receivers]
        # Ports: one of each node from outside, one of each GPU from neighbours.
        is_inside = here == there
        first_port = len(cluster.nodes)
        ports = np.where(is_inside, first_port + receivers, there)
        mouths = np.where(is_inside, first_port + senders, here)
        size = first_port + len(nodes)
        # Distinct (port, sender's card) pairs, counted by port.
        heard = np.unique(ports * size + mouths) // size
        too_many = np.bincount(heard, minlength=size)[ports] - incast.num_senders
        found[has] = 1 + incast.slowdown * np.maximum(too_many, 0)
    return found


def _waits_for_cards(
    cluster: Cluster, ends: tuple[Ints, Ints], parts: Floats, seconds: Floats
) -> Floats:
    """Return factors by which messages take longer, for no node to exceed the fastest link of the
    node over all paths together.

    A cluster file without `uplink` gives each two nodes their bandwidth for themselves; a ring uses
    one path of a node at a time, but here a node sends on several.

    Args:
        ends: [pair of holders] -> numbers of their nodes.
        parts, seconds: of the pairs.
    """
    here, there = ends
    # Shape [pair of holders]; messages inside a node share no card.
    num, classes = len(cluster.nodes), cluster.link_classes
    is_outside = here != there
    card_s = np.zeros(len(here))
    # First what each node sends, then what it receives, at its fastest link.
    for end in ends:
        speeds = np.zeros(num)
        own, carried = end[is_outside], parts[is_outside]
        np.maximum.at(speeds, own, classes.bytes_per_s[classes.of_pairs[here, there][is_outside]])
        totals = np.bincount(own, carried, num)
        card_s[is_outside] = np.maximum(card_s[is_outside], totals[own] / speeds[own])
    # Seconds of the whole path: all pairs of holders on it wait alike.
    pair = here * num + there
    own_s = np.bincount(pair, seconds)[pair]
    return np.where(is_outside, np.maximum(1.0, card_s / own_s), 1.0)
