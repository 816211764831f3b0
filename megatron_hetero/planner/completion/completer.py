"""All replicas of a structure completed: micro-batch size, stages, and shares of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_hetero.cost.choices import micro_batch_sizes
from megatron_hetero.cost.placement import PlacedStage
from megatron_hetero.model.training import TokenDispatcher
from megatron_hetero.planner.completion.dealt import dealt_over_replicas
from megatron_hetero.planner.completion.filled import Completion, Filled, shares
from megatron_hetero.planner.completion.pipelines import PipelineCompleter
from megatron_hetero.planner.completion.sharded import ShardedOptions
from megatron_hetero.planner.completion.stage_places import StagePlace
from megatron_hetero.planner.completion.tables import Tables
from megatron_hetero.planner.completion.tuner import Tuner
from megatron_hetero.planner.division.layers import minimax
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.units import Chain, Structure, keep_step


class Completer(PipelineCompleter):
    """Completes structures of one problem.

    `shards`: with sharded layers, and only structures that may have some.  `dealt_by`: with experts
    dealt out over replicas by this dispatcher of tokens, and only structures that gain from it.
    """

    def __init__(
        self, problem: Problem, *, shards: bool = False, dealt_by: TokenDispatcher | None = None
    ) -> None:
        super().__init__(problem, dealt_by=dealt_by)
        self.shards, self.dealt_by = shards, dealt_by
        self.own_size = problem.workload.training.micro_batch_size
        self.batch = problem.workload.training.global_batch_size
        self.by_room: dict[tuple[Structure, int], Tables] = {}
        """Of structures whose optimizer states are divided by free memory, and sizes."""
        self._known_sharded: dict[tuple[object, ...], Completion | None] = {}

    def sizes(self, num_replicas: int) -> tuple[int, ...]:
        """Return micro-batch sizes that so many replicas may have."""
        return micro_batch_sizes(self.costs, num_replicas)

    def complete(
        self, structure: tuple[Chain, ...], size: int, given: bool = False
    ) -> Completion | None:
        """Return the structure at one micro-batch size; None where it does not fit.

        Args:
            given: all stages as the job's flags say.
        """
        total, rest = divmod(self.batch, size)
        # The size has to divide the batch, with a micro-batch for each replica.
        if rest or total < len(structure):
            return None
        if self.shards:
            return self._sharded(structure, size) if not given else None
        if self.dealt_by is not None:
            return dealt_over_replicas(self, structure, size) if not given else None
        return self.whole(structure, self.table(structure, size, given))

    def in_sizes(self, structure: tuple[Chain, ...], sizes: Sequence[int]) -> Completion | None:
        """Return the structure with a micro-batch size for each replica; None where it does not
        fit."""
        # What is left when each replica has one micro-batch of its size.
        left = self.batch - sum(sizes)
        filled = []
        for chain, size in zip(structure, sizes, strict=True):
            tables = self.table(structure, size, False)
            found = self.pipeline(tables, chain, left // size + 1) if left >= 0 else None
            if found is None:
                return None
            filled.append(found)
        shared = shares(self.batch, filled)
        return shared and Completion(structure, tuple(filled), *shared, False)

    def whole(self, structure: tuple[Chain, ...], tables: Tables) -> Completion | None:
        """Complete it with whole layers."""
        # The most that one replica can have while all others have one.
        most = self.batch // tables.size - len(structure) + 1
        filled = []
        for chain in structure:
            found = self.pipeline(tables, chain, most)
            if found is None:
                return None
            filled.append(found)
        shared = shares(self.batch, filled)
        return shared and Completion(structure, tuple(filled), *shared, tables.given)

    def _sharded(self, structure: tuple[Chain, ...], size: int) -> Completion | None:
        """Complete the structure as one pipeline of all replicas, in step at sharded layers; None
        if no layer is sharded."""
        key = structure, size
        if key not in self._known_sharded:
            found = self.in_step(structure, size) if keep_step(structure) else None
            is_one = found is not None and any(found.sharded or ())
            self._known_sharded[key] = found if is_one else None
        return self._known_sharded[key]

    def in_step(self, structure: tuple[Chain, ...], size: int) -> Completion | None:
        """Complete replicas that keep step as a single pipeline, with the fastest number of sharded
        layers."""
        total, depth = self.batch // size, len(structure[0])
        tables = self.table(structure, size, False)
        # All replicas do the same micro-batches; a remainder only without a pipeline.
        count, more = divmod(total, len(structure))
        if more and depth > 1:
            return None
        numbers = tuple([count + (r < more) for r in range(len(structure))])
        self.work += 200 * depth
        tables_of = []
        # Options of each stage, with every number of sharded layers.
        for index in range(depth):
            units = [chain[index] for chain in structure]
            is_cut_alike = len({unit.width for unit in units}) == 1
            asked = len(structure), is_cut_alike
            if asked not in tables.sharded:
                tables.sharded[asked] = ShardedOptions(
                    tables.options, len(structure), is_cut_alike=is_cut_alike
                )
            # 1F1B holds as many micro-batches as there are stages from this one to the last.
            in_flight = min(depth - index, max(numbers))
            places = [
                StagePlace(unit.devices, None, index == 0, index == depth - 1, in_flight)
                for unit in units
            ]
            reduce_s, gather_s = tables.costs.layer_exchange_s(
                [PlacedStage(unit.devices, 1) for unit in units]
            )
            tables_of.append(tables.sharded[asked].shared(places, gather_s, reduce_s))
        # Layers of each stage, so that the slowest is as fast as possible.
        layers = minimax(
            self.problem.num_layers, [[shared.time_s for shared in of] for of in tables_of]
        )
        if layers is None:
            return None
        # The chosen options, alike in all replicas.
        chosen = [of[n - 1] for of, n in zip(tables_of, layers, strict=True)]
        sharded = tuple([shared.num_sharded for shared in chosen])
        times_s = [shared.time_s for shared in chosen]
        # In step, all replicas are as slow as the slowest.
        slowest = max(self.quick(tables, chain, times_s, False) for chain in structure)
        filled = tuple(
            [
                Filled(
                    layers, tuple([shared.options[r] for shared in chosen]), None, size, *slowest
                )
                for r in range(len(structure))
            ]
        )
        quick_s = slowest[0] + (max(numbers) - 1) * slowest[1]
        return Completion(structure, filled, numbers, quick_s, False, sharded)

    def rooms(self, structure: Structure) -> list[tuple[int, ...]]:
        """Return for how many layers each stage has room, all as the job's flags say,
        [replica][stage]."""
        tables = self.table(structure, self.own_size, True)
        most = self.batch // self.own_size - len(structure) + 1
        return [self._rooms(tables, chain, most) for chain in structure]

    def _rooms(self, tables: Tables, chain: Chain, most: int) -> tuple[int, ...]:
        key = self.shape(chain), most
        if key not in tables.rooms:
            in_flight = [min(len(chain) - i, most) for i in range(len(chain))]
            options = self.options(tables, chain, in_flight, False)
            tables.rooms[key] = tuple([len(times) for _, times in options])
        return tables.rooms[key]

    def tune(self, found: Completion, max_work: int) -> Completion:
        """Tune layers and launch counts by the recurrence, replica by replica; then the
        shares.  Replicas with sharded layers keep step, as do those that deal experts out together:
        they stay as they are, and so do pipelines of other prices."""
        # Replicas in step cannot be tuned one by one, and other pipelines by another recurrence.
        in_step = found.sharded is not None or found.dispatcher is not None
        if in_step or not self.costs.has_variants:
            return found
        tuned: dict[tuple[object, ...], tuple[Filled, float]] = {}
        best, before = found, found
        while True:
            filled, times_s = [], []
            for chain, own, number in zip(
                before.structure, before.filled, before.num_micro_batches, strict=True
            ):
                key = self.shape(chain), number, own.size
                if key not in tuned:
                    tables = self.by_room.get((found.structure, own.size))
                    if tables is None or found.optimizer_shares is None:
                        tables = self.table(found.structure, own.size, found.is_given)
                    tuned[key] = self._tuned(tables, chain, number, own, max_work)
                filled.append(tuned[key][0])
                times_s.append(tuned[key][1])
            made = replace(before, filled=tuple(filled), quick_s=max(times_s))
            # The first pass always counts; later ones only where they gain.
            if best is not found and made.quick_s >= best.quick_s:
                break
            best = made
            # Tuned replicas have other speeds, and so other shares of the batch.
            shared = shares(self.batch, filled)
            if shared is None or shared[0] == made.num_micro_batches or shared[1] >= made.quick_s:
                break
            before = replace(made, num_micro_batches=shared[0])
        return best

    def _tuned(
        self, tables: Tables, chain: Chain, number: int, own: Filled, max_work: int
    ) -> tuple[Filled, float]:
        """Return a pipeline of `number` micro-batches tuned from `own` on, and its seconds.

        What was tuned before counts as work again: how far a search goes depends on what it asks,
        not on what is remembered.
        """
        key = self.shape(chain), number, own.layers, own.counts, max_work
        if key not in tables.tuned:
            tuner = Tuner(self, tables, chain, number)
            tables.tuned[key] = (*tuner.run(own, max_work), tuner.work // 16)
        filled, time_s, work = tables.tuned[key]
        self.work += work
        return filled, time_s
