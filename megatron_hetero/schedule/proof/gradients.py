"""Operations of gradients, of new weights and of sharded layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_hetero.cost.sync.buckets import EMBEDDING
from megatron_hetero.cost.sync.communicators import summing_pairs
from megatron_hetero.cost.sync.holders import layer_sets
from megatron_hetero.exchange.groups.by_group import plan_by_group
from megatron_hetero.exchange.groups.pairs import pair_sums
from megatron_hetero.exchange.plan import Purpose
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.communication.communicators import Communicator
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_machines
from megatron_hetero.schedule.proof.operations import RankItems

_ELEMENTS = 1 << 20
"""Elements of a sample bucket; the sample's rounds stand for every bucket cut alike."""
SHARDED_TURN = 1
"""Turn of the communicators of sharded layers; sets of ranks may coincide with sets of other
exchanges."""


@dataclass(frozen=True)
class ExchangedBucket:
    """Gradients of one exchange: their holders, and the layers whose backward passes complete the
    gradients."""

    holders: tuple[int, ...]
    layers: frozenset[int]


@dataclass
class Gradients:
    """The exchanges of a plan.

    Attributes:
        plan, workload: of the job.
        buckets: of whole layers, in the order in which every rank starts its own.
        sharded: layer -> sets of ranks that have parts of it.
    """

    plan: Plan
    workload: Workload
    buckets: tuple[ExchangedBucket, ...]
    sharded: Mapping[int, tuple[tuple[int, ...], ...]]

    @staticmethod
    def of(plan: Plan, workload: Workload, *, full: bool = False) -> Gradients:
        """Find the exchanges of a plan.

        Args:
            plan: the plan.
            workload: its model and training.
            full: one bucket for each set of ranks, as of a small model; else each layer ends one,
                which is stricter, because one then waits behind another.
        """
        # Layers whose weights are gathered for each pass.
        numbers = {
            stage.first_layer + i
            for stage in plan.replicas[0].stages
            for i in range(stage.shape.num_sharded_layers)
        }
        # Sets of ranks that hold the same parameters: of sharded layers by layer, of whole ones in
        # order.
        sharded: dict[int, list[tuple[int, ...]]] = {}
        whole: list[tuple[tuple[int, ...], int]] = []
        for layer, ranks in layer_sets(plan, workload):
            if layer in numbers:
                sharded.setdefault(layer, []).append(ranks)
            else:
                whole.append((ranks, layer))
        buckets = [ExchangedBucket(ranks, frozenset((layer,))) for ranks, layer in whole]
        # A large bucket: all layers of a set together, ended by its last layer.
        if full:
            layers: dict[tuple[int, ...], set[int]] = {}
            last: dict[tuple[int, ...], int] = {}
            for place, (ranks, layer) in enumerate(whole):
                layers.setdefault(ranks, set()).add(layer)
                last[ranks] = place
            in_order = sorted(layers, key=last.__getitem__)
            buckets = [ExchangedBucket(ranks, frozenset(layers[ranks])) for ranks in in_order]
        return Gradients(
            plan, workload, tuple(buckets), {n: tuple(sets) for n, sets in sharded.items()}
        )

    @cached_property
    def communicators(self) -> tuple[Communicator, ...]:
        """Return the communicators of the exchanges, in the order of making."""
        whole: dict[tuple[int, ...], None] = {bucket.holders: None for bucket in self.buckets}
        whole |= dict.fromkeys(self.pairs)
        parts = dict.fromkeys(ranks for sets in self.sharded.values() for ranks in sets)
        return (
            *(Communicator("gradients", ranks) for ranks in whole),
            *(Communicator("gradients", ranks, turn=SHARDED_TURN) for ranks in parts),
        )

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Return the ranks that sum two by two."""
        if self.is_divided:
            return ()
        return summing_pairs(self.plan, [bucket.holders for bucket in self.buckets])

    @property
    def is_divided(self) -> bool:
        """Tell if the optimizer's state is divided among holders."""
        return self.workload.training.use_distributed_optimizer

    @cached_property
    def of_rank(self) -> tuple[tuple[ExchangedBucket, ...], ...]:
        """Return [rank] -> its buckets."""
        found: list[list[ExchangedBucket]] = [[] for _ in range(self.plan.layout.num_devices)]
        for bucket in self.buckets:
            for rank in bucket.holders:
                found[rank].append(bucket)
        return tuple(tuple(buckets) for buckets in found)

    @cached_property
    def _rounds(self) -> dict[tuple[tuple[int, ...], Purpose], _Rounds | None]:
        return {}

    def rounds(self, holders: tuple[int, ...], purpose: Purpose) -> _Rounds | None:
        """Return the rounds of an exchange by groups of machines; None for one call of a
        library."""
        if not self.plan.exchange_groups:
            return None
        # Computed once for each set of holders, though many buckets have the same.
        key = holders, purpose
        if key not in self._rounds:
            self._rounds[key] = _rounds_of(self.plan, holders, purpose, sums=not self.is_divided)
        return self._rounds[key]


@dataclass(frozen=True)
class _Rounds:
    """An exchange in rounds.

    Attributes:
        messages: [round] -> rank -> its messages.
        sums: rank -> (round of the sum, the two ranks).
    """

    messages: tuple[Mapping[int, tuple[tuple[int, bool], ...]], ...]
    sums: Mapping[int, tuple[int, tuple[int, int]]]


