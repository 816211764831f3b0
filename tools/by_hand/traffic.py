"""Bytes between nodes and over shared lines in a step: boundaries, gradients, new weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

from tools.by_hand.memory import bytes_of_parameter
from tools.by_hand.paper import Paper, Stage
from tools.by_hand.site import Site

Load = Mapping[tuple[str, str], float]
"""Bytes from one node to another."""


def boundary_bytes(paper: Paper, is_stock: bool) -> Load:
    """Sum the bytes of activations forward and their gradients back.

    Stock Megatron sends the whole activation from every GPU of a group unless sequence parallelism
    divides it; the plug-in sends each byte once.
    """
    job, found = paper.job, defaultdict[tuple[str, str], float](float)
    for replica in paper.replicas:
        size = replica.size * job.sequence * job.hidden * job.element
        for before, after in pairwise(replica.stages):
            copies = before.width if is_stock and not job.sequence_parallel else 1
            if before.node != after.node:
                found[before.node, after.node] += copies * size * replica.micro_batches
                found[after.node, before.node] += copies * size * replica.micro_batches
    return found


def _shared_parameters(paper: Paper) -> Iterator[tuple[list[Stage], float, float]]:
    """Yield (stages that hold the same, parameters that their groups divide, parameters that every
    GPU of them holds)."""
    job = paper.job
    words = paper.rows * job.hidden
    firsts = [r.stages[0] for r in paper.replicas]
    lasts = [r.stages[-1] for r in paper.replicas]
    cuts = sorted({s.first for r in paper.replicas for s in r.stages} | {job.layers})
    for first, end in pairwise(cuts):
        holders = [s for r in paper.replicas for s in r.stages if s.first <= first < s.end]
        count = end - first
        yield holders, count * sum(job.divided_layer), count * job.whole_layer
    if job.is_tied:
        yield firsts + [s for s in lasts if s not in firsts], words, 0.0
    else:
        yield lasts, words, 0.0
        yield firsts, words, 0.0
    if not job.is_rope:
        yield firsts, 0.0, job.positions * job.hidden


def _ring(paper: Paper, members: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    """Yield the nodes at both ends of every hop of a ring over groups, in the order of the plan's
    ranks."""
    ordered = sorted(members, key=lambda devices: paper.ranks[devices[0]])
    nodes = [devices[0].partition(":")[0] for devices in ordered]
    yield from zip(nodes, nodes[1:] + nodes[:1], strict=True)


def exchanges(paper: Paper, is_stock: bool) -> Iterator[tuple[list[Stage], Load]]:
    """Yield the exchanges that make the gradients of stages that hold the same equal, and bring new
    weights to all.

    An all-reduce in a ring: 2 (n - 1) / n of the bytes over every hop.  With the distributed
    optimizer each part goes from every holder to its owner, and the new weights go round.  Hops
    inside a node have the same node twice.
    """
    job = paper.job
    weight, gradient, _ = bytes_of_parameter(job)
    for holders, divided, whole in _shared_parameters(paper):
        if len(holders) < 2:
            continue
        found = defaultdict[tuple[str, str], float](float)
        if not job.divides_states or is_stock:
            groups = [holder.devices for holder in holders]
            share = (len(groups) - 1) / len(groups)
            # Reduce-scatter and all-gather of gradients, or of gradients and then of weights.
            each = (gradient + weight) if job.divides_states else 2 * gradient
            for hop in _ring(paper, groups):
                found[hop] += share * each * (divided + whole)
            yield holders, found
            continue
        sets = [(members, divided * part) for members, part in _slices(holders)]
        everyone = [(device, holder) for holder in holders for device in holder.devices]
        for members, params in [*sets, (everyone, whole)]:
            _to_owners(found, members, params * gradient)
            share = (len(members) - 1) / len(members)
            for hop in _ring(paper, [(device,) for device, _ in members]):
                found[hop] += share * weight * params
        yield holders, found


def _to_owners(
    found: dict[tuple[str, str], float], members: Sequence[tuple[str, Stage]], size: float
) -> None:
    """Add the bytes that each GPU sends each other one: the part of a gradient that the other
    owns."""
    total = sum(holder.state_share for _, holder in members)
    for sender, _ in members:
        for receiver, owner in members:
            if sender != receiver:
                pair = sender.partition(":")[0], receiver.partition(":")[0]
                found[pair] += size * owner.state_share / total


def _slices(holders: Sequence[Stage]) -> Iterator[tuple[list[tuple[str, Stage]], float]]:
    """Yield the GPUs that hold the same slice of a matrix, and the slice's part of the matrix."""
    ends = {holder.devices: _ends(holder) for holder in holders}
    cuts = sorted({Fraction(0), *(end for own in ends.values() for end in own)})
    for start, stop in pairwise(cuts):
        members = []
        for holder in holders:
            place = sum(end <= start for end in ends[holder.devices])
            members.append((holder.devices[place], holder))
        yield members, float(stop - start)


def _ends(stage: Stage) -> list[Fraction]:
    total, done, ends = sum(stage.shares), 0, []
    for share in stage.shares:
        done += share
        ends.append(Fraction(done, total))
    return ends


def loads(site: Site, *carried: Load) -> dict[str, tuple[float, float]]:
    """Sum (bytes, seconds) on every path `a -> b` and every line."""
    found: dict[str, tuple[float, float]] = {}

    def add(name: str, size: float, capacity: float) -> None:
        before, seconds = found.get(name, (0.0, 0.0))
        found[name] = before + size, seconds + size / capacity

    for load in carried:
        for (here, there), size in load.items():
            if here == there:
                continue
            path = site.between(here, there)
            add(f"{here} -> {there}", size, path.speed)
            for name, capacity in path.lines:
                add(name, size, capacity)
    return found
