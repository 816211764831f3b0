"""`megatron-hetero launch`: the files that start a plan under the launcher of a site."""

from __future__ import annotations

import argparse
import shlex
import shutil
from pathlib import Path

from megatron_hetero.cli.arguments import add_master_port, check_new_folder
from megatron_hetero.cli.launch_options import (
    add_options_of_launchers,
    refuse_image,
    refuse_options_of_others,
    refuse_options_of_training,
)
from megatron_hetero.cli.launch_running import add_actions, run_commands
from megatron_hetero.cli.on_loss import add_loss_arguments, replanning_of
from megatron_hetero.cli.output import Output
from megatron_hetero.cli.unread import refuse_unread
from megatron_hetero.errors import UsageError
from megatron_hetero.files import make_folder, write_json, write_text
from megatron_hetero.flags.environment import exports_left
from megatron_hetero.flags.gpu_needs import unmet_needs
from megatron_hetero.flags.launchers.install import find_wheel, install_script
from megatron_hetero.flags.launchers.job import LaunchFile, LaunchJob
from megatron_hetero.flags.launchers.launcher import ACTIONS
from megatron_hetero.flags.launchers.node_script import PLAN_NAME
from megatron_hetero.flags.launchers.registry import LAUNCHERS
from megatron_hetero.flags.launchers.replanning import CLUSTER_NAME, PROFILE_NAME
from megatron_hetero.flags.launchers.running import RECORD_NAME, record_of
from megatron_hetero.flags.needed import missing_in_job, missing_line
from megatron_hetero.flags.notes import unread_lines, unread_parts
from megatron_hetero.plan.file import load_plan
from megatron_hetero.serving.fleet.file import is_serving_plan, load_serving_plan
from megatron_hetero.serving.launch.folder import TARGETS, TARGETS_OF_PODS, fleet_files

DESCRIPTION = """\
Write the files that start a plan: a script that is the same on every node, and
the file of your launcher that runs it there, with the environment that each kind
of GPU needs.  Nothing is started.  Megatron flags that the plan does not know
(--data-path, --save, ...) may follow after --.

  megatron-hetero launch plan.json --for slurm -o job --partition gpu --time 12:00:00
  megatron-hetero launch --status job
  megatron-hetero launch serve.json --for vllm -o fleet    (a plan of serve-plan)

--status, --logs and --stop ask the launcher's own tools (squeue, qstat, kubectl,
sky, ssh, ...) about the job of a folder that was written before."""
TAKES_MEGATRON_FLAGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `launch`."""
    parser.add_argument("plan", type=Path, nargs="?", metavar="PLAN.JSON", help="the plan")
    # Launchers of training and of serving share the option; the plan decides which of them fit.
    targets = tuple(dict.fromkeys((*LAUNCHERS, *TARGETS)))
    parser.add_argument(
        "--for", dest="launcher", choices=targets, metavar="LAUNCHER",
        help=f"what starts the job: {', '.join(LAUNCHERS)}; of a serving plan: "
        f"{', '.join(TARGETS)}",
    )  # fmt: skip
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder for the files; it must not exist, or be empty",
    )
    parser.add_argument(
        "--script",
        metavar="PRETRAIN_GPT.PY",
        help="a pre-training script of your own (default: megatron_hetero.pretrain_gpt)",
    )
    parser.add_argument(
        "--name", default="megatron-hetero", help="name of the job (default: megatron-hetero)"
    )
    parser.add_argument(
        "--image",
        help=f"container image, for {', '.join(n for n, x in LAUNCHERS.items() if x.takes_image)} "
        "(slurm: where it has pyxis)",
    )
    parser.add_argument(
        "--wheel",
        help="the wheel of `make dist`, a path or an https URL: install.sh installs it on the "
        "machines, with the versions that it is tested with",
    )
    parser.add_argument(
        "--interface",
        action="append",
        default=[],
        metavar="[MACHINE=]NAME",
        help="private network interface of all machines, or of one, such as eth1, that NCCL and "
        "gloo keep to; repeatable",
    )
    parser.add_argument(
        "--public-addresses",
        action="store_true",
        help="take machines that the cluster names by public addresses; read SECURITY.md before",
    )
    add_master_port(parser)
    add_loss_arguments(parser)
    add_options_of_launchers(parser)
    add_actions(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Write the folder, or ask about the job of one."""
    # --status, --logs and --stop ask about a folder that was written before.
    for action in ACTIONS:
        folder = getattr(arguments, action)
        if folder is not None:
            if arguments.plan or arguments.launcher or arguments.output:
                raise UsageError(f"--{action} {folder} stands alone: the folder knows its job")
            what = f"--{action} asks after a job that is there"
            refuse_unread(arguments, add_arguments, (action, "dry_run", "json"), what)
            return run_commands(folder, action, arguments, output)
    if arguments.dry_run:
        raise UsageError("--dry-run goes with --status, --logs or --stop; the files start nothing")
    # All three are needed to write a folder; what is missing is named at once.
    missing = [
        name
        for name, value in (
            ("PLAN.JSON", arguments.plan),
            ("--for", arguments.launcher),
            ("-o FOLDER", arguments.output),
        )
        if value is None
    ]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} missing: launch PLAN.JSON --for LAUNCHER -o FOLDER, or launch "
            "--status FOLDER"
        )
    return _write_folder(arguments, output)


