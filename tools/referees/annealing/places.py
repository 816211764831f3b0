"""Random moves of the annealing over places: GPUs into stages, their widths, their order, replicas.

A move changes a copy of the pipelines in place and says whether it was one.  What stage a group of
GPUs is, and how many layers it gets, is not asked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.units import Chain, Unit

Pipelines = list[list[Unit]]
"""The groups of each replica, first to last."""


def moved(problem: Problem, pipelines: Sequence[Chain], random: Random) -> Pipelines:
    """Return pipelines one or two random moves away; empty where what was drawn is no move."""
    made = [list(pipeline) for pipeline in pipelines]
    for _ in range(random.choices((1, 2, 3), (75, 20, 5))[0]):
        (move,) = random.choices(_MOVES, _WEIGHTS)
        if not move(problem, made, random):
            return []
        made = [pipeline for pipeline in made if pipeline]
    return made


def random_pipelines(problem: Problem, random: Random) -> Pipelines:
    """Return GPUs, mostly all of them, in groups of random widths, in random order, in a random
    number of pipelines."""
    groups: list[Unit] = []
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
    if random.random() < 0.3:
        del groups[random.randint(1, len(groups)) :]
    counts = problem.replica_counts()
    number = random.choice([n for n in counts if n <= len(groups)] or [counts.start])
    made: Pipelines = [[] for _ in range(number)]
    for index, group in enumerate(groups):
        (made[index] if index < number else random.choice(made)).append(group)
    return [pipeline[: problem.max_stages()] for pipeline in made if pipeline]


def _group(node: str, indices: Sequence[int]) -> Unit:
    return Unit(node, tuple(sorted(indices)))


def _place(pipelines: Pipelines, random: Random) -> tuple[list[Unit], int]:
    pipeline = random.choice(pipelines)
    return pipeline, random.randrange(len(pipeline))


def _insert(pipelines: Pipelines, group: Unit, random: Random) -> None:
    """Put it anywhere, or as a replica of its own."""
    replica = random.randrange(len(pipelines) + 1)
    if replica == len(pipelines):
        pipelines.append([group])
    else:
        pipelines[replica].insert(random.randrange(len(pipelines[replica]) + 1), group)


def _idle(problem: Problem, pipelines: Pipelines, node: str) -> list[int]:
    used = {
        index
        for pipeline in pipelines
        for unit in pipeline
        for name, indices in unit.parts
        if name == node
        for index in indices
    }
    return [index for index in problem.gpus[node] if index not in used]


def _is_plain(unit: Unit) -> bool:
    """Return whether it is one group on one node."""
    return unit.context_parallel == 1 and not unit.beyond


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


def _replace(problem: Problem, pipelines: Pipelines, random: Random) -> bool:
    """Put idle GPUs of a node in the place of a group."""
    node = random.choice(problem.nodes).name
    idle = _idle(problem, pipelines, node)
    fitting = [width for width in problem.widths[node] if width <= len(idle)]
    if fitting:
        pipeline, i = _place(pipelines, random)
        pipeline[i] = _group(node, idle[: random.choice(fitting)])
    return bool(fitting)


def _regroup(problem: Problem, pipelines: Pipelines, random: Random) -> bool:
    """Divide the GPUs of one or two groups of a node, and those idle there, into other groups."""
    pipeline, i = _place(pipelines, random)
    unit = pipeline[i]
    if not _is_plain(unit):
        return False
    node, pool = unit.node, list(unit.indices)
    if random.random() < 0.3:
        pool += _idle(problem, pipelines, node)
    others = [
        (p, j)
        for p in pipelines
        for j, other in enumerate(p)
        if other is not unit and _is_plain(other) and other.node == node
    ]
    place: tuple[list[Unit], Unit] | None = None
    if others and random.random() < 0.7:
        p, j = random.choice(others)
        place = p, p[j]
        pool += p[j].indices
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
        pipelines.append([unit for unit, is_out in zip(pipeline, chosen, strict=True) if is_out])
        pipeline[:] = [unit for unit, is_out in zip(pipeline, chosen, strict=True) if not is_out]
    return True


def _join(problem: Problem, pipelines: Pipelines, random: Random) -> bool:
    """Make two replicas one."""
    if len(pipelines) < 2:
        return False
    one, other = random.sample(pipelines, 2)
    if random.random() < 0.5:
        one.extend(other)
    else:
        for unit in other:
            one.insert(random.randrange(len(one) + 1), unit)
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
        pipeline.sort(key=lambda unit: nodes.index(unit.node))
    return True


def _nodes(problem: Problem, pipelines: Pipelines, random: Random) -> bool:
    """Exchange the whole of two nodes with as many GPUs."""
    one, other = random.sample(problem.nodes, 2) if len(problem.nodes) > 1 else (None, None)
    if one is None or other is None:
        return False
    here, there = problem.gpus[one.name], problem.gpus[other.name]
    if len(here) != len(there):
        return False
    places = {one.name: (other.name, here, there), other.name: (one.name, there, here)}
    for pipeline in pipelines:
        for i, unit in enumerate(pipeline):
            if not any(node in places for node, _ in unit.parts):
                continue
            if not _is_plain(unit):
                return False
            node, old, new = places[unit.node]
            if unit.width not in problem.widths[node]:
                return False
            pipeline[i] = _group(node, [new[old.index(index)] for index in unit.indices])
    return True


_MOVES = (_exchange, _shift, _drop, _add, _replace, _regroup, _cut, _join, _reverse, _nodes)
_WEIGHTS = (22, 22, 4, 8, 4, 21, 5, 5, 6, 3)
