"""The groups of a job on a described cluster: ranks in the order of sites, types and nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.memory.libraries import kept_free, memory_kind
from megatron_hetero.cost.work.compute import can_train
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import InfeasiblePlanError, UnsupportedError
from megatron_hetero.model.spec import Workload
from megatron_hetero.sequences.price.modelled import EVERY, Exchange, ShareRule, modelled_prices
from megatron_hetero.sequences.price.token_rates import TokenRates, token_rates
from megatron_hetero.sequences.tree import GroupTree, Nest, make_tree, nested, ranks_of


@dataclass(frozen=True)
class ClusterGroups:
    """The groups, the GPU of each rank, and what each type of GPU takes for tokens."""

    tree: GroupTree
    devices: tuple[Device, ...]
    rates: tuple[TokenRates, ...]


def cluster_groups(
    cluster: Cluster,
    workload: Workload,
    profile: Profile | None = None,
    *,
    window: int | None = None,
    rule: ShareRule = "balanced",
    only_alike: bool = False,
    exchanges: Sequence[Exchange] = EVERY,
) -> ClusterGroups:
    """Make the groups of a job that has every usable GPU as a data-parallel rank.

    Ranks follow sites, in a site types of GPU, of a type nodes, so that groups are as fast inside
    as can be.

    Args:
        cluster: GPUs and links.
        workload: model and training.
        profile: measured times.
        window: keys that a query sees at most; None is all before it.
        rule: of the shares of unlike GPUs in a group.
        only_alike: no group has unlike GPUs.
        exchanges: as in `modelled_prices`.
    Raises:
        InfeasiblePlanError: a GPU cannot hold the model beside its optimizer.
        UnsupportedError: no GPU can train in the job's precision.
    """
    refuse_models(workload)
    # Usable GPUs in a nest of sites, types and nodes.
    usable = _usable(cluster, workload)
    nest, devices = _nest(cluster, usable)
    # Rates of one GPU of each kind; nodes of one kind share them.
    nodes = {memory_kind(n): n for n in (cluster.node_by_name[d.node] for d in devices)}
    by_kind = {
        kind: token_rates(
            workload, node.gpu_type, len(devices), kept_free(cluster, node, 1, 0, profile), profile
        )
        for kind, node in nodes.items()
    }
    rates = {n.name: by_kind[memory_kind(n)] for n in cluster.nodes if memory_kind(n) in by_kind}
    # Refuse a GPU that cannot hold the model and a token.
    for found in by_kind.values():
        if found.room_bytes <= found.token_bytes:
            missing = (found.token_bytes - found.room_bytes) / (1 << 30)
            raise InfeasiblePlanError(
                f"{found.gpu_name} cannot hold the whole model beside its gradients and optimizer: "
                f"{missing:.1f} GiB are missing. Groups of sequences have no tensor or pipeline "
                "parallelism; use --use-distributed-optimizer, a smaller model, or "
                "`megatron-hetero plan` with a fixed --seq-length."
            )

    # Prices of the groups so far, by name: most groups of a cluster are alike.
    priced: dict[object, tuple] = {}  # type: ignore[type-arg]

    def prices_of(ranks: tuple[int, ...]) -> tuple[object, tuple]:  # type: ignore[type-arg]
        # The name of a group has all that its prices come from, so that equal names are priced
        # alike.
        own = [devices[r] for r in ranks]
        of = [rates[d.node] for d in own]
        # Nodes count by their order in the group: groups on other nodes of the same kind are equal.
        places = {node: i for i, node in enumerate(dict.fromkeys(d.node for d in own))}
        # Sorted by text, because links have no order of their own.
        links = sorted(
            {
                (places[a.node], places[b.node], cluster.link(a, b))
                for a in own
                for b in own
                if a != b
            },
            key=str,
        )
        # Lines that node pairs share, as the capacities that slow an exchange over them.
        lines = tuple(
            (places[a], places[b], tuple(line.bytes_per_s for line in cluster.lines(a, b)))
            for a in places
            for b in places
            if a != b
        )
        name = (tuple((r, places[d.node]) for r, d in zip(of, own, strict=True)),
                tuple(links), lines)  # fmt: skip
        # A kind of group without a price is never used.
        if only_alike and len({r.gpu_name for r in of}) > 1:
            return name, ()
        if name not in priced:
            priced[name] = modelled_prices(
                workload, cluster, own, of, window, rule, exchanges=exchanges
            )
        return name, priced[name]

    tree = make_tree(nest, prices_of)
    return ClusterGroups(tree, devices, tuple(rates[d.node] for d in devices))


def refuse_models(workload: Workload) -> None:
    """Refuse models whose sequences are not priced yet, by name (`UnsupportedError`)."""
    model = workload.model
    names = {
        "--multi-latent-attention": bool(model.kv_lora_rank),
        "--moe-layer-freq": bool(model.moe_layer_freq),
    }
    for name, is_set in names.items():
        if is_set:
            raise UnsupportedError(
                f"{name}: what its sequences cost on groups of GPUs is not modelled yet; "
                "`megatron-hetero plan` with a fixed --seq-length plans it"
            )


def _usable(cluster: Cluster, workload: Workload) -> list[Device]:
    # Limits may name single devices or whole nodes.
    idle = set(cluster.limits.idle_devices)
    found = [
        d
        for d in cluster.devices
        if d.name not in idle
        and d.node not in idle
        and (cluster.library is None or cluster.gpu_type(d).library == cluster.library)
        and can_train(workload.training, cluster.gpu_type(d))
    ]
    if not found:
        raise UnsupportedError(
            f"no GPU of {cluster.source or 'the cluster'} can train in "
            f"{workload.training.precision}"
        )
    return found


def _nest(cluster: Cluster, usable: Sequence[Device]) -> tuple[Nest, tuple[Device, ...]]:
    """Nest GPUs in nodes, nodes of a type in a site, types, sites; each level by halves."""
    order: list[Device] = []
    sites: list[Nest] = []
    for site in dict.fromkeys(cluster.node_by_name[d.node].site for d in usable):
        here = [d for d in usable if cluster.node_by_name[d.node].site == site]
        kinds: list[Nest] = []
        for name in dict.fromkeys(cluster.gpu_type(d).name for d in here):
            nodes: list[Nest] = []
            alike = [d for d in here if cluster.gpu_type(d).name == name]
            # Ranks are numbered in the order in which GPUs join the nest.
            for node in dict.fromkeys(d.node for d in alike):
                own = [d for d in alike if d.node == node]
                ranks: list[Nest] = list(range(len(order), len(order) + len(own)))
                order += own
                nodes.append(nested(ranks))
            kinds.append(nested(nodes))
        sites.append(nested(kinds))
    nest = nested(sites)
    if len(ranks_of(nest)) != len(order):
        raise RuntimeError("a GPU is in the nest twice")
    return nest, tuple(order)
