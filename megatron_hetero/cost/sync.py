"""Seconds of the gradient exchange between replicas, and between the stages of a tied embedding.

Every run of layers with the same holders is exchanged by itself, as the runtime does: an all-reduce
in a ring, or, with the distributed optimizer, every part straight to its owner and the new weights
back in rings.  A stage exchanges as soon as its own last backward pass is done, deep layers first;
with `--overlap-grad-reduce` the first stage, whose backward pass ends last, begins within it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_hetero.cluster.spec import Cluster, Device, Node
from megatron_hetero.cost.parameters import embedding_params, layer_params
from megatron_hetero.cost.placement import PlacedStage, Placement
from megatron_hetero.cost.share import even_share, largest_fraction, member_shares
from megatron_hetero.model.spec import ModelSpec

StageId = tuple[int, int]
"""(replica, stage)."""


@dataclass(frozen=True)
class SyncGroup:
    """Stages that hold the same parameters, as (replica, stage), and how many (unsharded)."""

    holders: tuple[tuple[int, int], ...]
    num_params: int


def sync_groups(placement: Placement, model: ModelSpec, vocab_rows: int) -> Iterator[SyncGroup]:
    """Parameters by their set of holders, in the order in which a backward pass finishes them:
    output layer, deep layers first, embedding.  What one tensor-parallel group holds alone needs no
    exchange."""
    for group in _groups(placement, model, vocab_rows):
        if sum(placement.replicas[r].stages[s].context_parallel for r, s in group.holders) > 1:
            yield group


def _groups(placement: Placement, model: ModelSpec, vocab_rows: int) -> Iterator[SyncGroup]:
    replicas = placement.replicas
    first_stages = tuple((r, 0) for r in range(len(replicas)))
    last_stages = tuple((r, len(replica.stages) - 1) for r, replica in enumerate(replicas))
    words = vocab_rows * model.hidden_size
    positions = embedding_params(model, 1, 0)
    if not model.tied_embeddings:
        yield SyncGroup(last_stages, words)
    yield from _layer_groups(placement, model)
    if model.tied_embeddings:
        yield SyncGroup(tuple(sorted(set(first_stages + last_stages))), words)
        if positions:
            yield SyncGroup(first_stages, positions)
    else:
        yield SyncGroup(first_stages, words + positions)


def _layer_groups(placement: Placement, model: ModelSpec) -> Iterator[SyncGroup]:
    """Runs of layers with the same holders, deepest first."""
    replicas = placement.replicas
    cuts = sorted({start for r in replicas for start in r.first_layers} | {model.num_layers})
    stage_of = [len(replica.stages) - 1 for replica in replicas]
    per_layer = layer_params(model, even_share(model, 1))
    for first, end in reversed(list(pairwise(cuts))):
        for r, replica in enumerate(replicas):
            while replica.first_layers[stage_of[r]] > first:
                stage_of[r] -= 1
        yield SyncGroup(tuple(enumerate(stage_of)), (end - first) * per_layer)


def groups_of(placement: Placement, holders: Sequence[StageId]) -> list[PlacedStage]:
    """The tensor-parallel groups of some stages: each holds all that its stage holds."""
    return [group for r, s in holders for group in placement.replicas[r].stages[s].groups]


@dataclass(frozen=True)
class Hop:
    """One step of a ring: seconds for each byte of the whole buffer, and the link's latency."""

    sender: PlacedStage
    receiver: PlacedStage
    s_per_byte: float
    latency_s: float

    @property
    def nodes(self) -> tuple[str, str]:
        """Where it leads."""
        return self.sender.devices[0].node, self.receiver.devices[0].node


def ring(cluster: Cluster, model: ModelSpec, stages: Sequence[PlacedStage]) -> tuple[Hop, ...]:
    """The ring over the holders of a buffer, for one pass in which (n - 1) / n of it crosses every
    hop (a reduce-scatter or an all-gather; an all-reduce is both).

    It visits sites, then nodes, one after the other, as NCCL's own search would.  Ranks of the
    tensor-parallel groups work side by side: inside a node on links of their own, between nodes on
    one card.
    """
    ordered = sorted(stages, key=lambda stage: ring_key(cluster, stage.devices[0]))
    share = (len(ordered) - 1) / len(ordered)
    hops = []
    for sender, receiver in zip(ordered, ordered[1:] + ordered[:1], strict=True):
        link = cluster.link(sender.devices[0], receiver.devices[0])
        part = share
        if sender.devices[0].node == receiver.devices[0].node:
            part *= max(held_fraction(model, sender), held_fraction(model, receiver))
        hops.append(Hop(sender, receiver, part / link.bytes_per_s, link.latency_s))
    return tuple(hops)


