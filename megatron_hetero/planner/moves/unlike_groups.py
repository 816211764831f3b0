"""Stages joined into one of unlike GPUs in unequal shares: of tensors, or of sequences.

The other strategies cut every node into groups that divide the model evenly, and sequences into
equal parts.  Here neighbouring stages of a placement become one stage: a tensor-parallel group on
one node, where their GPUs together do not divide the model (three GPUs and 40 heads), or over
unlike GPUs, where the limits allow it; or their groups divide each sequence, where the job's layers
allow it.  Shares are by speed and memory (`group_shares`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import lcm

from megatron_hetero.cluster.names import machine_of
from megatron_hetero.cluster.spec import Device
from megatron_hetero.cost.choices import may_choose, shares_tokens
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.plan.layout import MAX_CONTEXT_PARALLEL
from megatron_hetero.planner.completion.stage_options import StagePlace
from megatron_hetero.planner.moves.group_shares import GroupShares, Shares
from megatron_hetero.planner.problem import Problem, Unit
from megatron_hetero.planner.refit.refit import Refitter
from megatron_hetero.planner.shapes.symmetric import equal_units

_LONGEST = 4
"""Stages that are joined at most."""
_MAX_OPTIONS = 2
"""Shares of one group that are tried."""
_MAX_PLACEMENTS = 16


def joined(problem: Problem, refitter: Refitter) -> Iterator[Placement]:
    """Yield placements in which a run of stages is one; replicas that are alike change together."""
    if not may_choose(problem.costs, "shares"):
        return
    yield from islice(_with_one(problem, refitter, 2, _in_tensor_shares), _MAX_PLACEMENTS)
    if problem.divides_sequences and shares_tokens(problem.costs):
        yield from islice(_with_one(problem, refitter, 1, _in_token_shares), _MAX_PLACEMENTS)


def in_unlike_parts(problem: Problem) -> Iterator[Placement]:
    """Yield placements in which each replica is one stage, whose groups divide sequences in shares.

    No other strategy begins with groups of a number that does not divide a sequence.
    """
    if problem.divides_sequences and shares_tokens(problem.costs):
        yield from islice(_in_unlike_parts(problem), _MAX_PLACEMENTS)


def _in_unlike_parts(problem: Problem) -> Iterator[Placement]:
    for width in sorted({w for node in problem.nodes for w in problem.widths[node.name]}):
        units = [unit for node in problem.nodes for unit in equal_units(problem, node, width)]
        for count in problem.replica_counts():
            size, rest = divmod(len(units), count)
            if size < 2 or rest:
                continue
            along = [units[r * size : (r + 1) * size] for r in range(count)]
            across = [units[r::count] for r in range(count)]
            for parts in (along, across)[: 1 if count == 1 else 2]:
                equal = Placement(tuple(_in_equal_parts(problem, own, count) for own in parts))
                refitter = Refitter(problem.costs, equal)
                stages = [
                    _in_token_shares(problem, refitter, replica.stages, 0, 1)
                    for replica in equal.replicas
                ]
                for chosen in zip(*stages, strict=False):
                    yield Placement(
                        tuple(
                            replace(r, stages=(stage,))
                            for r, stage in zip(equal.replicas, chosen, strict=True)
                        )
                    )


def _in_equal_parts(problem: Problem, units: Sequence[Unit], num_replicas: int) -> PlacedReplica:
    devices = tuple(device for unit in units for device in unit.devices)
    stage = PlacedStage(devices, problem.num_layers, context_parallel=len(units))
    return PlacedReplica((stage,), problem.num_micro_batches // num_replicas)


Run = Sequence[PlacedStage]
Ways = Callable[[Problem, Refitter, Run, int, int], Iterator[PlacedStage]]
"""Stages in the place of a run, which starts at stage so many of so many."""


def _with_one(
    problem: Problem, refitter: Refitter, shortest: int, ways: Ways
) -> Iterator[Placement]:
    """Yield placements with one stage in the place of a run of at least so many."""
    placement = refitter.placement
    shapes = [refitter.shape(replica) for replica in placement.replicas]
    for shape in dict.fromkeys(shapes):
        replica = placement.replicas[shapes.index(shape)]
        depth = len(replica.stages)
        for start in range(depth):
            for stop in range(start + shortest, min(start + _LONGEST, depth) + 1):
                for one in ways(problem, refitter, replica.stages[start:stop], start, depth):
                    yield Placement(
                        tuple(
                            _join(r, start, stop, one) if of == shape else r
                            for r, of in zip(placement.replicas, shapes, strict=True)
                        )
                    )


def _join(replica: PlacedReplica, start: int, stop: int, one: PlacedStage) -> PlacedReplica:
    devices = tuple(device for stage in replica.stages[start:stop] for device in stage.devices)
    return replace(
        replica,
        stages=(
            *replica.stages[:start],
            replace(one, devices=devices),
            *replica.stages[stop:],
        ),
        launch_counts=None,
    )


def _in_tensor_shares(
    problem: Problem, refitter: Refitter, run: Run, start: int, depth: int
) -> Iterator[PlacedStage]:
    """Yield a run as one tensor-parallel group in shares, the fastest first; nothing where its
    GPUs may not or need not be one in unequal shares."""
    costs, place = problem.costs, _place(run, start, depth)
    devices = place.devices
    taken = any(stage.shares or stage.context_parallel > 1 for stage in run)
    if taken or not _may_be_a_group(problem, devices):
        return
    num_layers = sum(stage.num_layers for stage in run)
    if len({costs.cluster.gpu_type(device).name for device in devices}) == 1:
        # Of equal GPUs, only what the other strategies have not tried.
        nodes = {device.node for device in devices}
        one_machine = len({machine_of(node) for node in nodes}) == 1
        known = len(nodes) == 1 and len(devices) in problem.widths[devices[0].node]
        if one_machine and not known:
            yield PlacedStage(devices, num_layers, (1,) * len(devices))
        return
    for shares in _options(refitter, place, num_layers):
        yield PlacedStage(devices, num_layers, shares)


def _in_token_shares(
    problem: Problem, refitter: Refitter, run: Run, start: int, depth: int
) -> Iterator[PlacedStage]:
    """Yield a run as one stage whose groups, those of its stages, divide sequences in unlike
    shares, the fastest first; nothing where the groups may not or need not do that."""
    groups = [group for stage in run for group in stage.groups]
    taken = any(stage.shares or stage.context_shares for stage in run)
    if taken or not _may_divide_a_sequence(problem, groups):
        return
    num_layers = sum(stage.num_layers for stage in run)
    place = replace(_place(run, start, depth), context_parallel=len(groups))
    for shares in _options(refitter, place, num_layers):
        if len(set(shares)) > 1:
            yield PlacedStage(
                place.devices, num_layers, context_parallel=len(groups), context_shares=shares
            )


def _place(run: Run, start: int, depth: int) -> StagePlace:
    devices = tuple(device for stage in run for device in stage.devices)
    left = depth - start - len(run)
    return StagePlace(devices, None, start == 0, not left, left + 1)


def _options(refitter: Refitter, place: StagePlace, num_layers: int) -> tuple[Shares, ...]:
    own = refitter.costs.on_devices(place.devices)
    return GroupShares(own, refitter.vocab_rows).options(place, num_layers)[:_MAX_OPTIONS]


def _may_divide_a_sequence(problem: Problem, groups: Sequence[PlacedStage]) -> bool:
    """Return whether model and limits allow these groups unlike shares of each sequence, which they
    have a use for where their GPUs are unlike."""
    training, seq_length = problem.workload.training, problem.workload.model.seq_length
    widths = {group.width for group in groups}
    kinds = {tuple(problem.cluster.gpu_type(d).name for d in group.devices) for group in groups}
    if len(widths) > 1 or len(kinds) == 1 or len(groups) > MAX_CONTEXT_PARALLEL:
        return False
    unit = lcm(2, *widths) if training.sequence_parallel else 2
    if seq_length % unit or seq_length < unit * len(groups):
        return False
    nodes = {device.node for group in groups for device in group.devices}
    return len(nodes) == 1 or not _is_pinned(problem)


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
