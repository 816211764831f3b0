"""The limits of a cluster file, checked against its nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from megatron_hetero.cluster.file.islands import Island
from megatron_hetero.cluster.file.references import References
from megatron_hetero.cluster.file.schema import LimitsSection
from megatron_hetero.cluster.limits import CHOICES, Limits

TENSOR_PARALLEL_CLASSES = ("nodes", "sites")
_DEVICE = re.compile(r"(?P<node>.+):(?P<index>[0-9]{1,4})", re.ASCII)


def resolve_limits(
    section: LimitsSection, islands: Sequence[Island], references: References
) -> Limits:
    """Build the `Limits` of the file's section; a machine that it names stands for all of its
    islands.

    Args:
        islands: of all machines.
    Raises:
        ClusterError: a limit names a node or GPU that is not there, or idles every GPU.
    """
    # Names in limits must be there.
    # Machine -> its GPUs, all islands together.
    num_gpus = {island.section.name: island.section.num_cards for island in islands}
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
        first_stage_nodes=_island_names(section.first_stage, islands),
        last_stage_nodes=_island_names(section.last_stage, islands),
        no_tensor_parallel_across=_island_names(
            _no_tensor_parallel_across(section, references), islands
        ),
        no_data_parallel_across_sites=section.no_data_parallel_across_sites,
        max_price_per_hour=section.max_price_per_hour,
        as_given=section.as_given,
        library=section.library,
        memory_reserve_bytes=section.memory_reserve,
    )


def _island_names(names: Sequence[str], islands: Sequence[Island]) -> tuple[str, ...]:
    """Replace a machine of several islands by their names."""
    found: list[str] = []
    for name in names:
        # A name that is no machine is a class such as "nodes", and stays.
        found += [i.name for i in islands if i.section.name == name] or [name]
    return tuple(found)


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
        # "box:3" is one GPU, "box" all of the machine.
        match = _DEVICE.fullmatch(name)
        node = match["node"] if match else name
        references.check(keypath, "node", node, references.nodes)
        count = num_gpus[node]
        indices = [int(match["index"])] if match else list(range(count))
        # Indices count from 0 up to the machine's last GPU.
        if indices[-1] >= count:
            last = f" to {node}:{count - 1}" if count > 1 else ""
            references.fail(keypath, f'there is no GPU "{name}"; there is {node}:0{last}')
        idle_devices.update((node, index) for index in indices)
    if len(idle_devices) == sum(num_gpus.values()):
        references.fail(["limits", "idle"], "every GPU is idle; leave at least one to train on")
