"""What a benchmark yields, as people and as programs see it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import pytest

from tools import results
from tools.bench.show import Columns, Failure, is_chosen, show

JOBS = Columns({"job": "{job}", "step s": "{step_s:.2f}", "twice": lambda row: str(2 * row["n"])})


def found() -> Iterator[Columns | Mapping[str, object] | Sequence[str] | str]:
    yield JOBS
    yield {"job": "a", "step_s": 1.234, "n": 1}
    yield {"job": "b", "step_s": None, "n": 2}
    yield "in the mean 1.23 s"
    yield Columns.of(("all", "worst"))
    yield ["2", "1.23"]


def test_tables_and_lines_are_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(found()) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| job | step s | twice |",
        "| --- | --: | --: |",
        "| a | 1.23 | 2 |",
        "| b | - | 4 |",
        "",
        "in the mean 1.23 s",
        "| all | worst |",
        "| --- | --: |",
        "| 2 | 1.23 |",
    ]


def test_results_read_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    show(found())
    jobs, means = results.tables_in(capsys.readouterr().out)
    assert jobs.rows == [["a", "1.23", "2"], ["b", "-", "4"]]
    assert means == results.Table(["all", "worst"], [["2", "1.23"]])


def test_programs_get_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(found(), as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"job": "a", "step_s": 1.234, "n": 1},
        {"job": "b", "step_s": None, "n": 2},
        ["2", "1.23"],
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_failure_is_the_exit_status(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(["fine", Failure("other load")], as_json=as_json) == 1
    assert ("other load" in capsys.readouterr().out) != as_json


def test_names_are_chosen_by_a_text_in_them() -> None:
    assert is_chosen("two-sites", None) and is_chosen("two-sites", [])
    assert is_chosen("two-sites", ["x", "sites"]) and not is_chosen("two-sites", ["three"])
