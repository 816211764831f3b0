"""Sailor's closed-form simulator (eth-easl/sailor at cf2c8e3), from its formulas and tables.

A Sailor pipeline is a list of stages, each with replicas in lockstep: the slowest one counts.  Our
replicas with equal layers become one such pipeline; where layers differ there are several, and the
gradient exchange between them is added.  Not modelled there: any overlap of computation and
communication, recomputation, launch counts, sequence parallelism, sharded optimizers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tools.referees.ring_order import slowest_neighbours
from tools.referees.sailor_tables import ELEMENT_BYTES, MEMORY_GIB, Endpoint, SailorTables

BUCKET_BYTES = 5e8
STATE_BYTES = 24
"""A parameter's optimizer 8, weight 4, extra copies 4, gradient 4, communication 4."""
WIDEST_IN_SYNC = 4


@dataclass(frozen=True, order=True)
class Group:
    """The tensor-parallel group of one stage of one replica."""

    zone: str
    gpu: str
    width: int
    gpus_per_node: int

    @property
    def sender(self) -> Endpoint:
        """Its key in the network tables when it sends activations."""
        return self.zone, self.gpu, min(self.width, self.gpus_per_node)

    @property
    def single(self) -> Endpoint:
        """Its key in the network tables in the gradient exchange."""
        return self.zone, self.gpu, 1


Chain = tuple[Group, ...]
"""The stages of one replica."""


@dataclass(frozen=True)
class Pipeline:
    """Replicas with the same layers, stage by stage in lockstep."""

    layers: tuple[int, ...]
    chains: tuple[Chain, ...]


class Sailor:
    """The simulator for one model at one micro-batch size."""

    def __init__(self, model: str, micro_batch_size: int) -> None:
        self.tables = SailorTables(model, micro_batch_size)
        self._p2p: dict[tuple[tuple[int, ...], Chain], tuple[list[float], list[float]]] = {}
        self._compute: dict[tuple[tuple[int, ...], Chain], list[float]] = {}
        self._sync: dict[tuple[float, int, Endpoint, Endpoint], float] = {}

    def compute_s(self, layers: tuple[int, ...], chain: Chain) -> list[float]:
        """Forward and backward of each stage of one replica for a micro-batch."""
        key = (layers, chain)
        if key not in self._compute:
            self._compute[key] = [
                sum(times[entry].forward_s + times[entry].backward_s for entry in entries)
                for group, entries in zip(chain, self.tables.entries(layers), strict=True)
                for times in [self.tables.times(group.gpu, group.width)]
            ]
        return self._compute[key]

    def update_s(self, layers: tuple[int, ...], chain: Chain) -> float:
        """The slowest stage's optimizer step, as recorded for its first entry."""
        return max(
            self.tables.times(group.gpu, group.width)[entries[0]].update_s
            for group, entries in zip(chain, self.tables.entries(layers), strict=True)
        )

    def messages_s(self, layers: tuple[int, ...], chain: Chain) -> tuple[list[float], list[float]]:
        """What each stage takes to send its activation on, and its gradient back.

        The gradient is sized by the stage's own first entry, as shipped.
        """
        key = (layers, chain)
        if key not in self._p2p:
            size = ELEMENT_BYTES * self.tables.micro_batch_size
            outputs = [entry.output_floats for entry in self.tables.memory(1)]
            entries = self.tables.entries(layers)
            activations, gradients = [0.0] * len(chain), [0.0] * len(chain)
            for s, (here, there) in enumerate(pairwise(chain)):
                activations[s] = self.tables.message_s(
                    here.sender, there.sender, outputs[entries[s][-1]] * size
                )
                gradients[s + 1] = self.tables.message_s(
                    there.sender, here.sender, outputs[entries[s + 1][0]] * size
                )
            self._p2p[key] = activations, gradients
        return self._p2p[key]

    def lockstep_s(self, pipeline: Pipeline, num_micro_batches: int) -> float:
        """One pipeline until its update, its replicas in lockstep."""
        chains = sorted(set(pipeline.chains))
        compute = _slowest(self.compute_s(pipeline.layers, chain) for chain in chains)
        messages = [self.messages_s(pipeline.layers, chain) for chain in chains]
        loads = stage_loads_s(
            _slowest(activations for activations, _ in messages),
            _slowest(gradients for _, gradients in messages),
        )
        slowest_s = max(c + p for c, p in zip(compute, loads, strict=True))
        update_s = max(self.update_s(pipeline.layers, chain) for chain in chains)
        return (num_micro_batches - 1) * slowest_s + sum(loads) + sum(compute) + update_s

    def all_reduce_s(
        self,
        num_bytes: float,
        num_ranks: int,
        sender: Endpoint,
        receiver: Endpoint,
    ) -> float:
        """Rings of at most 5e8 bytes, one after the other."""
        key = (num_bytes, num_ranks, sender, receiver)
        if key not in self._sync:
            full, rest = divmod(num_bytes, BUCKET_BYTES)
            bucket_s = self.tables.message_s(sender, receiver, BUCKET_BYTES / num_ranks)
            rest_s = self.tables.message_s(sender, receiver, rest / num_ranks)
            self._sync[key] = 2 * (num_ranks - 1) * (full * bucket_s + rest_s)
        return self._sync[key]

    def stage_params_bytes(self, layers: Sequence[int]) -> list[int]:
        """Bytes of each stage's parameters, not divided by any width."""
        params = [entry.num_params for entry in self.tables.memory(1)]
        return [
            ELEMENT_BYTES * sum(params[entry] for entry in entries)
            for entries in self.tables.entries(layers)
        ]

    def sync_inside_s(self, pipeline: Pipeline) -> float:
        """The slowest stage's exchange among its replicas, over its slowest neighbours, with the
        replicas in the best order found."""
        num_ranks = len(pipeline.chains)
        kinds = Counter(pipeline.chains)
        sizes = [
            num_bytes / min(WIDEST_IN_SYNC, *(chain[s].width for chain in kinds))
            for s, num_bytes in enumerate(self.stage_params_bytes(pipeline.layers))
        ]

        def neighbours_s(here: Chain, there: Chain) -> float:
            return max(
                self.all_reduce_s(size, num_ranks, a.single, b.single)
                for size, a, b in zip(sizes, here, there, strict=True)
            )

        costs = [[neighbours_s(here, there) for there in kinds] for here in kinds]
        return slowest_neighbours(list(kinds.values()), costs)

    def sync_between_s(self, pipelines: Sequence[Pipeline]) -> float:
        """The exchange between pipelines, sized by the first of those with most stages."""
        if len(pipelines) == 1:
            return 0.0
        longest = max(pipelines, key=lambda pipeline: len(pipeline.layers))
        return max(
            self.all_reduce_s(num_bytes, len(pipelines), key, key)
            for s, num_bytes in enumerate(self.stage_params_bytes(longest.layers))
            for key in {chain[s].single for chain in longest.chains}
        )

    def sync_s(self, pipelines: Sequence[Pipeline]) -> float:
        """The whole gradient exchange."""
        return max(map(self.sync_inside_s, pipelines)) + self.sync_between_s(pipelines)

    def step_s(self, pipelines: Sequence[Pipeline], num_micro_batches: int) -> float:
        """Seconds of a step in which no replica has more micro-batches than that."""
        slowest_s = max(self.lockstep_s(pipeline, num_micro_batches) for pipeline in pipelines)
        return slowest_s + self.sync_s(pipelines)

    def memory_bytes(self, width: int, entries: range, num_in_flight: int) -> int:
        """Peak bytes on each GPU of a stage."""
        held = [self.tables.memory(width)[entry] for entry in entries]
        params = sum(entry.num_params for entry in held)
        floats = sum(entry.activation_floats for entry in held)
        kept = floats * self.tables.micro_batch_size * ELEMENT_BYTES * num_in_flight
        return STATE_BYTES * params + kept + fixed_bytes(width)

    def missing_bytes(self, pipelines: Sequence[Pipeline]) -> int:
        """Most bytes that any GPU lacks; zero or less where the plan fits."""
        missing = []
        for pipeline in pipelines:
            num_stages = len(pipeline.layers)
            for chain in set(pipeline.chains):
                stages = zip(chain, self.tables.entries(pipeline.layers), strict=True)
                for s, (group, entries) in enumerate(stages):
                    needed = self.memory_bytes(group.width, entries, num_stages - s)
                    missing.append(needed - capacity_bytes(group.gpu))
        return max(missing)


