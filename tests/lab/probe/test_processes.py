"""Ranks of a measurement that end badly: the error names the one that is to blame."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.errors import CheckFailedError
from megatron_hetero.flags.environment import CONNECTIONS_VARIABLE
from megatron_hetero.lab.probe.processes import run_ranks

RANKS = """\
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("the card is gone")
time.sleep(60)
"""


def test_the_rank_that_died_is_named_and_not_the_one_that_waited_for_it(tmp_path: Path) -> None:
    code, folder = tmp_path / "code", tmp_path / "ranks"
    code.mkdir()
    folder.mkdir()
    (code / "ranks_of_test.py").write_text(RANKS)
    message = r"^rank 1 of the probe ended with 1; .*\n  the card"
    with pytest.raises(CheckFailedError, match=message):
        run_ranks("ranks_of_test", (), 2, folder, {"PYTHONPATH": str(code)})


def test_ranks_have_the_connections_that_local_jobs_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32 is computed as the user's job computes it."""
    monkeypatch.delenv(CONNECTIONS_VARIABLE, raising=False)
    code, folder = tmp_path / "code", tmp_path / "ranks"
    code.mkdir()
    folder.mkdir()
    (code / "says_environment.py").write_text(
        f"from os import environ as given; print(given.get({CONNECTIONS_VARIABLE!r}), "
        "'NVIDIA_TF32_OVERRIDE' in given)"
    )
    for number, said in ((1, "None False"), (2, "1 False")):
        run_ranks("says_environment", (), number, folder, {"PYTHONPATH": str(code)})
        assert (folder / "rank-0.log").read_text().split("\n")[0] == said
