"""The tables of flags as files: what a wrong entry is told, and that they are read when asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.errors import FileFormatError
from megatron_hetero.flags.support.kinds import Entry, Support
from megatron_hetero.flags.support.tables import read_table, support_table
from megatron_hetero.model.megatron_release import MEGATRON

GOOD = {"status": "proved", "names": ["--lr"], "note": "of {megatron}"}


def table(folder: Path, *rows: Any) -> Path:
    path = folder / "support.json"
    path.write_text(json.dumps(rows))
    return path


def test_an_entry_is_read_with_its_defaults(tmp_path: Path) -> None:
    (entry,) = read_table(table(tmp_path, GOOD), Support)
    assert entry == Support("proved", ("--lr",), f"of {MEGATRON}")


def test_a_treatment_in_verify_is_read(tmp_path: Path) -> None:
    row = {"treatment": "kept", "names": ["--lr"], "values": ["1"]}
    assert read_table(table(tmp_path, row), Entry) == (Entry("kept", ("--lr",), "", ("1",)),)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({**GOOD, "status": "prooved"}, "entry 2 .*--lr.*status is 'prooved'; allowed are proved"),
        ({**GOOD, "neutral": "disk"}, "neutral is 'disk'; allowed are log, kernels"),
        ({**GOOD, "presence": True}, "unknown key 'presence'; allowed are status, names"),
        ({**GOOD, "names": "--lr --min-lr"}, "names has to be a list of texts"),
        ({**GOOD, "note": ["a"]}, "note has to be no list"),
        ({"names": ["--lr"]}, "status is missing"),
        ({"status": "proved"}, "entry 2: an entry is an object with the key 'names'"),
        ("--lr", "entry 2: an entry is an object"),
    ],
)
def test_a_wrong_entry_is_named(row: Any, fault: str, tmp_path: Path) -> None:
    path = table(tmp_path, GOOD, row)
    with pytest.raises(FileFormatError, match=fault) as error:
        read_table(path, Support)
    assert str(error.value).startswith(f"{path}: entry 2")


@pytest.mark.parametrize("text", ["[{", "{}"])
def test_what_is_no_table_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "support.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=r"support\.json: (no JSON|a list of entries)"):
        read_table(path, Support)


def test_tables_are_read_when_they_are_asked() -> None:
    program = (
        "from megatron_hetero.flags.support import lookup, verification, tables\n"
        "assert not tables.support_table.cache_info().currsize\n"
        "assert not tables.verification_table.cache_info().currsize\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert support_table() is support_table()
