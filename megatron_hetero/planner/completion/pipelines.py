"""One replica of a structure completed: the options and layers of its stages, its launch counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest

from megatron_hetero.cost.memory.device import kept_sends
from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.cost.pipeline import steady_period_s
from megatron_hetero.model.training import TokenDispatcher
from megatron_hetero.planner.completion.filled import Filled
from megatron_hetero.planner.completion.like_chains import LikeChains
from megatron_hetero.planner.completion.stage_lines import StageOption
from megatron_hetero.planner.completion.stage_options import StageOptions
from megatron_hetero.planner.completion.stage_places import StagePlace
from megatron_hetero.planner.completion.tables import Key, Option, Options, Tables, holders_of
from megatron_hetero.planner.division.counts import NEGLIGIBLE_TRIP
from megatron_hetero.planner.division.layers import minimax
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.units import Chain
from megatron_hetero.schedule.orders.one_f_one_b import launch_counts


class PipelineCompleter:
    """Completes replicas of structures of one problem, each as a pipeline of its own.

    `dealt_by`: with experts dealt out over replicas by this dispatcher of tokens.
    """

    def __init__(self, problem: Problem, *, dealt_by: TokenDispatcher | None = None) -> None:
        self.problem = problem
        self.costs = problem.costs if dealt_by is None else problem.costs.dispatched(dealt_by)
        self.sharded = problem.workload.training.use_distributed_optimizer
        self.work = 0
        self._like = LikeChains(problem)
        self._tables: dict[tuple[object, ...], Tables] = {}
        self._rows: dict[frozenset[int], int] = {}
        self._likes: dict[tuple[int, int, bool], StageOptions] = {}

    def shape(self, chain: Chain) -> int:
        """Return equal for chains that are completed alike."""
        return self._like.of(chain).shape

    def table(
        self,
        structure: tuple[Chain, ...],
        size: int,
        given: bool,
        holders: StateHolders | None = None,
    ) -> Tables:
        """Return the tables of a structure at a micro-batch size; `holders` in the place of its
        own."""
        widths = frozenset().union(*[self._like.of(chain).widths for chain in structure])
        rows = self._rows.get(widths)
        if rows is None:
            rows = self._rows[widths] = self.costs.vocab_rows(sorted(widths))
        # The distributed optimizer's memory depends on how many replicas hold a layer.
        if self.sharded and holders is None:
            holders = holders_of(structure)
        key = (size, rows, holders, given)
        if key not in self._tables:
            costs = self.costs.variant(micro_batch_size=size, holders=holders)
            like = self._likes.get((size, rows, given))
            options = StageOptions(costs, rows, given, like)
            self._likes.setdefault((size, rows, given), options)
            self._tables[key] = Tables(costs, options)
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
        places = self._like.of(chain).places
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
        more = self._like.of(chain).more_holders if self.sharded else ()
        if not (more or tables.holders_of):
            return [None] * len(chain)
        # More context-parallel ranks than elsewhere are more holders of the states.
        of_all = tables.costs.holders
        by_ranks = [n and replace(of_all, layers=of_all.layers + n) for n in more]
        return [
            tables.holders_of.get(unit, own or None)
            for unit, own in zip_longest(chain, by_ranks)
        ]
