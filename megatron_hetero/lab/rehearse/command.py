"""`megatron-hetero rehearse` behind the command line: options in, data out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.lab.rehearse.links.network import SlowLink
from megatron_hetero.lab.rehearse.rehearsal import Rehearsal, rehearsal_to_data
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.job.local.folders import kept_folder
from megatron_hetero.runtime.job.local.loading import preload
from megatron_hetero.runtime.transformer_engine import layers

_FLAG = "--transformer-impl"

__all__ = ["import_megatron", "rehearsal_to_data", "rehearse_plan"]


def rehearse_plan(
    plan: Plan,
    cluster: Cluster,
    profile: Profile | None,
    *,
    steps: int,
    time_scale: float | None,
    slow_ranks: dict[int, float],
    slow_links: list[tuple[str, str, float]],
    keep: Path | None,
    on_progress: Callable[[str], None] = lambda words: None,
) -> Rehearsal:
    """Run a plan on this machine's CPU; see `lab.rehearse.run.rehearse`.

    Args:
        plan: a plan with devices and a workload, valid on `cluster`.
        cluster: the cluster to imitate.
        profile: measured times of its GPUs; without one the catalogue answers.
        steps: number of steps to rehearse.
        time_scale: seconds of this machine for one of the cluster's; None lets the ranks choose.
        slow_ranks: rank -> factor by which it computes slower than predicted.
        slow_links: (node, node, factor by which messages are slower than described).
        keep: folder for the files of the processes; None deletes them.
        on_progress: called with the state of the rehearsal, in words.
    """
    import_megatron(on_progress, () if plan.workload is None else plan.workload.megatron_args)
    from megatron_hetero.lab.rehearse.run import RehearsalOptions, rehearse

    options = RehearsalOptions(
        steps=steps,
        time_scale=time_scale,
        slow_ranks=slow_ranks,
        slow_links=tuple(SlowLink(*link) for link in slow_links),
    )
    with kept_folder(keep, "rehearse") as folder:
        return rehearse(plan, cluster, profile, options, folder, on_progress)


def import_megatron(
    on_progress: Callable[[str], None], megatron: Sequence[str] = (f"{_FLAG}=local",)
) -> None:
    """Import everything needed by the ranks once, before the fork; CUDA does not survive a fork.

    Args:
        on_progress: called with the activity, in words.
        megatron: Megatron's flags of the job, which name its layers.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    on_progress("importing Megatron")
    layers.provide_for(megatron)
    preload()
