"""The command line as a whole: verbs, exit codes, errors without traceback."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron_hetero import __version__, errors
from megatron_hetero.cli import main as cli
from megatron_hetero.cli.output import Output


def fake_verb(
    outcome: Exception | BaseException | int, takes_flags: bool = True
) -> SimpleNamespace:
    """A verb that raises or returns `outcome` and remembers its arguments."""
    verb = SimpleNamespace(DESCRIPTION="fake", TAKES_MEGATRON_FLAGS=takes_flags, seen=None)

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true")

    def run(arguments: argparse.Namespace, output: Output) -> int:
        verb.seen = arguments
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    verb.add_arguments, verb.run = add_arguments, run
    return verb


@pytest.fixture
def run_fake(monkeypatch: pytest.MonkeyPatch):
    def run(words: list[str], outcome: BaseException | int = 0, **options: bool):
        verb = fake_verb(outcome, **options)
        monkeypatch.setattr(cli, "_load", lambda name: verb)
        return cli.main(words), verb

    return run


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"megatron-hetero {__version__}\n"


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(f"\n    {verb} " in text for verb in cli.VERBS)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_its_file_and_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"megatron_hetero.cli.{verb.replace('-', '_')}")
    with pytest.raises(SystemExit) as stop:
        cli.main([verb, "--help"])
    assert stop.value.code == 0
    help_text = capsys.readouterr().out
    assert module.DESCRIPTION.splitlines()[0] in help_text
    assert max(map(len, help_text.splitlines())) <= 100


@pytest.mark.parametrize("words", [[], ["nosuch"], ["--nosuch"], ["plan", "--nosuch"], ["--ver"]])
def test_usage_errors_exit_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (errors.CheckFailedError, 1),
        (errors.UsageError, 2),
        (errors.UnsupportedError, 2),
        (errors.InfeasiblePlanError, 3),
        (errors.FileFormatError, 4),
        (errors.ClusterError, 4),
        (errors.ModelError, 4),
        (errors.PlanFormatError, 4),
        (errors.EnvironmentMismatchError, 5),
        (errors.MegatronVersionError, 5),
    ],
)
def test_errors_become_a_message_and_an_exit_code(
    run_fake, error: type[errors.HeteroError], exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = run_fake(["plan"], error("nodes[2] is [odd]; write another"))
    assert code == exit_code
    assert capsys.readouterr() == ("", "error: nodes[2] is [odd]; write another\n")


def test_an_interrupt_while_loading_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load", interrupted)
    assert cli.main(["plan"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.parametrize("words", [["plan", "--json"], ["plan", "--json", "--nosuch"]])
def test_with_json_an_error_is_an_object(
    run_fake, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code, _ = run_fake(words, errors.InfeasiblePlanError("no plan fits"))
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        code = stop.code
    captured = capsys.readouterr()
    found = json.loads(captured.out)["error"]
    assert found["exit_code"] == code
    if code == 3:
        assert found["class"] == "InfeasiblePlanError"
        assert found["message"] == "no plan fits"
    assert found["message"] in captured.err.replace("\n", " ")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGINT, "interrupted: ending what runs"),
        (signal.SIGTERM, "asked to end by SIGTERM: ending what runs"),
        (signal.SIGHUP, "the terminal was closed: ending what runs"),
    ],
)
def test_ctrl_c_is_answered_before_anything_else_is_done(
    number: signal.Signals,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("this run ignores the signal (nohup), and so do verbs")
    verb = fake_verb(0)
    seen: list[str] = []

    def run(arguments: argparse.Namespace, output: Output) -> int:
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:  # what is left to do comes after the answer
            seen.append(capsys.readouterr().err)
            assert signal.getsignal(number) == signal.SIG_DFL
            raise
        return 0

    verb.run = run
    monkeypatch.setattr(cli, "_load", lambda name: verb)
    before = signal.getsignal(number)
    assert cli.main(["plan", "--json"]) == 130
    assert signal.getsignal(number) == before
    assert words in seen[0]
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 130


def test_what_nohup_ignores_stays_ignored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb = fake_verb(0)

    def run(arguments: argparse.Namespace, output: Output) -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        return 0

    verb.run = run
    monkeypatch.setattr(cli, "_load", lambda name: verb)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert cli.main(["plan"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_interrupt_exits_with_130(run_fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_fake(["plan"], KeyboardInterrupt())[0] == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_a_defect_of_ours_keeps_its_traceback(run_fake) -> None:
    with pytest.raises(ZeroDivisionError):
        run_fake(["plan"], ZeroDivisionError())


def test_the_code_of_the_verb_is_returned(run_fake) -> None:
    assert run_fake(["plan"], 1)[0] == 1


def test_words_after_the_double_dash_are_megatrons(run_fake) -> None:
    _, verb = run_fake(["plan", "--json", "--", "--bf16", "--", "--json"])
    assert verb.seen.megatron_args == ("--bf16", "--", "--json")
    assert verb.seen.json is True


def test_a_verb_without_megatron_flags_refuses_them(
    run_fake, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run_fake(["diff", "--", "--bf16"], takes_flags=False)
    assert stop.value.code == 2
    assert "diff takes no Megatron flags" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "color"),
    [
        (["plan"], "auto"),
        (["--color", "never", "plan"], "never"),
        (["plan", "--color", "always"], "always"),
        (["--color", "never", "plan", "--color", "always"], "always"),
    ],
)
def test_color_is_taken_before_and_after_the_verb(run_fake, words: list[str], color: str) -> None:
    assert run_fake(words)[1].seen.color == color


def test_a_reader_that_leaves_is_not_an_error() -> None:
    command = [sys.executable, "-m", "megatron_hetero", "flags", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_module_and_script_are_the_same_program() -> None:
    environment = os.environ | {"NO_COLOR": "1"}
    command = [sys.executable, "-m", "megatron_hetero", "diff", "missing.json", "missing.json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 4
    assert done.stderr.startswith("error: missing.json")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "kept", "taken"),
    [
        (
            ["verify", "--layout", "tp2:4 @1", "--num-layers", "4", "--swiglu", "--steps", "3"],
            ["verify", "--layout", "tp2:4 @1", "--steps", "3"],
            ["--num-layers", "4", "--swiglu"],
        ),
        (
            ["verify", "--lr=-1e-3", "plan.json", "--optimizer", "sgd"],
            ["verify", "plan.json", "--optimizer", "sgd"],
            ["--lr=-1e-3"],
        ),
        (["verify", "plan.json", "--nothing", "4"], ["verify", "plan.json", "--nothing", "4"], []),
    ],
)
def test_megatron_flags_may_stand_among_a_verbs_own(
    words: list[str], kept: list[str], taken: list[str]
) -> None:
    from megatron_hetero.cli import main as module

    assert module._take_megatron_flags(words, module._load("verify")) == (kept, taken)


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["flags", "plan.json", "--plan-path", ""], "the argument after --plan-path"),
        (["flags", "plan.json", "--plan-path="], "the value of --plan-path"),
        (["plan", "--cluster", "c.yaml", "--model", ""], "the argument after --model"),
        (["diff", "", "b.json"], "the argument after diff"),
    ],
)
def test_an_empty_argument_is_no_default(
    words: list[str], place: str, capsys: pytest.CaptureFixture[str]
) -> None:

    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2
    assert f"{place} is empty" in capsys.readouterr().err


def test_a_flag_of_megatron_may_be_empty(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_hetero.cli.main import main

    words = ["plan", "--cluster", "missing.yaml", "--model", "missing", "--save", ""]
    assert main(words) == 4
    assert "missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verify", "--layout", "tp1:1", "--steps", "x"], '"x" is not a whole number'),
        (["rehearse", "p.json", "--cluster", "c.yaml", "--limit", "5%"], '"5%" is not a number'),
        (["data", "a.jsonl", "-o", "b", "--workers", "1.5"], '"1.5" is not a whole number'),
    ],
)
def test_what_is_no_number_is_said_in_words(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """argparse names the function that reads the value: `invalid at_least_one value`."""
    with pytest.raises(SystemExit):
        cli.main(words)
    assert said in capsys.readouterr().err
