"""What bash makes of generated scripts, and ours: equal, or ours says what it does not know."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, note, settings

from megatron_hetero.errors import ModelError
from megatron_hetero.model.script import Script, read_script
from tests.model.shell.generated import by_bash, scripts

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
_QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


def is_covered(read: Script, arguments: list[str]) -> bool:
    """Return whether what is read is the arguments, where words that are not known may be any."""
    if any(not part.name for part in read.unread):
        return True
    known = [(word.text if word.is_known else None) for word in read.words]
    if None not in known:
        return known == arguments
    # The known words appear in order among bash's.
    found = iter(arguments)
    return all(word in found for word in known if word is not None)


def check(script: str, folder: Path) -> None:
    starts = by_bash(script, folder)
    if not starts:
        return
    arguments = starts[-1]
    at = next(i for i, word in enumerate(arguments) if "pretrain_gpt" in word)
    try:
        read = read_script(folder / "train.sh", script)
    except ModelError as error:
        note(f"{script}\nrefused: {error}")
        return
    note(f"{script}\nbash: {arguments}\nours: {[(w.text, w.reason) for w in read.words]}")
    assert is_covered(read, arguments[at + 1 :])


@settings(max_examples=120, deadline=None, suppress_health_check=_QUIET)
@given(scripts)
def test_scripts_are_read_as_bash_reads_them(tmp_path: Path, script: str) -> None:
    check(script, tmp_path)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=_QUIET)
@given(scripts)
def test_many_scripts_are_read_as_bash_reads_them(tmp_path: Path, script: str) -> None:
    check(script, tmp_path)
