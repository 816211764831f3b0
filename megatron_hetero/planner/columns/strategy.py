"""Seeds for large clusters: nodes divided into the bundles of equal replicas with the best step.

Nodes that are alike form classes (`kinds`), whole nodes form bundles (`pricing`), and a linear
programme divides each pool of nodes into bundles (`bundle_mix`).  The programme does not see the
gradient exchange, so ways to shorten it are tried.  The layers on a node are limited more and more,
because its network card carries the gradients of all of them; and sites are left out, the weakest
ones and those whose cards are too slow (`site_mixes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from megatron_hetero.planner.columns.bundle_mix import MAX_ROUNDS, SLACKS, STEP_RATIO, PoolBundles
from megatron_hetero.planner.columns.choice_prices import ChoicePrices, in_order
from megatron_hetero.planner.columns.pricing import StageTable
from megatron_hetero.planner.columns.site_mixes import (
    Choice,
    QuickStep,
    Site,
    by_exchange,
    exchange_s,
    quick_step,
)
from megatron_hetero.planner.completion.own_flags import OwnFlags
from megatron_hetero.planner.division.counts import MIN_GAIN
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.seeds.settings import chosen_settings, search_under
from megatron_hetero.planner.shapes.kinds import Kind, kinds_of, ladder, powers_of_two
from megatron_hetero.planner.strategy import SEED_WORK

_MAX_SECANTS = 6
_MAX_WHOLE_EFFORTS = 8
"""Unlike sites searched in full. If there are more, each gets a part of the work only, with every
second limit on layers and one generation of bundles."""


class Columns:
    """Bundles by column generation; see the module."""

    name = "columns"

    def __init__(self, max_work: int = SEED_WORK) -> None:
        self.max_work = max_work
        """Limit in stages priced, beside the soonest choice of each number of sites and set of GPU
        types."""

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`.

        Where plans may choose micro-batch size and recompute, the search over structures chooses
        both anew; bundles are made under the same of them whatever the job's flags are, because
        another start may end in another plan.
        """
        search_under(board, chosen_settings(board.problem, "none"), self.name, self._search)

    def _search(self, board: Scoreboard) -> None:
        """Search with the job's micro-batch size and recompute."""
        problem = board.problem
        kinds = kinds_of(problem)
        if not kinds:
            return
        table, own_flags = StageTable(problem, kinds), OwnFlags(problem)
        found: dict[Choice, QuickStep] = {}
        pools = _pools(kinds)
        sites: list[Site] = []
        tried: list[list[Site]] = []
        # Ever fewer layers on a node; many sites take every second limit.
        for limit in _node_layer_limits(problem)[:: 2 if len(pools) > _MAX_WHOLE_EFFORTS else 1]:
            least_s = min((quick.step_s for quick in found.values()), default=inf)
            sites = _sites(table, own_flags, pools, limit, sites, least_s)
            tried.append(sites)
            may_gain = self._collect(problem, sites, found, least_s)
            # The tables of many sites are large.
            for site in sites:
                site.bundles.close()
            # No choice of sites may beat the best under this limit; tighter ones are not tried.
            if not may_gain:
                break
        # With several sites, also choices with a shorter exchange: slow cards hold less or idle.
        if found and len(pools) > 1:
            best = min(found, key=lambda choice: found[choice].step_s)
            pipelines_s = found[best].step_s - exchange_s(problem, best)
            for choice in by_exchange(tried, pipelines_s):
                self._add(problem, found, choice)
        firsts, others = in_order(found)
        prices = ChoicePrices(board, own_flags, found, self.name)
        # `firsts` are priced in any case, so that no kind of choice is left out by the work limit.
        for choice in firsts:
            prices.score(choice)
        prices.work, left = 0, list(others)
        while left and prices.work <= self.max_work:
            prices.score(left.pop(prices.soonest(left)))

    def _collect(
        self,
        problem: Problem,
        sites: Sequence[Site],
        found: dict[Choice, QuickStep],
        least_s: float,
    ) -> bool:
        """Add choices of mixes with their quick times; whether some may beat `least_s`."""
        may_gain = False
        for chosen in _site_choices(sites):
            step_s = _least_step_s(problem, chosen)
            if step_s is None or step_s > least_s:
                continue
            may_gain = True
            for choice in _choices(problem, chosen, step_s):
                self._add(problem, found, choice)
            # Those of fewer kinds that the exchange of all others leaves time for.
            if len(chosen) == 1 and found:
                (site,), most_s = chosen, min(quick.step_s for quick in found.values())
                for mix in site.bundles.mixes_of_fewer_kinds(problem.num_micro_batches, most_s):
                    self._add(problem, found, ((site, mix),))
        return may_gain

    def _add(self, problem: Problem, found: dict[Choice, QuickStep], choice: Choice) -> None:
        if choice not in found:
            quick = quick_step(problem, choice)
            if quick is not None:
                found[choice] = quick


def _choices(problem: Problem, sites: Sequence[Site], step_s: float) -> Iterator[Choice]:
    """Yield mixes for each site."""
    # The slack is for whole bundles, which do less than fractions of them.
    for slack in SLACKS:
        mixes = {id(site.bundles): site.bundles.mixes(slack * step_s) for site in sites}
        for number in range(max(len(found) for found in mixes.values())):
            picked = []
            for site in sites:
                found = mixes[id(site.bundles)]
                picked.append((site, found[min(number, len(found) - 1)]))
            yield tuple(picked)
    # A single site also has mixes of one bundle alone.
    if len(sites) == 1:
        for mix in sites[0].bundles.uniform_mixes(problem.num_micro_batches):
            yield ((sites[0], mix),)


