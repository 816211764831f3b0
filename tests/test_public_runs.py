"""Public runs: shapes have the published parameters, and every row makes a plan that is scored."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_hetero.cost.parameters import stage_params
from megatron_hetero.cost.share import even_share
from megatron_hetero.model.load import load_workload

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.public_runs import PublicRun, public_runs, summary, worst, write_runs
from tools.score_runs import score

RUNS = list(public_runs())


def test_the_shapes_have_as_many_parameters_as_their_source_says() -> None:
    known = [run for run in RUNS if run.row.get("parameters")]
    assert len(known) > 20
    for run in {(r.row["model"], r.row["sequence"]): r for r in known}.values():
        model = load_workload(None, run.flags).model
        num = stage_params(
            model, even_share(model, 1), model.num_layers, True, True, model.vocab_size
        )
        assert num == run.number("parameters"), run.name


def test_steps_are_those_of_the_published_throughput() -> None:
    run = PublicRun(
        {"micro_batch": "2", "micro_batches": "3", "gpus": "8", "sequence": "1000",
         "tokens_per_s": "24000"}, "mosaicml",
    )  # fmt: skip
    assert run.step_s == pytest.approx(2.0)


def test_rows_of_each_table_are_scored(tmp_path: Path) -> None:
    chosen = {(run.source, run.row["precision"], run.row["gpus"]): run for run in RUNS}
    found = score(write_runs(list(chosen.values()), tmp_path))
    assert [one.run for one in found] == [run.name for run in chosen.values()]
    assert all(one.measured == pytest.approx(run.step_s)
               for one, run in zip(found, chosen.values(), strict=True))  # fmt: skip
    lines = summary(found)
    assert lines[0].startswith("| steps by") and len(lines) > 5
    assert {line.partition(":")[0] for line in worst(found, 1)} == {
        run.row["gpu"] for run in chosen.values()
    }
