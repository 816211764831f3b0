"""Jobs to launch in tests, their files, and folders in which scripts run beside stand-ins."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

from megatron_hetero.flags.launchers.job import LaunchFile, LaunchJob
from megatron_hetero.flags.launchers.registry import LAUNCHERS
from megatron_hetero.plan.plan import Plan
from tests.plan.edits import PLAN


def mixed_plan() -> Plan:
    """Return the other tests' plan on an A100 node and an RTX 4090 node with one idle GPU."""
    a, b = PLAN.hosts
    hosts = (replace(a, gpu_type="A100-80GB"), replace(b, gpu_type="RTX-4090"))
    return replace(PLAN, hosts=hosts)


def job(**changes: object) -> LaunchJob:
    return replace(LaunchJob(mixed_plan(), image="registry.example/hetero:1"), **changes)


def files(launcher: str, **changes: object) -> tuple[LaunchFile, ...]:
    made = job(**changes)
    made.check()
    return LAUNCHERS[launcher].files(made)


def run_script(
    folder: Path, name: str, *words: str, **environment: str
) -> subprocess.CompletedProcess:
    """Run a script of `folder`, where `torchrun`, `ssh` are those of `folder/bin`."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(folder / name), *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": path, **environment},
    )


def written(folder: Path, made: tuple[LaunchFile, ...], torchrun: str) -> Path:
    for file in made:
        (folder / file.name).write_text(file.text)
    (folder / "bin").mkdir()
    for name, text in (
        ("torchrun", torchrun),
        # What ssh does with its last argument on the other machine; -tt -o OPTION HOST COMMAND.
        ("ssh", 'exec bash -c "$5"'),
    ):
        (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


SHOW = 'printf "%s\\n" "$@" "gpus=$CUDA_VISIBLE_DEVICES p2p=${NCCL_P2P_DISABLE:-} $NCCL_ALGO"'