def pass_latency_s(hops: Sequence[Hop]) -> float:
    """One pass leads over every hop of the ring but one."""
    return sum(h.latency_s for h in hops) - min(h.latency_s for h in hops)


def ring_key(cluster: Cluster, device: Device) -> tuple[str, Device]:
    """Order of a ring: by site, node and place in it."""
    return cluster.node_by_name[device.node].site, device


def held_fraction(model: ModelSpec, stage: PlacedStage) -> float:
    """The largest part of a parameter that one member of a stage holds."""
    if stage.shares is None:
        return 1 / stage.width
    return largest_fraction(model, member_shares(model, stage.width, stage.shares))


@dataclass(frozen=True)
class _Exchange:
    """What an exchange over some holders takes: seconds for each byte of gradient and of weight,
    fixed seconds, and the load of the paths between nodes."""

    gradient_s_per_byte: float
    weight_s_per_byte: float
    latency_s: float
    path_s_per_byte: Mapping[tuple[str, str], tuple[float, float]]


@dataclass(frozen=True)
class GroupTime:
    """One set of holders: how long it takes, of that the seconds of its last layer, and what it
    loads on the paths between nodes."""

    holders: tuple[StageId, ...]
    seconds: float
    last_layer_s: float
    path_s: Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class StageEnd:
    """When a stage's last backward pass ends, and how much earlier it may begin to exchange."""

    end_s: float
    head_start_s: float