def _pools(kinds: Sequence[Kind]) -> list[list[int]]:
    """Return the positions of kinds, by site."""
    by_site: dict[str, list[int]] = {}
    for index, kind in enumerate(kinds):
        by_site.setdefault(kind.node.site, []).append(index)
    return list(by_site.values())


def _node_layer_limits(problem: Problem) -> list[int]:
    limits = [-(-problem.num_layers // part) for part in ladder(problem.num_layers)]
    return list(dict.fromkeys(limits))


def _sites(
    table: StageTable,
    own_flags: OwnFlags,
    pools: Sequence[Sequence[int]],
    max_node_layers: int,
    before: Sequence[Site],
    step_s: float,
) -> list[Site]:
    """Return the sites of a pooling; those with the same nodes and network share their bundles.

    Args:
        before: the same sites with a higher limit, of which the best bundles are taken over.
        step_s: the best time found with that limit.
    """
    shared: dict[object, PoolBundles] = {}
    sites = []
    # Sites are alike if their kinds and networks are.
    contents = [
        tuple((table.kinds[index].content, table.layer_sync_s(index)) for index in pool)
        for pool in pools
    ]
    # Many unlike sites get less effort each.
    effort = min(1.0, _MAX_WHOLE_EFFORTS / len(set(contents)))
    for number, (pool, content) in enumerate(zip(pools, contents, strict=True)):
        kinds = tuple(table.kinds[index] for index in pool)
        if content not in shared:
            counts = _bundle_replica_counts(table.problem, kinds)
            # Start from the bundles that were best under the former limit.
            has_best = before and step_s < inf
            known = before[number].bundles.best_shapes(step_s) if has_best else ()
            shared[content] = PoolBundles(
                table, own_flags, pool, counts, max_node_layers, known, effort
            )
        sites.append(Site(shared[content], kinds))
    return sites


def _bundle_replica_counts(problem: Problem, kinds: Sequence[Kind]) -> list[int]:
    """Return equal replicas side by side: powers of two, and as many as a node has GPUs."""
    largest = max(kind.num_gpus for kind in kinds)
    counts = set(powers_of_two(largest))
    counts |= {kind.num_gpus for kind in kinds}
    allowed = problem.replica_counts()  # of thousands of GPUs: not to be gone through
    most = allowed[-1] if allowed else 0
    return sorted(count for count in counts if count <= most)


def _site_choices(sites: Sequence[Site]) -> Iterator[list[Site]]:
    """Yield all sites, and ever fewer of them: the strongest ones."""
    yield list(sites)
    ranked = sorted(sites, key=lambda site: -_strength(site))
    num_sites = len(sites) // 2
    while num_sites:
        yield ranked[:num_sites]
        num_sites //= 2


def _strength(site: Site) -> float:
    table = site.bundles.table
    return sum(
        len(kind.nodes) * kind.num_gpus / table.gpu_layer_s(index)
        for index, kind in zip(site.bundles.kinds, site.kinds, strict=True)
    )


def _least_step_s(problem: Problem, sites: Sequence[Site]) -> float | None:
    """Return about the least step time in which the sites' bundles, taken in fractions, do the
    batch."""
    # Alike sites share their bundles, which are generated once.
    pools = list({id(site.bundles): site.bundles for site in sites}.values())
    # All GPUs at full speed: no step is shorter.
    low_s = problem.num_micro_batches * problem.num_layers / sum(map(_strength, sites))
    step_s = _soonest_s(problem.num_micro_batches, sites, low_s)
    for attempt in range(MAX_ROUNDS if len(pools) <= _MAX_WHOLE_EFFORTS else 1):
        # Without a bundle that fits, only longer steps may have one: with fewer, wider stages.
        wanted_s = low_s * 2 ** (attempt + 1) if step_s is None else step_s
        new = [pool.generate(wanted_s) for pool in pools]
        if not any(new):
            break
        step_s = _soonest_s(problem.num_micro_batches, sites, low_s)
    return step_s


def _soonest_s(num_micro_batches: int, sites: Sequence[Site], low_s: float) -> float | None:
    """Return the least step time of the bundles known; None if there are none."""
    counts: dict[int, int] = {}
    for site in sites:
        counts[id(site.bundles)] = counts.get(id(site.bundles), 0) + 1
    pools = {id(site.bundles): site.bundles for site in sites}

    def done(step_s: float) -> float:
        return sum(counts[key] * pool.micro_batches(step_s) for key, pool in pools.items())

    if not any(pool.columns().bundles for pool in pools.values()):
        return None
    step_s = STEP_RATIO * low_s
    while (total := done(step_s)) == 0.0:
        step_s *= 2
    # What is done grows with time, ever faster or in a straight line: secants come from above.
    for _ in range(_MAX_SECANTS):
        if abs(total - num_micro_batches) < MIN_GAIN * num_micro_batches:
            break
        later_s = (1 + MIN_GAIN) * step_s
        slope = (done(later_s) - total) / (later_s - step_s)
        wanted_s = max(low_s, step_s + (num_micro_batches - total) / slope)
        if wanted_s == step_s:
            break
        # Below the fill of every bundle nothing is done: go there by halves.
        step_s = max(wanted_s, step_s / 2) if wanted_s < step_s else wanted_s
        total = done(step_s)
        while total == 0.0:
            step_s *= STEP_RATIO
            total = done(step_s)
    return step_s
