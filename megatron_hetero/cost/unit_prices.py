"""Unit prices of a cluster and a workload: pieces, memories, hops; cached."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Self

import numpy as np

from megatron_hetero.cluster.nodes import Device, Node
from megatron_hetero.cost.memory.device import stage_memory
from megatron_hetero.cost.memory.libraries import KeptFree, inward_communicators, kept_free
from megatron_hetero.cost.memory.stage import StageMemory, least_memory, with_in_flight
from megatron_hetero.cost.network.experts import expert_links
from megatron_hetero.cost.network.seconds import (
    BoundaryTime,
    boundary_time,
    groups_of,
    slowest_link,
    worst_link,
)
from megatron_hetero.cost.pipeline import steady_period_s
from megatron_hetero.cost.placement import PlacedStage
from megatron_hetero.cost.share import (
    TensorShare,
    equal_dealing,
    least_shares,
    member_shares,
)
from megatron_hetero.cost.variants import Variants
from megatron_hetero.cost.widths import usable_widths
from megatron_hetero.cost.work.pieces import (
    PieceTimes,
    activation_bytes,
    least_pieces,
    price_groups,
    price_pieces,
)
from megatron_hetero.model.blocks import padded_vocab_size
from megatron_hetero.plan.sharding.token_shares import token_counts


class UnitPrices(Variants):
    """Prices of a group, of a GPU's memory and of a boundary; `CostModel` adds the prices up.

    Other prices override `widths`, `pieces`, `memory`, `send_loads_s` and `quick_times_s`, which
    the search asks where it builds plans.
    """

    def _forget(self) -> None:
        self._pieces: dict[tuple[object, ...], PieceTimes] = {}
        self._memories: dict[tuple[object, ...], StageMemory] = {}
        self._of_one_in_flight: dict[tuple[object, ...], list[StageMemory]] = {}
        self._kept: dict[tuple[int, int, int], KeptFree] = {}
        self._hops: dict[tuple[object, ...], BoundaryTime] = {}
        self._of_plain_links: Self | None = None

    def _share(self, other: Self) -> None:
        # The optimizer's states count in memories alone.
        self._pieces, self._kept, self._hops = other._pieces, other._kept, other._hops

    @property
    def activation_bytes(self) -> int:
        """Return the bytes of a micro-batch's tensor across a stage boundary."""
        return activation_bytes(self.workload)

    def widths(self, node: Node) -> tuple[int, ...]:
        """Return the tensor-parallel widths that can be priced on a node for this model,
        ascending."""
        return usable_widths(self.cluster, self.workload, node)

    def vocab_rows(self, widths: Sequence[int]) -> int:
        """Count the rows of the padded vocabulary for a plan of these widths."""
        return padded_vocab_size(self.workload.model, tuple(widths))

    def pieces(self, node: Node, width: int, vocab_rows: int) -> PieceTimes:
        """Time the model's pieces on a group of `width` GPUs of one node, in equal shares; where
        the width does not divide the model, in shares as equal as can be, at least."""
        # GPUs that compute in another precision than the job's have a price list of their own.
        costs = self.on((node.gpu_type,))
        if costs is not self:
            return costs.pieces(node, width, vocab_rows)
        key = (self._kind(node), width, vocab_rows)
        # One price for each way to divide experts: the least of all counts.
        if key not in self._pieces:
            self._pieces[key] = least_pieces(
                [
                    price_pieces(
                        self.workload,
                        self.profile,
                        tuple((node.gpu_type, share) for share in members),
                        node.link,
                        vocab_rows,
                    )
                    for members in self._ways(width)
                ]
            )
        return self._pieces[key]

    def _ways(self, width: int) -> list[tuple[TensorShare, ...]]:
        """Return the unlike members of a group of equal shares; with `least_of_dealings`, of one
        that deals experts out as well."""
        model = self.workload.model
        table = equal_dealing(model, width) if self.least_of_dealings else None
        if table is None:
            return [least_shares(model, width)]
        return [least_shares(model, width), member_shares(model, width, expert_shares=table)[:1]]

    def group_pieces(
        self, devices: Sequence[Device], shares: tuple[int, ...] | None, vocab_rows: int
    ) -> PieceTimes:
        """Time the model's pieces on a group of any devices, in rank order, in any shares (None:
        equal)."""
        costs = self.on_devices(devices)
        if costs is not self:
            return costs.group_pieces(devices, shares, vocab_rows)
        # Equal shares on one node: the price is the same for every choice of its GPUs.
        nodes = tuple([device.node for device in devices])
        if shares is None and len(set(nodes)) == 1:
            return self.pieces(self.cluster.node_by_name[nodes[0]], len(devices), vocab_rows)
        # GPUs of a node are alike, so nodes in rank order tell the members and their links.
        key = (self._places(nodes), shares, vocab_rows)
        if key not in self._pieces:
            members = zip(
                [self.cluster.gpu_type(device) for device in devices],
                member_shares(self.workload.model, len(devices), shares),
                strict=True,
            )
            link = slowest_link(self.cluster, devices)
            self._pieces[key] = price_pieces(
                self.workload, self.profile, tuple(members), link, vocab_rows
            )
        return self._pieces[key]

    def _places(self, nodes: tuple[str, ...]) -> tuple[object, ...]:
        """Return what tells a group on these nodes, in rank order, from others: the kind where all
        are one node, else the nodes, since links lie between them."""
        if len(set(nodes)) > 1:
            return nodes
        return self._kind(self.cluster.node_by_name[nodes[0]]), len(nodes)

    def stage_pieces(self, stage: PlacedStage, vocab_rows: int) -> PieceTimes:
        """Time the model's pieces on the GPUs of a stage."""
        costs = self.of_stage(stage)
        if costs is not self:
            return costs.stage_pieces(stage, vocab_rows)
        # Plain groups have a simpler cache.
        if stage.context_parallel == 1 and stage.expert_shares is None and stage.experts is None:
            return self.group_pieces(stage.devices, stage.shares, vocab_rows)
        devices, width = stage.devices, stage.width
        # The key is all that tells the members, and the links of each group, from another stage's.
        nodes = tuple([device.node for device in devices])
        key = (
            *(self._places(nodes), stage.shares, vocab_rows),
            *(stage.context_parallel, stage.expert_shares, stage.context_shares),
            stage.expert_groups,
            None if stage.experts is None else tuple(self._ends(stage.experts.devices)),
        )
        # Members with their shares; experts add those with whom they wait.
        if key not in self._pieces:
            shares = member_shares(
                self.workload.model,
                width,
                stage.shares,
                stage.context_parallel,
                stage.expert_shares,
                stage.context_shares,
                stage.expert_groups,
            )
            gpus = [self.cluster.gpu_type(device) for device in devices]
            members = list(zip(gpus, shares, strict=True))
            links = None
            if stage.experts is not None:
                # They wait for each other in every layer: all are as slow as the slowest.
                others = {id(gpu): gpu for gpu in map(self.cluster.gpu_type, stage.experts.devices)}
                members += [(gpu, shares[0]) for gpu in others.values()]
                links = expert_links(self.cluster, stage.experts.devices, *stage.experts.sizes)
            # What hold the same parts stand on the same nodes, unless groups are over several.
            ends = self._ends(devices)
            rings = {tuple(ends[i::width]): devices[i::width] for i in range(width)}.values()
            self._pieces[key] = price_groups(
                self.workload,
                self.profile,
                tuple(members),
                [slowest_link(self.cluster, group) for group in groups_of(devices, width)],
                vocab_rows,
                worst_link([slowest_link(self.cluster, ring) for ring in rings]),
                links,
            )
        return self._pieces[key]

    def divided_pieces(
        self, node: Node, width: int, context_parallel: int, vocab_rows: int
    ) -> PieceTimes:
        """Time the model's pieces on a group among several of a node that divide sequences, however
        fast the rest."""
        costs = self.on((node.gpu_type,))
        if costs is not self:
            return costs.divided_pieces(node, width, context_parallel, vocab_rows)
        key = (self._kind(node), width, vocab_rows, context_parallel)
        # One group stands for all: each has one of the `context_parallel` equal parts of a
        # sequence.
        if key not in self._pieces:
            shares = member_shares(self.workload.model, width, None, context_parallel)
            members = tuple((node.gpu_type, share) for share in shares[:width])
            self._pieces[key] = price_pieces(
                self.workload, self.profile, members, node.link, vocab_rows
            )
        return self._pieces[key]

    def memory(
        self,
        node: Node,
        width: int,
        first: bool,
        last: bool,
        num_in_flight: int,
        vocab_rows: int,
        num_sends_kept: int | None = None,
        share: TensorShare | None = None,
    ) -> StageMemory:
        """Return the memory of a GPU of a stage, as a function of the stage's layers; see
        `stage_memory`.

        Args:
            width: GPUs of its tensor-parallel group.
            first, last: whether the stage holds the embedding, the head.
            num_in_flight, num_sends_kept: micro-batches and messages kept at the peak.
            share: what it holds of a group in unequal shares; None is an equal one, or the least
                that a width which does not divide the model leaves to one.
        """
        # A GPU in a precision of its own has a price list of its own, as in `pieces`.
        costs = self.on((node.gpu_type,))
        if costs is not self:
            asked = (first, last, num_in_flight, vocab_rows, num_sends_kept, share)
            return costs.memory(node, width, *asked)
        # Activations grow with the micro-batches in flight, libraries with the communicators that
        # these take, and all else stays: the memory with one in flight and without libraries is
        # computed once.
        kept = self._kept_free(node, width, inward_communicators(first, last, num_in_flight))
        of_one = (
            (node.gpu_type.name, node.gpu_type.memory_bytes),
            width if share is None else share,
            first,
            last,
            vocab_rows,
            num_sends_kept,
        )
        key = num_in_flight, kept.libraries, of_one
        if key not in self._memories:
            if of_one not in self._of_one_in_flight:
                # Without a given share: the last member has the least, and a bound takes the least
                # of both ways to divide experts.
                ways = [members[-1] for members in self._ways(width)] if share is None else [share]
                self._of_one_in_flight[of_one] = [
                    stage_memory(
                        self.workload,
                        node.gpu_type,
                        own,
                        first=first,
                        last=last,
                        num_in_flight=1,
                        vocab_rows=vocab_rows,
                        kept_free=KeptFree(0, kept.reserve),
                        num_sends_kept=num_sends_kept,
                        holders=self.holders,
                    )
                    for own in ways
                ]
            self._memories[key] = least_memory(
                [
                    with_in_flight(self.workload.model, memory, num_in_flight, kept.libraries)
                    for memory in self._of_one_in_flight[of_one]
                ]
            )
        return self._memories[key]

    def _kept_free(self, node: Node, width: int, num_inward: int) -> KeptFree:
        key = self._kind(node), width, num_inward
        if key not in self._kept:
            self._kept[key] = kept_free(self.cluster, node, width, num_inward, self.profile)
        return self._kept[key]

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
