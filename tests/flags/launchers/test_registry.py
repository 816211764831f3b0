"""The launchers of `launch --for`: what each has to have."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.flags.launchers.launcher import ACTIONS, LaunchRecord
from megatron_hetero.flags.launchers.registry import LAUNCHERS

FOLDER = Path(__file__).parents[3] / "megatron_hetero/flags/launchers"
GOLDEN = Path(__file__).parents[1] / "golden"


def test_every_launcher_has_a_file_of_its_name_and_golden_files() -> None:
    for name in LAUNCHERS:
        assert (FOLDER / f"{name}.py").is_file()
        assert any((GOLDEN / name).iterdir()), f"write tests/flags/golden/{name}"
    assert {path.name for path in GOLDEN.iterdir()} == set(LAUNCHERS)


def test_launchers_that_share_an_option_have_equal_ones() -> None:
    options = {option for launcher in LAUNCHERS.values() for option in launcher.options}
    flags = [option.flag for option in options]
    assert len(flags) == len(set(flags))
    for launcher in LAUNCHERS.values():
        assert len(launcher.options) == len(set(launcher.options))
        assert bool(launcher.options) == (launcher.read_options is not None)


@pytest.mark.parametrize("name", [n for n, launcher in LAUNCHERS.items() if launcher.commands])
def test_every_action_has_commands(name: str, tmp_path: Path) -> None:
    commands = LAUNCHERS[name].commands
    assert commands is not None
    for kept in ("job.id", "start.pid"):
        (tmp_path / kept).write_text("4711\n")
    record = LaunchRecord(launcher=name, name="job", hosts=("a", "b"), num_parts=2)
    for action in ACTIONS:
        assert all(command.argv for command in commands(tmp_path, record, action))
        assert list(commands(tmp_path, record, action))
