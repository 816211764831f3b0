"""`verify`: its arguments, and what it says where torch is missing."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import io
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from megatron_hetero.cli import verify
from megatron_hetero.cli.main import main
from megatron_hetero.errors import EnvironmentMismatchError
from tests.report.text.trials.test_verification import DATA


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    verify.add_arguments(parser)
    return parser.parse_args(words)


def test_defaults() -> None:
    arguments = parse("plan.json")
    assert vars(arguments) == {
        "plan": Path("plan.json"),
        "layout": None,
        "steps": 5,
        "optimizer": None,
        "precision": None,
        "floor": False,
        "keep": None,
        "json": False,
        "plant": None,
        "resume": False,
    }


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("plan.json", "--layout", "tp1:1 @1"),
        ("plan.json", "--steps", "0"),
        ("plan.json", "--steps", "many"),
        ("plan.json", "--optimizer", "lion"),
    ],
)
def test_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(*words)
    assert stop.value.code == 2


def test_plant_is_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    assert "--plant" not in capsys.readouterr().out


@pytest.mark.parametrize("missing", [["torch"], ["megatron.core"], list(verify.RUNTIME_MODULES)])
def test_without_the_runtime_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, missing: list[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else found(name)
    )
    with pytest.raises(EnvironmentMismatchError) as error:
        verify.require_runtime()
    message = str(error.value)
    assert f"not installed: {', '.join(missing)}." in message
    assert 'pip install ".[runtime]"' in message
    assert "CPU build of torch" in message


def test_the_refusal_exits_with_5(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "RUNTIME_MODULES", ("no_such_module_at_all", "no_such.child"))
    assert main(["verify", "--layout", "tp1:1 @1"]) == 5
    assert "error: this verb trains" in capsys.readouterr().err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """In the place of the runtime: what it was asked, and data to return."""
    module = types.ModuleType("command")
    module.data = copy.deepcopy(DATA)
    module.asked = []

    def verify_arguments(arguments: argparse.Namespace, on_progress: object) -> dict:
        module.asked.append(arguments)
        on_progress("starting")
        return module.data

    module.verify_arguments = verify_arguments
    monkeypatch.setattr(verify, "require_runtime", lambda: None)
    monkeypatch.setitem(sys.modules, "megatron_hetero.lab.verify.command", module)
    return module


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_the_verdict_is_the_exit_code(
    command: types.ModuleType, ok: bool, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    command.data["ok"] = ok
    assert main(["verify", "--layout", "tp1:1 @1", "--", "--swiglu"]) == code
    captured = capsys.readouterr()
    assert ("does NOT" in captured.out) == (not ok)
    assert captured.err == ""
    assert command.asked[0].megatron_args == ("--swiglu",)


def test_json_is_the_data_and_people_read_stderr(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--layout", "tp1:1 @1", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == command.data
    assert "Training with SGD" in captured.err


def test_numbers_of_a_diverged_run_are_null(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    command.data |= {"ok": False, "loss": float("nan")}
    command.data["runs"]["sgd"]["losses"][0]["plan"] = float("inf")
    assert main(["verify", "--layout", "tp1:1 @1", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["loss"] is None
    assert printed["runs"]["sgd"]["losses"][0]["plan"] is None


def test_color_never_leaves_no_escape(
    command: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["--color", "never", "verify", "--layout", "tp1:1 @1"]) == 0
    assert "The plan trains" in terminal.getvalue()
    assert "\x1b" not in terminal.getvalue()


def test_a_python_without_torch_reaches_the_refusal() -> None:
    """In a process where torch and megatron cannot be imported, as after `pip install .`."""
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['megatron'] = None\n"
        "from megatron_hetero.cli.main import main\n"
        "sys.exit(main(['verify', '--layout', 'tp1:1 @1']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert "pip install" in done.stderr
