"""No process of ours listens off loopback, by the kernel's own table."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.flags.launch import node_launches
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.runtime.job.local.loading import preload
from tests.runtime.listeners import Place, is_loopback, listeners

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/a100-rtx4090"
TINY = (
    *("--num-layers=2", "--hidden-size=16", "--num-attention-heads=2", "--seq-length=8"),
    *("--max-position-embeddings=8", "--micro-batch-size=1", "--global-batch-size=3"),
    *("--train-iters=2", "--lr=1e-3", "--mock-data", "--tokenizer-type=NullTokenizer"),
    *(
        "--vocab-size=32",
        "--eval-iters=0",
        "--eval-interval=1000",
        "--num-workers=0",
        "--log-interval=1",
    ),
)


def seen(command: Sequence[str], environment: Mapping[str, str] | None = None) -> set[Place]:
    """Every place at which a command or one of its children listened, looked up all the time."""
    variables = {**os.environ, **(environment or {})}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT)
        try:
            found = looked_up(process.pid, lambda: process.poll() is None)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        assert process.returncode == 0, output.read()[-3000:]
    return found


def seen_of_verb(words: Sequence[str]) -> set[Place]:
    """The same of a verb in a fork of this process, which has imported what ranks need."""
    preload()
    with tempfile.TemporaryFile("w+") as output:

        def run() -> None:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            sys.exit(main(list(words)))

        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        assert process.pid is not None
        try:
            found = looked_up(process.pid, process.is_alive)
        finally:
            process.kill()
            process.join()
        output.seek(0)
        assert process.exitcode == 0, output.read()[-3000:]
    return found


def looked_up(process: int, is_alive: Callable[[], bool]) -> set[Place]:
    found: set[Place] = set()
    known: dict[str, bool] = {}
    while is_alive():
        found |= listeners(process, known)
        time.sleep(0.05)
    return found


def test_a_wildcard_is_found() -> None:
    """The check can fail."""
    program = "import socket, time; s = socket.create_server(('', 0)); time.sleep(1)"
    found = seen([sys.executable, "-c", program])
    assert [place[0] for place in found] == ["0.0.0.0"]
    assert not any(map(is_loopback, found))


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ("verify", "--layout", "tp1:1,tp1:1 @2 | tp1:2 @1", "--steps=1", "--optimizer=sgd"),
            marks=pytest.mark.slow,
        ),
        (
            *("rehearse", "--cluster", str(EXAMPLE / "cluster.yaml"), "--steps=1"),
            *("--model", str(EXAMPLE / "gpt-7b.sh"), "--layout", "tp1:6,tp2:2,tp2:2 @4"),
            *("--num-layers=10", "--global-batch-size=4"),
        ),
    ],
    ids=lambda words: words[0],
)
def test_verify_and_rehearse(words: Sequence[str]) -> None:
    found = seen_of_verb(words)
    assert found, "gloo listens somewhere: the look-up came too late"
    assert all(map(is_loopback, found)), found


@pytest.mark.slow  # three interpreters import torch; tests/flags has the line's own address
def test_the_line_that_flags_prints_for_one_machine(tmp_path: Path) -> None:
    """Two replicas of unequal parts, by torchrun, as the demo starts them."""
    (launch,) = node_launches(plan_from_layout(parse_layout("tp1:2 @2 | tp1:2 @1")))
    assert launch.argv[0] == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", *launch.argv[1:], *TINY]
    command.append(f"--data-cache-path={tmp_path}")
    found = seen(command, {**dict(launch.environment), "CUDA_VISIBLE_DEVICES": ""})
    assert found and all(map(is_loopback, found)), found
