"""What an exchange by groups of machines puts on the links: the very transfers of its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from megatron_hetero.cluster.names import machine_of
from megatron_hetero.cluster.spec import Cluster, Device
from megatron_hetero.cost.network.link_terms import transfer_s
from megatron_hetero.exchange.by_group import plan_by_group
from megatron_hetero.exchange.plan import ExchangePlan, Owned, Purpose

_ELEMENTS = 1 << 20
"""Of the buffer by which plans are priced: parts are as exact as one of so many."""


@dataclass(frozen=True)
class GroupTransfer:
    """All that one holder sends another: the part of the buffer, and the seconds for which each
    byte of the buffer takes their link."""

    sender: int
    receiver: int
    part: float
    s_per_byte: float


@dataclass(frozen=True)
class GroupTransfers:
    """An exchange among some holders, for each byte of their buffer.

    `latency_s` is the sum over its rounds of the longest message's; `adding_s_per_byte` of the
    longest addition.
    """

    transfers: tuple[GroupTransfer, ...]
    latency_s: float
    adding_s_per_byte: float


def group_transfers(
    cluster: Cluster,
    devices: Sequence[Device],
    groups: Sequence[Sequence[str]],
    purpose: Purpose,
    weights: Sequence[int] | None = None,
) -> GroupTransfers | None:
    """Price an exchange by groups; None where all holders are in one group.

    Args:
        cluster: its links.
        devices: [holder] -> its GPU, or the first of those that work side by side.
        groups: `Plan.exchange_groups`.
        purpose: all-reduce, reduce-scatter or all-gather.
        weights: relative sizes of what each holder owns of a reduce-scatter or an all-gather; None
            is equal parts.
    """
    owners = None
    if purpose != "all_reduce":
        each = list(weights or [1] * len(devices))
        ends = [round(_ELEMENTS * end / sum(each)) for end in accumulate(each)]
        owners = [Owned(a, b, h) for h, (a, b) in enumerate(zip([0, *ends], ends, strict=False))]
        owners = [owned for owned in owners if owned.stop > owned.start]
    machines = [machine_of(device.node) for device in devices]
    plan = plan_by_group(machines, groups, _ELEMENTS, purpose, owners)
    return None if plan is None else _priced(cluster, devices, plan)


def _priced(cluster: Cluster, devices: Sequence[Device], plan: ExchangePlan) -> GroupTransfers:
    size, num = float(plan.size), len(devices)
    rounds, senders, receivers, start, stop = plan.table[:, :5].T
    key = (rounds * num + senders) * num + receivers
    messages, own = np.unique(key, return_inverse=True)
    parts = np.bincount(own, (stop - start) / size, len(messages))
    at, ends = np.divmod(messages, num * num)
    rows = list(zip(at.tolist(), *(e.tolist() for e in np.divmod(ends, num)), parts.tolist(),
                    strict=True))  # fmt: skip
    heard: dict[tuple[int, object, object], set[object]] = {}
    latency_s = [0.0] * plan.num_rounds
    slowest: dict[tuple[int, int], float] = {}
    for number, sender, receiver, _ in rows:
        here, there = devices[sender], devices[receiver]
        link = cluster.path(here, there)
        latency_s[number] = max(latency_s[number], link.latency_s)
        place = number, receiver
        slowest[place] = min(slowest.get(place, np.inf), link.reduce_bytes_per_s)
        if link.incast is not None:
            is_inside = here.node == there.node
            port: object = there if is_inside else there.node
            heard.setdefault((number, port, link.incast), set()).add(
                here if is_inside else here.node
            )
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for number, sender, receiver, part in rows:
        here, there = devices[sender], devices[receiver]
        link = cluster.path(here, there)
        port = there if here.node == there.node else there.node
        num_senders = len(heard.get((number, port, link.incast), ())) or 1
        carried, seconds = found.get((sender, receiver), (0.0, 0.0))
        found[sender, receiver] = carried + part, seconds + transfer_s(part, link, num_senders)
    _wait_for_cards(cluster, devices, found)
    return GroupTransfers(
        tuple(GroupTransfer(*pair, *loads) for pair, loads in found.items()),
        sum(latency_s),
        _adding_s(plan, slowest),
    )


def _wait_for_cards(
    cluster: Cluster,
    devices: Sequence[Device],
    found: dict[tuple[int, int], tuple[float, float]],
) -> None:
    """Let no node send or receive faster than its fastest link to another, on all paths together.

    A cluster file without `uplink` gives each two nodes their bandwidth for themselves; a ring uses
    one path of a node at a time, but here a node sends on several.
    """
    parts: dict[tuple[str, bool], float] = {}
    fastest: dict[tuple[str, bool], float] = {}
    pairs: dict[tuple[str, str], float] = {}
    for (sender, receiver), (part, seconds) in found.items():
        here, there = devices[sender].node, devices[receiver].node
        if here == there:
            continue
        pairs[here, there] = pairs.get((here, there), 0.0) + seconds
        speed = cluster.node_links[here, there].bytes_per_s
        for end in ((here, True), (there, False)):
            parts[end] = parts.get(end, 0.0) + part
            fastest[end] = max(fastest.get(end, 0.0), speed)
    for (sender, receiver), (part, seconds) in found.items():
        pair = devices[sender].node, devices[receiver].node
        if pair in pairs:
            ends = (pair[0], True), (pair[1], False)
            card_s = max(parts[end] / fastest[end] for end in ends)
            factor = max(1.0, card_s / pairs[pair])
            found[sender, receiver] = part, seconds * factor


def _adding_s(plan: ExchangePlan, rates: dict[tuple[int, int], float]) -> float:
    """Sum the longest addition of each round: one pass over all pieces of a range and the own."""
    pieces: dict[tuple[int, int, int, int], int] = {}
    for t in plan.transfers():
        if t.reduces and rates[t.round, t.destination] < np.inf:
            key = t.round, t.destination, t.start, t.stop
            pieces[key] = pieces.get(key, 0) + 1
    seconds: dict[tuple[int, int], float] = {}
    for (number, holder, start, stop), count in pieces.items():
        taken_s = (count + 2) * (stop - start) / plan.size / rates[number, holder]
        seconds[number, holder] = seconds.get((number, holder), 0.0) + taken_s
    longest: dict[int, float] = {}
    for (number, _), taken_s in seconds.items():
        longest[number] = max(longest.get(number, 0.0), taken_s)
    return sum(longest.values())
