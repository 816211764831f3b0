"""Stages joined into one tensor-parallel group in unequal shares.

The other strategies cut every node into groups that divide the model evenly.  Here neighbouring
stages of a placement become one stage: on one node, where their GPUs together do not divide the
model (three GPUs and 40 heads); and over unlike GPUs, where the limits allow it, in shares by speed
and memory (`group_shares`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_hetero.cluster.names import machine_of
from megatron_hetero.cluster.spec import Device
from megatron_hetero.cost.choices import may_choose
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.planner.completion.stage_options import StagePlace
from megatron_hetero.planner.moves.group_shares import GroupShares, Shares
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.refit.refit import Refitter

_LONGEST = 4
"""Stages that are joined at most."""
_MAX_OPTIONS = 2
"""Shares of one group that are tried."""
_MAX_PLACEMENTS = 16


def joined(problem: Problem, refitter: Refitter) -> Iterator[Placement]:
    """Yield placements in which a run of stages is one; replicas that are alike change together."""
    if not may_choose(problem.costs, "shares"):
        return
    placement = refitter.placement
    shapes = [refitter.shape(replica) for replica in placement.replicas]
    found = 0
    for shape in dict.fromkeys(shapes):
        replica = placement.replicas[shapes.index(shape)]
        for start in range(len(replica.stages)):
            for stop in range(start + 2, min(start + _LONGEST, len(replica.stages)) + 1):
                run, depth = replica.stages[start:stop], len(replica.stages)
                for shares in _shares(problem, refitter, run, start, depth):
                    found += 1
                    yield Placement(
                        tuple(
                            _join(r, start, stop, shares) if of == shape else r
                            for r, of in zip(placement.replicas, shapes, strict=True)
                        )
                    )
                    if found == _MAX_PLACEMENTS:
                        return


def _join(replica: PlacedReplica, start: int, stop: int, shares: Shares) -> PlacedReplica:
    run = replica.stages[start:stop]
    devices = tuple(device for stage in run for device in stage.devices)
    one = PlacedStage(devices, sum(stage.num_layers for stage in run), shares)
    return replace(
        replica,
        stages=(*replica.stages[:start], one, *replica.stages[stop:]),
        launch_counts=None,
    )


def _shares(
    problem: Problem, refitter: Refitter, run: tuple[PlacedStage, ...], start: int, depth: int
) -> tuple[Shares, ...]:
    """Return shares of all devices of a run, which starts at stage `start` of `depth`, the
    fastest first; none where they may not or need not be one group in unequal shares."""
    devices = tuple(device for stage in run for device in stage.devices)
    taken = any(stage.shares or stage.context_parallel > 1 for stage in run)
    if taken or not _may_be_a_group(problem, devices):
        return ()
    costs = problem.costs
    if len({costs.cluster.gpu_type(device).name for device in devices}) == 1:
        # Of equal GPUs, only what the other strategies have not tried.
        nodes = {device.node for device in devices}
        one_machine = len({machine_of(node) for node in nodes}) == 1
        known = len(nodes) == 1 and len(devices) in problem.widths[devices[0].node]
        return () if known or not one_machine else ((1,) * len(devices),)
    stages_left = depth - start - len(run)
    place = StagePlace(devices, None, start == 0, not stages_left, stages_left + 1)
    own = refitter.costs.on_devices(devices)
    shares = GroupShares(own, refitter.vocab_rows)
    return shares.options(place, sum(stage.num_layers for stage in run))[:_MAX_OPTIONS]


def _may_be_a_group(problem: Problem, devices: tuple[Device, ...]) -> bool:
    """Return whether model and limits allow these devices as one tensor-parallel group."""
    limits, model = problem.cluster.limits, problem.workload.model
    width = len(devices)
    if width > min(model.num_query_groups, *model.column_kinds):
        return False
    if any(size % width for size in model.divided_latents):
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
    machines = {machine_of(node) for node in nodes}
    across_machines = len(machines) > 1 and "nodes" in forbidden
    if across_machines or (len(nodes) > 1 and _is_pinned(problem)):
        return False
    return not (len(sites) > 1 and "sites" in forbidden)


def _is_pinned(problem: Problem) -> bool:
    """Return whether ends of pipelines have to be on certain nodes; groups over nodes leave that
    be."""
    limits = problem.cluster.limits
    return bool(limits.first_stage_nodes or limits.last_stage_nodes)
