"""`megatron-hetero rehearse --sequences` behind the command line: options in, data out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.lab.rehearse.command import import_megatron
from megatron_hetero.lab.rehearse.links.network import SlowLink
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.job.local.folders import kept_folder
from megatron_hetero.sequences.job_plan import job_groups, job_plan
from megatron_hetero.sequences.lengths import Lengths


def rehearse_sequences(
    cluster: Cluster,
    cluster_file: Path,
    workload: Workload,
    asked: Plan | None,
    lengths: Lengths,
    profile: Profile | None,
    *,
    steps: int,
    time_scale: float | None,
    slow_ranks: Mapping[int, float],
    slow_links: Sequence[tuple[str, str, float]],
    keep: Path | None,
    on_progress: Callable[[str], None] = lambda words: None,
) -> dict[str, Any]:
    """Run dealt steps on this machine's CPU; see `run.rehearse_deals`.

    Args:
        cluster: the machines.
        cluster_file: that describes them.
        workload: model and training.
        asked: the plan; None makes every GPU a replica.
        lengths: of the documents.
        profile: measured times of the GPUs; without one the catalogue answers.
        steps: number of steps to rehearse.
        time_scale: seconds of this machine for one of the cluster's; None lets the ranks choose.
        slow_ranks: rank -> factor by which it computes slower than predicted.
        slow_links: (node, node, factor by which messages are slower than described).
        keep: folder for the files of the processes; None deletes them.
        on_progress: called with the state of the rehearsal, in words.
    Returns:
        `error`, and of each step `predicted_s, rehearsed_s, error` and more.
    """
    # Plan and groups are those of the real job; only the ranks shrink tensors.
    plan = job_plan(cluster, workload, asked, profile)
    groups = job_groups(cluster, workload, asked, plan, profile)
    import_megatron(on_progress)
    from megatron_hetero.lab.rehearse.dealt.run import DealtJob, rehearse_deals
    from megatron_hetero.lab.rehearse.run import RehearsalOptions

    job = DealtJob(cluster, cluster_file.resolve(), workload, plan, groups, lengths)
    options = RehearsalOptions(
        steps, time_scale, slow_ranks, tuple(SlowLink(*link) for link in slow_links)
    )
    with kept_folder(keep, "rehearse") as folder:
        found = rehearse_deals(job, options, folder, on_progress)
    return {
        "error": found.error,
        "layout": format_layout(plan.layout),
        "num_ranks": plan.layout.num_devices,
        "time_scale": found.time_scale,
        "num_disturbed_steps": found.num_disturbed,
        "largest_lag_s": found.largest_lag_s,
        "steps": [asdict(step) | {"error": step.error} for step in found.steps],
    }
