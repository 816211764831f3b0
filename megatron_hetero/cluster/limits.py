"""The limits of a cluster file, checked against its nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from megatron_hetero.cluster.references import References
from megatron_hetero.cluster.schema import LimitsSection
from megatron_hetero.cluster.spec import CHOICES, Limits

TENSOR_PARALLEL_CLASSES = ("nodes", "sites")
_DEVICE = re.compile(r"(?P<node>.+):(?P<index>[0-9]{1,4})", re.ASCII)


def resolve_limits(
    section: LimitsSection, num_gpus: Mapping[str, int], references: References
) -> Limits:
    """`Limits` of the file's section.

    Args:
        num_gpus: GPUs of each node.
    Raises:
        ClusterError: a limit names a node or GPU that is not there, or idles every GPU.
    """
    _check_idle(section.idle, num_gpus, references)
    for key, names in (("first_stage", section.first_stage), ("last_stage", section.last_stage)):
        for i, name in enumerate(names):
            references.check(["limits", key, i], "node", name, references.nodes)
    for i, name in enumerate(section.as_given):
        references.check(["limits", "as_given", i], "setting", name, CHOICES)
    return Limits(
        max_tensor_parallel=section.max_tensor_parallel,
        max_pipeline_parallel=section.max_pipeline_parallel,
        num_replicas=section.num_replicas,
        idle_devices=section.idle,
        first_stage_nodes=section.first_stage,
        last_stage_nodes=section.last_stage,
        no_tensor_parallel_across=_no_tensor_parallel_across(section, references),
        no_data_parallel_across_sites=section.no_data_parallel_across_sites,
        max_price_per_hour=section.max_price_per_hour,
        as_given=section.as_given,
        memory_reserve_bytes=section.memory_reserve,
    )


def _no_tensor_parallel_across(section: LimitsSection, references: References) -> tuple[str, ...]:
    forbidden = section.no_tensor_parallel_across
    known = (*TENSOR_PARALLEL_CLASSES, *references.nodes)
    for i, name in enumerate(forbidden):
        references.check(["limits", "no_tensor_parallel_across", i], "class or node", name, known)
    if forbidden and not set(forbidden) & set(TENSOR_PARALLEL_CLASSES):
        # Forbidding one node more does not allow the rest: only [] or [sites] does.
        return (*Limits().no_tensor_parallel_across, *forbidden)
    return forbidden


def _check_idle(idle: Sequence[str], num_gpus: Mapping[str, int], references: References) -> None:
    idle_devices: set[tuple[str, int]] = set()
    for i, name in enumerate(idle):
        keypath = ("limits", "idle", i)
        match = _DEVICE.fullmatch(name)
        node = match["node"] if match else name
        references.check(keypath, "node", node, references.nodes)
        count = num_gpus[node]
        indices = [int(match["index"])] if match else list(range(count))
        if indices[-1] >= count:
            last = f" to {node}:{count - 1}" if count > 1 else ""
            references.fail(keypath, f'there is no GPU "{name}"; there is {node}:0{last}')
        idle_devices.update((node, index) for index in indices)
    if len(idle_devices) == sum(num_gpus.values()):
        references.fail(["limits", "idle"], "every GPU is idle; leave at least one to train on")
