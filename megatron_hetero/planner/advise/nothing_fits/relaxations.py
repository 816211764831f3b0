"""Changes of a job and its cluster, the cheapest first: settings, then limits, then GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.names import machine_of
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.choices import may_choose
from megatron_hetero.cost.work.compute import can_train, peak_flops_per_s
from megatron_hetero.model.training import TrainingSpec
from megatron_hetero.planner.advise.capacity import MoreGpus
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.restrictions.mixture import MIXED

FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

SERVER_GPUS = 8
"""GPUs of a server, connected by the links of a node."""


@dataclass(frozen=True)
class Settings:
    """The job with `num_changes` of its flags changed; `words` are the flags."""

    words: str
    training: TrainingSpec
    num_changes: int


def settings_changes(problem: Problem) -> list[Settings]:
    """Return the unchanged job and all combinations of changes that plans may not choose by
    themselves, fewest first; of as many, a smaller micro-batch before sequence parallelism,
    recompute and precision, each by as little as possible."""
    cluster, training = problem.cluster, problem.workload.training
    size = training.micro_batch_size
    menus: list[list[tuple[str, dict[str, object]]]] = [
        [
            (f"--micro-batch-size {part} instead of {size}", {"micro_batch_size": part})
            for part in range(size - 1, 0, -1)
            if size % part == 0 and not may_choose(problem.costs, "micro_batch_size")
        ],
        []
        if training.sequence_parallel
        else [("--sequence-parallel", {"sequence_parallel": True})],
        [] if may_choose(problem.costs, "recompute") else _recompute_changes(training),
        _precision_changes(cluster, training),
        [("no --fp8-format", {"fp8": False})] if training.fp8 else [],
    ]
    ranked = []
    # -1 is no change from a menu.
    for choice in product(*(range(-1, len(menu)) for menu in menus)):
        chosen = [(m, option) for m, option in enumerate(choice) if option >= 0]
        words = " and ".join(menus[m][option][0] for m, option in chosen)
        changed = training
        for m, option in chosen:
            changed = replace(changed, **menus[m][option][1])  # type: ignore[arg-type]
        # Sorted by number of changes, then by menus and by places in them.
        ranked.append((len(chosen), chosen, Settings(words, changed, len(chosen))))
    return [settings for *_, settings in sorted(ranked, key=lambda entry: entry[:2])]


def _recompute_changes(training: TrainingSpec) -> list[tuple[str, dict[str, object]]]:
    changes: list[tuple[str, dict[str, object]]] = []
    if training.recompute == "none":
        changes.append(("--recompute-granularity selective", {"recompute": "selective"}))
    if training.recompute != "full":
        changes.append((FULL_RECOMPUTE, {"recompute": "full"}))
    return changes


def _precision_changes(
    cluster: Cluster, training: TrainingSpec
) -> list[tuple[str, dict[str, object]]]:
    """Return fp16 for the whole job and, where some GPUs have bf16, for stages on the others."""
    if training.precision != "bf16" or training.mixes_precisions:
        return []
    types = [node.gpu_type for node in cluster.nodes]
    lacking = [t for t in types if peak_flops_per_s(t, "bf16") is None]
    changes: list[tuple[str, dict[str, object]]] = []
    if any(peak_flops_per_s(gpu, "fp16") is not None for gpu in lacking):
        changes.append(("--fp16 instead of --bf16", {"precision": "fp16"}))
    if 0 < len(lacking) < len(types):
        changes.append((MIXED, {"mixes_precisions": True}))
    return changes


def limit_changes(cluster: Cluster) -> Iterator[tuple[str, Limits]]:
    """Yield every limit relaxed by itself, then every two of them."""
    singles = list(_single_limit_changes(cluster))
    for words, relax in singles:
        yield words, relax(cluster.limits)
    for (words, relax), (other_words, other_relax) in combinations(singles, 2):
        once = relax(cluster.limits)
        if other_relax(once) not in (once, other_relax(cluster.limits)):  # not of one limit
            yield f"{words} and {other_words}", other_relax(once)


def _single_limit_changes(cluster: Cluster) -> Iterator[tuple[str, Callable[[Limits], Limits]]]:
    limits = cluster.limits
    # Wider groups, deeper pipelines, fewer replicas.
    width = limits.max_tensor_parallel
    if width is not None:
        for wider in range(width + 1, max(node.num_gpus for node in cluster.nodes) + 1):
            yield (
                f"limits.max_tensor_parallel {wider} instead of {width}",
                lambda old, wider=wider: replace(old, max_tensor_parallel=wider),  # type: ignore[misc]
            )
    if limits.max_pipeline_parallel is not None:
        yield (
            f"no limits.max_pipeline_parallel (now {limits.max_pipeline_parallel})",
            lambda old: replace(old, max_pipeline_parallel=None),
        )
    if limits.num_replicas is not None:
        for fewer in range(limits.num_replicas - 1, 0, -1):
            yield (
                f"limits.num_replicas {fewer} instead of {limits.num_replicas}",
                lambda old, fewer=fewer: replace(old, num_replicas=fewer),  # type: ignore[misc]
            )
    # Idle devices, and nodes for the ends.
    if limits.idle_devices:
        yield "no limits.idle", lambda old: replace(old, idle_devices=())
    if limits.first_stage_nodes or limits.last_stage_nodes:
        yield (
            "no limits.first_stage and limits.last_stage",
            lambda old: replace(old, first_stage_nodes=(), last_stage_nodes=()),
        )
    # Groups across nodes that are forbidden so far.
    names = [n for n in limits.no_tensor_parallel_across if n in cluster.node_by_name]
    if names:
        yield (
            f"limits.no_tensor_parallel_across without {', '.join(names)}",
            lambda old: replace(
                old,
                no_tensor_parallel_across=tuple(
                    n for n in old.no_tensor_parallel_across if n not in names
                ),
            ),
        )


def nodes_to_copy(nodes: Sequence[Node], training: TrainingSpec) -> list[Node]:
    """Return the largest node of each GPU type with support for the training precision; larger
    memory first."""
    by_type: dict[str, Node] = {}
    for node in nodes:
        held = by_type.get(node.gpu_type.name)
        if can_train(training, node.gpu_type) and (held is None or node.num_gpus > held.num_gpus):
            by_type[node.gpu_type.name] = node
    return sorted(by_type.values(), key=lambda n: (-n.gpu_type.memory_bytes, n.name))


def larger_nodes(nodes: Sequence[Node], training: TrainingSpec) -> list[Node]:
    """Return `nodes_to_copy` with as many GPUs as servers have, where theirs have fewer."""
    return [
        replace(node, num_gpus=SERVER_GPUS)
        for node in nodes_to_copy(nodes, training)
        if node.num_gpus < SERVER_GPUS
    ]


def with_more(cluster: Cluster, more: MoreGpus) -> Cluster:
    """Return the cluster with more GPUs.  Added nodes are joined as nodes are elsewhere: by the
    slowest link that the node they copy has, or its own inside link when it is alone."""
    node = more.node
    links, nodes = dict(cluster.node_links), list(cluster.nodes)
    own = [
        link
        for (a, b), link in sorted(links.items())
        if a == node.name and machine_of(b) != node.machine
    ]
    slowest = min(own, key=lambda link: link.bytes_per_s) if own else node.link
    sizes = [node.num_gpus] * more.num_full_nodes + [more.num_left_over] * (more.num_left_over > 0)
    for index, num_gpus in enumerate(sizes):
        copy = replace(
            node,
            name=f"{node.machine}-more-{index}",
            host=f"{node.host}-more-{index}",
            num_gpus=num_gpus,
            gpu_indices=(),
        )
        # A copy has the links of the node it copies, as far as there are any.
        for other in nodes:
            known = other.machine != node.machine and (node.name, other.name) in links
            links[copy.name, other.name] = links[node.name, other.name] if known else slowest
            links[other.name, copy.name] = links[other.name, node.name] if known else slowest
        nodes.append(copy)
    return replace(cluster, nodes=tuple(nodes), node_links=links)


def more_words(cluster: Cluster, more: MoreGpus) -> str:
    """Return `5 more RTX-3090: 2 more machines like a (2x RTX-3090 each) and one with 1x RTX-3090`;
    in larger ones than those of the cluster `12 more L40S: in machines of 8, linked as machine a
    is`."""
    node, full, left_over = more.node, more.num_full_nodes, more.num_left_over
    if node.num_gpus != cluster.node_by_name[node.name].num_gpus:
        where = f"in machines of {node.num_gpus}" if full else "in one machine"
        linked = f"linked as machine {node.machine} is"
        return f"{more.num_gpus} more {node.gpu_type.name}: {where}, {linked}"
    parts = []
    if full:
        plural = "machine" if full == 1 else "machines"
        each = "" if full == 1 else " each"
        kind = f"{node.num_gpus}x {node.gpu_type.name}{each}"
        parts.append(f"{full} more {plural} like {node.machine} ({kind})")
    if left_over:
        noun = "one more machine" if full == 0 else "one"
        parts.append(f"{noun} with {left_over}x {node.gpu_type.name}")
    linked = "" if full else f", linked as machine {node.machine} is"
    return f"{more.num_gpus} more {node.gpu_type.name}: {' and '.join(parts)}{linked}"
