"""Prices of a stage boundary: seconds of a crossing, and of the crossings of a pipeline; cached."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Self

import numpy as np

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.network.seconds import BoundaryTime, boundary_time
from megatron_hetero.cost.pipeline import steady_period_s
from megatron_hetero.cost.placement import PlacedStage
from megatron_hetero.cost.variants import Variants
from megatron_hetero.plan.sharding.token_shares import token_counts


class BoundaryPrices(Variants):
    """Prices of a boundary between two groups of GPUs; `UnitPrices` adds those of the groups."""

    def _forget(self) -> None:
        self._hops: dict[tuple[object, ...], BoundaryTime] = {}

    def _share(self, other: Self) -> None:
        self._hops = other._hops

    @property
    def activation_bytes(self) -> int:
        """Return the bytes of a micro-batch's tensor across a stage boundary."""
        model, training = self.workload.model, self.workload.training
        tokens = training.micro_batch_size * model.seq_length
        return tokens * model.hidden_size * training.residual_bytes

    def hop(self, senders: Sequence[Device], receivers: Sequence[Device]) -> BoundaryTime:
        """Time one crossing of a stage boundary."""
        key = self._hop_key(senders, receivers)
        found = self._hops.get(key)
        if found is None:
            found = self._hops[key] = boundary_time(
                self.cluster,
                senders,
                receivers,
                # Between unlike precisions the narrower one travels.
                min(self.on_devices(side).activation_bytes for side in (senders, receivers)),
                self.workload.training.sequence_parallel,
            )
        return found

    def _hop_key(
        self, senders: Sequence[Device], receivers: Sequence[Device]
    ) -> tuple[object, ...]:
        """Return what is equal for hops of equal price."""
        cluster = self.cluster
        ends = self._ends(senders), self._ends(receivers)
        # Lines and NICs are behind some pairs of nodes only.
        if cluster.has_lines or cluster.has_nics:
            return *ends[0], "to", *ends[1]
        # Otherwise kinds of nodes and the links between them; a large cluster has few of these.
        place = {name: i for i, name in enumerate(dict.fromkeys([*ends[0], *ends[1]]))}
        kinds = [self._kind(cluster.node_by_name[name]) for name in place]
        classes = cluster.link_classes
        numbers = [classes.node_number[name] for name in place]
        ways: object = ()
        if len(numbers) == 2:
            here, there = numbers
            ways = classes.of_pairs.item(here, there), classes.of_pairs.item(there, here)
        elif len(numbers) > 2:
            ways = classes.of_pairs[np.ix_(numbers, numbers)].astype(np.int32).tobytes()
        return *kinds, ways, *[place[name] for name in ends[0]], "to", *[place[n] for n in ends[1]]

    def _ends(self, devices: Sequence[Device]) -> list[str]:
        """Return the sender to further nodes of each GPU: a NIC, or the node."""
        if not self.cluster.has_nics:
            return [device.node for device in devices]
        return [self.cluster.nic_of(device) for device in devices]

    def stage_hop(self, senders: PlacedStage, receivers: PlacedStage) -> BoundaryTime:
        """Time one crossing from a stage to another."""
        # A plain boundary shares its price with `hop`.
        context = senders.context_parallel, receivers.context_parallel
        own = senders.precision, receivers.precision
        if context == (1, 1) and own == (None, None):
            return self.hop(senders.devices, receivers.devices)
        # Division of the sequence and precision on either side decide what travels between whom.
        tokens = self._uneven_tokens(senders), self._uneven_tokens(receivers)
        key = (*self._hop_key(senders.devices, receivers.devices), context, tokens, own)
        if key not in self._hops:
            self._hops[key] = boundary_time(
                self.cluster,
                senders.devices,
                receivers.devices,
                min(self.of_stage(side).activation_bytes for side in (senders, receivers)),
                self.workload.training.sequence_parallel,
                context,
                tokens,
            )
        return self._hops[key]

    def _uneven_tokens(self, stage: PlacedStage) -> tuple[int, ...] | None:
        shares = stage.context_shares
        if shares is None:
            return None
        return token_counts(self.workload.model.seq_length, shares, stage.width)

    def send_loads_s(self, groups: Sequence[Sequence[Device]]) -> tuple[float, ...]:
        """Return the seconds of each micro-batch for which messages keep a stage from computing,
        [stage].

        The sum of `hop_loads_s` over each stage's boundaries.
        """
        loads_s = [0.0] * len(groups)
        for index, (senders, receivers) in enumerate(pairwise(groups)):
            for stage, load_s in enumerate(self.hop_loads_s(senders, receivers), index):
                loads_s[stage] += load_s
        return tuple(loads_s)

    def hop_loads_s(
        self, senders: Sequence[Device], receivers: Sequence[Device]
    ) -> tuple[float, float]:
        """Return the seconds added by a boundary to the stages before and behind.

        Nothing here: the runtime sends beside computation.
        """
        return 0.0, 0.0

    def quick_times_s(
        self, stage_times_s: Sequence[float], groups: Sequence[Sequence[Device]]
    ) -> tuple[float, float]:
        """Estimate the seconds of a replica's first micro-batch, there and back, and of each
        further one.

        Args:
            stage_times_s: forward plus backward of one micro-batch, shape [stage].
            groups: the devices of each stage, shape [stage][tensor rank].
        """
        # Crossings of each boundary, forward and backward, shape [stage - 1].
        hops = [(self.hop(a, b), self.hop(b, a)) for a, b in pairwise(groups)]
        round_trips_s = [there.total_s + back.total_s for there, back in hops]
        # No micro-batch can follow faster than the busiest direction of a link carries the last
        # one.
        busiest_s = max(
            (max(there.serialisation_s, back.serialisation_s) for there, back in hops),
            default=0.0,
        )
        fill_s = sum(stage_times_s) + sum(round_trips_s)
        return fill_s, steady_period_s(stage_times_s, round_trips_s, busiest_s)
