"""Why a GPU stays unused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from megatron_hetero.cluster.nodes import Device, Node
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.ladder import Climber
from megatron_hetero.planner.evaluate.rungs import Rungs
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.moves.fine import insertions
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.units import Unit, chains_of
from megatron_hetero.units import format_duration

_MAX_WORK = 400_000
"""Limit of the work for all idle GPUs, in units of about 10 microseconds; each kind of node has an
equal part of what is left, and a tenth of all more while no place fits."""


def idle_reasons(problem: Problem, best: Candidate) -> dict[str, str]:
    """Return a sentence for every GPU outside the plan: forbidden, unable, or tried and slower.

    One of several nodes or replicas that are alike answers for all; when the work is done, one of
    like nodes elsewhere.
    """
    used = {device.name for device in best.placement.devices()}
    reasons = dict(problem.idle_reasons)
    # Nodes whose idle GPUs have equal prospects, each with its idle GPUs.
    number_of = problem.cluster.link_classes.node_number
    others = np.array([number_of[node.name] for node in problem.nodes], np.int64)
    by_kind: dict[object, list[tuple[Node, list[int]]]] = {}
    for node in problem.nodes:
        idle = [i for i in problem.gpus[node.name] if Device(node.name, i).name not in used]
        if idle:
            by_kind.setdefault(_kind(problem, node, len(idle), others), []).append((node, idle))
    # On a board of its own: what is tried here is no plan to choose from.
    rungs = Rungs(Scoreboard(problem))
    answers: dict[object, tuple[str, str]] = {}
    for number, alike in enumerate(by_kind.values()):
        node, idle = alike[0]
        likeness = problem.likeness.node(node.name), problem.widths[node.name], len(idle)
        # An equal part of the work that is left for each kind still to come.
        work = max(0, _MAX_WORK - rungs.done) // (len(by_kind) - number)
        if work or likeness not in answers:
            reason = _tried(rungs, best, node, idle, rungs.done + work)
            answers[likeness] = node.name, reason
        else:
            name, reason = answers[likeness]
            reason = f"not tried, but GPUs like it on {name}: {reason}"
        reasons |= {Device(node.name, i).name: reason for node, idle in alike for i in idle}
    return dict(sorted(reasons.items()))


def _kind(
    problem: Problem, node: Node, num_idle: int, others: npt.NDArray[np.int64]
) -> object:
    """Return equal for nodes whose idle GPUs have equal prospects; `others` are the numbers of all
    nodes."""
    classes = problem.cluster.link_classes
    links, here = classes.of_pairs, classes.node_number[node.name]
    paths = frozenset(zip(links[here, others].tolist(), links[others, here].tolist(), strict=True))
    own = problem.likeness.node(node.name), node.site, node.uplink_bytes_per_s
    return own, paths, problem.widths[node.name], num_idle


def _tried(rungs: Rungs, best: Candidate, node: Node, idle: Sequence[int], until: int) -> str:
    """Return why idle GPUs of a node are idle.

    Args:
        best: the plan without them.
        idle: at least one.
        until: work at which the trials end; half of what is left of it is for estimates.
    """
    problem, structure = rungs.problem, chains_of(best.placement)
    widths = [width for width in problem.widths[node.name] if width <= len(idle)]
    # The narrowest group that the node may have.
    units = [Unit(node.name, tuple(idle[: widths[0]]))] if widths else []
    estimated: list[Climber] = []
    half = (rungs.done + until) // 2
    # The GPU may become a stage, or a replica of its own, at each place.
    for moved in insertions(structure, units, problem.replica_counts(), rungs.completer.shape):
        found = rungs.sized(moved) if all(map(problem.chain_is_allowed, moved)) else None
        if found is not None:
            estimated.append(rungs.estimated(found))
        if rungs.done >= (half if estimated else half + _MAX_WORK // 10):
            break
    tried = _best_of(rungs, sorted(estimated), until, best)
    if tried is None:
        return "no place tried for it fits memory, limits and the number of layers"
    return _reason(problem, tried, best)


def _best_of(
    rungs: Rungs, estimated: Iterable[Climber], until: int, best: Candidate
) -> Candidate | None:
    """Return the best of some structures, tuned while there is work left; simulated where it may be
    better than `best`.

    Those that come first are priced, one at least, until the work is done.
    """
    stock_only = rungs.problem.objective.stock_only
    priced: list[Climber] = []
    for one in estimated:
        found = rungs.price(one)
        priced += [node for node in found if not stock_only or _is_stock(node)]
        if rungs.done >= until:
            break
    if not priced:
        return None
    node = min(priced)
    tried = node.candidate
    if tried is not None and not stock_only and rungs.done < until:
        tried = rungs.tune(node, tried).candidate
    # Without queues it loses already.
    if tried is None or best.coarse_key < tried.coarse_key:
        return tried  # Queues only make it longer.
    return rungs.simulated(tried)


def _is_stock(node: Climber) -> bool:
    return node.candidate is not None and node.candidate.is_stock


def _reason(problem: Problem, tried: Candidate, best: Candidate) -> str:
    """Return the disadvantage of the best plan tried with the GPU."""
    # First the limits, then the objective's measure, then seconds.
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
    if not best.standing.value:  # on machines at no price
        return f"in the best place tried it makes {step}, and tokens, which are free, cost money"
    dearer = tried.standing.value / best.standing.value - 1
    return f"in the best place tried it makes {step} and a token {dearer:.1%} dearer"
