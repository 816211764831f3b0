"""Unit prices of a cluster and a workload: pieces and memories of its groups; cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from megatron_hetero.cluster.nodes import Device, Node
from megatron_hetero.cost.hop_prices import BoundaryPrices
from megatron_hetero.cost.memory.device import stage_memory
from megatron_hetero.cost.memory.libraries import KeptFree, inward_communicators, kept_free
from megatron_hetero.cost.memory.stage import StageMemory, least_memory, with_in_flight
from megatron_hetero.cost.network.experts import expert_links
from megatron_hetero.cost.network.seconds import groups_of, slowest_link, worst_link
from megatron_hetero.cost.placement import PlacedStage
from megatron_hetero.cost.share import TensorShare, equal_dealing, least_shares, member_shares
from megatron_hetero.cost.widths import usable_widths
from megatron_hetero.cost.work.pieces import PieceTimes, least_pieces, price_groups, price_pieces
from megatron_hetero.model.blocks import padded_vocab_size


class UnitPrices(BoundaryPrices):
    """Prices of a group and of a GPU's memory beside those of a boundary; `CostModel` adds the
    prices up.

    Other prices override `widths`, `pieces`, `memory`, `send_loads_s` and `quick_times_s`, which
    the search asks where it builds plans.
    """

    def _forget(self) -> None:
        super()._forget()
        self._pieces: dict[tuple[object, ...], PieceTimes] = {}
        self._memories: dict[tuple[object, ...], StageMemory] = {}
        self._of_one_in_flight: dict[tuple[object, ...], list[StageMemory]] = {}
        self._kept: dict[tuple[int, int, int], KeptFree] = {}
        self._of_plain_links: Self | None = None

    def _share(self, other: Self) -> None:
        super()._share(other)
        # The optimizer's states count in memories alone.
        self._pieces, self._kept = other._pieces, other._kept

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
