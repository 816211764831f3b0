"""A timeline of real steps: every pass of every stage, in its order, on real jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_hetero.errors import UsageError
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.observe.timeline import measured_step, timeline_to_data
from megatron_hetero.schedule.of_plan import replica_schedule
from megatron_hetero.schedule.programme import COMPUTE


@pytest.mark.parametrize(
    "layout", ["tp1:1,tp1:1 @3 | tp1:2 @2", "tp1:1,tp1:1 @3"], ids=["our runtime", "stock Megatron"]
)
def test_a_job_writes_its_timeline(layout: str, tmp_path: Path) -> None:
    plan = plan_from_layout(parse_layout(layout))
    path = tmp_path / "timeline.json"
    argv = [
        "--num-layers=2", "--hidden-size=32", "--num-attention-heads=4", "--seq-length=16",
        "--max-position-embeddings=16", "--micro-batch-size=1", "--lr=1e-3", "--train-iters=5",
        f"--global-batch-size={sum(r.num_micro_batches for r in plan.replicas)}",
        "--mock-data", "--tokenizer-type=NullTokenizer", "--vocab-size=100", "--eval-iters=0",
        "--eval-interval=1000", "--log-interval=10", "--num-workers=0",
        f"--data-cache-path={tmp_path / 'cache'}", f"--hetero-layout={layout}",
        f"--hetero-timeline={path}", "--profile-step-start=3", "--profile-step-end=5",
    ]  # fmt: skip

    def train(rank: int) -> None:
        from megatron.core.pipeline_parallel import schedules

        from megatron_hetero.runtime.job import entry
        from tests.runtime.flag_runs import read_few_mock_documents

        read_few_mock_documents()
        forward_step = schedules.forward_step
        entry.main(argv)
        assert schedules.forward_step is forward_step, "it is as it was"

    num_ranks = plan.layout.num_devices
    run_jobs([LocalJob("job", num_ranks, train, tmp_path)], 110)
    data = json.loads(path.read_text())
    assert list(data["step_times_s"]) == ["3", "4"]
    assert data["step"] in (3, 4)
    assert data["measured_step_time_s"] == data["step_times_s"][str(data["step"])]
    names = {e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"}
    assert names == {"measured, step 3", "measured, step 4"}
    for stage in data["stages"]:
        schedule = replica_schedule(plan, stage["replica"])
        due = [o for i in schedule.programmes[stage["stage"]] for o in i if o.kind in COMPUTE]
        passes = [o for o in stage["operations"] if o["micro_batch"] >= 0]
        assert [(o["kind"], o["micro_batch"]) for o in passes] == [
            (o.kind, o.micro_batch) for o in due
        ]
        assert [o["kind"] for o in stage["operations"]][-2:] == ["gradient_sync", "step"]
        ends = 0.0
        for operation in stage["operations"]:
            assert ends <= operation["start_s"] < operation["end_s"]
            ends = operation["end_s"]
        assert ends <= data["measured_step_time_s"]


def test_a_batch_of_another_size_is_counted_by_kind() -> None:
    plan = plan_from_layout(parse_layout("tp1:2 @2"))
    spans = [["pass", float(i), i + 0.5] for i in range(6)]
    step = measured_step(plan, 7, [json.dumps([6.0, spans])])
    (stage,) = step.stages
    assert [(o.kind, o.micro_batch) for o in stage.operations] == [
        (kind, k) for k in range(3) for kind in ("forward", "backward")
    ]
    assert timeline_to_data(plan, [step])["step_times_s"] == {"7": 6.0}


def test_it_needs_a_plan(tmp_path: Path) -> None:
    from megatron_hetero.runtime.job.steps import job_of

    with pytest.raises(UsageError, match="needs a plan"):
        job_of([f"--hetero-timeline={tmp_path / 't.json'}"])