class GradientExchange:
    """Prices of one job's exchanges on one cluster, cached by the holders' nodes and widths.

    Args:
        gradient_bytes: of one element on its way.
        weight_bytes: of one element of the new weights, which the distributed optimizer gathers;
            None is an all-reduce.
    """

    def __init__(
        self, cluster: Cluster, model: ModelSpec, gradient_bytes: int, weight_bytes: int | None
    ) -> None:
        self._cluster = cluster
        self._model = model
        self._gradient_bytes = gradient_bytes
        self._weight_bytes = weight_bytes
        self._exchanges: dict[tuple[object, ...], _Exchange] = {}

    def groups(self, placement: Placement, vocab_rows: int) -> tuple[GroupTime, ...]:
        """Every exchange of a step, in the order in which all stages run them."""
        found = []
        per_layer = layer_params(self._model, even_share(self._model, 1))
        for group in sync_groups(placement, self._model, vocab_rows):
            stages = groups_of(placement, group.holders)
            exchange = self._exchange(stages)
            gradients = group.num_params * self._gradient_bytes
            weights = group.num_params * (self._weight_bytes or 0)
            busy_s = gradients * exchange.gradient_s_per_byte + weights * exchange.weight_s_per_byte
            num_layers = max(1, group.num_params // per_layer)
            found.append(
                GroupTime(
                    group.holders,
                    busy_s + exchange.latency_s,
                    busy_s / num_layers + exchange.latency_s,
                    {
                        path: gradients * there + weights * back
                        for path, (there, back) in exchange.path_s_per_byte.items()
                    },
                )
            )
        return tuple(found)

    def exposed_s(
        self,
        placement: Placement,
        vocab_rows: int,
        ends: Mapping[StageId, StageEnd],
        pipelines_s: float,
    ) -> float:
        """Seconds from the end of all pipelines to the last reduced gradient.

        A group begins when its last holder is ready and lasts as long as its slowest path; a path
        between two nodes carries all groups that cross it, one after the other.
        """
        clock = {stage: end.end_s - end.head_start_s for stage, end in ends.items()}
        path_s: dict[tuple[str, str], float] = {}
        path_begin_s: dict[tuple[str, str], float] = {}
        last_s = 0.0
        groups = self.groups(placement, vocab_rows)
        last_of = {holder: i for i, group in enumerate(groups) for holder in group.holders}
        for i, group in enumerate(groups):
            begin_s = max(clock[holder] for holder in group.holders)
            end_s = begin_s + group.seconds
            for holder in group.holders:
                # A stage's last gradients come last, whatever was exchanged before.
                if last_of[holder] == i:
                    end_s = max(end_s, ends[holder].end_s + group.last_layer_s)
            for holder in group.holders:
                clock[holder] = end_s
            for path, seconds in group.path_s.items():
                path_s[path] = path_s.get(path, 0.0) + seconds
                path_begin_s[path] = min(path_begin_s.get(path, begin_s), begin_s)
            last_s = max(last_s, end_s)
        last_s = max([last_s, *(path_begin_s[path] + s for path, s in path_s.items())])
        return max(0.0, last_s - pipelines_s)

    def alone_s(self, placement: Placement, vocab_rows: int) -> float:
        """Seconds of the exchange by itself, all stages ready at once."""
        ends = {
            (r, s): StageEnd(0.0, 0.0)
            for r, replica in enumerate(placement.replicas)
            for s in range(len(replica.stages))
        }
        return self.exposed_s(placement, vocab_rows, ends, 0.0)

    def _exchange(self, stages: Sequence[PlacedStage]) -> _Exchange:
        key = tuple(sorted((s.devices[0].node, s.width, s.shares or ()) for s in stages))
        if key not in self._exchanges:
            self._exchanges[key] = self._price(stages)
        return self._exchanges[key]

    def _price(self, stages: Sequence[PlacedStage]) -> _Exchange:
        hops = ring(self._cluster, self._model, stages)
        slowest = max(hop.s_per_byte for hop in hops)
        latency_s = pass_latency_s(hops)
        between: dict[tuple[str, str], float] = {}
        for hop in hops:
            if hop.nodes[0] != hop.nodes[1]:
                between[hop.nodes] = between.get(hop.nodes, 0.0) + hop.s_per_byte
        if self._weight_bytes is None:
            paths = {path: (2 * s, 0.0) for path, s in between.items()}
            return _Exchange(2 * slowest, 0.0, 2 * latency_s, paths)
        direct, to_owners = self._to_owners(stages)
        paths = {
            path: (to_owners.get(path, 0.0), between.get(path, 0.0))
            for path in {**to_owners, **between}
        }
        one_way_s = max(hop.latency_s for hop in hops)
        return _Exchange(direct, slowest, one_way_s + latency_s, paths)

    def _to_owners(
        self, stages: Sequence[PlacedStage]
    ) -> tuple[float, dict[tuple[str, str], float]]:
        """Every holder sends every other one its n-th: seconds for each byte of the buffer, on the
        busiest port or path and on each path between nodes."""
        num_of_node: dict[str, int] = {}
        largest_of_node: dict[str, float] = {}
        for stage in stages:
            node = stage.devices[0].node
            num_of_node[node] = num_of_node.get(node, 0) + 1
            largest_of_node[node] = max(
                largest_of_node.get(node, 0.0), held_fraction(self._model, stage)
            )
        num = len(stages)
        busiest = 0.0
        paths: dict[tuple[str, str], float] = {}
        for here, num_here in num_of_node.items():
            inside = self._cluster.node_by_name[here].link.bytes_per_s
            busiest = max(busiest, (num_here - 1) / num * largest_of_node[here] / inside)
            for there, num_there in num_of_node.items():
                if here != there:
                    link = self._cluster.node_links[here, there]
                    paths[here, there] = num_here * num_there / num / link.bytes_per_s
        return max([busiest, *paths.values()]), paths


@dataclass(frozen=True)
class LeastSync:
    """Seconds that the all-reduce of what a stage holds takes at least."""

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
    """The least all-reduce of a stage of `width` GPUs of a node, in any placement of so many
    replicas or more.

    A ring inside a node has a group of every replica there, one GPU wide at least, and goes out of
    the stage at the link's speed for each of its GPUs.  Any other ring leaves some node.
    """
    if num_replicas < 2:
        return NO_SYNC
    fastest = cluster.link_summary.fastest_bytes_per_s
    ways_s = [1 / fastest] if fastest else []
    if node.num_gpus >= width + num_replicas - 1:
        ways_s.append(1 / (width * node.link.bytes_per_s))
    per_byte_s = min(ways_s, default=0.0)
    per_param_s = 2 * (num_replicas - 1) / num_replicas * gradient_bytes * per_byte_s
    words = model.vocab_size * model.hidden_size
    ends_s = words * per_param_s
    return LeastSync(layer_params(model, even_share(model, 1)) * per_param_s, ends_s, ends_s)
