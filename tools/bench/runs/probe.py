"""Probe this CPU, plan with what it measured, train on the plan, and compare the step times.

    python tools/bench probe [--rounds 3] [--steps 8] [--keep FOLDER]

Nothing is dilated: two processes on two cores train a small GPT in Megatron's own loop.  The probe
gives the model's pieces (profile.json), memory bandwidth and the link between two processes
(cluster.yaml); the planner makes three plans of them: one process, a pipeline of two, and its own
choice for two.

All of it is done `--rounds` times and medians are compared, because the speed of shared machines
drifts within minutes.

Other load on the machine falsifies all of it: medians of short passes do not see that a process is
held back now and then, a whole step does.  So the one process, which never waits for another, also
counts its CPU seconds; where they are less than nine tenths of the wall's, the figures are void and
the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cost.work.profile import load_profile
from megatron_hetero.lab.probe.command import ProbeRequest, probe
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.planner import plan_and_explain
from megatron_hetero.runtime.job.local.folders import kept_folder
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from tools.bench.jobs import quoted
from tools.bench.show import Columns, Failure, option

MODEL = (
    "--num-layers=8",
    "--hidden-size=384",
    "--num-attention-heads=6",
    "--seq-length=256",
    "--max-position-embeddings=256",
    "--vocab-size=4000",
    "--micro-batch-size=1",
    "--global-batch-size=16",
    "--attention-dropout=0",
    "--hidden-dropout=0",
    # `probe` would measure Transformer Engine's layers, where it is installed; `train` has none.
    "--transformer-impl=local",
)
TRAINING = (
    "--lr=1e-5",
    "--mock-data",
    "--tokenizer-type=NullTokenizer",
    "--eval-iters=0",
    "--eval-interval=1000000",
    "--log-interval=1",
    "--num-workers=0",
)
NUM_RANKS = 2
SKIPPED_STEPS = 3
LEAST_SHARE = 0.9
CLUSTER = """version: 1
nodes: [{{name: here, gpu: CPU, count: {ranks}}}]
gpu_types:
  CPU: {{memory: 4 GiB, memory_bandwidth: {memory:.3f} GB/s, fp32: {fp32:.4f} TFLOPS,
       library: NCCL}}
links:
  inside_node: {{CPU: {{bandwidth: {link:.3f} GB/s, latency: {latency:.1f} us}}}}
limits: {{max_tensor_parallel: {width}, memory_reserve: 256 MiB, as_given: [micro_batch_size]
         {more}}}
