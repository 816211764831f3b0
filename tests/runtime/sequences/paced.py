"""A rehearsal of dealt steps: real processes whose passes take as long as the prices say.

    python -m tests.runtime.sequences.paced

Order, messages and waits are those of training; every pass sleeps until its GPU would have done it.
All steps are stretched to one length.  It prints the steps' rehearsed seconds over the predicted
ones.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import torch.distributed as dist

from megatron_hetero.lab.rehearse.clock import now, sleep_until
from megatron_hetero.runtime.job.arguments import split_arguments
from megatron_hetero.runtime.job.local_launch import run_jobs
from megatron_hetero.runtime.sequences import job as sequences_job
from megatron_hetero.runtime.sequences import schedule
from megatron_hetero.sequences.pipelines import PipelineRates
from megatron_hetero.sequences.simulated_step import SimulatedStep
from megatron_hetero.sequences.step_tokens import GroupTokens
from tests.runtime.sequences.flexible_runs import (
    SMALL,
    flexible_job,
    write_cluster,
    write_documents,
)

FLAGS = (
    "--num-layers=4", "--swiglu", "--group-query-attention", "--num-query-groups=2",
    "--position-embedding-type=rope", "--max-position-embeddings=2048",
    "--untie-embeddings-and-output-weights", "--hetero-stall-limit=0",
)  # fmt: skip
CASES: dict[str, tuple[dict[str, tuple[str, int]], tuple[str, ...]]] = {
    "single GPUs": ({"a": ("BRISK", 2), "b": ("TIRED", 2)}, ()),
    "unlike pipelines": (
        {"a": ("BRISK", 2), "b": ("TIRED", 3)},
        ("--hetero-layout=tp1:3,tp1:1 @12 | tp1:1,tp1:2,tp1:1 @12",),
    ),
    "twin pipelines": (
        {"a": ("BRISK", 4)},
        ("--hetero-layout=tp1:2,tp1:2 @12 | tp1:2,tp1:2 @12",),
    ),
}
STEP_S = 24.0


@dataclass
class _Pace:
    """What one rank knows of the step that it is in."""

    pipelines: Sequence[PipelineRates]
    replica: int
    stage: int
    scale: float = 0.0
    groups: deque[GroupTokens | None] = field(default_factory=deque)
    under_way: deque[tuple[float, Any]] = field(default_factory=deque)
    begun_s: float = 0.0
    ended_s: float = 0.0

    def seconds(self, group: GroupTokens | None) -> float:
        """The pace of a micro-batch on this rank's stage, in seconds of this machine."""
        return self.pipelines[self.replica].seconds(self.stage, group) * self.scale

    @property
    def forward_part(self) -> float:
        """The part of its passes that is the forward one."""
        return self.pipelines[self.replica].stages[self.stage].forward_part


def paced(argv: list[str], records: Path, step_s: float) -> Callable[[int], None]:
    """A beginning of a rank in which its passes keep the pace of the prices, in steps of so many
    predicted seconds."""

    def begin(rank: int) -> None:
        from megatron.core.pipeline_parallel import schedules

        arguments = split_arguments(argv)
        plan = sequences_job.sequences_plan(arguments)
        pipelines = sequences_job.groups_of(arguments, plan).pipelines
        pace: list[_Pace] = []
        found: list[tuple[float, float, float]] = []
        forward_step = schedule.forward_step
        backward_step, run_step = schedules.backward_step, schedule.DealtSchedule.__call__

        def run(self: Any, **named: Any) -> Any:
            # The step is dealt and read before its time begins.
            dealt_step = next(named["data_iterator"])
            place = self._groups.position
            if not pace:
                pace.append(_Pace(pipelines, place.replica, place.stage))
            num_stages = len(pipelines[place.replica].stages)
            pace[0].groups = deque(dealt_step.whole.of_rank(place.replica, num_stages))
            pace[0].scale = step_s / SimulatedStep(dealt_step.whole, pipelines).seconds
            dist.barrier()
            pace[0].begun_s = now()
            reports = run_step(self, **{**named, "data_iterator": iter([dealt_step])})
            found.append((pace[0].begun_s, pace[0].ended_s, pace[0].scale))
            records.mkdir(parents=True, exist_ok=True)
            (records / f"{rank}.json").write_text(json.dumps(found))
            return reports

        def together(group: Any) -> float:
            """All members of a group have begun: the first layer's keys and values are there."""
            if group.size() > 1:
                dist.barrier(group=group)
            return now()

        def forward(data_iterator: Any, model: Any) -> Any:
            batch = next(data_iterator)
            seconds = pace[0].seconds(pace[0].groups.popleft())
            began = together(batch.sequences.cp_group)
            output = forward_step(iter([batch]), model)
            pace[0].under_way.append((seconds, batch.sequences.cp_group))
            sleep_until(began + pace[0].forward_part * seconds)
            return output

        def backward(*given: Any) -> Any:
            seconds, group = pace[0].under_way.popleft()
            began = together(group)
            gradients = backward_step(*given)
            sleep_until(began + (1 - pace[0].forward_part) * seconds)
            pace[0].ended_s = now()
            return gradients

        schedule.forward_step, schedules.backward_step = forward, backward
        schedule.DealtSchedule.__call__ = run  # type: ignore[method-assign]

    return begin


def ratios(name: str, folder: Path, num_steps: int = 3, step_s: float = STEP_S) -> list[float]:
    """Rehearse a case; return each step's rehearsed seconds over the predicted ones."""
    nodes, ours = CASES[name]
    batch = 24
    drawn = numpy.random.default_rng(5)
    lengths = numpy.minimum(16 + drawn.lognormal(4.5, 1.0, 4 * batch), 1500).astype(int)
    write_documents(folder / "text", lengths.tolist())
    cluster = write_cluster(folder / "cluster.yaml", "20 us", **nodes)
    # Messages are those of this machine: links are to be as good as its own.
    cluster.write_text(cluster.read_text().replace("latency: 20 ms", "latency: 20 us"))
    num_ranks = sum(count for _, count in nodes.values())
    flags = [
        *FLAGS, f"--data-path={folder / 'text'}", f"--global-batch-size={batch}",
        f"--train-iters={num_steps + 1}", *ours,
    ]  # fmt: skip
    argv = [*SMALL, "--hetero-sequences=flexible", f"--hetero-cluster={cluster}", *flags]
    argv.append("--transformer-impl=local")
    job = flexible_job(
        folder / "ours", cluster, num_ranks, flags, paced(argv, folder / "paces", step_s)
    )
    run_jobs([job], 600)
    ranks = [json.loads((folder / "paces" / f"{r}.json").read_text()) for r in range(num_ranks)]
    found = []
    # The first step warms up.
    for step in range(1, num_steps + 1):
        begun_s, ended_s, _ = zip(*(rank[step] for rank in ranks), strict=True)
        found.append((max(ended_s) - max(begun_s)) / step_s)
    return found


def main() -> int:
    print("| ranks | rehearsed over predicted, each step | median |")
    print("| --- | --- | --: |")
    for name in CASES:
        with tempfile.TemporaryDirectory() as made:
            found = ratios(name, Path(made))
        print(f"| {name} | {', '.join(f'{r:.3f}' for r in found)} | {median(found):.3f} |")
    return 0


if __name__ == "__main__":
    before = time.monotonic()
    code = main()
    print(f"\n{time.monotonic() - before:.0f} s")
    sys.exit(code)
