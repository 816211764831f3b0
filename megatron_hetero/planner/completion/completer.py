"""All replicas of a structure completed: micro-batch size, stages, and shares of the batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, zip_longest

from megatron_hetero.cost.choices import micro_batch_sizes
from megatron_hetero.cost.memory.device import kept_sends
from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.cost.pipeline import steady_period_s
from megatron_hetero.cost.placement import PlacedStage
from megatron_hetero.model.spec import TokenDispatcher
from megatron_hetero.planner.completion.dealt import dealt_over_replicas
from megatron_hetero.planner.completion.filled import Completion, Filled, shares
from megatron_hetero.planner.completion.sharded import ShardedOptions
from megatron_hetero.planner.completion.stage_lines import StageOption
from megatron_hetero.planner.completion.stage_options import StageOptions, StagePlace
from megatron_hetero.planner.completion.tables import Key, Option, Options, Tables, holders_of
from megatron_hetero.planner.completion.tuner import Tuner
from megatron_hetero.planner.division.counts import NEGLIGIBLE_TRIP
from megatron_hetero.planner.division.layers import minimax
from megatron_hetero.planner.problem import Chain, Problem, Structure, Unit, keep_step
from megatron_hetero.schedule.orders.one_f_one_b import launch_counts


@dataclass(slots=True)
class _Like:
    """What a chain has in common with chains that are completed alike.

    Attributes:
        places: a number for each stage, equal for like groups at the same end, or at none.
        widths: of all stages.
        more_holders: context-parallel ranks of each stage beyond the fewest that a stage has; empty
            where all have as many.
        shape: a number, equal for chains that are completed alike.
    """

    places: tuple[int, ...]
    widths: frozenset[int]
    more_holders: tuple[int, ...]
    shape: int


class Completer:
    """Completes structures of one problem.

    `shards`: with sharded layers, and only structures that may have some.  `dealt_by`: with experts
    dealt out over replicas by this dispatcher of tokens, and only structures that gain from it.
    """

    def __init__(
        self, problem: Problem, *, shards: bool = False, dealt_by: TokenDispatcher | None = None
    ) -> None:
        self.shards, self.dealt_by = shards, dealt_by
        self.problem = problem
        self.costs = problem.costs if dealt_by is None else problem.costs.dispatched(dealt_by)
        self.own_size = problem.workload.training.micro_batch_size
        self.batch = problem.workload.training.global_batch_size
        self.sharded = problem.workload.training.use_distributed_optimizer
        self.work = 0
        self._tables: dict[tuple[object, ...], Tables] = {}
        self._group: dict[Unit, int] = {}
        self._groups: dict[Hashable, int] = {}
        self._likes: dict[int, tuple[Chain, _Like]] = {}
        """By the identity of chains, which structures share: quicker than by the names in them."""
        self._by_value: dict[Chain, _Like] = {}
        self._by_shape: dict[tuple[int, ...], _Like] = {}
        self._rows: dict[frozenset[int], int] = {}
        self.by_room: dict[tuple[Structure, int], Tables] = {}
        """Of structures whose optimizer states are divided by free memory, and sizes."""
        self._known_sharded: dict[tuple[object, ...], Completion | None] = {}

    def group(self, unit: Unit) -> int:
        """Return equal for groups of equal times and memory."""
        found = self._group.get(unit)
        if found is None:
            like = self.problem.likeness
            nodes = [node for node, _ in unit.parts]
            hops = [like.hop(a, b) for a, b in combinations(nodes, 2)]
            # A group over several nodes also depends on the links among them.
            key = tuple(map(like.node, nodes)), unit.form, tuple(hops)
            found = self._group[unit] = self._groups.setdefault(key, len(self._groups))
        return found

    def shape(self, chain: Chain) -> int:
        """Return equal for chains that are completed alike."""
        return self._like(chain).shape

    def _like(self, chain: Chain) -> _Like:
        known = self._likes.get(id(chain))
        if known is not None:
            return known[1]
        # An equal chain may have been made anew.
        like = self._by_value.get(chain)
        if like is None:
            like = self._by_value[chain] = self._compared(chain)
        self._likes[id(chain)] = chain, like
        return like

    def _compared(self, chain: Chain) -> _Like:
        hop = self.problem.likeness.hop
        groups = [self.group(unit) for unit in chain]
        hops = [
            hop(node, other)
            for a, b in pairwise(chain)
            for node, _ in a.parts
            for other, _ in b.parts
        ]
        # A number that is no group, between the groups and the hops.
        shape = (*groups, -2, *hops)
        like = self._by_shape.get(shape)
        if like is None:
            # Beside the group: 1 is the first stage, 2 the last, 3 the only one.
            last = len(chain) - 1
            ends = [(i == 0) + 2 * (i == last) for i in range(len(chain))]
            places = tuple([4 * group + end for group, end in zip(groups, ends, strict=True)])
            widths = frozenset([unit.width for unit in chain])
            ranks = [unit.context_parallel for unit in chain]
            more = tuple([n - min(ranks) for n in ranks]) if len(set(ranks)) > 1 else ()
            like = self._by_shape[shape] = _Like(places, widths, more, len(self._by_shape))
        return like

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

    def table(
        self,
        structure: tuple[Chain, ...],
        size: int,
        given: bool,
        holders: StateHolders | None = None,
    ) -> Tables:
        """Return the tables of a structure at a micro-batch size; `holders` in the place of its
        own."""
        widths = frozenset().union(*[self._like(chain).widths for chain in structure])
        rows = self._rows.get(widths)
        if rows is None:
            rows = self._rows[widths] = self.costs.vocab_rows(sorted(widths))
        # The distributed optimizer's memory depends on how many replicas hold a layer.
        if self.sharded and holders is None:
            holders = holders_of(structure)
        key = (size, rows, holders, given)
        if key not in self._tables:
            costs = self.costs.variant(micro_batch_size=size, holders=holders)
            self._tables[key] = Tables(costs, StageOptions(costs, rows, given))
        return self._tables[key]

    def pipeline(self, tables: Tables, chain: Chain, most: int) -> Filled | None:
        """Return a replica for at most so many micro-batches: with 1F1B's launch counts, or with
        those that hide its hops where they fit and are faster."""
        depth = len(chain)
        key = (self.shape(chain), most)
        if key in tables.filled:
            return tables.filled[key]
        self.work += 4 * depth
        # 1F1B's own launch counts: one more for each stage behind.
        found = self.filled(tables, chain, [min(depth - i, most) for i in range(depth)], False)
        if found is not None and not tables.given and depth > 1 and self.costs.has_launch_counts:
            ahead = self._ahead(tables, chain, most, found)
            if ahead is not None and ahead.period_s < found.period_s:
                found = ahead
        tables.filled[key] = found
        return found

    def _ahead(self, tables: Tables, chain: Chain, most: int, plain: Filled) -> Filled | None:
        depth = len(chain)
        times_s = [option.time_s for option in plain.options]
        period_s = max(times_s)
        trips_s, _ = self.trips(tables, chain)
        # Negligible trips are not hidden: further launches would take memory for little.
        hops_s = [trip_s / 2 if trip_s > NEGLIGIBLE_TRIP * period_s else 0.0 for trip_s in trips_s]
        if not any(hops_s):
            return None
        wanted = [min(count, most) for count in launch_counts(times_s, hops_s)]
        # Not more than 1F1B launches anyhow: nothing changes.
        if all(count <= min(depth - i, most) for i, count in enumerate(wanted)):
            return None
        return self.filled(tables, chain, wanted, True)

    def filled(
        self,
        tables: Tables,
        chain: Chain,
        in_flight: Sequence[int],
        has_counts: bool,
        limits: Sequence[int] | None = None,
    ) -> Filled | None:
        """Return a replica with the layers that make its slowest stage fastest; None where they do
        not fit.

        Args:
            in_flight: micro-batches that each stage holds, [stage].
            has_counts: these are launch counts of the replica's own.
            limits: layers that each stage may have beside what its memory says, [stage].
        """
        options = self.options(tables, chain, in_flight, has_counts)
        # Under prices of other pipelines a stage may be busy while it sends.
        loads_s = self.loads_s(tables, chain)
        busy_s = [
            times if not load_s else tuple([time_s + load_s for time_s in times])
            for (_, times), load_s in zip(options, loads_s, strict=True)
        ]
        if limits is not None:
            busy_s = [times[:most] for times, most in zip(busy_s, limits, strict=True)]
        layers = minimax(self.problem.num_layers, busy_s)
        if layers is None:
            return None
        chosen = tuple([of[n - 1] for n, (of, _) in zip(layers, options, strict=True)])
        counts = in_flight if has_counts else None
        return self.with_options(tables, chain, layers, chosen, loads_s, counts)

    def with_options(
        self,
        tables: Tables,
        chain: Chain,
        layers: tuple[int, ...],
        options: tuple[StageOption, ...],
        loads_s: Sequence[float],
        counts: Sequence[int] | None,
    ) -> Filled:
        """Return a replica with given layers and options, [stage]; `counts` are launch counts of
        its own, and `loads_s` as of the function of this name."""
        times_s = [option.time_s + load for option, load in zip(options, loads_s, strict=True)]
        fill_s, period_s = self.quick(tables, chain, times_s, counts is not None)
        own = None if counts is None else tuple(counts)
        return Filled(layers, options, own, tables.size, fill_s, period_s)

    def loads_s(self, tables: Tables, chain: Chain) -> Sequence[float]:
        """Return the seconds of each stage that a micro-batch's messages take, where stages do not
        compute while they send, [stage]."""
        if tables.costs.has_variants:
            return [0.0] * len(chain)
        return tables.costs.send_loads_s([unit.devices for unit in chain])

    def quick(
        self, tables: Tables, chain: Chain, times_s: list[float], has_counts: bool
    ) -> tuple[float, float]:
        """Return seconds of the first micro-batch and of each further one."""
        if not tables.costs.has_variants:
            return tables.costs.quick_times_s(times_s, [unit.devices for unit in chain])
        trips_s, busiest_s = self.trips(tables, chain)
        slowest_s, longest_s = max(times_s), max(trips_s, default=0.0)
        # Enough forwards ahead hide every hop but the slowest message's time on its link.
        if has_counts:
            period_s = max(slowest_s, busiest_s)
        # Negligible trips are added whole: quicker than to look at all cycles, and hardly more.
        elif longest_s < NEGLIGIBLE_TRIP * slowest_s:
            period_s = max(slowest_s + longest_s, busiest_s)
        else:
            period_s = steady_period_s(times_s, trips_s, busiest_s)
        return sum(times_s) + sum(trips_s), period_s

    def trips(self, tables: Tables, chain: Chain) -> tuple[list[float], float]:
        """Return seconds there and back over each boundary, and of the slowest message on its
        link."""
        shape = self.shape(chain)
        known = tables.trips.get(shape)
        if known is not None:
            return known
        trips_s, busiest_s = [], 0.0
        for a, b in pairwise(chain):
            key = (a.node, a.form, a.beyond, b.node, b.form, b.beyond)
            hop = tables.hops.get(key)
            # Hops depend on nodes and forms only, so that they are priced once.
            if hop is None:
                there = tables.costs.stage_hop(a.stage, b.stage)
                back = tables.costs.stage_hop(b.stage, a.stage)
                hop = tables.hops[key] = (
                    there.total_s + back.total_s,
                    max(there.serialisation_s, back.serialisation_s),
                )
            trips_s.append(hop[0])
            busiest_s = max(busiest_s, hop[1])
        known = tables.trips[shape] = trips_s, busiest_s
        return known

    def options(
        self, tables: Tables, chain: Chain, in_flight: Sequence[int], has_counts: bool
    ) -> Options:
        """Return the options of every stage by layers, and their seconds."""
        places = self._like(chain).places
        sends = kept_sends(in_flight) if has_counts else [None] * len(chain)
        # Stages alike in all this have the same options.
        keys = list(zip(places, in_flight, sends, self._holders(tables, chain), strict=True))
        found = map(tables.known.get, keys)
        return [
            self._option(tables, chain, index, keys[index]) if known is None else known
            for index, known in enumerate(found)
        ]

    def _option(self, tables: Tables, chain: Chain, index: int, key: Key) -> Option:
        unit = chain[index]
        _, in_flight, sends, holders = key
        place = StagePlace(
            unit.devices,
            unit.tensor_shares,
            index == 0,
            index == len(chain) - 1,
            in_flight,
            sends,
            holders,
            unit.context_parallel,
            context_shares=unit.context_shares,
        )
        of_place = tables.options.of(place)
        known = tables.known[key] = of_place, tuple([option.time_s for option in of_place])
        return known

    def _holders(self, tables: Tables, chain: Chain) -> Sequence[StateHolders | None]:
        """Return the holders of each stage's states where they are not as of all, [stage]."""
        more = self._like(chain).more_holders if self.sharded else ()
        if not (more or tables.holders_of):
            return [None] * len(chain)
        # More context-parallel ranks than elsewhere are more holders of the states.
        of_all = tables.costs.holders
        by_ranks = [n and replace(of_all, layers=of_all.layers + n) for n in more]
        return [
            tables.holders_of.get(unit, own or None)
            for unit, own in zip_longest(chain, by_ranks)
        ]

    def rooms(self, structure: Structure, chain: Chain) -> list[int]:
        """Return for how many layers each stage of a replica has room, all as the job's flags
        say."""
        tables = self.table(structure, self.own_size, True)
        most = self.batch // self.own_size - len(structure) + 1
        in_flight = [min(len(chain) - i, most) for i in range(len(chain))]
        return [len(times) for _, times in self.options(tables, chain, in_flight, False)]

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
