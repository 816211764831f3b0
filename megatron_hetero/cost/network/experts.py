"""Exchange of tokens among the ranks of a group of experts, by stock Megatron's dispatchers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.network.collectives import all_gather_s, reduce_scatter_s
from megatron_hetero.cost.network.seconds import slowest_link, worst_link
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.model.training import TrainingSpec


@dataclass(frozen=True)
class ExpertLinks:
    """Prices of exchanges over the links of a group of experts.

    `size` groups of experts, each on `width` ranks that divide every expert.  An all-to-all of one
    byte on each rank, spread evenly over the experts, takes `all_to_all_s_per_byte`, beside
    `latency_s`.  `link` is the slowest of all ranks, `width_link` of those that divide an expert.
    """

    size: int
    width: int
    all_to_all_s_per_byte: float
    latency_s: float
    link: Link | None
    width_link: Link | None

    def pass_s(self, model: ModelSpec, training: TrainingSpec, own_tokens: int) -> float:
        """Return the seconds of a pass of one layer: tokens to their experts and back.

        Gathered (`--moe-token-dispatcher-type allgather`), all tokens are on all ranks and what
        experts give is summed; all-to-all, each token goes to its own experts alone, and is
        gathered among the ranks that divide these.

        Args:
            own_tokens: of a micro-batch, on each rank.
        """
        token_bytes = float(model.hidden_size * training.element_bytes)
        if training.token_dispatcher == "allgather":
            return _there_and_back_s(own_tokens * token_bytes, self.size * self.width, self.link)
        # Each token goes to `topk` experts, there and back, and what pads them for fp8.
        padded = model.num_experts * training.padded_rows if training.pads_routing else 0.0
        routed_bytes = (own_tokens * model.moe_router_topk + padded) * token_bytes
        one_way_s = self.latency_s + routed_bytes * self.all_to_all_s_per_byte
        return 2 * one_way_s + _there_and_back_s(routed_bytes, self.width, self.width_link)


def links_in_group(link: Link, width: int, *, is_dealt: bool) -> ExpertLinks:
    """Return the links of experts that lie on one tensor-parallel group: dealt out whole to its
    ranks, or each divided by all of them.

    Args:
        link: the slowest inside the group.
        width: of the group.
        is_dealt: experts are whole.
    """
    size, divisor = (width, 1) if is_dealt else (1, width)
    others = (size - 1) / size
    latency_s = link.latency_s if others else 0.0
    return ExpertLinks(size, divisor, others / link.bytes_per_s, latency_s, link, link)


def _there_and_back_s(rank_bytes: float, num_ranks: int, link: Link | None) -> float:
    """Time an all-gather and a reduce-scatter of what each rank has."""
    if link is None:
        return 0.0
    # What all ranks have together: the collective's whole buffer.
    whole = num_ranks * rank_bytes
    return all_gather_s(whole, num_ranks, link) + reduce_scatter_s(whole, num_ranks, link)


def expert_links(cluster: Cluster, devices: Sequence[Device], size: int, width: int) -> ExpertLinks:
    """Return the links of the slowest of some groups of experts.

    A GPU sends to those of its own node on a port of its own.  What leaves a node, or comes to it,
    shares its NIC with all ranks that have the same one.

    Args:
        devices: of whole groups, one after the other, in rank order.
        size, width: of each group, as in `ExpertLinks`.
    """
    # Whole groups of experts, and the narrow groups that divide one expert.
    whole = size * width
    groups = [devices[first : first + whole] for first in range(0, len(devices), whole)]
    narrow = [g[i : i + width] for g in groups for i in range(0, whole, width)]
    # Seconds for each byte on a rank, by port of a GPU and by direction of a NIC.
    loads: dict[tuple[str, str], float] = {}
    latency_s = 0.0
    # Load ports and NICs by the pairs of ranks that exchange tokens.
    for group in groups:
        kinds: dict[tuple[str, str], list[int]] = {}
        for index, device in enumerate(group):
            kinds.setdefault((device.node, cluster.nic_of(device)), []).append(index)
        # GPUs behind the same NIC are alike.
        for (node, nic), own in kinds.items():
            for (there, other_nic), others in kinds.items():
                sender, receiver = group[own[0]], group[others[0]]
                # A GPU does not send to itself: any two of the kind tell the link.
                if node == there and nic == other_nic:
                    receiver = group[others[-1]]
                pairs = _num_pairs(own, others, width)
                if not pairs:
                    continue
                link = cluster.path(sender, receiver)
                latency_s = max(latency_s, link.latency_s)
                if node == there:
                    # Each GPU has a port of its own, and sends one part to each of the others.
                    each = pairs / len(own) / size / link.bytes_per_s
                    for index in own:
                        key = "port", group[index].name
                        loads[key] = loads.get(key, 0.0) + each
                    continue
                # Between nodes the NICs of both ends are taken, by all pairs behind them together.
                link = cluster.link(sender, receiver)
                for key in (("out", nic), ("in", other_nic)):
                    loads[key] = loads.get(key, 0.0) + pairs / size / link.bytes_per_s
    # The busiest port or NIC decides.
    return ExpertLinks(
        size,
        width,
        max(loads.values(), default=0.0),
        latency_s,
        _slowest(cluster, groups, whole),
        _slowest(cluster, narrow, width),
    )


def _num_pairs(own: Sequence[int], others: Sequence[int], width: int) -> int:
    """Count the pairs of different ranks, one from each list, with the same part of every expert.
    """
    # Ranks of the other list by the part of an expert that they hold.
    counts: dict[int, int] = {}
    for index in others:
        counts[index % width] = counts.get(index % width, 0) + 1
    known = set(others)
    return sum(counts.get(index % width, 0) - (index in known) for index in own)


def _slowest(cluster: Cluster, groups: Sequence[Sequence[Device]], size: int) -> Link | None:
    if size == 1:
        return None
    return worst_link([slowest_link(cluster, group) for group in groups])
