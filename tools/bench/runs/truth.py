"""Predicted against measured training: layouts that the probe did not time, on this CPU.

    python tools/bench truth [--only NAME ...] [--steps 8] [--seconds 8] [--keep FOLDER]

The pieces of a small GPT are probed once.  Then each layout of `LAYOUTS` trains for some steps in
Megatron's own loop, one or two processes that meet through gloo, nothing dilated; and once more,
for two steps, with the bytes of its live tensors counted.  The measured runs become RUNS.yaml, and
tools/score_runs.py scores the planner's predictions of them; its tables are printed.

Other load on the machine falsifies the seconds, not the bytes.  So every run counts the CPU seconds
of its last process too: where the lone process of the first layout has fewer than nine tenths of
the wall's, the figures are void and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.files import write_json
from megatron_hetero.lab.probe.command import ProbeRequest, probe
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.place import place_in_order
from megatron_hetero.plan.plan import Layout, Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.job.local.folders import kept_folder
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from tools.bench.runs.probe import TRAINING, cluster_text, judged, train
from tools.bench.show import option
from tools.score_runs import score, tables

LAYOUTS = {
    "one process": "tp1:8 @8",
    "one process, micro-batches of 2": "tp1:8 @4x2",
    "pipeline": "tp1:4,tp1:4 @8",
    "pipeline 3:5": "tp1:3,tp1:5 @8",
    "pipeline 5:3": "tp1:5,tp1:3 @8",
    "pipeline 6:2": "tp1:6,tp1:2 @8",
    "pipeline, micro-batches of 2": "tp1:4,tp1:4 @4x2",
    "pipeline 3:5, micro-batches of 2": "tp1:3,tp1:5 @4x2",
    "replicas": "tp1:8 @4 | tp1:8 @4",
    "replicas 3:5": "tp1:8 @3 | tp1:8 @5",
    "replicas 2:6": "tp1:8 @2 | tp1:8 @6",
    "replicas, micro-batches of 2": "tp1:8 @2x2 | tp1:8 @2x2",
    "tensor-parallel": "tp2:8 @8",
    "tensor-parallel, micro-batches of 2": "tp2:8 @4x2",
}
MODEL = (
    "--num-layers=8",
    "--hidden-size=256",
    "--num-attention-heads=4",
    "--seq-length=256",
    "--max-position-embeddings=256",
    "--vocab-size=4000",
    "--micro-batch-size=1",
    "--global-batch-size=8",
    "--attention-dropout=0",
    "--hidden-dropout=0",
    # `probe` would measure Transformer Engine's layers, where it is installed; `train` has none.
    "--transformer-impl=local",
)
NUM_RANKS = 2
_LIMIT_S = 600.0


@dataclass(frozen=True)
class Trained:
    """A layout that has trained: median seconds of its steps, the part of them that its last
    process had a core, and the bytes of live tensors by device and part."""

    name: str
    layout: str
    step_s: float
    cpu_share: float
    live_bytes: dict[str, dict[str, int]]


def measure(folder: Path, names: Sequence[str], steps: int, seconds: float) -> list[Trained]:
    """Probe, train every layout and write RUNS.yaml with what it names.

    Args:
        folder: of all files.
        names: of `LAYOUTS`.
        steps: timed, of each training.
        seconds: for each width of the probe.
    """
    workload = load_workload(None, MODEL)
    # Layers of Megatron without Transformer Engine keep the scores and do not fuse.
    training = replace(workload.training, flash_attention=False, fused_activation=False)
    workload = replace(workload, training=training)
    request = ProbeRequest(
        workload, "CPU", (1, 2), (1, 2), 8, seconds, folder / "profile.json", NUM_RANKS
    )
    one, two = probe(request, lambda words: print(words, file=sys.stderr))
    if one.result is None or two.result is None:
        raise SystemExit(f"{request.output} has a probe of earlier: give --keep an empty folder")
    for ranks in (1, NUM_RANKS):
        text = cluster_text(one.result, two.result, ranks, width=NUM_RANKS)
        (folder / f"cluster-{ranks}.yaml").write_text(text)
    found = []
    for name in names:
        layout = parse_layout(LAYOUTS[name])
        print(f"training {name}, {LAYOUTS[name]}", file=sys.stderr)
        own = folder / folder_name(name)
        own.mkdir(exist_ok=True)
        cluster = load_cluster(folder / f"cluster-{layout.num_devices}.yaml")
        plan = replace(plan_from_layout(layout, workload), workload=workload)
        plan = place_in_order(plan, cluster)
        save_plan(plan, own / "plan.json")
        model = flags_of(layout)
        step_s, cpu_s = train(own / "paced", own / "plan.json", layout.num_devices, steps, model)
        live_bytes = counted(own, plan, model)
        found.append(Trained(name, LAYOUTS[name], step_s, cpu_s / step_s, live_bytes))
        write_runs(folder, found)
    return found


def flags_of(layout: Layout) -> tuple[str, ...]:
    """Return the job's flags with the layout's size of micro-batches; all replicas have one."""
    return (*MODEL, f"--micro-batch-size={layout.replicas[0].micro_batch_size or 1}")


def counted(folder: Path, plan: Plan, model: Sequence[str] = MODEL) -> dict[str, dict[str, int]]:
    """Train two steps and return the bytes of live tensors by device and part."""
    argv = (*model, *TRAINING, "--train-iters=2", f"--data-cache-path={folder / 'cache'}",
            f"--hetero-plan={folder / 'plan.json'}")  # fmt: skip

    def rank_main(rank: int) -> None:
        from megatron_hetero.lab.kit.live_bytes import LiveBytes
        from megatron_hetero.runtime.job import entry

        live = LiveBytes()
        entry.main(argv, live)
        live.save(folder / f"bytes-{rank}.json")

    table = rank_table(plan)
    run_jobs([LocalJob("counting", len(table), rank_main, folder / "counted")], _LIMIT_S)
    return {
        place.device or "": json.loads((folder / f"bytes-{rank}.json").read_text())
        for rank, place in enumerate(table)
    }


def folder_name(name: str) -> str:
    """Return the name of a layout as that of a folder."""
    return name.replace(" ", "-").replace(",", "").replace(":", "-")


def write_runs(folder: Path, rows: Sequence[Trained]) -> None:
    """Write RUNS.yaml, for tools/score_runs.py; JSON is YAML too."""
    day = datetime.now(UTC).date().isoformat()
    source = f"tools/bench truth, {os.cpu_count()} CPU cores without a GPU, {day}"
    runs = [
        {
            "name": f"{row.name}, `{row.layout}`".replace("|", "\\|"),
            "source": f"{source}, {row.cpu_share:.0%} of the time on a core",
            "cluster": f"cluster-{parse_layout(row.layout).num_devices}.yaml",
            "plan": f"{folder_name(row.name)}/plan.json",
            "profile": "profile.json",
            "measured": {"step_time_s": row.step_s, "live_bytes": row.live_bytes},
        }
        for row in rows
    ]
    write_json(folder / "RUNS.yaml", {"version": 1, "runs": runs})


OPTIONS = (
    option("--only", nargs="+", choices=list(LAYOUTS), metavar="NAME"),
    option("--steps", type=int, default=8, help="of each training"),
    option("--seconds", type=float, default=8.0, help="for each width of the probe"),
    option("--keep", type=Path, metavar="FOLDER", help="keep RUNS.yaml and its files"),
)


def run(given: argparse.Namespace) -> Iterator[str]:
    """Measure and score; yield the tables as text."""
    with kept_folder(given.keep, "bench-truth") as name:
        folder = Path(name)
        rows = measure(folder, given.only or list(LAYOUTS), given.steps, given.seconds)
        yield "\n".join(tables(score(folder / "RUNS.yaml")))
    yield "\n" + judged(rows[0].name, rows[0].cpu_share)