def _rounds_of(
    plan: Plan, holders: tuple[int, ...], purpose: Purpose, *, sums: bool
) -> _Rounds | None:
    machines = rank_machines(plan)
    # The rounds between machines, as the runtime computes them.
    made = plan_by_group(
        [machines[rank] for rank in holders],
        plan.exchange_groups,
        _ELEMENTS,
        purpose,
        uplinks=plan.exchange_uplinks,
    )
    if made is None:
        return None
    # Of every round: with whom a rank exchanges, and if it sends.
    expanded = made.expanded()
    found: list[dict[int, set[tuple[int, bool]]]] = []
    for number, source, destination in np.unique(expanded.table[:, :3], axis=0).tolist():
        while len(found) <= number:
            found.append({})
        sender, receiver = holders[source], holders[destination]
        found[number].setdefault(sender, set()).add((receiver, True))
        found[number].setdefault(receiver, set()).add((sender, False))
    # An all-reduce by groups also adds up pairs of ranks on one machine.
    of_pairs = pair_sums(expanded) if sums and purpose == "all_reduce" else {}
    return _Rounds(
        tuple({rank: tuple(sorted(own)) for rank, own in of.items()} for of in found),
        {
            holders[holder]: (own.round, (holders[own.holders[0]], holders[own.holders[1]]))
            for holder, own in of_pairs.items()
        },
    )


NONE_LATE = EMBEDDING - 1
"""Before all layers: gradients of all may be exchanged within the passes."""
ALL_LATE = 1 << 20
"""Behind all layers."""


class RankGradients:
    """Operations of a rank on gradients and weights, written to the rank's items.

    Args:
        gradients: of the job.
        items: where to write.
        number_of: communicator -> its number.
        deepest_late: gradients of this layer and of all before it are exchanged after the passes.
    """

    def __init__(
        self,
        gradients: Gradients,
        items: RankItems,
        number_of: Mapping[Communicator, int],
        deepest_late: int = NONE_LATE,
    ) -> None:
        self._gradients, self._items, self._number_of = gradients, items, number_of
        self._deepest_late = deepest_late
        self._buckets = gradients.of_rank[items.rank]
        self._started: list[int] = []
        self._next = 0

    def start_complete(self, layers: Collection[int]) -> None:
        """Start the next buckets that may start within the passes, as far as their gradients are
        complete.

        Args:
            layers: of this rank, whose gradients are not complete.
        """
        while self._next < len(self._buckets):
            # Buckets start in one order on every rank, so one that may not start holds up the rest.
            bucket = self._buckets[self._next]
            is_late = min(bucket.layers) <= self._deepest_late
            if is_late or not bucket.layers.isdisjoint(layers):
                return
            self._start_next()

    def finish(self) -> None:
        """Start all buckets that are left, each when those before it are done, as on a rank with
        the least room; then wait for the last."""
        while self._next < len(self._buckets):
            self._wait()
            self._start_next()
        self._wait()

    def _start_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        purpose: Purpose = "reduce_scatter" if self._gradients.is_divided else "all_reduce"
        self._started += self._exchange(bucket.holders, purpose, "gradients")

    def _wait(self) -> None:
        for operation in self._started:
            self._items.wait(operation)
        self._started = []

    def start_weights(self) -> list[int]:
        """Start to give new weights to their holders; return the operations to wait for."""
        if not self._gradients.is_divided:
            return []
        return [
            operation
            for bucket in reversed(self._buckets)
            for operation in self._exchange(bucket.holders, "all_gather", "new weights")
        ]

    def gather(self, layer: int) -> list[int]:
        """Start to gather a sharded layer."""
        return [
            self._items.collective(group, f"weights of layer {layer}")
            for group in self._sharded_groups(layer)
        ]

    def give(self, layer: int) -> list[int]:
        """Start to send a sharded layer's gradients to their owners."""
        return [
            self._items.collective(group, f"gradients of layer {layer}")
            for group in self._sharded_groups(layer)
        ]

    def _sharded_groups(self, layer: int) -> Iterator[int]:
        for ranks in self._gradients.sharded.get(layer, ()):
            if self._items.rank in ranks:
                yield self._number_of[Communicator("gradients", ranks, turn=SHARDED_TURN)]

    def _exchange(self, holders: tuple[int, ...], purpose: Purpose, what: str) -> list[int]:
        """Write an exchange; return what is left to wait for."""
        items, rank = self._items, self._items.rank
        group = self._number_of[Communicator("gradients", holders)]
        rounds = self._gradients.rounds(holders, purpose)
        if rounds is None:
            return [items.collective(group, what)]
        # A rank without a sum has a round that never comes (-2).
        at, pair = rounds.sums.get(rank, (-2, (0, 0)))
        for number, messages in enumerate(rounds.messages):
            if number == at:
                # This round and the next are one sum of two ranks.
                items.done(self._number_of[Communicator("gradients", pair)], what)
            elif number != at + 1 and rank in messages:
                # A round waits for the one before it, and holds up all from the head of a queue.
                items.wait(items.messages(group, messages[rank], f"{what}, round {number}"))
        return []