def _slowest(stages_s: Iterable[Sequence[float]]) -> list[float]:
    """The slowest replica at each stage."""
    return [max(times_s) for times_s in zip(*stages_s, strict=True)]


def stage_loads_s(activations_s: Sequence[float], gradients_s: Sequence[float]) -> list[float]:
    """p_i: what messages add to each stage; the ends of long pipelines pay twice, as shipped."""
    num_stages = len(activations_s)
    if num_stages == 1:
        return [0.0]
    loads = [a + g for a, g in zip(activations_s, gradients_s, strict=True)]
    loads[0] = activations_s[0] * (1 if num_stages <= 3 else 2)
    loads[-1] = 2 * gradients_s[-1]
    return loads


def fixed_bytes(width: int) -> int:
    """What Megatron takes beside parameters and activations."""
    return 2 * 10**9 if width == 1 else 3 * 10**9


def capacity_bytes(gpu: str) -> int:
    """Memory of a GPU type."""
    return MEMORY_GIB[gpu] << 30


def pipelines_of(replicas: Sequence[tuple[tuple[int, ...], Chain]]) -> tuple[Pipeline, ...]:
    """Replicas (layers, groups) as Sailor's pipelines: equal layers together, like stages next to
    each other, longest pipelines first."""
    by_layers: dict[tuple[int, ...], list[Chain]] = {}
    for layers, chain in replicas:
        by_layers.setdefault(layers, []).append(chain)
    order = sorted(by_layers, key=lambda layers: (-len(layers), layers))
    return tuple(Pipeline(layers, tuple(sorted(by_layers[layers]))) for layers in order)


def fewest_micro_batches(sequences: int, micro_batch_size: int, num_replicas: int) -> int:
    """Of each replica, when all have the same."""
    return math.ceil(sequences / (micro_batch_size * num_replicas))
