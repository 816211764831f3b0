"""Shares of a group of unlike GPUs, by speed and memory: of tensors, or of sequences.

HAP (arXiv:2401.05965) finds shares x of the members by a linear programme: the least T with
T >= s_i x_i for every member, and sum x = 1.  Here x_i is also limited by the part of the stage
that member i has memory for, and x is in whole units of 1/K, because heads cannot be divided.  The
cost model gives every member's seconds and bytes for each number of units.  It is optimal to give
out the units one by one, each to the member that is least slow with it (`layers.minimax`).

Members are the GPUs of a tensor-parallel group, or the groups of a stage that divide its sequences.

Example: a layer takes 1 s on a and 3 s on b, and there are 8 heads.  Six on a and two on b take
0.75 s; if a holds only five of them, five and three take 1.125 s.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import gcd, lcm

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.choices import recomputes
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.share import TensorShare, even_share, member_shares
from megatron_hetero.cost.work.compute import group_layer_times
from megatron_hetero.planner.completion.stage_places import StagePlace
from megatron_hetero.planner.division.layers import minimax

Shares = tuple[int, ...]

FINEST = 64
"""Units in which shares are given; the runtime rounds them to heads, blocks of columns and tokens.
"""


@dataclass(frozen=True)
class GroupShares:
    """Finds the shares of groups; `vocab_rows` is the padded vocabulary of their plan."""

    costs: CostModel
    vocab_rows: int

    def options(self, place: StagePlace, num_layers: int) -> tuple[Shares, ...]:
        """Return shares of a group with `num_layers` layers, distinct: the fastest without a
        thought for memory, then the fastest that fits with some kind of recompute, then the rest,
        fastest first."""
        members, found, fitting = _members(place), dict[Shares, float](), set[Shares]()
        # Coarse units fit heads exactly, finer ones follow speeds more closely.
        for units in self._numbers_of_units(place):
            times_s = [list(self._times_s(member, place, units)) for member in members]
            most = [units] * len(members)
            # [cap] -> most units of each member: without a limit, then by memory of each kind of
            # recompute.
            caps = [most, *(self._caps(kind, place, num_layers, units) for kind in self._kinds)]
            for number, cap in enumerate(caps):
                parts = minimax(units, [own[:n] for own, n in zip(times_s, cap, strict=True)])
                if parts is not None:
                    shares = tuple(part // gcd(*parts) for part in parts)
                    found.setdefault(shares, self._stage_s(shares, place, num_layers))
                    fitting |= {shares} if number else set()
        best = min(found, key=found.__getitem__)
        # From the best, and from the same with equal shares for equal GPUs.
        for start in (best, self._alike(best, place)):
            polished = self._polished(start, place, num_layers)
            found.setdefault(polished, self._stage_s(polished, place, num_layers))
        ranked = sorted(found, key=lambda shares: (found[shares], shares))
        fits = [shares for shares in ranked if shares in fitting]
        # Few are tried: faster ones that do not fit must not crowd out all that do.
        return tuple(dict.fromkeys((ranked[0], *fits[:1], *ranked)))

    @property
    def _kinds(self) -> Sequence[CostModel]:
        return [self.costs.variant(recompute=kind) for kind in recomputes(self.costs)]

    def _numbers_of_units(self, place: StagePlace) -> Iterator[int]:
        if place.context_parallel > 1:
            # No unit is smaller than what two chunks and all TP ranks divide evenly.
            yield min(FINEST, self.costs.workload.model.seq_length // lcm(2, place.width))
            return
        units = self.costs.workload.model.num_query_groups
        yield units
        while 2 * units <= FINEST:
            units *= 2
            if units >= place.width:
                yield units

    def _times_s(self, member: Sequence[Device], place: StagePlace, units: int) -> Iterator[float]:
        """Yield seconds of a layer on one member with 1, 2, ... units of so many, rising."""
        workload, gpu = self.costs.workload, self.costs.cluster.gpu_type(member[0])
        alone, last_s = even_share(workload.model, 1), 0.0
        # A profile or other prices may know this GPU better: in proportion to a layer on it alone.
        is_s = self.costs.group_pieces((member[0],), None, self.vocab_rows).layer.total_s
        factor = is_s / group_layer_times(workload, [(gpu, alone)]).total_s
        for part in _parts(place, units):
            share = _share(self.costs, place, part, units)
            time_s = factor * group_layer_times(workload, [(gpu, share)]).total_s
            # Rounding to heads may make a larger part quicker; `minimax` needs rising times.
            last_s = max(time_s, last_s)
            yield last_s

    def _caps(self, costs: CostModel, place: StagePlace, num_layers: int, units: int) -> list[int]:
        """Return units that each member holds at most, with so many layers."""

        def lacks_memory(device: Device, part: int) -> bool:
            memory = costs.memory(
                costs.cluster.node_by_name[device.node],
                place.width,
                place.first,
                place.last,
                place.num_in_flight,
                self.vocab_rows,
                place.num_sends_kept,
                _share(costs, place, part, units),
            )
            return memory.peak_bytes(num_layers) > memory.capacity_bytes

        parts = _parts(place, units)
        return [
            # The fullest device of a member limits it; more units only take more memory.
            min(bisect_left(parts, True, key=partial(lacks_memory, device)) for device in member)
            for member in _members(place)
        ]

    def _gpus(self, place: StagePlace) -> list[str]:
        return [self.costs.cluster.gpu_type(member[0]).name for member in _members(place)]

    def _alike(self, shares: Shares, place: StagePlace) -> Shares:
        """Return nearly the same shares, equal for GPUs of one kind."""
        gpus = self._gpus(place)
        total = {
            kind: sum(s for s, g in zip(shares, gpus, strict=True) if g == kind) for kind in gpus
        }
        unit = sum(shares) / FINEST
        return tuple(max(1, round(total[g] / gpus.count(g) / unit)) for g in gpus)

    def _polished(self, shares: Shares, place: StagePlace, num_layers: int) -> Shares:
        """Let attention and MLP each wait for their slowest member, and round differently:
        shares by both together, a little more or less for one kind of GPU while that is faster."""
        gpus = self._gpus(place)
        kinds = sorted(set(gpus))
        # In units fine enough for a step of one to be small.
        scale = max(1, FINEST // sum(shares))
        best = tuple(scale * share for share in shares)
        best_s = self._stage_s(best, place, num_layers)
        # All steps for all kinds, until none is faster.
        while True:
            steps = product(kinds, (-2, -1, 1, 2))
            trials = [
                tuple(s + step * (g == kind) for s, g in zip(best, gpus, strict=True))
                for kind, step in steps
            ]
            ranked = [(self._stage_s(t, place, num_layers), t) for t in trials if min(t) > 0]
            if min(ranked)[0] >= best_s:
                return tuple(share // gcd(*best) for share in best)
            best_s, best = min(ranked)

    def _stage_s(self, shares: Shares, place: StagePlace, num_layers: int) -> float:
        if place.context_parallel == 1:
            place = replace(place, shares=shares)
        else:
            place = replace(place, context_shares=shares)
        pieces = self.costs.stage_pieces(place.stage, self.vocab_rows)
        return pieces.stage(num_layers, place.first, place.last).total_s


def _members(place: StagePlace) -> list[tuple[Device, ...]]:
    """Return what has a share: each GPU of a tensor-parallel group, or each of several groups."""
    if place.context_parallel == 1:
        return [(device,) for device in place.devices]
    return [group.devices for group in place.stage.groups]


def _parts(place: StagePlace, units: int) -> range:
    """Return the possible units of one member."""
    return range(1, units - len(_members(place)) + 2)


def _share(costs: CostModel, place: StagePlace, part: int, units: int) -> TensorShare:
    """Return what a member with `part` of `units` units holds, to the nearest head and column, or
    token; plans round to blocks of columns (`plan.sharding.shards.COLUMN_BLOCK`).

    Its rows of the vocabulary are the shares (part, rest), it being the first.
    """
    model, width, context = costs.workload.model, place.width, place.context_parallel
    if context > 1:
        # Others have equal parts of what is left: only the member's own part matters.
        others = (units - part,) * (context - 1)
        own = (part * (context - 1), *others)
        return member_shares(model, width, None, context, None, own)[0]
    heads, columns, shared, dense = (
        max(1, round(number * part / units)) if number else 0
        for number in (
            model.num_query_groups,
            model.mlp_columns,
            model.moe_shared_expert_intermediate_size,
            model.dense_columns,
        )
    )
    # A share of nothing is not allowed, so that the rest never falls below one.
    others = (max(1, (units - part) // (width - 1)),) * (width - 1)
    return TensorShare(
        width,
        heads,
        columns,
        (part, *others),
        0,
        shared_columns=shared,
        dense_columns=dense,
    )
