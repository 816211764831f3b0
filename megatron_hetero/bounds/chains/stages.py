"""Every option to make a stage of equal GPUs, with the least time and exchange.

This is the first part of the lower bound for pipelines that may launch ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from megatron_hetero.bounds.chains.kinds import GpuClass
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cost.choices import may_choose, recomputes
from megatron_hetero.cost.memory.stage import update_traffic_bytes, with_some_layers_recomputed
from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.network.seconds import BoundaryTime
from megatron_hetero.cost.placement import Recompute
from megatron_hetero.cost.work.gradient_sums import update_time_s

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PLACES = ((False, False), (False, True), (True, False), (True, True))
"""Pairs (is first, is last) of a stage; a place's index is 2 * first + last."""
FEW_IN_FLIGHT = 6
MANY_IN_FLIGHT = 24
"""More micro-batches in flight count as so many: quickly, and as near as it goes."""


@dataclass(frozen=True)
class ChainStageOptions:
    """All options; a kind is a group of `width` GPUs of class `gpu_class`, arrays begin with it."""

    gpu_class: Ints
    width: Ints
    time_s: Floats
    """Least seconds of a micro-batch in such a stage, [kind, place, micro-batches in flight - 1,
    layers]; infinite where memory does not allow it, whatever is recomputed."""
    rate_s: Floats
    """The same for a single sequence."""
    update_s: Floats
    """Least update, once a step, [kind, place, layers]."""
    sync_s: Floats
    """Least exchange between the last backward pass and the end of a step, [kind, place, layers]"""
    trip_s: Floats
    """There and back over a boundary, [kind, kind behind]; infinite where there is none."""
    send_rate_s: Floats
    """Seconds that a sequence keeps the link busy, [kind, kind behind]."""
    least_size: int
    most_size: int
    """Sequences of a micro-batch."""

    @property
    def max_in_flight(self) -> int:
        """More micro-batches in flight count as so many."""
        return int(self.time_s.shape[2])


class StageOptionMaker:
    """Options of a job and the job's GPU classes, for any micro-batch sizes and numbers of
    replicas."""

    def __init__(self, classes: Sequence[GpuClass], max_in_flight: int = FEW_IN_FLIGHT) -> None:
        self.classes = classes
        self.max_in_flight = max_in_flight
        self.kinds = [(i, c, w) for i, c in enumerate(classes) for w in c.widths]
        self._of_size: dict[tuple[int, StateHolders], ChainStageOptions] = {}
        self._syncs: dict[int, Floats] = {}

    def options(
        self, sizes: Sequence[CostModel], num_replicas: tuple[int, int]
    ) -> ChainStageOptions:
        """Return the least prices over micro-batches of these sizes, in plans with between
        `num_replicas[0]` and `num_replicas[1]` replicas; stages may have any allowed recompute."""
        fewest, most = num_replicas
        found = [self._options(_least_states(costs, most)) for costs in sizes]
        # What is exchanged depends on the number of replicas, not on the micro-batch.
        if fewest not in self._syncs:
            self._syncs[fewest] = np.array(
                [
                    [_syncs_s(sizes[0], c, width, fewest, *ends) for ends in PLACES]
                    for _, c, width in self.kinds
                ]
            )

        def least(arrays: Iterable[Floats]) -> Floats:
            smallest: Floats = np.minimum.reduce(list(arrays))
            return smallest

        return ChainStageOptions(
            found[0].gpu_class,
            found[0].width,
            least(options.time_s for options in found),
            least(options.rate_s for options in found),
            least(options.update_s for options in found),
            self._syncs[fewest],
            least(options.trip_s for options in found),
            least(options.send_rate_s for options in found),
            min(options.least_size for options in found),
            max(options.most_size for options in found),
        )

    def _options(self, costs: CostModel) -> ChainStageOptions:
        """Price one micro-batch size; what is exchanged is left out."""
        size = costs.workload.training.micro_batch_size
        key = (size, costs.holders)
        if key not in self._of_size:
            times, updates = [], []
            # Classes of like GPUs in unlike places share their prices.
            known: dict[tuple[object, ...], tuple[list[list[list[float]]], list[list[float]]]] = {}
            for _, c, width in self.kinds:
                like = *c.likeness, width
                if like not in known:
                    known[like] = (
                        [_times_s(costs, c.node, width, *e, self.max_in_flight) for e in PLACES],
                        [_updates_s(costs, c.node, width, *ends) for ends in PLACES],
                    )
                of_places, updates_of_places = known[like]
                times.append(of_places)
                updates.append(updates_of_places)
            # A boundary costs what the nearest groups of its classes pay.
            crossings = _Crossings(costs, self.classes)
            pairs = np.array(
                [
                    [crossings.least((a, width), (b, other)) for b, _, other in self.kinds]
                    for a, _, width in self.kinds
                ]
            )
            self._of_size[key] = ChainStageOptions(
                np.array([i for i, _, _ in self.kinds], np.int64),
                np.array([width for _, _, width in self.kinds], np.int64),
                np.array(times),
                np.array(times) / size,
                np.array(updates),
                np.zeros(0),
                pairs[:, :, 0],
                # A missing link is told by its infinite trip; its rate counts as 0.
                np.where(np.isfinite(pairs[:, :, 1]), pairs[:, :, 1], 0.0) / size,
                size,
                size,
            )
        return self._of_size[key]


