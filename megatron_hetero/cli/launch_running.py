"""Actions of `launch` on a job that runs: its status, its logs, its end."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from pathlib import Path

from megatron_hetero.cli.output import Output
from megatron_hetero.errors import CheckFailedError, EnvironmentMismatchError, UsageError
from megatron_hetero.flags.launchers.launcher import Action
from megatron_hetero.flags.launchers.running import commands_of, read_record

_HELP: dict[Action, str] = {
    "status": "what the job of a folder is doing",
    "logs": "the last lines of its logs",
    "stop": "stop it",
}


def add_actions(parser: argparse.ArgumentParser) -> None:
    """Declare an option for each action, and `--dry-run` for all of them."""
    running = parser.add_mutually_exclusive_group()
    for action, text in _HELP.items():
        running.add_argument(f"--{action}", type=Path, metavar="FOLDER", help=text)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="with --status, --logs, --stop: print the commands and run none",
    )


def run_commands(
    folder: Path, action: Action, arguments: argparse.Namespace, output: Output
) -> int:
    """Run the commands of an action; show their output as it comes.

    Args:
        folder: what `launch` has written.
        action: what is asked of the folder's job.
        arguments: of `launch`; `json` and `dry_run` count.
        output: for what is not printed by the commands themselves.
    Returns:
        The exit code of a success.
    Raises:
        HeteroError: the folder has no job, a tool is missing, or a command fails.
    """
    # The record in the folder says which tools know the job.
    todo = commands_of(folder, action)
    if arguments.json:
        if not arguments.dry_run:
            raise UsageError(f"--{action} shows what the launcher's tools print; leave --json")
        output.json({"folder": str(folder), "commands": [list(command.argv) for command in todo]})
        return 0
    num_failed = 0
    for command in todo:
        if arguments.dry_run:
            output.verbatim(shlex.join(command.argv))
            continue
        # The launcher's tools may be on another machine than this one.
        if shutil.which(command.argv[0]) is None:
            text = f"there is no {command.argv[0]} here; run this where the job was started"
            if not command.may_fail:
                raise EnvironmentMismatchError(text)
            output.note(text)
            num_failed += 1
            continue
        code = subprocess.run(command.argv, cwd=folder, check=False).returncode
        # A command that may fail counts, and only if all of them fail the job was not found.
        num_failed += code != 0
        if code and not command.may_fail:
            raise CheckFailedError(f"{shlex.join(command.argv)} ended with exit code {code}")
    if num_failed and num_failed == len(todo):
        raise CheckFailedError(f"--{action} {folder}: none of its commands found the job")
    launcher, record = read_record(folder)
    # Some launchers leave machines that go on costing.
    if action == "stop" and not arguments.dry_run and launcher.after_stop is not None:
        output.note(launcher.after_stop(record))
    return 0
