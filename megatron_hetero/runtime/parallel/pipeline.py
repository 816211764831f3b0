"""The boundaries of a rank's stage, as Megatron's loop asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron_hetero.runtime.parallel.boundary import Boundary
from megatron_hetero.runtime.parallel.groups import RankGroups

LED_BELOW_BYTES = 1 << 19
"""Over gloo, smaller activations go between the first ranks of both groups, and the receiver
broadcasts (`tools/bench boundary`). Over NCCL, not yet measured, all ranks send parts."""


def always_send_parts() -> None:
    """Send in this process as over NCCL, whatever the size: for what stands for a run on GPUs."""
    global LED_BELOW_BYTES
    LED_BELOW_BYTES = 0


class PipelineCommunicator:
    """Value for `pretrain(p2p_communicator=)`, which Megatron's loop hands to the schedule.

    `boundaries` are this rank's, by their place in the chain of model chunks; a replica of a single
    stage has none.  The properties answer what Megatron asks of its own `P2PCommunicator`.

    Args:
        sequence_parallel: the job's flag.  The one in `config` is this rank's, and Megatron takes
            it away from groups of one rank, whose neighbours may follow it all the same.
        crossings: what crosses the boundaries of unlike precisions (`Boundary`), by their place.
    """

    def __init__(
        self,
        groups: RankGroups,
        config: Any,
        sequence_parallel: bool,
        crossings: Mapping[int, torch.dtype] = MappingProxyType({}),
    ) -> None:
        self.config = config
        self.pp_group = groups.pipeline
        self.boundaries: dict[int, Boundary] = {}
        # Over gloo a leading rank sends for its group, but only tensors that the group would gather
        # anyway.
        is_gathered = not (sequence_parallel or config.sequence_parallel)
        over_gloo = dist.get_backend(groups.world) == dist.Backend.GLOO
        # One boundary for each hop of this rank: it is either before or behind the boundary.
        for number, hop in groups.hops.items():
            before, after = groups.chain[number], groups.chain[number + 1]
            if before == groups.pipeline.stage:
                own, peers, outward, inward = before, after, hop.forward, hop.backward
            else:
                own, peers, outward, inward = after, before, hop.backward, hop.forward
            self.boundaries[number] = Boundary(
                groups,
                groups.stage_ranks[peers],
                outward,
                inward,
                config,
                groups.stage_ranks[own],
                hop.shapes,
                LED_BELOW_BYTES if is_gathered and over_gloo else 0,
                crossings.get(number),
            )

    def hook(self, model: list[Any]) -> list[Any]:
        """Store the boundaries on the model's configuration: Megatron's `post_wrap_hook`."""
        set_boundaries(get_model_config(model[0]), self.boundaries)
        return model

    @property
    def is_pp_first_stage(self) -> bool:
        return self.pp_group.rank() == 0

    @property
    def is_pp_last_stage(self) -> bool:
        return self.pp_group.rank() == self.pp_group.size() - 1

    @property
    def total_stages(self) -> int:
        return self.pp_group.size()

    @property
    def current_stage(self) -> int:
        return self.pp_group.rank()


_ATTRIBUTE = "hetero_boundaries"


def set_boundaries(config: Any, boundaries: Mapping[int, Boundary]) -> None:
    """Store a rank's boundaries on a model's configuration, where `boundaries_of` finds them."""
    setattr(config, _ATTRIBUTE, boundaries)


def boundaries_of(config: Any) -> Mapping[int, Boundary]:
    """Return this rank's boundaries, by their place in the chain; none under stock Megatron."""
    found: Mapping[int, Boundary] = getattr(config, _ATTRIBUTE, {})
    return found
