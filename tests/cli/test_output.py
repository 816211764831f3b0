"""Streams, colour and width of what verbs print."""

from __future__ import annotations

import io
import json
import sys
import time
import warnings

import pytest
from rich.padding import Padding
from rich.table import Table

from megatron_hetero.cli import output as output_module
from megatron_hetero.cli.output import MAX_WIDTH, Output, wants_color
from megatron_hetero.errors import BoundFaultWarning


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize(
    ("color", "stream", "environment", "expected"),
    [
        ("auto", Terminal(), {}, True),
        ("auto", io.StringIO(), {}, False),
        ("auto", Terminal(), {"NO_COLOR": "1"}, False),
        ("auto", Terminal(), {"NO_COLOR": ""}, True),
        ("auto", Terminal(), {"TERM": "dumb"}, False),
        ("always", io.StringIO(), {"NO_COLOR": "1"}, True),
        ("never", Terminal(), {}, False),
    ],
)
def test_who_decides_about_colour(
    monkeypatch: pytest.MonkeyPatch,
    color: str,
    stream: io.StringIO,
    environment: dict[str, str],
    expected: bool,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert wants_color(color, stream) is expected


def test_never_means_no_escape_at_all_even_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    Output(color="never").error("no")
    assert terminal.getvalue() == "error: no\n"


def test_always_colours_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    Output(color="always").error("no")
    assert "\x1b[" in capsys.readouterr().err


def test_json_owns_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(json_to_stdout=True)
    output.show("for people")
    output.json({"step_time_s": 1.5})
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"step_time_s": 1.5}
    assert captured.err == "for people\n"


def test_nan_is_never_printed_as_json() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Output(json_to_stdout=True).json({"gap": float("nan")})


def test_text_wraps_but_verbatim_text_and_errors_do_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long_line = "word " * 60 + "end"
    output = Output()
    output.show(long_line)
    output.verbatim(long_line)
    output.error(long_line)
    captured = capsys.readouterr()
    shown, _, kept = captured.out.rpartition("\n")[0].rpartition("\n")
    assert max(map(len, shown.splitlines())) <= MAX_WIDTH
    assert kept == long_line
    assert captured.err == f"error: {long_line}\n"


def test_an_error_shows_no_screens_of_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    Output(json_to_stdout=True).failed("ModelError", f"one\n{'x' * 100_000}", 4)
    captured = capsys.readouterr()
    assert len(captured.err) < 10_000 and "... (92000 more characters)" in captured.err
    assert "92000 more" in captured.out


def test_names_in_square_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    Output().show("nodes[red] [bold]x[/bold] :warning:")
    assert capsys.readouterr().out == "nodes[red] [bold]x[/bold] :warning:\n"


def test_a_fault_of_the_bound_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(color="never")
    with output.own_warnings():
        warnings.simplefilter("always")
        warnings.warn("the bound is wrong", BoundFaultWarning, stacklevel=1)
    assert capsys.readouterr() == ("", "warning: the bound is wrong\n")


def test_a_search_in_a_pipe_says_now_and_then_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Output().search_progress() as progress:
        progress(0.25, 40, 0.2)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(output_module, "SAID_EVERY_S", 0.05)
    with Output().search_progress() as progress:
        progress(0.25, 40, 0.2)
        time.sleep(0.2)
    assert "note: searching: 40 plans, best step time 250 ms" in capsys.readouterr().err


def test_progress_says_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Output(color="never").progress("starting") as say:
        say("step 1 of 2")
    assert "step 1 of 2" in terminal.getvalue()


def test_progress_is_silent_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with Output().progress("starting") as say:
        say("step 1 of 2")
    assert capsys.readouterr() == ("", "")


def test_progress_follows_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Output(color="never").search_progress() as progress:
        progress(None, 1)
        progress(0.25, 40, 0.2)
    assert "searching: 40 plans, best step time 250 ms, gap at most 25%" in terminal.getvalue()


def test_shown_text_has_no_trailing_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("stage", "GPUs")
    table.add_row("0", "a: 0 1")
    Output().show(Padding(table, (0, 9, 1, 1)), "end")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert lines[-1] == "end"


def test_lines_break_between_words_only(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/data/" + 120 * "x" + "/plan.json"
    Output().show(f"Written to {path}; next: megatron-hetero flags {path}", "  - a\n\n  - b", "")
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith(f"{path};") for line in lines)
    assert path in lines
    assert lines[-4:] == ["  - a", "", "  - b", ""]


def test_what_goes_on_is_said_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_module, "SAID_EVERY_S", 0.05)
    with Output().progress("rehearsing step 1") as change:
        time.sleep(0.2)
        change("rehearsing step 2")
        time.sleep(0.2)
    said = capsys.readouterr().err
    assert "note: rehearsing step 1 (" in said and "note: rehearsing step 2 (" in said
    monkeypatch.setattr(output_module, "SAID_EVERY_S", 30.0)
    with Output().progress("short"):
        pass
    assert capsys.readouterr().err == ""


def test_a_table_keeps_its_columns_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = Table("stage", "GPUs", "memory")
    cells = ("0.0, 1.0", "a: 0 1 2 3 (RTX-4090)", "12.8 / 23.5 GiB  54%")
    table.add_row(*cells)
    Output().show(table, "word " * 20)
    shown = capsys.readouterr().out
    assert all(cell in shown for cell in cells)
    assert max(map(len, shown.splitlines()[-2:])) <= 40
