"""`verify`: its arguments, and what it says where torch is missing."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hetero.cli import verify
from megatron_hetero.cli.main import main
from megatron_hetero.errors import EnvironmentMismatchError


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
        "floor": False,
        "keep": None,
        "json": False,
        "plant": None,
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
    assert 'pip install "megatron-hetero[runtime]"' in message
    assert "CPU build of torch" in message


def test_the_refusal_exits_with_5(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "RUNTIME_MODULES", ("no_such_module_at_all", "no_such.child"))
    assert main(["verify", "--layout", "tp1:1 @1"]) == 5
    assert "error: this verb trains" in capsys.readouterr().err


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
