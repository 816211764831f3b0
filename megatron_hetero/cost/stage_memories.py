"""The memory of each GPU of a stage, in the stage's own settings."""

from __future__ import annotations

from typing import Self

from megatron_hetero.cost.memory.device import kept_sends
from megatron_hetero.cost.memory.sharded import sharded_memory
from megatron_hetero.cost.memory.stage import StageMemory, tightest, with_some_layers_recomputed
from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.cost.placement import PlacedReplica, Sharding
from megatron_hetero.cost.share import member_shares
from megatron_hetero.cost.unit_prices import UnitPrices


class MemoryPrices(UnitPrices):
    """Memories of stages; `StagePrices` adds their seconds."""

    def _of_stage(self, replica: PlacedReplica, index: int) -> Self:
        """Return the price list under the settings of stage `index` alone, but for its
        recompute."""
        # Parts of states by stage are numbers of holders, one over the part.
        parts = replica.stages[index].state_parts
        holders = None
        if parts is not None and self.workload.training.use_distributed_optimizer:
            holders = StateHolders(*(1 / part for part in parts))
        costs = self.variant(micro_batch_size=replica.micro_batch_size, holders=holders)
        return costs.of_stage(replica.stages[index])

    def stage_memory(self, replica: PlacedReplica, index: int, rows: int) -> StageMemory:
        """Return the memory of the fullest GPU of stage `index`."""
        memories = self.stage_memories(replica, index, rows)
        return tightest(memories, replica.stages[index].num_layers)

    def stage_memories(
        self, replica: PlacedReplica, index: int, rows: int, *, of_ends: bool = False
    ) -> tuple[StageMemory, ...]:
        """Return the memory of each GPU of stage `index`, in rank order; equal ones are one object.

        With launch counts of its own a replica runs in our runtime.

        Args:
            replica, index: the stage.
            rows: of the padded vocabulary.
            of_ends: the base is that of embedding and head alone, for no layers.
        """
        # Stages in a precision of their own have a price list of their own.
        costs = self._of_stage(replica, index)
        if costs is not self:
            return costs.stage_memories(replica, index, rows, of_ends=of_ends)
        if (sharding := replica.stages[index].sharding) is not None:
            return self._sharded_memories(replica, index, rows, sharding)
        stage, num_in_flight = replica.stages[index], replica.num_in_flight
        first, last = index == 0, index == len(replica.stages) - 1
        # Our runtime keeps tensors for neighbours; stock Megatron keeps one for each.
        num_sends_kept = None
        if replica.launch_counts is not None:
            num_sends_kept = kept_sends(num_in_flight)[index]
        model, made = self.workload.model, dict[tuple[object, ...], StageMemory]()
        some = None if of_ends else stage.recompute_num_layers
        counts = self._kind_counts(replica, index)
        if of_ends:
            counts = (0,) * len(counts)
        found = []
        shares = member_shares(
            model,
            stage.width,
            stage.shares,
            stage.context_parallel,
            stage.expert_shares,
            stage.context_shares,
            stage.expert_groups,
        )
        # Equal GPUs with equal shares are computed once.
        for device, share in zip(stage.devices, shares, strict=True):
            node = self.cluster.node_by_name[device.node]
            key = self._kind(node), share
            if key not in made:
                asked = (
                    *(node, stage.width, first, last, num_in_flight[index], rows),
                    *(num_sends_kept, share),
                )
                memory = self.variant(recompute=stage.recompute).memory(*asked)
                # Some layers recomputed: between the memories of both.
                if some is not None:
                    kept = self.variant(recompute="none").memory(*asked)
                    memory = with_some_layers_recomputed(kept, memory, some)
                made[key] = memory.with_layers(counts)
            found.append(made[key])
        return tuple(found)

    def _sharded_memories(
        self, replica: PlacedReplica, index: int, rows: int, sharding: Sharding
    ) -> tuple[StageMemory, ...]:
        """Return the memory of each GPU of a stage with sharded layers."""
        # Holders that cut a layer alike exchange it in place; others pack it first.
        num_layers = replica.stages[index].num_layers
        is_cut_alike = len({peer.stages[index].cut for peer in sharding.replicas}) == 1
        sharded = sharded_memory(
            self.workload.training, self.holders.layers, is_cut_alike=is_cut_alike
        )
        whole = self.stage_memories(replica.without_sharding, index, rows)
        # Equal GPUs share one object, in the result as well.
        made = {id(memory): sharded.of(memory, sharding.num_layers, num_layers) for memory in whole}
        return tuple(made[id(memory)] for memory in whole)

    def _kind_counts(self, replica: PlacedReplica, index: int) -> tuple[int, ...]:
        """Count the layers of each kind on stage `index`; empty where all layers are alike."""
        model = self.workload.model
        if not model.kinds:
            return ()
        return model.kind_counts(replica.first_layers[index], replica.stages[index].num_layers)
