"""The GPUs that would hold a model at all: of each type the fewest in one pipeline.

A second replica takes weights and gradients once more, so the fewest GPUs have one replica, and the
distributed optimizer, which divides states among replicas, does not help them.  Of equal GPUs with
stages of one width the fewest follow from the memory model alone: a stage holds as many layers as
fit beside the micro-batches that 1F1B keeps at its place, counted from the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import GpuType, Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.memory.stage import StageMemory
from megatron_hetero.cost.placement import Recompute
from megatron_hetero.cost.work.compute import can_train
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.plan import Layout, ReplicaShape, StageShape
from megatron_hetero.planner.advise.alternatives import layout_text
from megatron_hetero.planner.advise.nothing_fits.relaxations import SERVER_GPUS
from megatron_hetero.planner.loop import SearchLimits
from megatron_hetero.planner.portfolio import default_strategies, search
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.seeds.first_fit import (
    FirstFit,
    least_settings,
    with_least_settings,
)
from megatron_hetero.planner.structure_search import StructureSearch
from megatron_hetero.units import MAX_BANDWIDTH_BYTES_PER_S

_LINK = Link(MAX_BANDWIDTH_BYTES_PER_S, 0.0)
"""Any: what fits does not depend on it."""


@dataclass(frozen=True)
class Holding:
    """The fewest GPUs of a type for the model, and a plan on these GPUs.

    `num_gpus_as_given` is with the job's own micro-batch size and recompute, where `num_gpus` has
    those that take the least memory; None is none in nodes of 8 with a layer or more to a stage.
    `fullest` is the part of the memory in use on the fullest GPU.
    """

    gpu: GpuType
    num_gpus: int | None
    layout: Layout | None
    micro_batch_size: int
    recompute: Recompute
    fullest: float | None
    num_gpus_as_given: int | None


def holdings(
    workload: Workload, gpus: Sequence[GpuType], limits: Limits | None = None
) -> tuple[Holding, ...]:
    """Return for each type able to train in the job's precision the fewest GPUs that hold the
    model; types with the fewest GPUs come first.

    Raises:
        UsageError: the job itself cannot be planned.
    """
    found = []
    for gpu in gpus:
        if can_train(workload.training, gpu):
            problem = make_problem(_node_of(gpu, limits or Limits()), workload)
            found.append(_holding(gpu, problem))
    return tuple(
        sorted(found, key=lambda h: (h.num_gpus is None, h.num_gpus or 0, h.gpu.memory_bytes))
    )


def plan_that_fits(cluster: Cluster, workload: Workload) -> str | None:
    """Return the layout of some plan that a cluster holds, however slow; None where none was found.

    Raises:
        UsageError: the job itself cannot be planned.
    """
    problem = make_problem(cluster, workload)
    board = search(problem, None, (FirstFit(),))
    if board.best is None:
        tuned = StructureSearch(SearchLimits(moves=False))
        board = search(problem, None, (*default_strategies(), FirstFit(), tuned))
    return None if board.best is None else layout_text(board.best.placement)


def _node_of(gpu: GpuType, limits: Limits) -> Cluster:
    node = Node("node", gpu, SERVER_GPUS, "main", "node", _LINK)
    # Limits on groups, depth and memory hold for any machine; others name nodes of a cluster.
    kept = Limits(
        max_tensor_parallel=limits.max_tensor_parallel,
        max_pipeline_parallel=limits.max_pipeline_parallel,
        memory_reserve_bytes=limits.memory_reserve_bytes,
        as_given=limits.as_given,
    )
    return Cluster((node,), {}, kept)


def _holding(gpu: GpuType, problem: Problem) -> Holding:
    (size, recompute), least = least_settings(problem), with_least_settings(problem)
    fewest, given = _fewest(least), _fewest(problem)
    as_given = None if given is None else given.num_devices
    if fewest is None:
        return Holding(gpu, None, None, size, recompute, None, as_given)
    stages = fewest.replicas[0].stages
    parts = []
    # [stage] -> part of its memory in use, the reserve left out.
    for place, stage in enumerate(stages):
        memory = _memory(least, stage.tensor_parallel, place, len(stages))
        used = memory.peak_bytes(stage.num_layers) - memory.base["reserve"]
        parts.append(used / memory.capacity_bytes)
    return Holding(gpu, fewest.num_devices, fewest, size, recompute, max(parts), as_given)


def _fewest(problem: Problem) -> Layout | None:
    """Return the pipeline of the fewest GPUs; of as many, that of the narrowest groups."""
    node = problem.nodes[0]
    found = [
        Layout((ReplicaShape(stages, problem.num_micro_batches),))
        for width in problem.widths[node.name]
        if (stages := _shortest(problem, width)) is not None
    ]
    return min(found, key=lambda layout: layout.num_devices, default=None)


def _shortest(problem: Problem, width: int) -> tuple[StageShape, ...] | None:
    """Return the fewest stages of equal width for all layers, dealt out as evenly as memory
    allows."""
    for num_stages in range(1, problem.max_stages() + 1):
        places = range(num_stages)
        most = [_memory(problem, width, place, num_stages).max_layers for place in places]
        if min(most) < 1 and num_stages > 1:
            return None  # more stages keep more micro-batches on the first
        if min(most) >= 1 and sum(most) >= problem.num_layers:
            return tuple(StageShape(width, n) for n in _dealt(problem.num_layers, most))
    return None


def _memory(problem: Problem, width: int, place: int, num_stages: int) -> StageMemory:
    costs, node = problem.costs, problem.nodes[0]
    in_flight = min(num_stages - place, problem.num_micro_batches)
    first, last = place == 0, place == num_stages - 1
    rows = costs.vocab_rows([width])
    return costs.memory(node, width, first, last, in_flight, rows)


def _dealt(num_layers: int, most: Sequence[int]) -> list[int]:
    """Deal as evenly as the limits let it be."""
    level = [0] * len(most)
    for _ in range(num_layers):
        room = [i for i in range(len(most)) if level[i] < most[i]]
        level[min(room, key=lambda i: (level[i], -i))] += 1
    return level
