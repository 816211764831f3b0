"""The communication library of a plan's machines."""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.makers import DEFAULT_LIBRARY, Library, library_of_name
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import ClusterError
from megatron_hetero.plan.plan import Host, Plan


def library_of(host: Host) -> Library:
    """Return the library of a host of a plan: the one it names, else that of its type of GPU.

    A plan whose hosts show none is refused (`plan.checks`), so that the default stands for nothing
    there.
    """
    return host.library or library_shown(host) or DEFAULT_LIBRARY


def kept_to_plan(cluster: Cluster, plan: Plan) -> Cluster:
    """Return the cluster, kept to GPUs of the plan's library, with which alone another plan can be
    compared; unchanged if there is none."""
    library = library_of(plan.hosts[0]) if plan.hosts else None
    has_some = any(node.gpu_type.library == library for node in cluster.nodes)
    return replace(cluster, kept_to=library) if has_some else cluster


def library_shown(host: Host) -> Library | None:
    """Return the library that the catalogue, or the name, shows of a host's types of GPU; None
    where the maker is not known."""
    names = dict.fromkeys(host.type_by_device.values())
    return next((library for name in names if (library := _usual(name)) is not None), None)


def stated(gpu: GpuType) -> Library | None:
    """Return the library that a host with this GPU has to state; None if the GPU's name implies
    it."""
    return None if gpu.library == _usual(gpu.name) else gpu.library


def _usual(name: str) -> Library | None:
    try:
        return gpu_type(name).library
    except ClusterError:
        return library_of_name(name)
