"""Mixes of bundles where the replica with most micro-batches sets the pace of all.

There every replica does as many micro-batches, and the step is that of the slowest: what counts is
how many replicas end in time.  Replicas with the same layers exchange them first, so that groups of
near sites are tried with layers of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from megatron_hetero.planner.columns.bundle_mix import SLACKS, Mix, PoolBundles
from megatron_hetero.planner.columns.packing import Floats, pack
from megatron_hetero.planner.columns.site_mixes import Choice, Site
from megatron_hetero.planner.problem import Problem

_MAX_EVEN = 12
"""Numbers of replicas to try."""

_Layers = tuple[int, ...]
"""Of a replica, stage by stage."""


def even_choices(problem: Problem, sites: Sequence[Site]) -> Iterator[Choice]:
    """Mixes with as many micro-batches for every replica, the soonest of a few numbers of
    replicas."""
    pools = {id(site.bundles): _EvenPool(site.bundles) for site in sites}
    own = [pools[id(site.bundles)] for site in sites]
    number, divisions = problem.num_micro_batches, near_sites(sites)
    ranked: list[tuple[float, int]] = []
    for each in sorted({-(-number // count) for count in problem.replica_counts()}):
        wanted = -(-number // each)
        times_s = np.unique(np.concatenate([pool.times_s(each) for pool in pools.values()]))

        def is_enough(step_s: float, each: int = each, wanted: int = wanted) -> bool:
            return sum(pool.replicas(step_s, each) for pool in own) >= wanted * (1 - 1e-9)

        index = bisect_left(times_s, True, key=is_enough)
        if index < len(times_s):
            ranked.append((float(times_s[index]), each))
    for soonest_s, each in sorted(ranked)[:_MAX_EVEN]:
        for step_s in (slack * soonest_s for slack in SLACKS):
            yield tuple((s, pools[id(s.bundles)].mix(step_s, each)) for s in sites)
            most = {key: pool.layers(step_s, each) for key, pool in pools.items()}
            for groups in divisions:
                yield tuple(
                    (site, pools[id(site.bundles)].mix(step_s, each, layers))
                    for site, layers in _own_layers(groups, most)
                )


class _EvenPool:
    """A pool's bundles by how many replicas of theirs do so many micro-batches each in a step."""

    def __init__(self, bundles: PoolBundles) -> None:
        self.bundles = bundles
        self.columns = bundles.columns()
        self._of_layers: dict[_Layers, list[int]] = {}
        for index, bundle in enumerate(self.columns.bundles):
            self._of_layers.setdefault(bundle.filled.layers, []).append(index)

    def times_s(self, each: int) -> Floats:
        """Of every bundle, for so many micro-batches."""
        times_s: Floats = self.columns.fill_s + (each - 1) * self.columns.period_s
        return times_s

    def replicas(self, step_s: float, each: int) -> float:
        """The most that end in time, bundles taken in fractions."""
        return pack(self._worths(step_s, each), self.columns.rows, self.bundles.nodes()).worth

    def layers(self, step_s: float, each: int) -> dict[_Layers, float]:
        """The same of those with equal layers."""
        worths, nodes, found = self._worths(step_s, each), self.bundles.nodes(), {}
        for layers, own in self._of_layers.items():
            if worths[own].any():
                found[layers] = pack(worths[own], self.columns.rows[:, own], nodes).worth
        return found

    def mix(self, step_s: float, each: int, layers: _Layers | None = None) -> Mix:
        """Whole bundles with most replicas; of these layers alone, if given."""
        worths = self._worths(step_s, each)
        if layers is not None:
            own = np.zeros(len(worths))
            own[self._of_layers[layers]] = 1.0
            worths *= own
        return self.bundles.solve(worths)

    def _worths(self, step_s: float, each: int) -> Floats:
        return np.where(self.times_s(each) <= step_s, self.columns.num_replicas, 0.0)


def _own_layers(
    groups: Sequence[Sequence[Site]], most: Mapping[int, Mapping[_Layers, float]]
) -> Iterator[tuple[Site, _Layers]]:
    """For each group of sites the layers with which it has most replicas, and which no other has.

    Args:
        most: of each pool's bundles, how many replicas it has with which layers.
    """
    used: set[_Layers] = set()
    for group in groups:
        counts: dict[_Layers, float] = {}
        for site in group:
            for layers, count in most[id(site.bundles)].items():
                counts[layers] = counts.get(layers, 0.0) + count
        free = [layers for layers in counts if layers not in used]
        if not free:
            continue
        best = max(free, key=lambda layers: (counts[layers], -len(layers), layers))
        used.add(best)
        yield from ((site, best) for site in group if best in most[id(site.bundles)])


def near_sites(sites: Sequence[Site]) -> list[list[list[Site]]]:
    """Divisions of sites into groups of near ones, from every site alone to all together."""
    groups = [[site] for site in sites]
    found = [groups]
    while len(groups) > 1:
        nearest = min(
            (min(_pair_s(a, b) for a in one for b in other), i, j)
            for (i, one), (j, other) in combinations(enumerate(groups), 2)
        )
        i, j = nearest[1:]
        rest = (group for k, group in enumerate(groups) if k not in (i, j))
        groups = [[*groups[i], *groups[j]], *rest]
        found.append(groups)
    return found


def _pair_s(one: Site, other: Site) -> float:
    return one.bundles.table.pair_sync_s(one.kinds[0].node.name, other.kinds[0].node.name)
