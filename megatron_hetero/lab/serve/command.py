"""`megatron-hetero serve` behind the command line: all ranks of a replica on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_hetero.lab.serve.endpoint import endpoint
from megatron_hetero.lab.serve.rank import ServeOptions, plan_of_layout, serve_rank
from megatron_hetero.runtime.job.local.folders import kept_folder
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs

_FOREVER_S = float("inf")


def serve_here(layout: str, argv: Sequence[str], options: ServeOptions, keep: Path | None) -> None:
    """Serve a replica until it is stopped.

    Args:
        layout: its stages.
        argv: Megatron's flags, with the checkpoint.
        options: settings of the replica.
        keep: folder for the logs of the ranks; None deletes them.
    Raises:
        HeteroError: model, layout and machine contradict each other.
        RankFailedError: a rank has died; all requests have been told.
    """
    plan = plan_of_layout(layout)
    # Serving has no micro-batches, which a layout of training counts behind the @.
    words = (*argv, f"--hetero-layout={layout if '@' in layout else f'{layout} @1'}")
    with kept_folder(keep, "serve") as folder:
        print(f"logs of the ranks: {folder}", flush=True)
        job = LocalJob(
            f"replica {layout}",
            plan.layout.num_devices,
            lambda rank: serve_rank(words, options, endpoint),
            folder,
        )
        run_jobs([job], _FOREVER_S)
