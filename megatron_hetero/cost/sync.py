"""Seconds of the gradient exchange between replicas, and between the stages of a tied embedding.

The planner's quick form of what `schedule.gradient_exchange` makes and the runtime does.  Every run
of layers with the same holders is one exchange: an all-reduce in a ring, or, with the distributed
optimizer, every part straight to its owner, and after the update the new weights in rings.  It
begins when its last holder's backward passes are done (with `--overlap-grad-reduce` a first stage
begins within its last one), and takes each of its paths in turn with all others that cross it; a
port of a stage inside its node is a path too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.buckets import (
    MAX_BUCKET_ELEMENTS,
    StageId,
    layer_tensors,
    num_rank_sets,
)
from megatron_hetero.cost.exchange_clock import BUFFERS_AT_ONCE, Flow, Path, Step, last_end_s
from megatron_hetero.cost.parameters import embedding_params, layer_params
from megatron_hetero.cost.placement import PlacedStage, Placement
from megatron_hetero.cost.ring import held_fraction, pass_latency_s, ring, ring_key
from megatron_hetero.cost.share import even_share
from megatron_hetero.model.spec import ModelSpec


@dataclass(frozen=True)
class SyncGroup:
    """Stages that hold the same parameters, and how many (unsharded).

    A backward pass completes them layer by layer, down to `first_layer`; what comes before the
    layers is complete with the first of them, what follows them has none.
    """

    holders: tuple[StageId, ...]
    num_params: int
    first_layer: int = 0
    num_layers: int = 0


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
    if not model.tied_embeddings:
        yield SyncGroup(last_stages, words, model.num_layers)
    yield from _layer_groups(placement, model)
    holders = last_stages if model.tied_embeddings else ()
    yield SyncGroup(tuple(sorted(set(first_stages + holders))), words)


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
        num_layers = end - first
        # Positions travel with the first layers, which the same stages hold.
        positions = 0 if first else embedding_params(model, 1, 0)
        size = num_layers * per_layer + positions
        yield SyncGroup(tuple(enumerate(stage_of)), size, first, num_layers)


def groups_of(placement: Placement, holders: Sequence[StageId]) -> list[PlacedStage]:
    """The tensor-parallel groups of some stages: each holds all that its stage holds."""
    return [group for r, s in holders for group in placement.replicas[r].stages[s].groups]


@dataclass(frozen=True)
class _Prices:
    """An exchange over some holders: seconds for each byte on each path, and latency, of gradients
    and of new weights.  A port is named by its group's place in the ring."""

    gradients: Flow
    weights: Flow | None
    num_rank_sets: int


@dataclass(frozen=True)
class GroupTime:
    """One set of holders: its parameters, buckets, and what it loads on its paths."""

    group: SyncGroup
    bucket_share: float
    """Of its parameters, in each bucket but the last."""
    buffers: Mapping[StageId, int]
    """Those that a bucket takes of a rank of each holder; empty where it needs none."""
    gradients: Flow
    weights: Flow | None

    @property
    def path_s(self) -> Mapping[tuple[str, str], float]:
        """Seconds for which it takes each path between two nodes in a step."""
        found: dict[tuple[str, str], float] = {}
        for flow in (self.gradients, self.weights):
            for path, seconds in flow.paths if flow else ():
                if isinstance(path[0], str) and isinstance(path[1], str):
                    nodes = path[0], path[1]
                    found[nodes] = found.get(nodes, 0.0) + seconds
        return found


