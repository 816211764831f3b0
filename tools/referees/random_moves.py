"""Random moves of the annealing over places: GPUs into stages, their widths, their order, replicas.

A move changes a copy of the pipelines in place and says whether it was one.  What stage a group of
GPUs is, and how many layers it gets, is not asked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from megatron_hetero.cluster.spec import Device
from megatron_hetero.cost.placement import PlacedStage
from megatron_hetero.planner.problem import Problem

Pipelines = list[list[PlacedStage]]
"""The groups of each replica, first to last; their layers do not count."""


def moved(problem: Problem, pipelines: Sequence[Sequence[PlacedStage]], random: Random) -> Pipelines:
    """Return pipelines one or two random moves away; empty where what was drawn is no move."""
    made = [list(pipeline) for pipeline in pipelines]
    for _ in range(random.choices((1, 2, 3), (75, 20, 5))[0]):
        (move,) = random.choices(_MOVES, _WEIGHTS)
        if not move(problem, made, random):
            return []
        made = [pipeline for pipeline in made if pipeline]
    return made


def random_pipelines(problem: Problem, random: Random) -> Pipelines:
    """Return all GPUs in groups of random widths, in random order, in a random number of
    pipelines."""
    groups: list[PlacedStage] = []
    narrow = random.random() < 0.3
    for node in problem.nodes:
        free = list(problem.gpus[node.name])
        while free:
            fitting = [w for w in problem.widths[node.name] if w <= len(free)]
            if not fitting:
                break
            width = fitting[0] if narrow else random.choice(fitting)
            groups.append(_group(node.name, free[:width]))
            del free[:width]
    random.shuffle(groups)
    counts = problem.replica_counts()
    number = random.choice([n for n in counts if n <= len(groups)] or [counts.start])
    made: Pipelines = [[] for _ in range(number)]
    for index, group in enumerate(groups):
        (made[index] if index < number else random.choice(made)).append(group)
    return [pipeline[: problem.max_stages()] for pipeline in made if pipeline]


def _group(node: str, indices: Sequence[int]) -> PlacedStage:
    return PlacedStage(tuple([Device(node, index) for index in sorted(indices)]), 1)


def _place(pipelines: Pipelines, random: Random) -> tuple[list[PlacedStage], int]:
    pipeline = random.choice(pipelines)
    return pipeline, random.randrange(len(pipeline))


def _insert(pipelines: Pipelines, group: PlacedStage, random: Random) -> None:
    """Put it anywhere, or as a replica of its own."""
    replica = random.randrange(len(pipelines) + 1)
    if replica == len(pipelines):
        pipelines.append([group])
    else:
        pipelines[replica].insert(random.randrange(len(pipelines[replica]) + 1), group)


def _idle(problem: Problem, pipelines: Pipelines, node: str) -> list[int]:
    used = {d for pipeline in pipelines for stage in pipeline for d in stage.devices}
    return [index for index in problem.gpus[node] if Device(node, index) not in used]


def _is_plain(stage: PlacedStage) -> bool:
    """Return whether it is one group on one node."""
    return stage.context_parallel == 1 and len({device.node for device in stage.devices}) == 1


def _exchange(problem: Problem, pipelines: Pipelines, random: Random) -> bool:
    """Exchange two groups."""
    (one, i), (other, j) = _place(pipelines, random), _place(pipelines, random)
    one[i], other[j] = other[j], one[i]
    return one is not other or i != j


def _shift(problem: Problem, pipelines: Pipelines, random: Random) -> bool:
    """Put a group elsewhere."""
    pipeline, i = _place(pipelines, random)
    group = pipeline.pop(i)
    _insert([p for p in pipelines if p] if random.random() < 0.5 else pipelines, group, random)
    return any(group in p for p in pipelines)


def _drop(problem: Problem, pipelines: Pipelines, random: Random) -> bool:
    """Leave a group idle."""
    pipeline, i = _place(pipelines, random)
    del pipeline[i]
    return any(pipelines)


def _add(problem: Problem, pipelines: Pipelines, random: Random) -> bool:
    """Use idle GPUs of a node."""
    node = random.choice(problem.nodes).name
    idle = _idle(problem, pipelines, node)
    fitting = [width for width in problem.widths[node] if width <= len(idle)]
    if fitting:
        _insert(pipelines, _group(node, idle[: random.choice(fitting)]), random)
    return bool(fitting)


def _regroup(problem: Problem, pipelines: Pipelines, random: Random) -> bool:
    """Divide the GPUs of one or two groups of a node, and those idle there, into other groups."""
    pipeline, i = _place(pipelines, random)
    stage = pipeline[i]
    if not _is_plain(stage):
        return False
    node = stage.devices[0].node
    pool = [device.index for device in stage.devices]
    if random.random() < 0.3:
        pool += _idle(problem, pipelines, node)
    others = [
        (p, j)
        for p in pipelines
        for j, other in enumerate(p)
        if other is not stage and _is_plain(other) and other.devices[0].node == node
    ]
    place: tuple[list[PlacedStage], PlacedStage] | None = None
    if others and random.random() < 0.7:
        p, j = random.choice(others)
        place = p, p[j]
        pool += [device.index for device in p[j].devices]
    widths = [width for width in problem.widths[node] if width <= len(pool)]
    width = random.choice(widths)
    pipeline[i] = _group(node, pool[:width])
    rest = pool[width:]
    fitting = [width for width in problem.widths[node] if width <= len(rest)]
    if place is not None:
        p, other = place
        j = next(j for j, found in enumerate(p) if found is other)
        if fitting and random.random() < 0.8:
            width = random.choice(fitting)
            p[j] = _group(node, rest[:width])
            rest = rest[width:]
        else:
            del p[j]
    fitting = [width for width in problem.widths[node] if width <= len(rest)]
    if fitting and random.random() < 0.8:
        group = _group(node, rest[: random.choice(fitting)])
        if random.random() < 0.5:
            at = next((j for j, found in enumerate(pipeline) if found is pipeline[i - 1]), 0)
            pipeline.insert(at + 1, group)
        else:
            _insert(pipelines, group, random)
    return True


def _cut(problem: Problem, pipelines: Pipelines, random: Random) -> bool:
    """Cut a pipeline into two replicas."""
    pipeline = random.choice(pipelines)
    if len(pipeline) < 2:
        return False
    if random.random() < 0.5:
        at = random.randrange(1, len(pipeline))
        pipelines.append(pipeline[at:])
        del pipeline[at:]
    else:
        chosen = [random.random() < 0.5 for _ in pipeline]
        pipelines.append([s for s, is_out in zip(pipeline, chosen, strict=True) if is_out])
        pipeline[:] = [s for s, is_out in zip(pipeline, chosen, strict=True) if not is_out]
    return True


def _join(problem: Problem, pipelines: Pipelines, random: Random) -> bool:
    """Make two replicas one."""
    if len(pipelines) < 2:
        return False
    one, other = random.sample(pipelines, 2)
    if random.random() < 0.5:
        one.extend(other)
    else:
        for stage in other:
            one.insert(random.randrange(len(one) + 1), stage)
    other.clear()
    return True


def _reverse(problem: Problem, pipelines: Pipelines, random: Random) -> bool:
    """Turn a part of a pipeline round, or sort it by nodes."""
    pipeline = random.choice(pipelines)
    if len(pipeline) < 2:
        return False
    i, j = sorted(random.sample(range(len(pipeline) + 1), 2))
    if random.random() < 0.8:
        pipeline[i:j] = pipeline[i:j][::-1]
    else:
        nodes = [node.name for node in problem.nodes]
        random.shuffle(nodes)
        pipeline.sort(key=lambda stage: nodes.index(stage.devices[0].node))
    return True


def _nodes(problem: Problem, pipelines: Pipelines, random: Random) -> bool:
    """Exchange the whole of two nodes with as many GPUs."""
    one, other = random.sample(problem.nodes, 2) if len(problem.nodes) > 1 else (None, None)
    if one is None or other is None:
        return False
    here, there = problem.gpus[one.name], problem.gpus[other.name]
    if len(here) != len(there):
        return False
    to = {Device(one.name, i): Device(other.name, j) for i, j in zip(here, there, strict=True)}
    to |= {device: own for own, device in to.items()}
    for pipeline in pipelines:
        for i, stage in enumerate(pipeline):
            devices = [to.get(device, device) for device in stage.devices]
            if tuple(devices) == stage.devices:
                continue
            if not _is_plain(stage) or stage.width not in problem.widths[devices[0].node]:
                return False
            pipeline[i] = PlacedStage(tuple(devices), 1)
    return True


_MOVES = (_exchange, _shift, _drop, _add, _regroup, _cut, _join, _reverse, _nodes)
_WEIGHTS = (22, 24, 4, 8, 22, 5, 5, 7, 3)
