"""The time of a stage for each number of layers, with as much recompute as its memory needs.

A stage that does not fit recomputes some of its layers (Megatron's `--recompute-method block`).  A
stage with memory to spare recomputes none, whatever the job's own flags say; the gradient is the
same.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import zip_longest

from megatron_hetero.cost.choices import (
    deals_experts,
    deals_unlike,
    expert_groups,
    recomputes,
)
from megatron_hetero.cost.memory.stage import StageMemory
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedExperts, Recompute
from megatron_hetero.cost.share import equal_dealing
from megatron_hetero.cost.work.pieces import PieceTimes
from megatron_hetero.model.blocks import divides_experts
from megatron_hetero.planner.completion.stage_lines import (
    Rooms,
    StageLine,
    StageOption,
    StageTimes,
    difference,
)
from megatron_hetero.planner.completion.stage_places import LikePlaces, StagePlace


class StageOptions:
    """The fastest option that fits, by layers; places that are alike are looked at once.

    `given`: all stages as the job's flags say.  `like`: options that differ in the division of the
    optimizer's states alone, with which all is kept that does not depend on the division.
    """

    def __init__(
        self,
        costs: CostModel,
        vocab_rows: int,
        given: bool = False,
        like: StageOptions | None = None,
    ) -> None:
        self.costs = costs
        self.vocab_rows = vocab_rows
        self.own: Recompute = costs.workload.training.recompute
        self.given = given
        self.choices = (self.own,) if given else recomputes(costs)
        self.deals = deals_experts(costs) and not given
        self._found: dict[Hashable, tuple[StageOption, ...]] = {}
        self._lines: dict[Hashable, list[StageLine]] = {}
        self._times: dict[Hashable, StageTimes] = like._times if like else {}
        self._slopes: dict[Hashable, tuple[Rooms, ...]] = like._slopes if like else {}
        """By one micro-batch more, and by one message more."""
        self._alike: LikePlaces = (
            like._alike if like else LikePlaces(costs.cluster, costs.workload.model)
        )

    def of(self, place: StagePlace) -> tuple[StageOption, ...]:
        """Return options with 1, 2, ... layers, as many as fit; empty where not even one does."""
        key = self.key(place)
        if key not in self._found:
            self._found[key] = self._look(place, key)
        return self._found[key]

    def whatever_memory(self, place: StagePlace, num_layers: int) -> StageOption:
        """Return a stage as the job's flags say, whether it fits or not."""
        return self._timed(self.own, place).option(num_layers, num_layers)

    @property
    def num_looked(self) -> int:
        """Unlike places so far."""
        return len(self._lines)

    def key(self, place: StagePlace) -> tuple[Hashable, ...]:
        """Return equal for places that are alike."""
        return (
            self._alike.times_key(place),
            place.holders,
            place.num_in_flight,
            place.num_sends_kept,
        )

    def _look(self, place: StagePlace, key: tuple[Hashable, ...]) -> tuple[StageOption, ...]:
        model = self.costs.workload.model
        in_flight, sends = place.num_in_flight, place.num_sends_kept
        if not model.kinds:  # memory is a straight line in both
            # By default a stage keeps one message for each neighbour.
            if sends is None:
                sends = (not place.first) + (not place.last)
            # All numbers in flight share one line, looked at with one micro-batch and no message.
            key = key[:2]
        if key not in self._lines:
            if not model.kinds:
                place = replace(place, num_in_flight=1, num_sends_kept=0)
            self._lines[key] = [
                self._line(recompute, dealt)
                for dealt in self._worth(place)
                for recompute in self.choices
            ]
        of_lines = [
            line.times.all_within(
                model.num_layers,
                line.rooms if model.kinds else line.rooms_with(in_flight, sends or 0),
            )
            for line in self._lines[key]
        ]
        options: list[StageOption] = []
        for of_layers in zip_longest(*of_lines):
            found = [option for option in of_layers if option is not None]
            # Memory grows with layers: more of them do not fit either.
            if not found:
                break
            options.append(found[0] if len(found) == 1 else min(found, key=_time_s))
        return tuple(options)

    def _worth(self, place: StagePlace) -> list[StagePlace]:
        """Return the ways to deal experts out, of several over replicas those alone that no other
        beats both in time and in memory."""
        every = list(self._dealings(place))
        if not place.peers:
            return every
        known: dict[StagePlace, tuple[float, int, int]] = {}
        # Compared by seconds and bytes of a layer, and by the bytes left free.
        for dealt in every:
            line = self._line(self.choices[0], dealt)
            free, layer, *_ = line.rooms[0]
            known[dealt] = sum(line.times.layer_s), layer, -free
        return [
            dealt
            for index, (dealt, own) in enumerate(known.items())
            if not any(
                all(a <= b for a, b in zip(other, own, strict=True))
                # Of equal ways the first stays.
                and (other != own or number < index)
                for number, other in enumerate(known.values())
            )
        ]

    def _dealings(self, place: StagePlace) -> Iterator[StagePlace]:
        """Yield the place with experts as they lie; if experts may be dealt out, also divided and
        dealt out: in equal numbers, or in numbers by the shares that the group's GPUs have of all
        else, which follow their speed and memory."""
        if place.expert_shares or divides_experts(self.costs.workload.model, place.width):
            yield place
        if self.deals and place.context_parallel == 1:
            model = self.costs.workload.model
            table = equal_dealing(model, place.width)
            if place.shares is not None:
                table = place.shares if deals_unlike(self.costs, place.width) else None
            for other in (None, table):
                may_lie = other or divides_experts(model, place.width)
                if other != place.expert_shares and may_lie:
                    yield replace(place, expert_shares=other)
        yield from self._over_replicas(place)

    def _over_replicas(self, place: StagePlace) -> Iterator[StagePlace]:
        """Yield the place with experts dealt out over the stages that are alike, in whole groups of
        some of them."""
        own, number = len(place.devices), len(place.peers)
        for size, width in expert_groups(self.costs, place.width, own * number):
            whole = size * width
            # A group of experts is made of whole stages, or divides one.
            if (own % whole and whole % own) or place.shares or place.context_shares:
                continue
            together = max(1, whole // own)
            if number % together == 0:
                devices = tuple(d for peer in place.peers[:together] for d in peer)
                yield replace(place, experts=PlacedExperts((size, width), devices))

    def _line(self, recompute: Recompute, place: StagePlace) -> StageLine:
        """Return options that recompute like this; of "full" as few layers as will do.

        Where all layers are alike the place keeps one micro-batch and no message.
        """
        times, rooms = self._timed(recompute, place), self._rooms(recompute, place)
        if self.costs.workload.model.kinds:
            return StageLine(times, rooms)
        # One micro-batch more, and one message more, give the slopes of the line, whoever holds the
        # optimizer's states; endless holders (a bound) leave no copies for the update.
        key = recompute, self._alike.times_key(place), len(rooms)
        if key not in self._slopes:
            more = replace(place, num_in_flight=2), replace(place, num_sends_kept=1)
            self._slopes[key] = tuple(
                [difference(self._rooms(recompute, one), rooms) for one in more]
            )
        return StageLine(times, rooms, *self._slopes[key])

    def _is_partial(self, recompute: Recompute) -> bool:
        return recompute == "full" and "none" in self.choices

    def _rooms(self, recompute: Recompute, place: StagePlace) -> Rooms:
        partly = self._is_partial(recompute)
        memories = self.memories(recompute, place)
        kept = self.memories("none", place) if partly else memories
        rooms = []
        for without, with_all in zip(kept, memories, strict=True):
            # Recompute saves activations and nothing else.
            part = "activations"
            saved = without.per_layer[part] - with_all.per_layer[part] if partly else 0
            rooms.append(
                (
                    without.capacity_bytes - without.base_bytes,
                    without.bytes_per_layer,
                    without.capacity_bytes - with_all.base_bytes,
                    saved,
                )
            )
            if without.has_copies:
                # While the optimizer works there is nothing that recomputing would save.
                base, layer = without.updating_line
                free = without.capacity_bytes - base
                rooms.append((free, layer, free, 0))
        return tuple(rooms)

    def _timed(self, recompute: Recompute, place: StagePlace) -> StageTimes:
        key = recompute, self._alike.times_key(place)
        if key not in self._times:
            self._times[key] = self._times_of(recompute, place)
        return self._times[key]

    def _times_of(self, recompute: Recompute, place: StagePlace) -> StageTimes:
        partly = self._is_partial(recompute)
        pieces = self.pieces(recompute, place)
        plain = self.pieces("none", place) if partly else pieces
        ends = pieces.stage(0, place.first, place.last)
        return StageTimes(
            recompute,
            self.own,
            partly,
            (ends.forward_s, ends.backward_s),
            (pieces.layer.forward_s, pieces.layer.backward_s),
            (plain.layer.forward_s, plain.layer.backward_s),
            place.expert_shares,
            None if place.experts is None else place.experts.sizes,
        )

    def pieces(self, recompute: Recompute, place: StagePlace) -> PieceTimes:
        """Time the model's pieces on the stage, under a kind of recompute."""
        costs = self.costs.variant(recompute=recompute)
        if place.context_parallel > 1 or place.expert_shares is not None or place.experts:
            return costs.stage_pieces(place.stage, self.vocab_rows)
        return costs.group_pieces(place.devices, place.shares, self.vocab_rows)

    def memories(self, recompute: Recompute, place: StagePlace) -> tuple[StageMemory, ...]:
        """Return the memory of the unlike devices of the stage."""
        costs = self.costs.variant(recompute=recompute, holders=place.holders)
        return tuple(
            costs.memory(
                costs.cluster.node_by_name[device.node],
                place.width,
                place.first,
                place.last,
                place.num_in_flight,
                self.vocab_rows,
                place.num_sends_kept,
                share,
            )
            for device, share in self._alike.unlike_devices(place)
        )


def _time_s(option: StageOption) -> float:
    return option.time_s
