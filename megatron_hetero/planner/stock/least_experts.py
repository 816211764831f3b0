"""The least exchange of experts that a kind of GPU can have, however its group lies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import numpy as np

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.network.experts import ExpertLinks


@dataclass(frozen=True)
class KindLinks:
    """The best links of the nodes of a kind.

    Attributes:
        node: one of them; all are alike.
        most: GPUs of a node that a group may have at most.
        num_nics: network cards of the node.
        between: as good as each link to another node in every respect; None where there is none.
    """

    node: Node
    most: int
    num_nics: int
    between: Link | None

    @classmethod
    def of(cls, cluster: Cluster, node: Node, most: int) -> KindLinks:
        """Return the links of a node in a cluster."""
        if cluster.has_nics:
            others = [other for other in cluster.nodes if other.name != node.name]
            links = [cluster.link(a, b.devices[0]) for b in others for a in node.devices]
        else:
            # Few unlike links, however many nodes there are.
            classes = cluster.link_classes
            own = classes.node_number[node.name]
            kinds = np.unique(np.delete(classes.of_pairs[own], own))
            links = [classes.links[kind] for kind in kinds.tolist()]
        num_nics = len({cluster.nic_of(device) for device in node.devices})
        if not links:
            return cls(node, most, num_nics, None)
        # Rings may have rates of their own; what a rank adds takes no time here.
        rates = [link.bytes_per_s for link in links]
        rates += [rate for link in links for _, rate in link.group_bytes_per_s]
        best = Link(max(rates), min(link.latency_s for link in links))
        return cls(node, most, num_nics, best)


def least_expert_links(
    kind: KindLinks, stage_width: int, size: int, width: int
) -> Iterator[ExpertLinks]:
    """Yield links of which one is no slower than those of any group with GPUs of the kind.

    A node of the kind holds some GPUs of the group.  What these
    send to the rest leaves over the node's network cards, and a GPU's part for the others of the
    node over its own port (`cost.network.experts.expert_links`): the slower of both counts, for the
    number of GPUs with which that is the least.

    Args:
        stage_width: of the tensor-parallel groups.
        size, width: of the group of experts, as in `ExpertLinks`.
    """
    whole, inside, between = size * width, kind.node.link, kind.between
    width_link = inside if width > 1 else None
    least = _least_s_per_byte(kind, stage_width, size, width)
    # Inside a node, or over the network, which no group escapes that is larger than a node.
    if whole <= kind.most:
        link = inside if whole > 1 else None
        yield ExpertLinks(size, width, least, inside.latency_s, link, width_link)
    if between is not None:
        yield ExpertLinks(size, width, least, between.latency_s, between, width_link)


def _least_s_per_byte(kind: KindLinks, stage_width: int, size: int, width: int) -> float:
    """Return the seconds of an all-to-all for each byte on a rank."""
    whole, between = size * width, kind.between
    found = []
    # A group of experts and tensor-parallel groups may cut each other.
    step = gcd(stage_width, whole)
    for own in range(step, min(whole, kind.most) + 1, step):
        # Ranks with the same part of every expert exchange tokens: so many lie on this node.
        alike = own / width
        port_s = (alike - 1) / size / kind.node.link.bytes_per_s
        if own == whole:
            found.append(port_s)
        elif between is not None:
            card_s = own * (size - alike) / size / min(kind.num_nics, own) / between.bytes_per_s
            found.append(max(port_s, card_s))
    return min(found, default=0.0)
