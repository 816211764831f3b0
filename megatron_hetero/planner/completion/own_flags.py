"""Replicas completed as the job's own flags say, one by one: for seeds, orders and repairs.

The search over structures completes what these bring anew, with all settings that a plan may have.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.cost.placement import Placement
from megatron_hetero.planner.completion.completer import Completer
from megatron_hetero.planner.completion.filled import Completion, Filled, shares
from megatron_hetero.planner.completion.stage_places import StagePlace
from megatron_hetero.planner.completion.tables import Tables
from megatron_hetero.planner.division.layers import split_layers
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.units import Chain


class OwnFlags:
    """Completes chains of one problem; like chains are completed once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.completer = Completer(problem)
        self._known: dict[Hashable, Filled | None] = {}
        self._nearest: dict[Hashable, Filled] = {}

    def chain(
        self, chain: Chain, num_replicas: int = 1, limits: tuple[int, ...] | None = None
    ) -> Filled | None:
        """Return a replica with the layers that make its slowest stage fastest; None where they
        do not fit.

        Args:
            num_replicas: in all, which divide the distributed optimizer's states.
            limits: layers that each stage may have beside what its memory says, shape [stage].
        """
        key = self.completer.shape(chain), num_replicas, limits
        if key not in self._known:
            tables = self._tables(chain, num_replicas)
            self._known[key] = self.completer.filled(
                tables, chain, self._in_flight(chain, num_replicas), False, limits
            )
        return self._known[key]

    def nearest(self, chain: Chain, num_replicas: int = 1) -> tuple[bool, Filled]:
        """Return whether a replica fits, and the replica; where it does not, with the layers that
        lack least memory.

        Raises:
            ValueError: there are more stages than layers.
        """
        found = self.chain(chain, num_replicas)
        if found is not None:
            return True, found
        key = self.completer.shape(chain), num_replicas
        if key not in self._nearest:
            self._nearest[key] = self._lacking_least(chain, num_replicas)
        return False, self._nearest[key]

    def _lacking_least(self, chain: Chain, num_replicas: int) -> Filled:
        options, own = self._tables(chain, num_replicas).options, self.problem.workload.training
        # Bytes that each stage lacks without layers, and those of each layer, of its fullest GPU.
        missing, added = [], []
        for place in self._places(chain, num_replicas):
            memories = options.memories(own.recompute, place)
            missing.append(max(float(m.peak_bytes(0) - m.capacity_bytes) for m in memories))
            added.append(max(float(m.bytes_per_layer) for m in memories))
        num_layers = self.problem.num_layers
        layers = split_layers(num_layers, added, missing, [num_layers] * len(chain))
        if layers is None:
            raise ValueError(f"{len(chain)} stages for {num_layers} layers")
        return self.keeping(chain, layers, num_replicas)

    def keeping(self, chain: Chain, layers: tuple[int, ...], num_replicas: int = 1) -> Filled:
        """Return a replica with given layers, whether they fit or not."""
        tables = self._tables(chain, num_replicas)
        places = self._places(chain, num_replicas)
        options = [
            tables.options.whatever_memory(place, number)
            for place, number in zip(places, layers, strict=True)
        ]
        loads_s = self.completer.loads_s(tables, chain)
        return self.completer.with_options(tables, chain, layers, tuple(options), loads_s, None)

    def placement(self, chains: Sequence[Chain], filled: Sequence[Filled]) -> Placement | None:
        """Return replicas with micro-batches in proportion to speed; None where the batch or the
        limits do not allow so many replicas, or not these."""
        problem = self.problem
        if len(chains) not in problem.replica_counts():
            return None
        if not all(problem.chain_is_allowed(chain) for chain in chains):
            return None
        shared = shares(self.completer.batch, filled)
        if shared is None:
            return None
        whole = Completion(tuple(chains), tuple(filled), *shared, is_given=True)
        return whole.placement(self.completer.own_size)

    def _tables(self, chain: Chain, num_replicas: int) -> Tables:
        # A tied embedding is on two stages of each replica, or may be.
        sharded = self.completer.sharded
        holders = StateHolders(num_replicas, 2 * num_replicas) if sharded else None
        return self.completer.table((chain,), self.completer.own_size, True, holders)

    def _in_flight(self, chain: Chain, num_replicas: int) -> list[int]:
        # Every other replica has one micro-batch at least.
        most = max(1, self.problem.num_micro_batches - num_replicas + 1)
        return [min(len(chain) - index, most) for index in range(len(chain))]

    def _places(self, chain: Chain, num_replicas: int) -> list[StagePlace]:
        last = len(chain) - 1
        return [
            StagePlace(unit.devices, None, index == 0, index == last, number)
            for index, (unit, number) in enumerate(
                zip(chain, self._in_flight(chain, num_replicas), strict=True)
            )
        ]
