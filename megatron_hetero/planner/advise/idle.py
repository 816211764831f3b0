"""Why a GPU stays unused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nsmallest

from megatron_hetero.cluster.spec import Device, Node
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.ladder import Climber
from megatron_hetero.planner.evaluate.rungs import Rungs
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.moves.fine import insertions
from megatron_hetero.planner.problem import Problem, Unit, chains_of
from megatron_hetero.units import format_duration

_MAX_WORK = 100_000
"""Stages of pipelines tried for all idle GPUs together; each kind of node has an equal part of what
is left."""
_PRICED_PART = 10
"""Of the plans tried, those priced whole with their exchange: the fastest, one in so many."""


def idle_reasons(problem: Problem, best: Candidate) -> dict[str, str]:
    """Return a sentence for every GPU outside the plan: forbidden, unable, or tried and slower.

    One of several nodes or replicas that are alike answers for all.
    """
    used = {device.name for device in best.placement.devices()}
    reasons = dict(problem.idle_reasons)
    by_kind: dict[object, list[tuple[Node, list[int]]]] = {}
    for node in problem.nodes:
        idle = [i for i in problem.gpus[node.name] if Device(node.name, i).name not in used]
        if idle:
            by_kind.setdefault(_kind(problem, node, len(idle)), []).append((node, idle))
    # On a board of its own: what is tried here is no plan to choose from.
    rungs = Rungs(Scoreboard(problem))
    work_left = _MAX_WORK
    for number, alike in enumerate(by_kind.values()):
        reason, work = _tried(rungs, best, *alike[0], work_left // (len(by_kind) - number))
        work_left -= work
        reasons |= {Device(node.name, i).name: reason for node, idle in alike for i in idle}
    return dict(sorted(reasons.items()))


def _kind(problem: Problem, node: Node, num_idle: int) -> object:
    """Return equal for nodes whose idle GPUs have equal prospects."""
    likeness = problem.likeness
    paths = frozenset(likeness.hop(node.name, other.name) for other in problem.nodes)
    own = likeness.node(node.name), node.site, node.uplink_bytes_per_s
    return own, paths, problem.widths[node.name], num_idle


def _tried(
    rungs: Rungs,
    best: Candidate,
    node: Node,
    idle: Sequence[int],
    max_work: int,
) -> tuple[str, int]:
    """Return why idle GPUs of a node are idle, and the stages tried for that.

    Args:
        best: the plan without them.
        idle: at least one.
        max_work: stages to try, in one placement or more.
    """
    problem, structure = rungs.problem, chains_of(best.placement)
    widths = [width for width in problem.widths[node.name] if width <= len(idle)]
    units = [Unit(node.name, tuple(idle[: widths[0]]))] if widths else []
    estimated: list[Climber] = []
    work, stages = 0, sum(map(len, structure))
    for moved in insertions(structure, units, problem.replica_counts(), rungs.completer.shape):
        if work and work + stages > max_work:
            break
        work += stages
        found = rungs.sized(moved) if all(map(problem.chain_is_allowed, moved)) else None
        if found is not None:
            estimated.append(rungs.estimated(found))
    tried = _best_of(rungs, estimated, max(1, max_work // stages // _PRICED_PART))
    if tried is None:
        return "no place for it fits memory, limits and the number of layers", work
    return _reason(problem, tried, best), work


def _best_of(rungs: Rungs, estimated: Iterable[Climber], most: int) -> Candidate | None:
    """Return the best of some structures, tuned and simulated; priced whole are those with the
    shortest estimates, up to `most`."""
    stock_only = rungs.problem.objective.stock_only
    for node in sorted(one for of in nsmallest(most, estimated) for one in rungs.price(of)):
        candidate = node.candidate
        if candidate is None or (stock_only and not candidate.is_stock):
            continue
        num_stages = sum(map(len, node.found.structure))
        tuned = node if stock_only else rungs.tune(node, candidate, _MAX_WORK // num_stages)
        return rungs.simulated(tuned.candidate or candidate)
    return None


def _reason(problem: Problem, tried: Candidate, best: Candidate) -> str:
    """Return what a plan with the GPU does worse, the best of those tried."""
    if tried.standing.excess > best.standing.excess:
        return "in the best place tried it breaks a limit of time or money"
    longer_s = tried.step_time_s - best.step_time_s
    if tried.standing.value <= best.standing.value:
        if longer_s < 0.0:
            shorter = format_duration(-longer_s)
            if tried.coarse_key < best.coarse_key:
                return (
                    f"in the best place tried a step is {shorter} shorter: use --strategy thorough"
                )
            return (
                f"in the best place tried it saves {shorter} of a step, too little for the plug-in"
            )
        return f"in the best place tried it makes a step {format_duration(longer_s)} longer"
    step = f"a step {format_duration(abs(longer_s))} {'longer' if longer_s >= 0 else 'shorter'}"
    if problem.objective.name == "fewest-gpus":
        return "the deadline is kept without it"
    dearer = tried.standing.value / best.standing.value - 1
    return f"in the best place tried it makes {step} and a token {dearer:.1%} dearer"