def _least_states(costs: CostModel, most: int) -> CostModel:
    """Return prices with the fewest optimizer states possible for a stage, with `most` replicas."""
    if not costs.workload.training.use_distributed_optimizer:
        return costs
    # With shares free to choose, a stage may keep no states of its own at all.
    if may_choose(costs, "optimizer_share"):
        return costs.variant(holders=StateHolders(inf, inf))
    return costs.sharded_among(most)


def _times_s(
    costs: CostModel, node: Node, width: int, first: bool, last: bool, max_in_flight: int
) -> list[list[float]]:
    """[micro-batches in flight - 1][layers], the least over all kinds of recompute that fit."""
    # Seconds by recompute and layers; memory decides which of them count.
    num_layers, rows = costs.workload.model.num_layers, costs.workload.model.vocab_size
    variants: dict[Recompute, CostModel] = {
        r: costs.variant(recompute=r) for r in recomputes(costs)
    }
    pieces = {r: v.pieces(node, width, rows) for r, v in variants.items()}
    times_s = {
        r: [p.stage(layers, first, last).total_s for layers in range(num_layers + 1)]
        for r, p in pieces.items()
    }
    found: list[list[float]] = []
    # Whole recompute or none, by the layers that fit of each kind.
    known: dict[tuple[int, ...], list[float]] = {}
    # From the most micro-batches in flight down: fewer in flight leave more memory.
    for in_flight in range(max_in_flight, 0, -1):
        memories = {
            r: v.memory(node, width, first, last, in_flight, rows) for r, v in variants.items()
        }
        fitting = tuple([min(memory.max_layers, num_layers) for memory in memories.values()])
        if fitting not in known:
            known[fitting] = _least_of_fitting(list(times_s.values()), fitting)
        least = known[fitting]
        if min(fitting) == num_layers:
            found += [least] * in_flight  # with fewer in flight all fits, too
            break
        # In between: as few layers recomputed as make it fit.
        if len(variants) > 1:
            kept, recomputed = memories["none"], memories["full"]
            of_none = with_some_layers_recomputed(kept, recomputed, 0)
            some_recomputed = with_some_layers_recomputed(kept, recomputed, 1)
            least = list(least)
            # Bytes that recomputing one layer frees.
            saved = of_none.base_bytes - some_recomputed.base_bytes
            for layers in range(max(1, kept.max_layers + 1), num_layers + 1):
                missing = of_none.training_bytes(layers) - kept.capacity_bytes
                never = of_none.updating_bytes(layers) > kept.capacity_bytes
                # A further layer adds more than its recompute frees: none fits after the first that
                # does not.
                if saved <= 0 or never or missing > layers * saved:
                    break
                # The fewest recomputed layers whose freed bytes cover what is missing.
                some = max(1, -(-missing // saved))
                time_s = times_s["full"][some]
                time_s += pieces["none"].layer.times(layers - some).total_s
                least[layers] = min(least[layers], time_s)
        found.append(least)
    return found[::-1]


def _least_of_fitting(times_s: Sequence[Sequence[float]], fitting: Sequence[int]) -> list[float]:
    """Return the least seconds by layers, of those kinds of recompute that fit.

    Args:
        times_s: [recompute][layers].
        fitting: most layers that fit, [recompute]; negative where not even the ends fit.
    """
    least = [inf] * len(times_s[0])
    for of_kind_s, most in zip(times_s, fitting, strict=True):
        for layers in range(1, most + 1):
            least[layers] = min(least[layers], of_kind_s[layers])
    return least


def _updates_s(costs: CostModel, node: Node, width: int, first: bool, last: bool) -> list[float]:
    """[layers]."""
    num_layers, rows = costs.workload.model.num_layers, costs.workload.model.vocab_size
    memory = costs.memory(node, width, first, last, 1, rows)
    # Linear in layers: two points say everything.
    training = costs.workload.training
    some, more = (
        update_time_s(update_traffic_bytes(memory, n, costs.holders, training), node.gpu_type)
        for n in (0, 1)
    )
    return [some + layers * (more - some) for layers in range(num_layers + 1)]


def _syncs_s(
    costs: CostModel, gpu_class: GpuClass, width: int, fewest: int, first: bool, last: bool
) -> list[float]:
    """[layers]."""
    sync = min(
        (costs.least_sync(node, width, fewest) for node in gpu_class.nodes),
        key=lambda sync: sync.layer_s,
    )
    # A stage that is both ends holds tied words once.
    has_head = last and not (first and costs.workload.model.tied_embeddings)
    ends_s = sync.embedding_s * first + sync.head_s * has_head
    num_layers = costs.workload.model.num_layers
    return [ends_s + layers * sync.layer_s for layers in range(num_layers + 1)]


class _Crossings:
    """The least boundary between groups of two classes."""

    def __init__(self, costs: CostModel, classes: Sequence[GpuClass]) -> None:
        free = costs.cluster.without_nics
        is_free = free is costs.cluster
        # Which GPUs a group has, and so how many NICs, is not known here.
        self._costs = costs if is_free else type(costs)(free, costs.workload, costs.profile)
        self._classes = classes
        self._pairs: dict[tuple[int, int], list[tuple[str, str]]] = {}

    def least(self, sender: tuple[int, int], receiver: tuple[int, int]) -> tuple[float, float]:
        """Return (seconds there and back, busy seconds of the link in the busier direction), each
        the least possible; a group is (class, width)."""
        found: list[tuple[BoundaryTime, BoundaryTime]] = []
        nodes = self._costs.cluster.node_by_name
        for a, b in self._node_pairs(sender[0], receiver[0]):
            one, other = nodes[a].devices[: sender[1]], nodes[b].devices[: receiver[1]]
            found.append((self._costs.hop(one, other), self._costs.hop(other, one)))
        # Groups of one node need GPUs for both of them on it.
        total = sender[1] + receiver[1]
        node = self._classes[sender[0]].node
        if sender[0] == receiver[0] and total <= node.num_gpus:
            devices = node.devices[:total]
            one, other = devices[: sender[1]], devices[sender[1] :]
            found.append((self._costs.hop(one, other), self._costs.hop(other, one)))
        return (
            min((there.total_s + back.total_s for there, back in found), default=inf),
            min((max(h.serialisation_s for h in pair) for pair in found), default=inf),
        )

    def _node_pairs(self, one: int, other: int) -> list[tuple[str, str]]:
        """Return a pair of different nodes for each kind of link between the classes."""
        if (one, other) not in self._pairs:
            links = self._costs.cluster.node_links
            kinds: dict[object, tuple[str, str]] = {}
            # Nodes of a class differ only in their links, and equal links give equal boundaries.
            for a in self._classes[one].nodes:
                for b in self._classes[other].nodes:
                    pair = (a.name, b.name)
                    if pair in links:
                        kinds.setdefault((links[pair], links[b.name, a.name]), pair)
            self._pairs[one, other] = list(kinds.values())
        return self._pairs[one, other]
