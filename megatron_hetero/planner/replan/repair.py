"""Placements near an old plan: what is left of it, with as little moved as can be.

A replica that lost nothing keeps its stages and layers.  One that did is dropped, gets other GPUs
in the place of those it lost, gives the lost stage's layers to its neighbours, or is filled anew;
GPUs that are new may form replicas of their own.  Micro-batches, which are nobody's state, are
always divided anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

from megatron_hetero.cost.placement import Placement
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.completion.own_flags import OwnFlags
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.shapes.kinds import cut
from megatron_hetero.planner.units import Chain, Unit

Piece = tuple[Unit, int]
"""A stage: its GPUs and its number of layers."""
Pipeline = tuple[Piece, ...]

MAX_TRIED = 400
"""Most combinations tried, in each of three steps: replacing GPUs that a replica lost, mending all
broken replicas together (of more, only alike), and climbing from the nearest."""


@dataclass(frozen=True)
class OldReplica:
    """A replica of the old plan: (GPUs that are left of a stage, its width, its layers)."""

    stages: tuple[tuple[Unit | None, int, int], ...]

    @property
    def whole(self) -> Pipeline | None:
        """The replica's stages if no GPU was lost, otherwise None."""
        pieces = [(u, n) for u, width, n in self.stages if u is not None and u.width == width]
        return tuple(pieces) if len(pieces) == len(self.stages) else None


def old_replicas(problem: Problem, plan: Plan, alive: frozenset[str]) -> list[OldReplica]:
    """Return the remains of a plan on devices still in use."""
    found = []
    for replica in plan.replicas:
        stages = []
        for stage in replica.stages:
            left = sorted(d for d in stage.devices if d in alive)
            devices = [problem.cluster.device_by_name[name] for name in left]
            nodes = {device.node for device in devices}
            unit = None
            # A stage that is left on several nodes has no unit of its own any more.
            if len(nodes) == 1:
                (node,) = nodes
                indices = tuple(sorted(device.index for device in devices))
                widths = [w for w in problem.widths[node] if w <= len(indices)]
                unit = Unit(node, indices[: widths[-1]]) if widths else None
            stages.append((unit, stage.shape.tensor_parallel, stage.shape.num_layers))
        found.append(OldReplica(tuple(stages)))
    return found


def near_placements(problem: Problem, old: Sequence[OldReplica]) -> Iterator[Placement]:
    """Yield placements near the old plan; not all fit, and some are alike."""
    own_flags = OwnFlags(problem)
    for pipelines in _mended(own_flags, old):
        placement = _with_micro_batches(own_flags, pipelines)
        if placement is not None:
            yield placement
        for node in problem.nodes:
            free = _free(problem, pipelines).get(node.name, ())
            for width in problem.widths[node.name]:
                if width > len(free):
                    continue
                grown = _new_replicas(own_flags, node.name, free, width)
                placement = _with_micro_batches(own_flags, [*pipelines, *grown])
                if grown and placement is not None:
                    yield placement


def _with_micro_batches(own_flags: OwnFlags, pipelines: Sequence[Pipeline]) -> Placement | None:
    """Return pipelines with their micro-batches, without a check of memory; None if the limits or
    the batch forbid the pipelines."""
    chains = [tuple(unit for unit, _ in pipeline) for pipeline in pipelines]
    layers = [tuple(number for _, number in pipeline) for pipeline in pipelines]
    filled = [own_flags.keeping(*each) for each in zip(chains, layers, strict=True)]
    return own_flags.placement(chains, filled)


def _mended(own_flags: OwnFlags, old: Sequence[OldReplica]) -> Iterator[list[Pipeline]]:
    problem = own_flags.problem
    kept = [whole for replica in old if (whole := replica.whole) is not None]
    broken = [replica for replica in old if replica.whole is None]
    # What is left of broken replicas is not free for others yet.
    free = _free(problem, [*kept, *(_left_of(replica) for replica in broken)])
    # The empty pipeline drops the replica.
    options = [[(), *_options(own_flags, replica, free)] for replica in broken]
    num_combined = 1
    for found in options:
        num_combined *= len(found)
    # All combinations, or of too many only the broken replicas mended alike.
    if num_combined <= MAX_TRIED:
        choices: Iterator[tuple[Pipeline, ...]] = product(*options)
    else:
        most = max(map(len, options))
        choices = (tuple(o[min(i, len(o) - 1)] for o in options) for i in range(most))
    for choice in choices:
        pipelines = [*kept, *(pipeline for pipeline in choice if pipeline)]
        # Two mended replicas may have reached for the same free GPUs.
        taken = [gpu for p in pipelines for unit, _ in p for gpu in unit.devices]
        if pipelines and len(taken) == len(set(taken)):
            yield pipelines


