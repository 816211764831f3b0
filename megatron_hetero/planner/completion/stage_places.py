"""Stages without their layers, and which of them are alike.

Alike are places of equal seconds and bytes, whatever their nodes are called, so that each kind is
priced once.
"""

from __future__ import annotations

from collections.abc import Hashable

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.memory.libraries import memory_kind
from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.cost.network.seconds import slowest_link
from megatron_hetero.cost.placement import PlacedExperts, PlacedStage
from megatron_hetero.cost.share import TensorShare, member_shares
from megatron_hetero.hashed import value
from megatron_hetero.model.spec import ModelSpec


@value(frozen=True)
class StagePlace:
    """A stage without its layers: who it is, where in its pipeline, and what it has to keep.

    `num_sends_kept` as in `CostModel.memory`; `holders` are those of its optimizer states, None as
    the price list has them.  `peers` are the devices of alike stages, its own first, with which it
    may deal experts out; `experts` says how it does.
    """

    devices: tuple[Device, ...]
    shares: tuple[int, ...] | None
    first: bool
    last: bool
    num_in_flight: int
    num_sends_kept: int | None = None
    holders: StateHolders | None = None
    context_parallel: int = 1
    expert_shares: tuple[int, ...] | None = None
    context_shares: tuple[int, ...] | None = None
    peers: tuple[tuple[Device, ...], ...] = ()
    experts: PlacedExperts | None = None

    @property
    def width(self) -> int:
        """Tensor-parallel width."""
        return len(self.devices) // self.context_parallel

    @property
    def stage(self) -> PlacedStage:
        """The stage with one layer."""
        return PlacedStage(
            self.devices,
            1,
            self.shares,
            context_parallel=self.context_parallel,
            expert_shares=self.expert_shares,
            context_shares=self.context_shares,
            experts=self.experts,
        )


UnlikeDevices = tuple[tuple[Device, TensorShare], ...]
"""Devices of a stage with distinct kinds or contents."""


class LikePlaces:
    """Keys that are equal for places that are alike, on one cluster and for one model."""

    def __init__(self, cluster: Cluster, model: ModelSpec) -> None:
        self._cluster, self._model = cluster, model
        self._peers: dict[tuple[tuple[Device, ...], ...], Hashable] = {}
        self._unlike: dict[Hashable, UnlikeDevices] = {}
        self._kinds: dict[str, tuple[str, int, int]] = {}

    def times_key(self, place: StagePlace) -> Hashable:
        """Return equal for places of equal times, whatever they have to keep."""
        cluster = self._cluster
        gpus = tuple([self._kind(device) for device in place.devices])
        link = slowest_link(cluster, place.devices)
        ends = place.first, place.last
        key: tuple[Hashable, ...] = gpus, link, place.shares, ends, place.expert_shares
        # Among peers the links to all of them count, and how the experts lie.
        if place.peers:
            key = *key, self._peers_key(place), place.experts and place.experts.sizes
        if place.context_parallel == 1:
            return key
        own = tuple(slowest_link(cluster, group.devices) for group in place.stage.groups)
        return *key, place.context_parallel, place.context_shares, own

    def _kind(self, device: Device) -> tuple[str, int, int]:
        """Return the kind of memory of the device's node."""
        found = self._kinds.get(device.node)
        if found is None:
            node = self._cluster.node_by_name[device.node]
            found = self._kinds[device.node] = memory_kind(node)
        return found

    def _peers_key(self, place: StagePlace) -> Hashable:
        """Return equal for places among peers of equal times: as if nodes had no names."""
        peers = place.peers
        if peers not in self._peers:
            cluster = self._cluster
            devices = [device for peer in peers for device in peer]
            # Nodes by the order in which they come: only which of them are equal matters.
            numbers: dict[str, int] = {}
            own = []
            for device in devices:
                number = numbers.setdefault(device.node, len(numbers))
                own.append((number, self._kind(device)))
            self._peers[peers] = tuple(own), slowest_link(cluster, devices), len(peers)
        return self._peers[peers]

    def unlike_devices(self, place: StagePlace) -> UnlikeDevices:
        """Return the stage's devices with distinct kinds or contents."""
        key = self.times_key(place)
        if key not in self._unlike:
            shares = member_shares(
                self._model,
                place.width,
                place.shares,
                place.context_parallel,
                place.expert_shares,
                place.context_shares,
                None if place.experts is None else place.experts.sizes,
            )
            unlike = {
                (self._kind(device), share): (device, share)
                for device, share in zip(place.devices, shares, strict=True)
            }
            self._unlike[key] = tuple(unlike.values())
        return self._unlike[key]
