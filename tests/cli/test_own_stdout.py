"""Standard output with `--json`, beside a solver that prints from C."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/serving"

LOUD = """
import ctypes, sys
import scipy.optimize
solve = scipy.optimize.milp

def loud(*given, **named):
    ctypes.CDLL(None).puts(b"a line of the solver")
    return solve(*given, **named)

scipy.optimize.milp = loud
from megatron_hetero.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""HiGHS prints only now and then, so its line is played here, by the C library as there."""


def _run(*more: str) -> subprocess.CompletedProcess[str]:
    words = [
        "serve-plan", "--cluster", str(EXAMPLE / "cluster.yaml"), "--model", str(EXAMPLE),
        "--workload", str(EXAMPLE / "workload.yaml"), "--json", *more,
    ]  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", LOUD, *words], capture_output=True, text=True, check=False
    )


def test_json_is_alone_on_stdout() -> None:
    done = _run()
    assert done.returncode == 0
    assert json.loads(done.stdout)["kind"] == "serving"
    assert "a line of the solver" in done.stderr


def test_an_error_in_json_is_alone_on_stdout() -> None:
    done = _run("--budget", "0.5")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["exit_code"] == 3
    assert "a line of the solver" in done.stderr


RANK = """
import logging, sys
from pathlib import Path
from megatron_hetero.cli.own_stdout import own_stdout
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.job.local.loading import preload

with own_stdout(True):
    preload()  # Megatron's log handler takes `sys.stdout` as it is now
    run_jobs([LocalJob("job", 1, lambda rank: logging.info("a rank"), Path(sys.argv[1]))], 60)
    print("{}")
"""


def test_a_rank_logs_into_its_own_file(tmp_path: Path) -> None:
    """`verify --json` forks ranks; their log came before the JSON object."""
    done = subprocess.run(
        [sys.executable, "-c", RANK, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "{}\n"), done.stderr
    assert any("a rank" in log.read_text() for log in tmp_path.glob("*.log"))