def _left_of(replica: OldReplica) -> Pipeline:
    return tuple((unit, layers) for unit, _, layers in replica.stages if unit is not None)


def _options(
    own_flags: OwnFlags, replica: OldReplica, free: dict[str, tuple[int, ...]]
) -> list[Pipeline]:
    """Return the ways to mend a replica, with layers of surviving stages kept, and with all layers
    filled anew."""
    found: list[Pipeline] = []
    for pipeline in _replaced(own_flags.problem, replica, free):
        found.append(pipeline)
        found.append(_refitted(own_flags, tuple(unit for unit, _ in pipeline)))
    for pipeline in _absorbed(replica):
        found.append(pipeline)
        found.append(_refitted(own_flags, tuple(unit for unit, _ in pipeline)))
    return list(dict.fromkeys(p for p in found if p))


def _replaced(
    problem: Problem, replica: OldReplica, free: dict[str, tuple[int, ...]]
) -> Iterator[Pipeline]:
    """Yield pipelines with every lost stage on the stage's remaining GPUs, or on free GPUs of a
    node, the old width first."""
    menus: list[list[Unit]] = []
    for unit, width, _ in replica.stages:
        if unit is not None and unit.width == width:
            menus.append([unit])
            continue
        others = [
            Unit(node, gpus[:w])
            for node, gpus in sorted(free.items())
            for w in problem.widths[node]
            if w <= len(gpus)
        ]
        # The old width first: no tensor has to be cut anew.
        others.sort(key=lambda u: (u.width != width, -u.width, u.node))
        menus.append([*([unit] if unit is not None else []), *others])
    for units in islice(product(*menus), MAX_TRIED):
        taken = [gpu for unit in units for gpu in unit.devices]
        if len(taken) == len(set(taken)):
            layers = [n for _, _, n in replica.stages]
            yield tuple(zip(units, layers, strict=True))


def _absorbed(replica: OldReplica) -> Iterator[Pipeline]:
    """Give the layers of lost stages to the stage before, to the one behind, or half to
    each."""
    for part in (0, 1 / 2, 1):
        pieces: list[Piece] = []
        waiting = 0
        for unit, width, layers in replica.stages:
            if unit is not None and unit.width == width:
                pieces.append((unit, layers + waiting))
                waiting = 0
                continue
            # The first stages have no stage before them to give layers to.
            before = round(part * layers) if pieces else 0
            if before:
                pieces[-1] = (pieces[-1][0], pieces[-1][1] + before)
            waiting += layers - before
        if pieces:
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + waiting)
            yield tuple(pieces)


def _refitted(own_flags: OwnFlags, chain: Chain) -> Pipeline:
    """Return the chain with balanced layers; empty if it is not allowed or does not fit."""
    if not own_flags.problem.chain_is_allowed(chain):
        return ()
    filled = own_flags.chain(chain)
    return () if filled is None else tuple(zip(chain, filled.layers, strict=True))


def _new_replicas(
    own_flags: OwnFlags, node: str, free: tuple[int, ...], width: int
) -> list[Pipeline]:
    """Return replicas on the free GPUs of one node: as many of one unit as fit, else one of all
    units."""
    units, start = [], 0
    for w in cut(len(free), width, own_flags.problem.widths[node]):
        units.append(Unit(node, free[start : start + w]))
        start += w
    each = [_refitted(own_flags, (unit,)) for unit in units]
    # One replica a unit if each holds the model, else one replica of all units.
    if units and all(each):
        return each
    together = _refitted(own_flags, tuple(units)) if units else ()
    return [together] if together else []


def _free(problem: Problem, pipelines: Sequence[Pipeline]) -> dict[str, tuple[int, ...]]:
    """Return usable GPUs of each node that no pipeline uses."""
    used = {device for p in pipelines for unit, _ in p for device in unit.devices}
    names = {(device.node, device.index) for device in used}
    free = {
        node.name: tuple(i for i in problem.gpus[node.name] if (node.name, i) not in names)
        for node in problem.nodes
    }
    return {node: gpus for node, gpus in free.items() if gpus}
