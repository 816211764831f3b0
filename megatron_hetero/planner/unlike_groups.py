"""Stages joined into one tensor-parallel group in unequal shares.

The strategies before cut every node into groups that divide the model evenly.  Here neighbouring
stages of a placement become one stage: on one node where their GPUs together do not divide the
model (three GPUs and 40 heads), and over nodes of unlike GPUs where the limits allow it.  Shares of
two kinds of GPUs are found by trying all small ratios (the objective is HAP's: the slowest member
decides; its linear programme drops the constants, which the prices here have).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from megatron_hetero.cluster.spec import Device
from megatron_hetero.cost.choices import may_choose
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.refill import Refiller

_LONGEST = 4
"""Stages that are joined at most."""
_LARGEST = 8
"""Shares of unlike GPUs are up to this."""
_MAX_PLACEMENTS = 8


def joined(problem: Problem, refiller: Refiller) -> Iterator[Placement]:
    """Placements in which a run of stages is one; replicas that are alike change together."""
    if not may_choose(problem.costs, "shares"):
        return
    placement = refiller.placement
    shapes = [refiller.shape(replica) for replica in placement.replicas]
    found = 0
    for shape in dict.fromkeys(shapes):
        replica = placement.replicas[shapes.index(shape)]
        for start in range(len(replica.stages)):
            for stop in range(start + 2, min(start + _LONGEST, len(replica.stages)) + 1):
                shares = _shares(problem, refiller, replica.stages[start:stop])
                if shares is None:
                    continue
                found += 1
                yield Placement(
                    tuple(
                        _join(r, start, stop, shares) if of == shape else r
                        for r, of in zip(placement.replicas, shapes, strict=True)
                    )
                )
                if found == _MAX_PLACEMENTS:
                    return


def _join(replica: PlacedReplica, start: int, stop: int, shares: tuple[int, ...]) -> PlacedReplica:
    run = replica.stages[start:stop]
    devices = tuple(device for stage in run for device in stage.devices)
    one = PlacedStage(devices, sum(stage.num_layers for stage in run), shares)
    return replace(
        replica,
        stages=(*replica.stages[:start], one, *replica.stages[stop:]),
        launch_counts=None,
    )


def _shares(
    problem: Problem, refiller: Refiller, run: tuple[PlacedStage, ...]
) -> tuple[int, ...] | None:
    """The fastest shares of all devices of a run; None where they may not or need not be one group
    in unequal shares."""
    devices = tuple(device for stage in run for device in stage.devices)
    if any(stage.shares for stage in run) or not _may_be_a_group(problem, devices):
        return None
    costs = problem.costs
    gpus = [costs.cluster.gpu_type(device).name for device in devices]
    kinds = sorted(set(gpus))
    if len(kinds) == 1:
        # Of equal GPUs, only what the other strategies have not tried.
        one_node = len({device.node for device in devices}) == 1
        known = one_node and len(devices) in problem.widths[devices[0].node]
        return None if known or not one_node else (1,) * len(devices)
    if len(kinds) > 2:
        return None
    ratios = [
        (a, b) for a in range(1, _LARGEST + 1) for b in range(1, _LARGEST + 1) if gcd(a, b) == 1
    ]
    options = [tuple(a if gpu == kinds[0] else b for gpu in gpus) for a, b in ratios]
    rows = refiller.vocab_rows
    return min(options, key=lambda s: costs.group_pieces(devices, s, rows).layer.total_s)


def _may_be_a_group(problem: Problem, devices: tuple[Device, ...]) -> bool:
    """Whether model and limits allow these devices as one tensor-parallel group."""
    limits, model = problem.cluster.limits, problem.workload.model
    width = len(devices)
    if width > min(model.num_query_groups, model.mlp_columns):
        return False
    if limits.max_tensor_parallel is not None and width > limits.max_tensor_parallel:
        return False
    if problem.workload.training.sequence_parallel and model.seq_length % width:
        return False
    nodes = {device.node for device in devices}
    forbidden = limits.no_tensor_parallel_across
    if nodes & set(forbidden):
        return False
    sites = {problem.cluster.node_by_name[node].site for node in nodes}
    across_nodes = len(nodes) > 1 and ("nodes" in forbidden or _is_pinned(problem))
    return not across_nodes and not (len(sites) > 1 and "sites" in forbidden)


def _is_pinned(problem: Problem) -> bool:
    """Whether ends of pipelines have to be on certain nodes; groups over nodes leave that be."""
    limits = problem.cluster.limits
    return bool(limits.first_stage_nodes or limits.last_stage_nodes)
