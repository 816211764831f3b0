"""When nothing fits: which GPU lacks how much, and the smallest change that is known to help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_hetero.cluster.spec import Cluster, Limits, Node
from megatron_hetero.errors import HeteroError, InfeasiblePlanError
from megatron_hetero.model.spec import TrainingSpec
from megatron_hetero.planner.constructive import Constructive
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.run import search
from megatron_hetero.planner.scoreboard import Candidate, Scoreboard
from megatron_hetero.planner.strategy import Strategy
from megatron_hetero.planner.symmetric import Symmetric
from megatron_hetero.units import format_bytes

_MAX_NODE_FACTOR = 16


def infeasible_error(problem: Problem, board: Scoreboard) -> InfeasiblePlanError:
    """The error to raise.  Every relaxation it names was planned with, and fits."""
    sentences = [_shortage(problem, board.nearest_miss)]
    relaxation = find_relaxation(problem)
    if relaxation:
        sentences.append(f"Smallest relaxation that fits (planned and checked): {relaxation}.")
    else:
        sentences.append(
            "None of the relaxations tried fits (fp16, recompute, sequence parallelism, smaller "
            f"micro-batches, wider TP, fewer limits, up to {_MAX_NODE_FACTOR} times the GPUs of "
            "one type): use a smaller model or other GPUs."
        )
    return InfeasiblePlanError(" ".join(sentences))


def find_relaxation(problem: Problem) -> str | None:
    """The first of `relaxations` with which a plan fits."""
    strategies: tuple[Strategy, ...] = (Symmetric(), Constructive(max_work=2000))
    for words, cluster, training in relaxations(problem):
        workload = replace(problem.workload, training=training)
        try:
            relaxed = make_problem(cluster, workload, problem.costs.profile)
        except HeteroError:
            continue  # this change is not a valid job; the next one may be
        if search(relaxed, None, strategies).best is not None:
            return words
    return None


def relaxations(problem: Problem) -> Iterator[tuple[str, Cluster, TrainingSpec]]:
    """Changes from cheap to dear: flags first, then limits, then hardware."""
    cluster, training = problem.cluster, problem.workload.training
    flags = list(_flag_changes(training))
    for words, changed in flags:
        yield words, cluster, changed
    both_words, both = flags[-1] if flags else ("", training)
    joined = f"{both_words} and " if both_words else ""
    for words, limits in _limit_changes(cluster.limits):
        yield words, replace(cluster, limits=limits), training
        if flags:
            yield joined + words, replace(cluster, limits=limits), both
    for factor in (2, 4, 8, _MAX_NODE_FACTOR):
        for node in _largest_nodes(problem):
            more = _with_copies(cluster, node, factor - 1)
            num_gpus = (factor - 1) * node.num_gpus
            words = f"{num_gpus} more {node.gpu_type.name}, linked as on {node.name}"
            yield words, more, training
            if flags:
                yield joined + words, more, both


def _flag_changes(training: TrainingSpec) -> Iterator[tuple[str, TrainingSpec]]:
    """Single changes of the job's flags, then all of them together."""
    smallest = replace(training, micro_batch_size=1)
    if training.precision == "bf16":  # what GPUs before Ampere lack
        yield "--fp16 instead of --bf16", replace(training, precision="fp16")
    if training.recompute == "none":
        yield "--recompute-granularity selective", replace(training, recompute="selective")
    if training.recompute != "full":
        yield (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            replace(training, recompute="full"),
        )
    if not training.sequence_parallel:
        yield "--sequence-parallel", replace(training, sequence_parallel=True)
    size = training.micro_batch_size // 2
    while size:
        if training.micro_batch_size % size == 0:
            yield f"--micro-batch-size {size}", replace(training, micro_batch_size=size)
        size //= 2
    combined = replace(smallest, recompute="full")
    if combined != training:
        words = (
            f"--micro-batch-size 1 with --recompute-granularity full --recompute-method uniform "
            f"--recompute-num-layers 1 (now {training.micro_batch_size} and {training.recompute})"
        )
        yield words, combined
        if not training.sequence_parallel:
            yield words + " and --sequence-parallel", replace(combined, sequence_parallel=True)