"""


def write_runs(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write `RUNS.yaml` of one round, for tools/score_runs.py."""
    day = datetime.now(UTC).date().isoformat()
    source = f"tools/bench probe, {os.cpu_count()} CPU cores without a GPU, {day}"
    lines = ["version: 1", "runs:"]
    for row in rows:
        share = f"{row['cpu_share']:.0%} of the time on a core"
        lines += [
            f"- name: {row['plan']}, {row['layout']}",
            f"  source: {source}, {share}",
            f"  cluster: {row['plan']}.yaml",
            f"  plan: {row['plan']}.json",
            "  profile: profile.json",
            f"  measured: {{step_time_s: {row['measured_step_time_s']:.6f}}}",
        ]
    (folder / "RUNS.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def middle(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one plan's medians over all rounds."""
    of = {
        key: median(row[key] for row in rounds)
        for key in ("predicted_step_time_s", "measured_step_time_s", "measured_cpu_s", "cpu_share")
    }
    error = of["predicted_step_time_s"] / of["measured_step_time_s"] - 1
    return rounds[0] | of | {"error": error, "errors": [row["error"] for row in rounds]}


def cluster_text(
    one: dict[str, Any], two: dict[str, Any], num_ranks: int, *, width: int, more: str = ""
) -> str:
    """Write this machine as a cluster file.

    Args:
        one, two: what a probe of one process and of two has found.
        num_ranks: processes, each a GPU.
        width: most of a tensor-parallel group.
        more: limits, beginning with a comma.
    """
    rates = {rate["what"]: rate["value"] for rate in one["rates"]}
    return CLUSTER.format(
        ranks=num_ranks,
        memory=rates["memory"] / 1e9,
        fp32=rates["product"] / 1e12,
        link=two["link"]["bytes_per_s"] / 1e9,
        latency=two["link"]["latency_s"] * 1e6,
        width=width,
        more=more,
    )


def compare(folder: Path, steps: int, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each plan: layout, predicted and measured step time, error, CPU seconds."""
    workload = load_workload(None, MODEL)
    profile_path = folder / "profile.json"
    request = ProbeRequest(workload, "CPU", (1, 2), (1,), 8, seconds, profile_path, NUM_RANKS)
    one, two = probe(request, lambda words: print(words, file=sys.stderr))
    assert one.result is not None and two.result is not None
    rows = []
    for name, more, num_ranks in (
        ("one process", ', idle: ["here:1"]', 1),
        ("pipeline", ", num_replicas: 1", 2),
        ("own choice", "", 2),
    ):
        cluster_path = folder / f"{name}.yaml"
        cluster_path.write_text(cluster_text(one.result, two.result, NUM_RANKS, width=1, more=more))
        cluster = load_cluster(cluster_path)
        plan, _ = plan_and_explain(cluster, workload, profile=load_profile(profile_path))
        assert plan.estimates is not None
        plan_path = folder / f"{name}.json"
        save_plan(plan, plan_path)
        measured_s, cpu_s = train(folder / name, plan_path, num_ranks, steps)
        predicted_s = plan.estimates.step_time_s
        rows.append(
            {
                "plan": name,
                "layout": format_layout(plan.layout),
                "measured_inputs": plan.estimates.measured,
                "predicted_step_time_s": predicted_s,
                "measured_step_time_s": measured_s,
                "error": predicted_s / measured_s - 1,
                "measured_cpu_s": cpu_s,
                "cpu_share": cpu_s / measured_s,
            }
        )
    return rows


def train(
    folder: Path, plan_path: Path, num_ranks: int, steps: int, model: Sequence[str] = MODEL
) -> tuple[float, float]:
    """Return the median seconds of a step by the wall, and in CPU seconds of the last rank."""
    argv = (*model, *TRAINING, f"--train-iters={steps}", f"--data-cache-path={folder / 'cache'}",
            f"--hetero-plan={plan_path}")  # fmt: skip

    def rank_main(rank: int) -> None:
        from megatron_hetero.runtime.job import entry
        from megatron_hetero.runtime.megatron import training_log

        def observe(iteration: int, losses: dict[str, Any], norm: Any) -> None:
            print(f"clocks {time.perf_counter():.6f} {time.process_time():.6f}", flush=True)

        training_log.add_observer(observe)
        entry.main(argv)

    run_jobs([LocalJob("training", num_ranks, rank_main, folder)], timeout_s=600.0)
    log = (folder / f"rank-{num_ranks - 1}.log").read_text()
    clocks = [(float(a), float(b)) for a, b in re.findall(r"clocks ([0-9.]+) ([0-9.]+)", log)]
    steps_s = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(clocks[SKIPPED_STEPS:])]
    return median(wall for wall, _ in steps_s), median(cpu for _, cpu in steps_s)


COLUMNS = Columns({
    "plan": lambda row: f"{row['plan']}, {quoted(row['layout'])}",
    "predicted": "{predicted_step_time_s:.2f} s", "trained": "{measured_step_time_s:.2f} s",
    "error": lambda row: f"{100 * row['error']:+.1f} %",
    "the rounds": lambda row: ", ".join(f"{100 * error:+.1f}" for error in row["errors"]),
})  # fmt: skip


OPTIONS = (
    option("--rounds", type=int, default=3),
    option("--steps", type=int, default=8, help="of each training"),
    option("--seconds", type=float, default=8.0, help="for each probe"),
    option(
        "--keep", type=Path, metavar="FOLDER", help="write what tools/score_runs.py reads there"
    ),
)


def run(given: argparse.Namespace) -> Iterator[Columns | dict[str, Any] | str]:
    """Measure, plan and train in each round; yield the medians."""
    with kept_folder(given.keep, "bench-probe") as name:
        rounds = []
        for number in range(given.rounds):
            folder = Path(name) / f"round-{number}"
            folder.mkdir(exist_ok=True)
            print(f"round {number + 1} of {given.rounds}", file=sys.stderr)
            rounds.append(compare(folder, given.steps, given.seconds))
            write_runs(folder, rounds[-1])
    rows = [middle(row) for row in zip(*rounds, strict=True)]
    yield COLUMNS
    yield from rows
    yield judged("one process", rows[0]["cpu_share"], f"{rows[0]['measured_cpu_s'] * 1e3:.1f} ms")


def judged(name: str, share: float, cpu: str = "") -> str:
    """Return a line on a process that waited for no other; a failure if other load held it back.

    Args:
        name: of the process.
        share: part of the time of its steps that it had a core.
        cpu: text of its CPU seconds of a step.
    """
    words = f"{name}: {cpu and f'{cpu} of CPU a step, '}{share:.0%} of the time on a core"
    return words if share >= LEAST_SHARE else Failure(f"{words}; other load: the seconds are void")
