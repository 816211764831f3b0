"""`doctor --train` without a GPU: what it tries, what it says, and that it finds planted faults."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_hetero.cli.main import main
from megatron_hetero.lab.kit.cases import CASES, Case, cases_for
from megatron_hetero.lab.kit.checks import MEMORY_FAULT
from megatron_hetero.lab.kit.command import KitRequest, examine
from megatron_hetero.lab.kit.documents import NUM_RANKS, deal, try_documents
from megatron_hetero.lab.kit.equality import try_case
from megatron_hetero.lab.kit.lost_rank import LOSSES, Lost, lose
from megatron_hetero.lab.kit.race import Race
from megatron_hetero.lab.kit.shared_card import CONTROL, apart, side_by_side
from megatron_hetero.lab.kit.small_job import Machine
from megatron_hetero.lab.kit.verdicts import equality_verdict
from megatron_hetero.report.text.trials.kit import kit_report
from megatron_hetero.runtime.transformer_engine.layers import LOCAL, TRANSFORMER_ENGINE
from tests.runtime.transformer_engine import with_layers
from tests.runtime.transformer_engine.proofs import forecast_parts, tried_case


def tried(folder: Path, **asked: Any) -> dict[str, Any]:
    said: list[str] = []
    data = examine(KitRequest(folder, **asked), said.append)
    assert json.loads((folder / "report.json").read_text()) == data
    return data


def test_every_machine_tries_every_path() -> None:
    """Ranks share the cards of a machine that has too few."""
    for number in (0, 1, 2, 8):
        assert cases_for(Machine("any", number), False) == CASES
        assert len(cases_for(Machine("any", number), True)) == 1
    assert len({case.name for case in CASES}) == len(CASES)


CHEAP = ("launched ahead", "resumed as another plan", "exchange by groups")
"""Cases of kinds that the kit alone makes: a change of the plan, a checkpoint, machines."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[pytest.mark.slow] * (c.name not in CHEAP), id=c.name)
        for c in CASES
        if c.layers == LOCAL
    ],
)
def test_a_case_trains_as_one_process(case: Case, tmp_path: Path) -> None:
    found = try_case(case, Machine("CPU", 0), tmp_path, lambda words: None)
    assert equality_verdict(found).ok, found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(c.name, marks=[pytest.mark.slow] * (place > 0))
        for place, c in enumerate(c for c in CASES if c.layers == TRANSFORMER_ENGINE)
    ],
)
def test_a_case_trains_with_transformer_engines_layers(name: str, tmp_path: Path) -> None:
    is_equal, said = with_layers.call(TRANSFORMER_ENGINE, tried_case, name, str(tmp_path))
    assert is_equal and said.startswith("Transformer Engine"), said


def test_local_layers_train_where_transformer_engine_is_installed(tmp_path: Path) -> None:
    """Megatron then takes Transformer Engine's norm at the end of local layers too, which has a
    state of its own: so must stages that divide the sequence, beside one that does not."""
    is_equal, said = with_layers.call(
        TRANSFORMER_ENGINE, tried_case, "sequence parallel", str(tmp_path)
    )
    assert is_equal and said.startswith("Megatron's local ones"), said


@pytest.mark.parametrize("fault", [None, pytest.param("slice-not-reduced", marks=pytest.mark.slow)])
def test_dealt_documents_train_as_one_process(fault: str | None, tmp_path: Path) -> None:
    found = try_documents(Machine("CPU", 0), tmp_path, fault)
    assert equality_verdict(found).ok == (fault is None), found


def test_the_deal_of_the_kit_has_all_that_a_deal_can() -> None:
    lengths = (30, 41, 8, 64, 5, 13)
    step, note = deal(None, [{"tokens": range(length)} for length in lengths])
    groups = [group for groups in step.micro_batches for group in groups]
    dealt = {k: sum(own) for g in groups for k, own in zip(g.sequences, g.tokens, strict=True)}
    assert dealt == dict(enumerate(lengths)) and not note
    assert any(group.domains for group in groups)
    assert any(group.size == NUM_RANKS and not group.domains for group in groups)
    assert any(len(step.of_rank(rank)) < len(step.micro_batches) for rank in range(NUM_RANKS))


@pytest.mark.slow
def test_memory_with_transformer_engines_layers_is_as_predicted(tmp_path: Path) -> None:
    parts, said = with_layers.call(TRANSFORMER_ENGINE, forecast_parts, str(tmp_path))
    for predicted, held in parts.values():
        assert held == pytest.approx(predicted, rel=0.005)
    # The profile was measured with the layers that it is for.
    assert said.startswith("> layers: Transformer Engine")


@pytest.mark.parametrize("how", ["killed", pytest.param("stopped", marks=pytest.mark.slow)])
def test_a_lost_rank_is_named_by_all_others(how: str, tmp_path: Path) -> None:
    found = lose(how, Machine("CPU", 0), tmp_path)
    assert found.ok, found.what
    assert len(found.codes) == 2


@pytest.mark.parametrize(
    ("codes", "named", "ok"),
    [
        ({0: 6, 2: 6}, {0: (1,), 2: (1,)}, True),
        ({0: 6, 2: 6}, {0: (2,), 2: (2,)}, False),
        ({0: 6, 2: 6}, {0: (), 2: ()}, False),
        ({0: 6, 2: 1}, {0: (1,), 2: (1,)}, False),
    ],
)
def test_what_the_others_of_a_lost_rank_have_to_do(
    codes: dict[int, int], named: dict[int, tuple[int, ...]], ok: bool
) -> None:
    assert Lost(1, codes, named).ok == ok