def _limit_changes(limits: Limits) -> Iterator[tuple[str, Limits]]:
    if limits.max_tensor_parallel is not None:
        width = limits.max_tensor_parallel
        for wider in (width * 2, width * 4, width * 8):
            yield (
                f"limits.max_tensor_parallel {wider} instead of {width}",
                replace(limits, max_tensor_parallel=wider),
            )
    if limits.max_pipeline_parallel is not None:
        yield (
            f"no limits.max_pipeline_parallel (now {limits.max_pipeline_parallel})",
            replace(limits, max_pipeline_parallel=None),
        )
    if limits.num_replicas is not None and limits.num_replicas > 1:
        yield "limits.num_replicas 1", replace(limits, num_replicas=1)
    if limits.idle_devices:
        yield "no limits.idle", replace(limits, idle_devices=())
    if limits.first_stage_nodes or limits.last_stage_nodes:
        yield (
            "no limits.first_stage and limits.last_stage",
            replace(limits, first_stage_nodes=(), last_stage_nodes=()),
        )


def _largest_nodes(problem: Problem) -> list[Node]:
    """For each usable GPU type, its largest node; larger memory first."""
    by_type: dict[str, Node] = {}
    for node in problem.nodes:
        held = by_type.get(node.gpu_type.name)
        if held is None or node.num_gpus > held.num_gpus:
            by_type[node.gpu_type.name] = node
    return sorted(by_type.values(), key=lambda n: (-n.gpu_type.memory_bytes, n.name))


def _with_copies(cluster: Cluster, node: Node, count: int) -> Cluster:
    """The cluster with `count` more nodes like `node`; copies are joined as nodes are elsewhere:
    by the slowest link that `node` has, or its own inside link when it is alone."""
    links = dict(cluster.node_links)
    nodes = list(cluster.nodes)
    own = [link for (a, _), link in sorted(links.items()) if a == node.name]
    slowest = min(own, key=lambda link: link.bytes_per_s) if own else node.link
    for index in range(count):
        copy = replace(node, name=f"{node.name}-more-{index}", host=f"{node.host}-more-{index}")
        for other in nodes:
            known = other.name != node.name and (node.name, other.name) in links
            links[copy.name, other.name] = links[node.name, other.name] if known else slowest
            links[other.name, copy.name] = links[other.name, node.name] if known else slowest
        nodes.append(copy)
    return replace(cluster, nodes=tuple(nodes), node_links=links)


def _shortage(problem: Problem, miss: Candidate | None) -> str:
    """What the attempt that came closest lacks."""
    training = problem.workload.training
    if miss is None:
        if not problem.nodes:
            return (
                f"No plan fits: no GPU of the cluster can be used (in {training.precision}, "
                "under its limits)."
            )
        return (
            "No plan fits: the limits, the number of layers and the number of micro-batches "
            f"({problem.num_layers}, {problem.num_micro_batches}) leave no arrangement of "
            f"{problem.num_gpus} GPUs."
        )
    r, s = max(
        (
            (r, s)
            for r, replica in enumerate(miss.cost.replicas)
            for s in range(len(replica.stages))
        ),
        key=lambda place: miss.cost.replicas[place[0]].stages[place[1]].missing_bytes,
    )
    stage, cost = miss.placement.replicas[r].stages[s], miss.cost.replicas[r].stages[s]
    node = problem.cluster.node_by_name[stage.devices[0].node]
    parts = cost.memory.parts_bytes(stage.num_layers)
    largest = max(sorted(parts), key=lambda part: parts[part])
    return (
        f"No plan fits: in the attempt that came closest, stage {s} of replica {r} "
        f"({stage.num_layers} layers on {stage.width}x {node.gpu_type.name}, {node.name}) needs "
        f"{format_bytes(cost.missing_bytes)} ({cost.missing_bytes} bytes) more on each GPU than "
        f"its {format_bytes(cost.memory.capacity_bytes)}, at micro-batch "
        f"{training.micro_batch_size}; most goes to {largest} ({format_bytes(parts[largest])})."
    )
