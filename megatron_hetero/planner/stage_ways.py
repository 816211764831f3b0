"""What a stage takes with so many layers, when it may recompute as much as its memory asks for.

A stage that does not fit recomputes some of its layers (Megatron's `--recompute-method block`),
one that has memory to spare recomputes none, whatever the job's own flags say; the gradient is the
same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from megatron_hetero.cluster.spec import Device
from megatron_hetero.cost.choices import recomputes
from megatron_hetero.cost.memory import StageMemory, StateHolders, with_some_layers_recomputed
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.network import slowest_link
from megatron_hetero.cost.pieces import PieceTimes
from megatron_hetero.cost.placement import Recompute
from megatron_hetero.cost.share import member_shares


@dataclass(frozen=True)
class StagePlace:
    """A stage without its layers: who it is, where in its pipeline, and what it has to keep.

    `num_sends_kept` as in `CostModel.memory`; `holders` are those of its optimizer states, None as
    the price list has them.
    """

    devices: tuple[Device, ...]
    shares: tuple[int, ...] | None
    first: bool
    last: bool
    num_in_flight: int
    num_sends_kept: int | None = None
    holders: StateHolders | None = None


@dataclass(frozen=True)
class Way:
    """One number of layers on a stage: seconds of a micro-batch there and back, and what it
    recomputes, in the terms of `PlacedStage`."""

    time_s: float
    recompute: Recompute | None
    num_recomputed: int | None


class StageWays:
    """The fastest way that fits, by layers; places that are alike are looked at once."""

    def __init__(self, costs: CostModel, vocab_rows: int) -> None:
        self.costs = costs
        self.vocab_rows = vocab_rows
        self.own: Recompute = costs.workload.training.recompute
        self.choices = recomputes(costs)
        self._found: dict[Hashable, tuple[Way, ...]] = {}

    def of(self, place: StagePlace) -> tuple[Way, ...]:
        """Ways with 1, 2, ... layers, as many as fit; empty where not even one does."""
        key = self._key(place)
        if key not in self._found:
            self._found[key] = self._look(place)
        return self._found[key]

    def _key(self, place: StagePlace) -> Hashable:
        cluster = self.costs.cluster
        gpus = tuple(
            (gpu.name, gpu.memory_bytes)
            for gpu in (cluster.gpu_type(device) for device in place.devices)
        )
        link = slowest_link(cluster, place.devices)
        ends = place.first, place.last
        kept = place.num_in_flight, place.num_sends_kept, place.holders
        return gpus, link, place.shares, ends, kept

    def _look(self, place: StagePlace) -> tuple[Way, ...]:
        pieces = {r: self._pieces(r, place) for r in self.choices}
        memories = {r: self._memories(r, place) for r in self.choices}
        ways: list[Way] = []
        for num_layers in range(1, self.costs.workload.model.num_layers + 1):
            found = [
                way
                for recompute in self.choices
                if (way := self._way(recompute, place, num_layers, pieces, memories)) is not None
            ]
            if not found:
                break
            ways.append(min(found, key=lambda way: way.time_s))
        return tuple(ways)

    def _pieces(self, recompute: Recompute, place: StagePlace) -> PieceTimes:
        costs = self.costs.variant(recompute=recompute)
        return costs.group_pieces(place.devices, place.shares, self.vocab_rows)

    def _memories(self, recompute: Recompute, place: StagePlace) -> tuple[StageMemory, ...]:
        """Of the unlike devices of the stage."""
        costs = self.costs.variant(recompute=recompute, holders=place.holders)
        width = len(place.devices)
        shares = member_shares(costs.workload.model, width, place.shares)
        unlike = {
            (costs.cluster.gpu_type(device).name, share): (device, share)
            for device, share in zip(place.devices, shares, strict=True)
        }
        return tuple(
            costs.memory(
                costs.cluster.node_by_name[device.node],
                width,
                place.first,
                place.last,
                place.num_in_flight,
                self.vocab_rows,
                place.num_sends_kept,
                share,
            )
            for device, share in unlike.values()
        )

    def _way(
        self,
        recompute: Recompute,
        place: StagePlace,
        num_layers: int,
        pieces: dict[Recompute, PieceTimes],
        memories: dict[Recompute, tuple[StageMemory, ...]],
    ) -> Way | None:
        """The way that recomputes like this; of "full" as few layers as will do."""
        partly = recompute == "full" and "none" in self.choices
        num_recomputed = num_layers
        if partly:
            num_recomputed = fewest_recomputed(memories["none"], memories["full"], num_layers)
            if num_recomputed > num_layers:
                return None
        elif any(m.peak_bytes(num_layers) > m.capacity_bytes for m in memories[recompute]):
            return None
        times = pieces[recompute].stage(num_recomputed, place.first, place.last)
        if partly:
            times = times + pieces["none"].layer.times(num_layers - num_recomputed)
        if partly and 0 < num_recomputed < num_layers:
            return Way(times.total_s, "full", num_recomputed)
        if partly and num_recomputed == 0:
            recompute = "none"
        return Way(times.total_s, None if recompute == self.own else recompute, None)


def fewest_recomputed(
    kept: Sequence[StageMemory], recomputed: Sequence[StageMemory], num_layers: int
) -> int:
    """Layers that have to be recomputed so that `num_layers` fit on every device; more than
    `num_layers` where that is not enough.  Both memories of each device, shape [device]."""
    fewest = 0
    for without, with_all in zip(kept, recomputed, strict=True):
        if without.peak_bytes(num_layers) <= without.capacity_bytes:
            continue
        none = with_some_layers_recomputed(without, with_all, 0).peak_bytes(num_layers)
        one = with_some_layers_recomputed(without, with_all, 1).peak_bytes(num_layers)
        if one >= none:
            return num_layers + 1
        fewest = max(fewest, -(-(none - without.capacity_bytes) // (none - one)), 1)
    return fewest
