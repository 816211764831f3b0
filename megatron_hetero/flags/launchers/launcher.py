"""One launcher as data: its files, its options, and the commands that ask after its jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from megatron_hetero.flags.launchers.job import LaunchFile, LaunchJob

Action = Literal["status", "logs", "stop"]
ACTIONS: tuple[Action, ...] = ("status", "logs", "stop")
LOG_LINES = "200"
"""Number of lines that `--logs` shows of each log."""


class LaunchRecord(BaseModel):
    """Content of `launch.json`: what the commands need to find the job of a folder."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    launcher: str
    name: str
    hosts: tuple[str, ...]
    num_parts: int


@dataclass(frozen=True)
class LauncherCommand:
    """A command to run in the job's folder; `may_fail` if the job may be over already."""

    argv: tuple[str, ...]
    may_fail: bool = False


@dataclass(frozen=True)
class LaunchOption:
    """An option of `launch` that some launchers read, and all others refuse.

    Launchers that share an option have equal ones. `metavar` is None for a switch; `repeats` if the
    option may be given several times.
    """

    flag: str
    help: str
    metavar: str | None = None
    repeats: bool = False

    @property
    def name(self) -> str:
        """Return the name of the value, as argparse makes it from the flag."""
        return self.flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class Launcher:
    """A launcher of a site, by which `launch --for NAME` writes a job and asks after it.

    `files` returns the launcher's own files; `cli.launch` adds plan.json, launch.json, and
    install.sh where there is a wheel. `start` says what starts the job; {folder} in it stands for
    the folder, which is the working directory of `commands`.
    `commands` yields the commands of an action; None where nothing knows the whole job.
    `options` are those of the command line; `read_options` returns the job with their values.
    `brings_folder` if the launcher brings the files to the machines; else a person copies them.
    `takes_image` if the job may run in a container image; else --image is refused.
    `can_replan` if its start script watches over all machines.
    `after_stop` returns what a person has to know once a job was stopped.
    """

    name: str
    files: Callable[[LaunchJob], tuple[LaunchFile, ...]]
    start: str
    commands: Callable[[Path, LaunchRecord, Action], Iterator[LauncherCommand]] | None = None
    options: tuple[LaunchOption, ...] = ()
    read_options: Callable[[LaunchJob, Mapping[str, Any]], LaunchJob] | None = None
    brings_folder: bool = False
    takes_image: bool = False
    can_replan: bool = False
    after_stop: Callable[[LaunchRecord], str] | None = None