def test_a_resumed_plan_that_loses_a_sum_is_found(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.resumed)
    found = try_case(
        case, Machine("CPU", 0), tmp_path, lambda words: None, "slice-not-reduced"
    )
    assert not found["ok"]


def test_ranks_share_cards_by_time_slices_where_there_is_no_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    with side_by_side(0) as on_cpu, side_by_side(1) as on_gpu:
        assert on_cpu == "processes on the CPU"
        assert on_gpu == f"time slices: {CONTROL} is not installed"


@pytest.mark.parametrize("refuses", [False, True])
def test_the_service_runs_in_a_folder_of_its_own_and_ends(
    refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control program that writes down how it was called."""
    program = tmp_path / CONTROL
    log = tmp_path / "log"
    ending = 'echo "no device" >&2; exit 1' if refuses else "cat"
    program.write_text(
        f'#!/bin/bash\n{{ echo "$@" "$CUDA_MPS_PIPE_DIRECTORY"; {ending}; }} >> {log}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with side_by_side(1) as how:
        folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
        # A rank that dies under the service would end the kernels of all others.
        with apart():
            assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
        assert os.environ.get("CUDA_MPS_PIPE_DIRECTORY") == folder
        assert how == ("time slices: MPS refused (no device)" if refuses else "MPS")
        assert (folder is None) == refuses
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    said = log.read_text()
    assert said.startswith("-d /") and ("quit" in said) != refuses


def test_the_short_check_passes_on_a_cpu(tmp_path: Path) -> None:
    data = tried(tmp_path, is_short=True)
    assert data["ok"] and [check["ok"] for check in data["checks"]] == [True]
    assert data["machine"]["gpus"] == 0 and data["profile"] is None


@pytest.mark.parametrize(
    "fault",
    [
        "slice-not-reduced",
        "last-bit-moved",
        pytest.param("unequal-starts", marks=pytest.mark.slow),
    ],
)
def test_planted_faults_are_found(fault: str, tmp_path: Path) -> None:
    """A sum that is left out, a bit of one holder, and a weight that is another on one rank."""
    data = tried(tmp_path, is_short=True, fault=fault)
    assert not data["ok"]
    assert data["planted"]["found_by"] == data["checks"][-1]["name"]
    assert f"{fault} was found by" in kit_text(data)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_kit_on_a_cpu(tmp_path: Path) -> None:
    assert main(["doctor", "--train", "-o", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "report.json").read_text())
    # One of documents, and memory and speed with local layers and with Transformer Engine's.
    assert len(data["checks"]) == len(CASES) + 1 + len(LOSSES) + 4
    # Megatron was imported in this process without Transformer Engine.
    untried = [check["name"] for check in data["checks"] if not check["tried"]]
    assert len(untried) == sum(case.layers == TRANSFORMER_ENGINE for case in CASES) + 2
    forecast = next(check for check in data["checks"] if "held_bytes" in check)
    for predicted, held in forecast["parts_bytes"].values():
        assert held == pytest.approx(predicted, rel=0.005)
    assert len(json.loads((tmp_path / "profile.json").read_text())["points"]) == 3
    planted = tried(tmp_path / "planted", fault=MEMORY_FAULT)
    assert [check["name"].split()[0] for check in planted["checks"] if not check["ok"]] == [
        "memory"
    ]
    assert "too little is predicted" in kit_text(planted)


def test_the_report_names_what_failed() -> None:
    data = {
        "checks": [
            check("equal", True, "loss differs by 1e-7"),
            check("memory", False, "too little"),
            check("fp8", True, "no such card", is_tried=False),
        ],
        "planted": {"fault": "sum-lost", "found_by": None, "not_tried": ["fp8"]},
        "machine": {"gpus": 2, "gpu": "A100", "torch": "2", "megatron_core": "0.19", "date": "D"},
        "profile": "doctor/profile.json",
    }
    text = kit_text(data)
    assert "passed  equal" in text and "FAILED  memory" in text
    assert "not tried  fp8" in text
    assert "1 of 3 checks failed, 1 were not tried, on 2 x A100" in text
    assert "sum-lost was NOT FOUND" in text and "not tried here: fp8" in text


def check(name: str, ok: bool, what: str, *, is_tried: bool = True) -> dict[str, Any]:
    return {"name": name, "ok": ok, "what": what, "seconds": 4.0, "tried": is_tried}


def test_the_interval_holds_the_median() -> None:
    found = Race((1.0,) * 12, tuple(1.0 + 0.01 * n for n in range(12)))
    low, high = found.interval
    assert found.ratio == pytest.approx(1.055)
    assert 1.0 <= low < found.ratio < high <= 1.11


@pytest.mark.parametrize(
    "words", [["plan.json", "--train"], ["--train", "--on-cluster"], ["plan.json"], []]
)
def test_a_plan_and_a_kit_are_two_things(words: list[str]) -> None:
    assert main(["doctor", *words]) == 2


def test_unknown_faults_are_refused(tmp_path: Path) -> None:
    assert main(["doctor", "--train", "-o", str(tmp_path), "--plant", "nothing"]) == 2


def kit_text(data: dict[str, Any]) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200, color_system=None, markup=False).print(kit_report(data))
    return stream.getvalue()
