"""What bash makes of generated scripts, and ours: equal, or ours says what it does not know."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, note, settings

from megatron_hetero.errors import ModelError
from megatron_hetero.model.script import Script, read_script
from tests.model.shell.generated import by_bash, environments, scripts

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
_QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


def is_covered(read: Script, arguments: list[str]) -> bool:
    """Return whether what is read is the arguments.

    A word that is not known may be any, and where it may split, any number of words.  After a note
    on code or a file that is not read, all may be other words.
    """
    if any(not part.name or part.reason.startswith("it is sourced") for part in read.unread):
        return True
    reached = {0}
    for word in read.words:
        if word.is_known:
            reached = {i + 1 for i in reached if arguments[i : i + 1] == [word.text]}
        elif word.may_split:
            reached = set(range(min(reached, default=len(arguments) + 1), len(arguments) + 1))
        else:
            reached = {i + 1 for i in reached if i < len(arguments)}
    return len(arguments) in reached


def check(script: str, folder: Path, given: dict[str, str]) -> None:
    starts = by_bash(script, folder, given)
    if not starts:
        return
    arguments = starts[-1]
    at = next(i for i, word in enumerate(arguments) if "pretrain_gpt" in word)
    try:
        read = read_script(folder / "train.sh", script)
    except ModelError as error:
        note(f"{script}\nrefused: {error}")
        return
    note(f"{script}\nbash, {given}: {arguments}\nours: {[(w.text, w.reason) for w in read.words]}")
    assert is_covered(read, arguments[at + 1 :])


@settings(max_examples=120, deadline=None, suppress_health_check=_QUIET)
@given(scripts, environments)
def test_scripts_are_read_as_bash_reads_them(
    tmp_path: Path, script: str, environment: dict[str, str]
) -> None:
    check(script, tmp_path, environment)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=_QUIET)
@given(scripts, environments)
def test_many_scripts_are_read_as_bash_reads_them(
    tmp_path: Path, script: str, environment: dict[str, str]
) -> None:
    check(script, tmp_path, environment)
