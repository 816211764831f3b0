"""Jobs with the flags of public training scripts: read, planned for, and trained as one process.

`tools/verify_scripts.py` does all of it for all of them; `docs/scripts.md` is its table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.run import outcome_to_data, verify
from megatron_hetero.model.blocks import num_parameters
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.file import load_plan

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import verify_scripts

PUBLISHED = {
    "deepseek-v3-like": 671.0e9,
    "gpt-oss-20b": 20.9e9,
    "llama3-70b": 70.6e9,
    "llama3-8b": 8.03e9,
    "mixtral-8x7b": 46.7e9,
    "nemotron-like": 15.6e9,
    "qwen3-30b-a3b": 30.5e9,
    "qwen3-8b": 8.19e9,
    "sft-packed": 8.05e9,
}
"""Parameters; of the published models where the job is one of them."""
FAST = {"gpt-oss-20b", "qwen3-8b"}
REFUSED: dict[str, str] = {}


def test_every_script_is_here() -> None:
    assert {script.stem for script in verify_scripts.scripts()} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_script_describes_the_model_that_it_is_named_after(name: str) -> None:
    job = load_workload(verify_scripts.FOLDER / f"{name}.flags")
    assert num_parameters(job) == pytest.approx(PUBLISHED[name], rel=0.004)
    assert not [word for word in job.megatron_args if word.endswith("-model-parallel-size")]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FAST else pytest.mark.slow)
        for name in PUBLISHED
        if name not in REFUSED
    ],
)
def test_a_script_trains_as_one_process(name: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    verify_scripts.verified_plan(verify_scripts.FOLDER / f"{name}.flags", path)
    plan = load_plan(path)
    assert plan.workload is not None
    options = Options(steps=1 if name in FAST else 3, optimizers=("sgd",))
    outcome = verify(plan, plan.workload, options, tmp_path)
    assert outcome.ok, outcome_to_data(outcome)


def test_the_page_is_that_of_the_results() -> None:
    data = json.loads(verify_scripts.RESULTS.read_text())
    assert verify_scripts.PAGE.read_text() == verify_scripts.page(data), (
        "run python tools/verify_scripts.py table"
    )
    for case in data["cases"]:
        assert case["is_planned"] and case["prints_flags"]
        assert case["is_equal"] != (case["name"] in REFUSED)
        assert REFUSED.get(case["name"], "") in case["error"]


def test_the_summary_of_a_plan() -> None:
    words = verify_scripts.summary("tp2:3,tp1:1 @4 | tp1:4 @2")
    assert words == "4 GPUs: 2 replicas of 1 and 2 stages, widths 1 and 2"
