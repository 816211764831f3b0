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


class ByGroups(defaultdict[tuple[str, str], float]):
    """Bytes of an exchange by groups of machines, in which a node sends on several paths at once:
    its card is as fast as the fastest of them, and all of them wait for it."""


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
    optimizer each part goes from every holder to its owner, and the new weights go round.  By
    groups of machines each range is added up inside them first (`add_by_groups`).  Hops inside a
    node have the same node twice.
    """
    job = paper.job
    weight, gradient, _ = bytes_of_parameter(job)
    for holders, divided, whole in _shared_parameters(paper):
        if len(holders) < 2:
            continue
        crosses = len({_group_of(paper, holder.node) for holder in holders}) > 1
        found = (ByGroups if crosses else defaultdict[tuple[str, str], float])(float)
        if crosses and not job.divides_states:
            size = 1.0 * gradient * (divided + whole)
            add_by_groups(found, paper, [(h.devices[0], h) for h in holders], size, size)
            yield holders, found
            continue
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
            if crosses:
                sizes = params * gradient, params * weight
                add_by_groups(found, paper, members, *sizes, is_owned=True)
                continue
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


def _group_of(paper: Paper, node: str) -> int:
    for number, group in enumerate(paper.groups):
        if node in group:
            return number
    return -1


_Nest = list["_Nest"] | int
"""Groups of machines, machines, GPUs: the number of a GPU, or what is reduced together."""


def add_by_groups(
    found: dict[tuple[str, str], float],
    paper: Paper,
    members: Sequence[tuple[str, Stage]],
    size: float,
    back: float,
    is_owned: bool = False,
) -> None:
    """Add the bytes of an exchange that is reduced inside machines, then inside groups of machines,
    then between the groups, and that comes back the same way.

    What a nest holds of a range lies with one GPU of each of its members; one of these adds it up:
    the member that has the range's owner, or else each member a piece: an equal one, or of machines
    with unlike uplinks, and of three groups of them or more, one that suits these.

    Args:
        found: bytes between nodes, added to.
        paper: the plan.
        members: GPUs, or the first of those that work side by side.
        size: bytes of all gradients.
        back: bytes that come back.
        is_owned: every range has an owner, by the members' shares of the optimizer's state.
    """
    ordered = sorted(members, key=lambda member: paper.ranks[member[0]])
    nodes = [device.partition(":")[0] for device, _ in ordered]
    by_group: dict[int, dict[str, list[_Nest]]] = {}
    for number, node in enumerate(nodes):
        machines = by_group.setdefault(_group_of(paper, node), {})
        machines.setdefault(node, []).append(number)
    nest: _Nest = [list(machines.values()) for _, machines in sorted(by_group.items())]
    ends = [Fraction(0)]
    if is_owned:
        total = sum(holder.state_share for _, holder in ordered)
        for _, holder in ordered:
            ends.append(ends[-1] + Fraction(holder.state_share) / Fraction(total))

    def inside(part: _Nest, number: int) -> bool:
        return part == number if isinstance(part, int) else any(inside(p, number) for p in part)

    def uplink(part: _Nest) -> int:
        if isinstance(part, int):
            return 1
        first = part[0]
        return paper.uplinks[nodes[first]] if isinstance(first, int) else sum(map(uplink, part))

    def reduced(part: _Nest) -> list[tuple[Fraction, Fraction, int]]:
        if isinstance(part, int):
            return [(Fraction(0), Fraction(1), part)]
        sums = [reduced(member) for member in part]
        is_even = not paper.uplinks or (part is nest and len(part) == 2)
        shares = _owned([1] * len(part) if is_even else [uplink(member) for member in part])
        if len(sums) == 1:
            return sums[0]
        cuts = sorted({start for of in sums for start, _, _ in of} | set(ends) | {Fraction(1)})
        held = []
        for start, stop in pairwise(cuts):
            at = [next(who for a, b, who in of if a <= start < b) for of in sums]
            pieces = [(i, (stop - start) * share) for i, share in enumerate(shares) if share]
            if is_owned:
                owner = next(i for i in range(len(ordered)) if ends[i] <= start < ends[i + 1])
                of_owner = [i for i, member in enumerate(part) if inside(member, owner)]
                pieces = [(i, stop - start) for i in of_owner] or pieces
            for adds, length in pieces:
                held.append((start, start + length, at[adds]))
                start += length
                for sender in at[:adds] + at[adds + 1 :]:
                    here, there = nodes[sender], nodes[at[adds]]
                    found[here, there] += float(length) * size
                    found[there, here] += float(length) * back
        return held

    reduced(nest)


def _owned(uplinks: Sequence[int]) -> list[Fraction]:
    """Return what each of some members owns.

    A member that owns s of a range sends 1 - s of it to its owners, and its own sum to all n - 1
    others: 1 + (n - 2) s.  Those that own anything take equally long, t: s = (t u - 1) / (n - 2).
    """
    others = len(uplinks) - 2
    if len(set(uplinks)) == 1 or not others:
        return [Fraction(uplink, sum(uplinks)) for uplink in uplinks]
    owning = list(uplinks)
    while True:
        t = Fraction(others + len(owning), sum(owning))
        if min(owning) * t >= 1:
            return [max(Fraction(0), (t * uplink - 1) / others) for uplink in uplinks]
        owning.remove(min(owning))


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
        cards = _cards_s(site, load) if isinstance(load, ByGroups) else {}
        for (here, there), size in load.items():
            if here == there:
                continue
            path = site.between(here, there)
            waits_s = max(cards.get((here, True), 0.0), cards.get((there, False), 0.0))
            add(
                f"{here} -> {there}",
                size,
                min(path.speed, size / waits_s) if waits_s else path.speed,
            )
            for name, capacity in path.lines:
                add(name, size, capacity)
    return found


def _cards_s(site: Site, load: Load) -> dict[tuple[str, bool], float]:
    """Time what each node's card sends (True) and receives, at the speed of its fastest path."""
    sizes, speeds = defaultdict[tuple[str, bool], float](float), dict[tuple[str, bool], float]()
    for (here, there), size in load.items():
        for end in ((here, True), (there, False)):
            if here != there:
                sizes[end] += size
                speeds[end] = max(speeds.get(end, 0.0), site.between(here, there).speed)
    return {end: size / speeds[end] for end, size in sizes.items()}
