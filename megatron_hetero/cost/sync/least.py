"""Lower bounds of a gradient exchange, whatever the placement; the bound of a step uses them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.parameters import layer_params
from megatron_hetero.cost.share import even_share
from megatron_hetero.model.spec import ModelSpec


@dataclass(frozen=True)
class LeastSync:
    """Least seconds of the all-reduce of a stage's parts."""

    layer_s: float
    embedding_s: float
    head_s: float


NO_SYNC = LeastSync(0.0, 0.0, 0.0)


def least_sync(
    cluster: Cluster,
    model: ModelSpec,
    node: Node,
    width: int,
    num_replicas: int,
    gradient_bytes: int,
) -> LeastSync:
    """Bound the all-reduce of a stage of `width` GPUs of a node from below, in any placement of
    `num_replicas` replicas or more.

    Each layer's gradients leave the stage on one path: to a group of its node over links of its
    GPUs, or to another node.  Layers with unlike holders may leave on unlike paths at a time, so
    all paths together carry them.

    Args:
        node: the stage's.
        width: its GPUs.
        num_replicas: of the placement, at least.
        gradient_bytes: of one element on its way.
    """
    # A single replica exchanges nothing.
    if num_replicas < 2:
        return NO_SYNC
    # All paths that leave the stage: neighbours' links, and the node's way out.
    leaving_bytes_per_s = 0.0
    if node.num_gpus > width:
        leaving_bytes_per_s += width * node.link.bytes_per_s
    fastest = cluster.link_summary.fastest_bytes_per_s
    if fastest:
        leaving_bytes_per_s += min((len(cluster.nodes) - 1) * fastest, node.uplink_bytes_per_s)
    per_byte_s = 1 / leaving_bytes_per_s if leaving_bytes_per_s else 0.0
    # Least part that leaves in an all-reduce, over all these paths together.
    per_param_s = 2 * (num_replicas - 1) / num_replicas * gradient_bytes * per_byte_s
    # The vocabulary is not padded in a bound; either end holds all its rows.
    words = model.vocab_size * model.hidden_size
    ends_s = words * per_param_s
    return LeastSync(layer_params(model, even_share(model, 1)) * per_param_s, ends_s, ends_s)


@dataclass(frozen=True)
class Cut:
    """The links between parts of a cluster: the fastest of them, the bandwidth of all that leave
    one part together (of the part that has most), and the least latency of any."""

    fastest_bytes_per_s: float
    all_bytes_per_s: float
    latency_s: float


def least_ends_sync_s(
    num_params: int, num_holders: int, cut: Cut, gradient_bytes: int, weight_bytes: float | None
) -> float:
    """Bound the exchange of parameters, and of their new weights, from below where `num_holders`
    holders or more are on both sides of a cut.

    A ring leaves each part on one path; to owners, what the others hold leaves it on all.

    Args:
        weight_bytes: of an element of the new weights on average, 0 where passes hide them; None is
            an all-reduce.
    """
    # Parameters that have to cross the cut, at least.
    others = num_params * (num_holders - 1) / num_holders
    ring_s = others / cut.fastest_bytes_per_s
    if weight_bytes is None:
        return 2 * (gradient_bytes * ring_s + cut.latency_s)
    owners_s = others * gradient_bytes / cut.all_bytes_per_s
    return owners_s + weight_bytes * ring_s + (2 if weight_bytes else 1) * cut.latency_s
