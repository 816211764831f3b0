"""Checkpoints that last, in Megatron's places: every save, every load, every job."""

from __future__ import annotations

from functools import partial

from megatron_hetero.runtime.megatron.checkpoints import (
    data,
    load,
    loaded_data,
    metadata,
    save,
    sharding,
)
from megatron_hetero.runtime.megatron.checkpoints import tracker as tracker_file
from megatron_hetero.runtime.state import choosing, coverage, folders, other_layers
from megatron_hetero.runtime.state.metadata_reading import read_metadata
from megatron_hetero.runtime.state.saving import Saver


def guard_checkpoints(
    plan_hash: str | None, keep: int | None, ranks: choosing.UnlikeRanks | None = None
) -> Saver:
    """From here on this process saves and loads as `saving` and `choosing` say.

    Args:
        plan_hash: of the plan that the job runs; None without one.
        keep: the number of checkpoints that are kept; None for all.
        ranks: as in `choosing.load_checkpoint`.
    Raises:
        MegatronVersionError: what would be replaced is not known in this Megatron or torch.
    """
    saver = Saver(plan_hash, keep)
    save.apply(saver.save_checkpoint)
    data.apply(saver.save)
    tracker_file.apply(folders.TRACKER, saver.write_tracker)
    load.apply(partial(choosing.load_checkpoint, ranks=ranks))
    loaded_data.apply(other_layers.load)
    metadata.apply(read_metadata)
    sharding.apply(coverage.is_a_grid, coverage.faults_of)
    return saver
