"""Classes of GPUs that are alike.  The bound knows a cluster only by these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cost.choices import may_choose
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.widths import uneven_widths, usable_gpus


@dataclass
class GpuClass:
    """GPUs of equal kind in any place; only the neighbours differ."""

    nodes: list[Node]
    widths: tuple[int, ...]
    num_gpus: int

    @property
    def node(self) -> Node:
        """The first node of the class."""
        return self.nodes[0]

    @property
    def likeness(self) -> tuple[object, ...]:
        """What prices of a group depend on: equal for classes that differ in their places alone."""
        gpu = self.node.gpu_type
        return gpu.name, gpu.memory_bytes, self.node.num_gpus, self.node.link


def gpu_classes(
    costs: CostModel, apart: Literal["", "site", "node"] = "", uneven: bool = False
) -> list[GpuClass]:
    """Return all GPUs that may be used, by class.

    Args:
        apart: GPUs of two sites, or two nodes, are of two classes.
        uneven: with widths that do not divide the model.
    """
    found: dict[tuple[object, ...], GpuClass] = {}
    # By name: the first node stands for its class, whatever the order of the file.
    for node in sorted(costs.cluster.nodes, key=lambda node: node.name):
        num_gpus = len(usable_gpus(costs.cluster, node))
        widths = tuple(w for w in group_widths(costs, node, uneven) if w <= num_gpus)
        # The limits may leave a node without any GPU.
        if not widths:
            continue
        where = {"": None, "site": node.site, "node": node.name}[apart]
        own = GpuClass([node], widths, num_gpus)
        key = (*own.likeness, widths, where)
        known = found.setdefault(key, own)
        if known is not own:
            known.num_gpus += num_gpus
            known.nodes.append(node)
    return list(found.values())


def group_widths(costs: CostModel, node: Node, uneven: bool) -> tuple[int, ...]:
    """Return possible widths of groups inside a node, ascending; if `uneven`, including widths that
    do not divide the model."""
    even = costs.widths(node)
    if not (uneven and may_choose(costs, "shares")):
        return even
    return tuple(sorted({*even, *uneven_widths(costs.cluster, costs.workload, node)}))
