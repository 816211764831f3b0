"""Links of the GPUs of a stage among themselves, and with those who hold experts for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Device, Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.choices import ExpertGroups
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.network.experts import ExpertLinks, expert_links
from megatron_hetero.cost.network.seconds import groups_of, slowest_link, worst_link
from megatron_hetero.cost.share import TensorShare
from megatron_hetero.cost.work.pieces import PieceTimes, price_pieces
from megatron_hetero.hashed import hashed_once
from megatron_hetero.planner.replica_shapes import Likeness


@hashed_once
@dataclass(frozen=True)
class StageLinks:
    """The properties of a stage's GPUs that decide the times of its passes under given settings.

    Attributes:
        kinds: of its GPUs (`Likeness.node`), ascending, and of those among whom its experts are
            dealt out.
        link: the slowest of its tensor-parallel groups.
        context: the slowest among GPUs with other parts of a sequence; None without such.
        experts: None where each stage has all experts.
        nodes: a node of each kind.
    """

    kinds: tuple[int, ...]
    link: Link
    context: Link | None
    experts: ExpertLinks | None
    nodes: tuple[Node, ...] = field(compare=False)

    def pieces(self, costs: CostModel, share: TensorShare | None, width: int) -> PieceTimes:
        """Time the model's pieces on the stage, as `UnitPrices.stage_pieces` times them.

        Args:
            costs: the price list.
            share: contents of each GPU; None for a plain equal part.
            width: of the tensor-parallel groups.
        """
        rows = costs.vocab_rows([width])
        if share is None:
            return costs.pieces(self.nodes[0], width, rows)
        gpus = [node.gpu_type for node in self.nodes]
        costs = costs.on(gpus)
        members = tuple((gpu, share) for gpu in gpus)
        given = costs.workload, costs.profile, members, self.link, rows
        return price_pieces(*given, self.context, self.experts)


def stage_links(
    cluster: Cluster,
    likeness: Likeness,
    width: int,
    devices: Sequence[Device],
    block: Sequence[Device],
    groups: ExpertGroups | None,
) -> StageLinks:
    """Return the links of a stage.

    Args:
        cluster: with the nodes.
        likeness: tells kinds of GPUs.
        width: of the tensor-parallel groups.
        devices: the stage's own, in rank order.
        block: the devices of all groups of experts that the stage's own are in; its own without.
        groups: sizes of the groups of experts; None where each stage has all experts.
    """
    link = worst_link([slowest_link(cluster, group) for group in groups_of(devices, width)])
    context = None
    # GPUs with the same part of the weights pass keys and values round.
    if len(devices) > width:
        rings = [devices[i::width] for i in range(width)]
        # GPUs of a group lie on one node: without network cards of their own all rings are alike.
        rings = rings if cluster.has_nics else rings[:1]
        context = worst_link([slowest_link(cluster, ring) for ring in rings])
    found = None if groups is None else expert_links(cluster, block, *groups)
    kinds = {likeness.node(device.node): cluster.node_by_name[device.node] for device in block}
    numbers = tuple(sorted(kinds))
    return StageLinks(numbers, link, context, found, tuple(kinds[n] for n in numbers))
