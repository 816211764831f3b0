"""Data parallelism kept inside sites (`limits.no_data_parallel_across_sites`)."""

from __future__ import annotations

from megatron_hetero.cost.placement import Placement
from megatron_hetero.planner.problem import Problem


def sites_are_apart(problem: Problem, placement: Placement) -> bool:
    """Return whether all holders of each layer are on a single site, if the limits keep data
    parallelism inside sites."""
    if not problem.cluster.limits.no_data_parallel_across_sites:
        return True
    nodes = problem.cluster.node_by_name
    # Layer -> the site of its first holder, which all other holders have to be on.
    site_of_layer: dict[int, str] = {}
    for replica in placement.replicas:
        for first, stage in zip(replica.first_layers, replica.stages, strict=True):
            # The first device of each group stands for the group.
            sites = {nodes[device.node].site for device in stage.devices[:: stage.width]}
            for layer in range(first, first + stage.num_layers):
                if sites != {site_of_layer.setdefault(layer, min(sites))}:
                    return False
    return True