def _write_folder(arguments: argparse.Namespace, output: Output) -> int:
    folder: Path = arguments.output
    # Serving plans start engines, training plans processes: each has launchers of its own.
    check_new_folder(folder, f"-o {folder}")
    if is_serving_plan(arguments.plan):
        return _write_fleet(arguments, output)
    if arguments.launcher not in LAUNCHERS:
        raise UsageError(
            f"--for {arguments.launcher} starts engines, and {arguments.plan} is a plan of "
            f"training; its launchers are {', '.join(LAUNCHERS)}"
        )
    launcher = LAUNCHERS[arguments.launcher]
    refuse_options_of_others(arguments)
    refuse_image(arguments, [name for name, other in LAUNCHERS.items() if other.takes_image])
    # The job as launchers see it, checked before anything is written.
    wheel = find_wheel(arguments.wheel) if arguments.wheel is not None else None
    plan = load_plan(arguments.plan)
    job = LaunchJob(
        plan,
        arguments.name,
        arguments.script,
        tuple(arguments.megatron_args or ()),
        arguments.master_port,
        arguments.image,
        is_installed_by_script=wheel is not None,
        interfaces=tuple(_interface(text) for text in arguments.interface),
        takes_public_addresses=arguments.public_addresses,
        replanning=replanning_of(arguments, plan),
    )
    if launcher.read_options is not None:
        job = launcher.read_options(job, vars(arguments))
    job.check()
    # What the job's script would lack, as notes.
    parts = unread_parts(job.plan, job.more_flags)
    for note in (*job.notes, *unread_lines(parts), *unmet_needs(job.plan), *_left_exports(job)):
        output.note(note)
    left = [part.name for part in parts if part.name.startswith("--")]
    if left:
        output.note(
            f"the job starts without {', '.join(left)}; give them behind `--`, for example "
            f"-- {left[0]} VALUE"
        )
    missing = missing_in_job(job.plan.workload, job.more_flags)
    if missing:
        output.note(
            f"the job cannot start without {missing_line(missing)}. Give them behind `--`, or let "
            "`megatron-hetero init --job` write a script that has all of them and plan from it"
        )
    # The launcher's files, the plan, and what planning again needs.
    files = [*launcher.files(job), *([install_script(wheel)] if wheel is not None else [])]
    make_folder(folder)
    for file in files:
        _write(folder, file)
    copied = {PLAN_NAME: arguments.plan}
    if job.replanning is not None:
        copied |= {CLUSTER_NAME: arguments.cluster, PROFILE_NAME: arguments.profile}
    for name, path in copied.items():
        if path is not None:
            shutil.copyfile(path, folder / name)
    written = [*(f.name for f in files), *(n for n, p in copied.items() if p), RECORD_NAME]
    # The record tells later calls how the job was launched.
    write_json(folder / RECORD_NAME, record_of(job, arguments.launcher))
    if wheel is not None and wheel.path is not None:
        shutil.copyfile(wheel.path, folder / wheel.name)
        written.append(wheel.name)
    # How to start, and what has to be done before.
    start = launcher.start.format(folder=shlex.quote(str(folder)))
    if arguments.json:
        output.json({"folder": str(folder), "files": written, "start": start})
        return 0
    output.show(f"Written to {folder}: {', '.join(written)}")
    if wheel is not None and not launcher.brings_folder:
        install = f"bash {shlex.quote(str(folder))}/install.sh"
        output.show(f"Install: {install}, on each machine or on their shared disk")
    if len(job.plan.hosts) > 1 and not launcher.brings_folder:
        output.show(
            f"Copy: {folder} to the same path on every machine, or have it on a shared disk"
        )
    output.show(f"Start: {start}")
    return 0


def _write_fleet(arguments: argparse.Namespace, output: Output) -> int:
    """Write the folder of a serving plan."""
    folder: Path = arguments.output
    # A serving plan starts engines.
    if arguments.launcher not in TARGETS:
        raise UsageError(
            f"--for {arguments.launcher} starts training, and {arguments.plan} is a serving plan; "
            f"its targets are {', '.join(TARGETS)}"
        )
    refuse_options_of_training(arguments)
    refuse_image(arguments, TARGETS_OF_PODS)
    files, next_step = fleet_files(
        load_serving_plan(arguments.plan), arguments.launcher, arguments.image
    )
    make_folder(folder)
    for file in files:
        _write(folder, file)
    start = next_step.format(folder=shlex.quote(str(folder)))
    names = [file.name for file in files]
    if arguments.json:
        output.json({"folder": str(folder), "files": names, "start": start})
        return 0
    output.show(f"Written to {folder}: {', '.join(names)}", f"Start: {start}")
    return 0


def _left_exports(job: LaunchJob) -> tuple[str, ...]:
    """Return the notes on variables of the script; an interface that the command names is none."""
    # The command names the interface itself.
    left = exports_left(job.plan)
    return tuple(note for note in left if not (job.interfaces and "SOCKET_IFNAME=" in note))


def _interface(text: str) -> tuple[str, str]:
    machine, _, name = text.rpartition("=")
    return machine, name


def _write(folder: Path, file: LaunchFile) -> None:
    path = folder / file.name
    write_text(path, file.text)
    if file.executable:
        path.chmod(0o755)