@dataclass(frozen=True)
class StageEnd:
    """When a stage's last backward pass ends, and of that pass the seconds within which gradients
    are exchanged as they become complete (0: all after it)."""

    end_s: float
    backward_s: float = 0.0


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
        self._prices: dict[tuple[object, ...], _Prices] = {}

    def groups(self, placement: Placement, vocab_rows: int) -> tuple[GroupTime, ...]:
        """Every exchange of a step, in the order in which all stages run them."""
        found = []
        for group in sync_groups(placement, self._model, vocab_rows):
            stages = sorted(
                groups_of(placement, group.holders),
                key=lambda stage: ring_key(self._cluster, stage.devices[0]),
            )
            prices = self._priced(stages)
            sets = prices.num_rank_sets
            buffers: Mapping[StageId, int] = {}
            if self._weight_bytes is not None:
                buffers = buffers_of(placement, group.holders, sets)
            share = 1.0
            if group.num_layers:
                share = min(1.0, mean_bucket_params(self._model, sets) / group.num_params)
            gradients = prices.gradients.of(stages, group.num_params * self._gradient_bytes)
            weights = None
            if prices.weights is not None and self._weight_bytes is not None:
                weights = prices.weights.of(stages, group.num_params * self._weight_bytes)
            found.append(GroupTime(group, share, buffers, gradients, weights))
        return tuple(found)

    def exposed_s(
        self,
        placement: Placement,
        vocab_rows: int,
        ends: Mapping[StageId, StageEnd],
        pipelines_s: float,
    ) -> float:
        """Seconds from the end of all pipelines to the last reduced gradient, and those of the new
        weights after the update."""
        groups = self.groups(placement, vocab_rows)
        steps = []
        for timed in groups:
            group = timed.group
            end = group.first_layer + group.num_layers
            first = max(group.first_layer, end - ceil(timed.bucket_share * group.num_layers))
            steps.append(
                Step(
                    group.holders,
                    timed.gradients,
                    max(self._ready_s(placement, h, ends[h], first) for h in group.holders),
                    max(
                        self._ready_s(placement, h, ends[h], group.first_layer)
                        for h in group.holders
                    ),
                    timed.bucket_share,
                    timed.buffers,
                )
            )
        exposed_s = max(0.0, last_end_s(steps) - pipelines_s)
        gathers = [
            Step(g.group.holders, g.weights, 0.0, 0.0, g.bucket_share, g.buffers)
            for g in groups
            if g.weights is not None
        ]
        return exposed_s + last_end_s(gathers)

    @staticmethod
    def _ready_s(placement: Placement, holder: StageId, end: StageEnd, layer: int) -> float:
        """When a holder has the gradients down to `layer`."""
        if not end.backward_s:
            return end.end_s
        r, s = holder
        replica = placement.replicas[r]
        below = layer - replica.first_layers[s]
        return end.end_s - end.backward_s * below / replica.stages[s].num_layers

    def alone_s(self, placement: Placement, vocab_rows: int) -> float:
        """Seconds of the exchange by itself, all stages ready at once."""
        ends = {
            (r, s): StageEnd(0.0)
            for r, replica in enumerate(placement.replicas)
            for s in range(len(replica.stages))
        }
        return self.exposed_s(placement, vocab_rows, ends, 0.0)

    def _priced(self, stages: Sequence[PlacedStage]) -> _Prices:
        """Of holders in the order of their ring."""
        key = tuple((s.devices[0].node, s.width, s.shares) for s in stages)
        if key not in self._prices:
            self._prices[key] = self._price(stages)
        return self._prices[key]

    def _price(self, stages: Sequence[PlacedStage]) -> _Prices:
        hops = ring(self._cluster, self._model, stages)
        around: list[tuple[Path, float]] = []
        for place, hop in enumerate(hops):
            if hop.nodes[0] != hop.nodes[1]:
                around.append((hop.nodes, hop.s_per_byte))
            else:
                around.append(((place, "out"), hop.s_per_byte))
                around.append((((place + 1) % len(hops), "in"), hop.s_per_byte))
        once = Flow(_summed(around), pass_latency_s(hops))
        if self._weight_bytes is None:
            twice = tuple((path, 2 * seconds) for path, seconds in once.paths)
            return _Prices(Flow(twice, 2 * once.latency_s), None, num_rank_sets(list(stages)))
        return _Prices(self._to_owners(stages), once, num_rank_sets(list(stages)))

    def _to_owners(self, stages: Sequence[PlacedStage]) -> Flow:
        """Every holder sends every other one its n-th."""
        num = len(stages)
        members: dict[str, list[int]] = {}
        for place, stage in enumerate(stages):
            members.setdefault(stage.devices[0].node, []).append(place)
        loads: list[tuple[Path, float]] = []
        latency_s = 0.0
        for here, own in members.items():
            link = self._cluster.node_by_name[here].link
            if len(own) > 1:
                latency_s = max(latency_s, link.latency_s)
                largest = max(held_fraction(self._model, stages[place]) for place in own)
                port_s = (len(own) - 1) / num * largest / link.bytes_per_s
                loads += [((place, way), port_s) for place in own for way in ("out", "in")]
            for there, others in members.items():
                if here != there:
                    path = self._cluster.node_links[here, there]
                    latency_s = max(latency_s, path.latency_s)
                    seconds = len(own) * len(others) / num / path.bytes_per_s
                    loads.append(((here, there), seconds))
        return Flow(tuple(loads), latency_s)


def _summed(loads: Sequence[tuple[Path, float]]) -> tuple[tuple[Path, float], ...]:
    found: dict[Path, float] = {}
    for path, seconds in loads:
        found[path] = found.get(path, 0.0) + seconds
    return tuple(found.items())


def buffers_of(placement: Placement, holders: Sequence[StageId], sets: int) -> dict[StageId, int]:
    """Of the buffers that a rank of each holder has, those that a divided bucket of stages takes: a
    rank of a narrow stage is in several buckets of ranks for each."""
    found = {}
    for r, s in holders:
        narrowest = min(group.width for group in placement.replicas[r].stages[s].groups)
        found[r, s] = min(BUFFERS_AT_ONCE, -(-sets // narrowest))
    return found


@lru_cache(maxsize=256)
def mean_bucket_params(model: ModelSpec, sets: int) -> float:
    """Parameters of a bucket (`cost.buckets`) in a long run of layers: whole tensors, as many as
    find room."""
    limit = MAX_BUCKET_ELEMENTS * sets
    size = total = num_full = 0
    while num_full < _BUCKETS_FOR_MEAN:
        for tensor in layer_tensors(model):
            if size and size + tensor > limit:
                total, num_full, size = total + size, num_full + 1, 0
            size += tensor
    return total / num_full


_BUCKETS_FOR_MEAN = 16
