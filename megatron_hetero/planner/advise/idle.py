"""Why a GPU stays unused."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from itertools import islice

from megatron_hetero.cluster.spec import Device
from megatron_hetero.cost.placement import Placement
from megatron_hetero.planner.completion.fill import Filler
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.moves.fine import insertions
from megatron_hetero.planner.problem import Problem, Unit, chains_of
from megatron_hetero.units import format_duration

_MAX_WORK = 20_000
"""Stages of pipelines tried for a node with idle GPUs."""
_PRICED_PART = 10
"""Of the plans tried, those priced whole with their exchange: the fastest, one in so many."""
_MAX_WORK_IN_ALL = 200_000
"""Stages tried for all nodes together: in a plan of thousands each try prices thousands."""
_MAX_GPUS_APART = 64
"""In larger clusters one of several nodes or replicas that are alike answers for all."""


def idle_reasons(problem: Problem, board: Scoreboard, best: Candidate) -> dict[str, str]:
    """Return a sentence for every GPU outside the plan: forbidden, unable, or tried and slower."""
    used = {device.name for device in best.placement.devices()}
    reasons = dict(problem.idle_reasons)
    filler = Filler(problem)
    chains = chains_of(best.placement)
    known: dict[tuple[object, ...], str] = {}
    shape = filler.shape if problem.num_gpus > _MAX_GPUS_APART else None
    stages = sum(map(len, chains))
    work = 0
    for node in problem.nodes:
        idle = [i for i in problem.gpus[node.name] if Device(node.name, i).name not in used]
        if not idle:
            continue
        # Nodes that are alike, with as many idle GPUs, are tried once.
        kind = (
            *(node.gpu_type.name, node.site, len(idle), problem.widths[node.name], node.link),
            *(node.uplink_bytes_per_s, node.nics),
        )
        if kind in known:
            reasons.update({Device(node.name, i).name: known[kind] for i in idle})
            continue
        # Chains are filled anew with every GPU tried, by groups of one node that divide evenly.
        is_cut = best.placement.has_shares or best.placement.has_context_parallel
        if is_cut or work >= _MAX_WORK_IN_ALL:
            reason = (
                "not tried: the plan has groups that only its own shares divide"
                if best.placement.has_shares
                else "not tried: the plan has groups that divide sequences"
                if is_cut
                else "not tried: explaining idle GPUs had used up its work on nodes before it"
            )
            reasons.update({Device(node.name, i).name: reason for i in idle})
            continue
        widths = [width for width in problem.widths[node.name] if width <= len(idle)]
        units = [Unit(node.name, tuple(idle[: widths[0]]))] if widths else []
        tries = insertions(chains, units, problem.replica_counts(), shape)
        placements = []
        for moved in islice(tries, max(1, _MAX_WORK // stages)):
            work += stages
            placement = filler.placement(moved)
            if placement is not None:
                placements.append(placement)
        tried = _best_of(board, placements, max(1, _MAX_WORK // stages // _PRICED_PART))
        if tried is not None:
            reason = _reason(problem, tried, best)
        else:
            reason = "no place for it fits memory, limits and the number of layers"
        if problem.num_gpus > _MAX_GPUS_APART:
            known[kind] = reason
        reasons.update({Device(node.name, i).name: reason for i in idle})
    return dict(sorted(reasons.items()))


def _best_of(board: Scoreboard, placements: Iterable[Placement], most: int) -> Candidate | None:
    """Return the best of some placements; priced whole are those with the fastest pipelines, up to
    `most`, and none that cannot be the best."""
    least_s = {placement: board.least_step_s(placement) for placement in placements}
    best: Candidate | None = None
    for placement in nsmallest(most, least_s, key=least_s.__getitem__):
        if best is not None and board.is_by_time and least_s[placement] > best.coarse_key[1]:
            break
        found = board.score_with_counts(placement, "idle check", whole=True)
        if found is not None and (best is None or found.key < best.key):
            best = found
    return best


def _reason(problem: Problem, tried: Candidate, best: Candidate) -> str:
    """Return what a plan with the GPU does worse, the best of those tried."""
    if tried.standing.excess > best.standing.excess:
        return "in the best place tried it breaks a limit of time or money"
    longer_s = tried.step_time_s - best.step_time_s
    if tried.standing.value <= best.standing.value:
        longer = format_duration(max(longer_s, 0.0))
        return f"in the best place tried it makes a step {longer} longer"
    step = f"a step {format_duration(abs(longer_s))} {'longer' if longer_s >= 0 else 'shorter'}"
    if problem.objective.name == "fewest-gpus":
        return "the deadline is kept without it"
    dearer = tried.standing.value / best.standing.value - 1
    return f"in the best place tried it makes {step} and a token {dearer:.1%} dearer"
